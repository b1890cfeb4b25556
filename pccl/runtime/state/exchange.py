"""``StateExchange``: everything that this peer gives and takes of shared state.

Frames of shared state find the session of their operation here. Whoever asks about an operation
that has ended here, or has none yet, is told that there is nothing to be had.
"""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.messages import Progress
from pccl.protocol.shared_state import Elected
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.state.frames import StateSender
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.prefetch import Prefetch
from pccl.runtime.state.results import Results
from pccl.runtime.state.session import StateNews, StateSession
from pccl.runtime.state.snapshot import StateSnapshot, idle_operation
from pccl.transports.link import Lane, Links
from pccl.transports.sinks import Drain, Sink

KINDS = frozenset(
    {
        *(FrameKind.MAP_ASK, FrameKind.MAP, FrameKind.LAYOUT_ASK, FrameKind.LAYOUT),
        *(FrameKind.PIECE_ASK, FrameKind.PIECE, FrameKind.PIECE_LACK, FrameKind.PIECE_HAVE),
        *(FrameKind.WATCH, FrameKind.RESULT),
    }
)
"""Of the frames that belong here."""

_QUESTIONS = (FrameKind.MAP_ASK, FrameKind.LAYOUT_ASK, FrameKind.PIECE_ASK)


_UNREAD_BYTES_MAX = 16 << 10
"""Who does not read is told no more about operations that are unknown here."""


class StateExchange:
    """All sessions of one peer.

    Args:
        group: the peer group.
        links: of this peer.
        now_ns: the present.
        stall_ns: a source that sends nothing for so long is passed over.
        report: given what the machine has to know of sessions.
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
        """What newcomers may fetch while nobody waits for them."""
        self.prefetches: dict[OperationId, Prefetch] = {}
        """Of this newcomer."""
        self.results = Results(self.show, self._hide)
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
        """Lend a shared state to an operation; whoever asks gets pieces of it from now on."""
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
        """This is elected."""
        self.sessions[operation].begin(elected)

    def compare(self, operation: OperationId, reference: PeerId) -> None:
        """Find out how the own state differs from another one."""
        self.sessions[operation].compare(reference)

    def detach(self, operation: OperationId) -> None:
        """The caller leaves; his memory is free after this."""
        self.sessions[operation].detach()

    def end(self, operation: OperationId) -> StateSession:
        """The operation is over for this peer; the memory is free when this returns."""
        session = self.sessions.pop(operation)
        session.end()
        return session

    def show(self, memory: StateMemory) -> None:
        """Let newcomers fetch this state, as it is now, until another one takes its place."""
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
        self, memory: StateMemory, fetched: FetchedPieces, on_ready: Callable[[], None]
    ) -> Prefetch:
        """Fetch what the members show, until ``end_prefetch``."""
        operation = idle_operation(memory.layout, self._group)
        prefetch = self.prefetches[operation] = Prefetch(
            memory, fetched, operation, self._links, self._now_ns, self._stall_ns, on_ready
        )
        return prefetch

    def end_prefetch(self, operation: OperationId) -> None:
        """Fetch nothing more; what is here stays in ``fetched``."""
        prefetch = self.prefetches.pop(operation, None)
        if prefetch is not None:
            prefetch.close()

    def close(self) -> None:
        """Give and take nothing more."""
        for operation in list(self.prefetches):
            self.end_prefetch(operation)
        self.results.clear()
        for operation in list(self.sessions):
            self.end(operation)
        for snapshot in self.snapshots.values():
            snapshot.close()
        self.snapshots.clear()

    def tick(self) -> None:
        """Time has passed."""
        for part in self._parts():
            part.tick()
        for operation in [one for one, snapshot in self.snapshots.items() if snapshot.is_over]:
            self.snapshots.pop(operation).close()

    def progress(self) -> tuple[Progress, ...]:
        """How far everything is."""
        return tuple(session.progress for session in self.sessions.values())

    # -- links -------------------------------------------------------------------------------------

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """Decide where a frame goes.

        Raises:
            RemoteProtocolError: the sender may not send this.
        """
        session, peer = self.sessions.get(header.operation), lane.link.peer
        if header.operation.term == 0:
            return self._idle_frame(lane, peer, header)
        if session is not None and peer in session.ring:
            return session.frame_started(peer, header)
        return _refuse(lane, header)

    def _idle_frame(self, lane: Lane, peer: PeerId, header: FrameHeader) -> Sink:
        """The same for what belongs to no operation that members wait for."""
        operation = header.operation
        if header.kind is FrameKind.WATCH:
            self.results.watch(peer, StateSender(operation, self._links))
        elif header.kind in _QUESTIONS and operation in self.snapshots:
            return self.snapshots[operation].frame_started(peer, header)
        elif header.kind not in _QUESTIONS and operation in self.prefetches:
            return self.prefetches[operation].frame_started(peer, header)
        return _refuse(lane, header)

    def lane_lost(self, lane: Lane) -> None:
        """A lane is gone, with what was on it."""
        self.lane_failed(lane.link.peer)

    def lane_failed(self, peer: PeerId) -> None:
        """What a peer has sent on a lane may be lost, though there was none here."""
        for part in self._parts():
            part.lane_lost(peer)

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """The link to a peer has come up, or is down."""
        for part in self._parts():
            part.link_changed(peer, up=up)
        if not up:
            self.results.forget([peer])
            for snapshot in self.snapshots.values():
                snapshot.forget(peer)

    def uses(self, peer: PeerId) -> bool:
        """Whether something is expected of ``peer``, or goes to it."""
        return any(part.uses(peer) for part in self._parts()) or any(
            snapshot.owes(peer) for snapshot in self.snapshots.values()
        )

    def _parts(self) -> list[StateSession | Prefetch]:
        return [*self.sessions.values(), *self.prefetches.values()]


def _refuse(lane: Lane, header: FrameHeader) -> Sink:
    """There is nothing to be had here; whoever asks is told so."""
    if header.kind in _QUESTIONS and lane.backlog_bytes < _UNREAD_BYTES_MAX:
        lane.say(FrameHeader(FrameKind.PIECE_LACK, header.operation, 0, 0, 0))
    return Drain(header.length)
