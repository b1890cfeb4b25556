"""``ToldLosses``: checks that callers get an error when their process loses its place.

The checker is independent of the code that it checks: it only looks at calls that raised, and at
handles that callers waited for.
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
    """Counts the callers of one process that got the error of a lost place.

    Args:
        who: name of the process.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._told: Counter[tuple[bytes, PeerId]] = Counter()
        """Run and id of a lost place -> number of callers that got its error."""
        self._launched: set[int] = set()
        """Detached calls, for which no caller waits."""
        self._tells: dict[int, tuple[bytes, PeerId]] = {}
        """Detached call that failed by a loss -> run and id of the lost place."""

    def saw(self, engine: PeerEngine, event: PeerEvent, effects: list[PeerEffect]) -> None:
        """Check an event that the machine of ``engine`` handled, and its effects.

        Raises:
            Violation: a call outlasts the loss, or ``NotConnected`` came before the loss error.
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
            raise Violation(f"{self._who}: its membership is lost, but calls are open: {event}")

    def _raised(self, effect: RaiseCall, me: tuple[bytes, PeerId], *, is_lost: bool) -> None:
        if isinstance(effect.error, MembershipError):
            if effect.call in self._launched:
                self._tells[effect.call] = me
            else:
                self._told[me] += 1
        elif is_lost and isinstance(effect.error, NotConnected) and not self._told[me]:
            raise Violation(f"{self._who}: no caller got a MembershipError before {effect}")
