"""``ToldEvents``: checks that the events of a peer tell the truth, and nothing twice.

It follows the events as a listener does, and compares the result with the machine of the peer.
"""

from __future__ import annotations

from collections.abc import Sequence

from pccl.machines.peer.events import ReduceResult
from pccl.machines.peer.machine import Standing
from pccl.protocol.types import Roster
from pccl.runtime.engine import PeerEngine
from pccl.stress.sim.checkers.outcomes import Violation
from pccl.telemetry import events as tell


class ToldEvents:
    """What a listener knows of one process.

    Args:
        who: name of the process.
        engine: its peer.
        may_lose_packets: whether large packets may vanish in the run.
    """

    def __init__(self, who: str, engine: PeerEngine, *, may_lose_packets: bool) -> None:
        self._who, self._engine, self._may_lose_packets = who, engine, may_lose_packets
        self._new: list[tell.PeerReport] = []
        self._newest: Roster | None = None
        """The newest roster at the last check, if the process was a member."""
        self._present: set[int] | None = None
        """Ids of the other members; None: the process is no member."""
        self._unlinked: set[int] = set()
        """Members to which the link is lost."""
        self._waiting: set[str] = set()
        """Calls that wait."""
        engine.events.listen(lambda stamped: self._new.append(stamped.event))

    def check(self, results: Sequence[ReduceResult] = ()) -> None:
        """Check the events since the last check; the machine has handled an event.

        Args:
            results: results that callers got meanwhile.

        Raises:
            Violation: an event is wrong, or one is missing.
        """
        new, self._new = self._new, []
        told = [
            (e.tag, e.peer_id, e.norm, e.limit, e.excluded)
            for e in new
            if isinstance(e, tell.ContributionFlagged)
        ]
        flagged = [
            (result.operation.tag, result.contributors[f.rank], f.norm, f.limit, f.excluded)
            for result in results
            for f in result.flagged
        ]
        if told != flagged:
            raise Violation(f"{self._who}: its events name {told}, its results {flagged}")
        for event in new:
            self._hear(event)
        if self._waiting and not len(self._engine.calls):
            raise Violation(f"{self._who}: its events say that calls wait: {self._waiting}")
        machine = self._engine.machine
        newest = machine.newest if machine.standing is Standing.MEMBER else None
        if not new and newest is self._newest:
            return
        self._newest = newest
        present = {*newest.ring} - {machine.peer} if newest is not None else None
        if self._present != present:
            raise Violation(f"{self._who}: the members are {present}, its events say {self._told}")

    @property
    def _told(self) -> str:
        return "none" if self._present is None else str(sorted(self._present))

    def _hear(self, event: tell.PeerReport) -> None:
        present = self._present
        match event:
            case tell.Joined() if present is None:
                newest = self._engine.machine.newest
                assert newest is not None
                self._present = set(map(int, newest.ring)) - {event.peer_id}
            case tell.MembershipLost() if present is not None:
                self._present = None
                self._unlinked.clear()
            case tell.MemberJoined(peer_id=peer) if present is not None and peer not in present:
                present.add(peer)
            case tell.MemberLost(peer_id=peer) if present is not None and peer in present:
                present.remove(peer)
                self._unlinked.discard(peer)
            case tell.LinkLost(peer_id=peer) if present and peer in present - self._unlinked:
                self._unlinked.add(peer)
            case tell.LinkRestored(peer_id=peer) if peer in self._unlinked:
                self._unlinked.remove(peer)
            case tell.Waiting(call=call):
                self._waiting.add(call)
            case tell.WaitingEnded(call=call) if call in self._waiting:
                self._waiting.remove(call)
            case tell.CallEnded() | tell.AddressUnreachable():
                pass
            case tell.LargePacketsLost() if self._may_lose_packets:
                pass
            case tell.ContributionFlagged() if present is not None:
                pass
            case tell.PortForwarded() | tell.PortNotForwarded():
                pass  # of the router, which is no part of the run
            case tell.MasterDisconnected() | tell.MasterReconnected() if present is not None:
                pass
            case _:
                raise Violation(f"{self._who}: its events say {self._told}, and then {event}")
