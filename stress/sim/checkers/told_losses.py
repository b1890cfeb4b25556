"""``ToldLosses``: whether the callers of one process hear that its place in the run is lost.

Written apart from the code that it checks: it knows who was told from what calls have raised, and
from which handles were looked at.
"""

from __future__ import annotations

from collections import Counter

from pccl.machines.peer.events import (
    Claim,
    Close,
    LeftFailed,
    PeerEffect,
    PeerEvent,
    RaiseCall,
    ReduceCall,
)
from pccl.machines.peer.machine import Standing
from pccl.protocol.errors import MembershipError, NotConnected
from pccl.protocol.types import PeerId
from pccl.runtime.engine import PeerEngine
from pccl.stress.sim.checkers.outcomes import Violation


class ToldLosses:
    """What the callers of one process were told.

    Args:
        who: its name.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._told: Counter[tuple[bytes, PeerId]] = Counter()
        """By run and id: how many callers were told that this incarnation has lost its place."""
        self._launched: set[int] = set()
        """Calls for which nobody waits."""
        self._tells: dict[int, tuple[bytes, PeerId]] = {}
        """Such calls that have a loss for their outcome -> whose."""

    def saw(self, engine: PeerEngine, event: PeerEvent, effects: list[PeerEffect]) -> None:
        """The machine of ``engine`` has handled an event.

        Raises:
            Violation: a caller was told less than what has happened.
        """
        machine = engine.machine
        me = machine.run, machine.peer
        match event:
            case ReduceCall(call, detached=True):
                self._launched.add(call)
            case Claim(call) if call in self._tells:
                self._told[self._tells.pop(call)] += 1
            case LeftFailed(error) if isinstance(error, MembershipError):
                self._told[me] -= 1
            case _:
                pass
        for effect in effects:
            if isinstance(effect, RaiseCall):
                self._raised(effect, me, is_lost=machine.standing is Standing.LOST)
        if machine.standing is Standing.LOST and not isinstance(event, Close) and len(engine.calls):
            raise Violation(f"{self._who}: it has lost its place, and calls go on: {event}")

    def _raised(self, effect: RaiseCall, me: tuple[bytes, PeerId], *, is_lost: bool) -> None:
        if isinstance(effect.error, MembershipError):
            if effect.call in self._launched:
                self._tells[effect.call] = me
            else:
                self._told[me] += 1
        elif is_lost and isinstance(effect.error, NotConnected) and not self._told[me]:
            raise Violation(f"{self._who}: nobody was told of its loss before {effect}")
