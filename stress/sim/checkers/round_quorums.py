"""``RoundQuorums``: checks that a round goes on without members only if each group has a quorum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pccl.machines.master.events import Announce, ConnectionMessage, MasterEvent
from pccl.machines.master.machine import MasterMachine
from pccl.machines.master.membership import RegisteredPeer
from pccl.protocol.messages import Return, RoundRequest
from pccl.protocol.types import PeerId, Quorum, RoundId, RoundKind
from pccl.stress.sim.checkers.outcomes import Violation


class RoundQuorums:
    """Watches the rounds of one master process, in a run whose members make no mistakes.

    Args:
        done: counts rounds that went on without members.
    """

    def __init__(self, done: Counter[str]) -> None:
        self._done = done
        self._asked: dict[RoundId, dict[PeerId, Quorum | None]] = {}
        self._returned: dict[int, PeerId] = {}
        """Connection -> the peer that reports on it to this new master. The report counts even if
        the connection is lost before the master knows the run."""
        self._open: dict[RoundKind, RoundId] = {}
        """The open rounds before the present event; none while the run is unknown."""

    def saw(self, machine: MasterMachine, event: MasterEvent, effects: Iterable[object]) -> None:
        """Check an event that the machine handled, and its effects.

        Raises:
            Violation: a round has closed without a quorum of some group.
        """
        if isinstance(event, ConnectionMessage) and isinstance(event.message, Return):
            self._returned[event.connection] = event.message.peer
        if isinstance(event, ConnectionMessage) and isinstance(event.message, RoundRequest):
            asked, known = event.message, machine.connections.peers.get(event.connection)
            peer = self._returned.get(event.connection) if known is None else known.id
            if peer is not None:
                self._asked.setdefault(asked.round, {})[peer] = asked.quorum
        before = self._open
        self._open = {}
        if machine.recovering:
            return
        self._open = {kind: machine.rounds.present(kind) for kind in RoundKind}
        for kind, closed in before.items():
            if self._open[kind].n == closed.n + 1:
                admitted = {
                    effect.peer
                    for effect in effects
                    if isinstance(effect, Announce) and effect.what == "admitted"
                }
                members = [one for one in machine.membership.members() if one.id not in admitted]
                self._judge(closed, members)

    def _judge(self, closed: RoundId, members: list[RegisteredPeer]) -> None:
        asked = self._asked.pop(closed, {})
        calls = {one.id: asked[one.id] for one in members if one.id in asked}
        if len(calls) == len(members) or not calls:
            return
        self._done["round without members"] += 1
        sizes = Counter(one.group for one in members)
        present = Counter(one.group for one in members if one.id in calls)
        for quorum in calls.values():
            if quorum is None:
                raise Violation(f"{closed} went on without members, but one waits for all")
            for group, size in sizes.items():
                if present[group] < quorum.of(size):
                    raise Violation(f"{closed} went on with {present[group]} of group {group}")
