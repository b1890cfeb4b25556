"""``StateExchange``: owns all uploads and downloads of this peer, and routes frames to them.

It passes each frame of shared state to the session of its operation. It refuses requests about
operations that have ended on this peer, or have not begun yet.
"""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.messages import Progress
from pccl.protocol.shared_state import Elected
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.state.frames import QUESTIONS, StateSender
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.prefetch import Prefetch
from pccl.runtime.state.results import LateResults, Results
from pccl.runtime.state.session import StateNews, StateSession
from pccl.runtime.state.snapshot import StateSnapshot, idle_operation
from pccl.transports.link import Lane, Link, Links
from pccl.transports.sinks import Drain, Sink

KINDS = frozenset(
    {
        *(FrameKind.MAP_ASK, FrameKind.MAP, FrameKind.LAYOUT_ASK, FrameKind.LAYOUT),
        *(FrameKind.PIECE_ASK, FrameKind.PIECE, FrameKind.PIECE_LACK, FrameKind.PIECE_HAVE),
        *(FrameKind.WATCH, FrameKind.RESULT),
    }
)
"""Kinds of the frames that this class receives."""

_UNREAD_BYTES_MAX = 16 << 10
"""Unsent bytes on a lane above which this peer sends no refusals: the other side does not read."""


class StateExchange:
    """All sessions, snapshots and prefetches of one peer.

    Args:
        group: the peer group.
        links: links of this peer.
        now_ns: returns the current time in nanoseconds.
        stall_ns: nanoseconds without a byte after which a source counts as stalled.
        report: receives the events of sessions for the machine.
    """

    def __init__(
        self,
        group: int,
        links: Links,
        now_ns: Callable[[], int],
        stall_ns: int,
        report: Callable[[StateNews], None],
    ) -> None:
        self.sessions: dict[OperationId, StateSession] = {}
        self.snapshots: dict[OperationId, StateSnapshot] = {}
        """States that newcomers may fetch while the members keep working."""
        self.prefetches: dict[OperationId, Prefetch] = {}
        """Downloads of this peer before its admission."""
        self.results = Results(self.show, self._hide)
        self.late_results = LateResults(self.show, self._hide)
        self._group = group
        self._links = links
        self._now_ns = now_ns
        self._stall_ns = stall_ns
        self._report = report

    # -- what the engine does --------------------------------------------------------------------

    def post(
        self,
        operation: OperationId,
        memory: StateMemory,
        fetched: FetchedPieces,
        ring: tuple[PeerId, ...],
        own: PeerId,
    ) -> StateSession:
        """Open a session for an operation. The session sends pieces to members that ask."""
        session = self.sessions[operation] = StateSession(
            operation,
            memory,
            fetched,
            ring,
            own,
            self._links,
            self._now_ns,
            self._stall_ns,
            self._report,
        )
        return session

    def begin(self, operation: OperationId, elected: Elected) -> None:
        """Fetch the contents that ``elected`` names. A later call replaces the target."""
        self.sessions[operation].begin(elected)

    def compare(self, operation: OperationId, reference: PeerId) -> None:
        """Find where this peer's state differs from that of ``reference``."""
        self.sessions[operation].compare(reference)

    def detach(self, operation: OperationId) -> None:
        """Stop reading the tensors, because the caller of ``operation`` left."""
        self.sessions[operation].detach()

    def end(self, operation: OperationId) -> StateSession:
        """End the session of ``operation`` and return it. The session no longer uses the memory."""
        session = self.sessions.pop(operation)
        session.end()
        return session

    def show(self, memory: StateMemory) -> None:
        """Let newcomers fetch the current contents of ``memory``; replace an older snapshot."""
        operation = idle_operation(memory.layout, self._group)
        if operation in self.snapshots:
            self.snapshots[operation].renew(memory)
        else:
            self.snapshots[operation] = StateSnapshot(memory, operation, self._links)

    def _hide(self, memory: StateMemory) -> None:
        snapshot = self.snapshots.pop(idle_operation(memory.layout, self._group), None)
        if snapshot is not None:
            snapshot.close()

    def begin_prefetch(
        self,
        memory: StateMemory,
        fetched: FetchedPieces,
        on_ready: Callable[[], None],
        only: bytes = b"",
    ) -> Prefetch:
        """Fetch the members' snapshot until ``end_prefetch``; for ``only`` see ``Prefetch``."""
        operation = idle_operation(memory.layout, self._group)
        prefetch = self.prefetches[operation] = Prefetch(
            memory, fetched, operation, self._links, self._now_ns, self._stall_ns, on_ready, only
        )
        return prefetch

    def end_prefetch(self, operation: OperationId) -> None:
        """Stop a prefetch. Its pieces stay in ``fetched``."""
        prefetch = self.prefetches.pop(operation, None)
        if prefetch is not None:
            prefetch.close()

    def close(self) -> None:
        """End all uploads and downloads."""
        for operation in list(self.prefetches):
            self.end_prefetch(operation)
        self.results.clear()
        self.late_results.clear()
        for operation in list(self.sessions):
            self.end(operation)
        for snapshot in self.snapshots.values():
            snapshot.close()
        self.snapshots.clear()

    def tick(self) -> None:
        """Let downloads check their timeouts; drop snapshots of states that no longer exist."""
        for part in self._parts():
            part.tick()
        self.late_results.tick(self._now_ns())
        for operation in [one for one, snapshot in self.snapshots.items() if snapshot.is_over]:
            self.snapshots.pop(operation).close()

    def progress(self) -> tuple[Progress, ...]:
        """Return the progress of each session."""
        return tuple(session.progress for session in self.sessions.values())

    # -- links -------------------------------------------------------------------------------------

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """Return the sink that receives the payload of a frame.

        Raises:
            RemoteProtocolError: the peer may not send such a frame.
        """
        session, peer = self.sessions.get(header.operation), lane.link.peer
        if header.operation.term == 0:
            return self._idle_frame(lane, peer, header)
        if session is not None and peer in session.ring:
            return session.frame_started(peer, header)
        return refuse(lane, header)

    def _idle_frame(self, lane: Lane, peer: PeerId, header: FrameHeader) -> Sink:
        """Return the sink of a frame of term 0: for a snapshot, a prefetch, or the results."""
        operation = header.operation
        if header.kind is FrameKind.WATCH:
            self.results.watch(peer, StateSender(operation, self._links))
        elif header.kind in QUESTIONS and operation in self.snapshots:
            return self.snapshots[operation].frame_started(peer, header)
        elif header.kind not in QUESTIONS and operation in self.prefetches:
            return self.prefetches[operation].frame_started(peer, header)
        return refuse(lane, header)

    def lane_lost(self, lane: Lane) -> None:
        """Repeat requests to the peer of a lost lane."""
        self.lane_failed(lane.link, lane.number)

    def lane_failed(self, link: Link, number: int) -> None:
        """Repeat requests: a lane that broke, perhaps in its handshake, may have lost frames."""
        if link.lane(number) is None:  # else it is replaced
            link.broken.add(number)
        self._ask_again(link.peer)

    def lane_up(self, lane: Lane) -> None:
        """Repeat requests again when a broken lane is replaced.

        Until then the other side may not know of the loss, and may answer on the broken lane.
        """
        broken = lane.link.broken
        if lane.number in broken:
            broken.remove(lane.number)
            self._ask_again(lane.link.peer)

    def _ask_again(self, peer: PeerId) -> None:
        for part in self._parts():
            part.lane_lost(peer)

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """Adapt all uploads and downloads to a link that came up or broke."""
        for part in self._parts():
            part.link_changed(peer, up=up)
        if not up:
            self.results.forget([peer])
            for snapshot in self.snapshots.values():
                snapshot.forget(peer)

    def uses(self, peer: PeerId) -> bool:
        """Whether this peer expects shared state from ``peer``, or has pieces queued for it."""
        if not (self.sessions or self.prefetches or self.snapshots):
            return False  # nearly always, and each tick asks for each link
        return any(part.uses(peer) for part in self._parts()) or any(
            snapshot.owes(peer) for snapshot in self.snapshots.values()
        )

    def _parts(self) -> list[StateSession | Prefetch]:
        return [*self.sessions.values(), *self.prefetches.values()]


def refuse(lane: Lane, header: FrameHeader) -> Sink:
    """Refuse a request, or ignore any other frame; discard the payload."""
    if header.kind in QUESTIONS and lane.backlog_bytes < _UNREAD_BYTES_MAX:
        lane.say(FrameHeader(FrameKind.PIECE_LACK, header.operation, 0, 0, 0))
    return Drain(header.length)
