"""``StateExchange``: everything that this peer gives and takes of shared state.

Frames of shared state find the session of their operation here. Whoever asks about an operation
that has ended here, or has none yet, is told that there is nothing to be had.
"""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.messages import Difference, Progress
from pccl.protocol.shared_state import Elected
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.exhibit import Exhibit, idle_operation
from pccl.runtime.prefetch import Prefetch
from pccl.runtime.state_intake import Drain
from pccl.runtime.state_memory import StateMemory
from pccl.runtime.state_session import StateSession
from pccl.runtime.stock import Stock
from pccl.transports.lane import Lane, Sink
from pccl.transports.link import Links

KINDS = frozenset(
    {
        *(FrameKind.MAP_ASK, FrameKind.MAP, FrameKind.LAYOUT_ASK, FrameKind.LAYOUT),
        *(FrameKind.PIECE_ASK, FrameKind.PIECE, FrameKind.PIECE_LACK, FrameKind.PIECE_HAVE),
    }
)
"""Of the frames that belong here."""

_QUESTIONS = (FrameKind.MAP_ASK, FrameKind.LAYOUT_ASK, FrameKind.PIECE_ASK)


class StateExchange:
    """All sessions of one peer.

    Args:
        links: of this peer.
        now_ns: the present.
        stall_ns: a source that sends nothing for so long is passed over.
        on_done: called with the digest once everything that is elected is here.
        on_starved: called with a reason when nobody gives what is missing.
        on_compared: called with the answer of ``compare``.
    """

    def __init__(
        self,
        links: Links,
        now_ns: Callable[[], int],
        stall_ns: int,
        on_done: Callable[[OperationId, bytes], None],
        on_starved: Callable[[OperationId, str], None],
        on_compared: Callable[[OperationId, Difference], None],
    ) -> None:
        self.sessions: dict[OperationId, StateSession] = {}
        self.exhibits: dict[OperationId, Exhibit] = {}
        """What newcomers may fetch while nobody waits for them."""
        self.prefetch: Prefetch | None = None
        """Of this newcomer."""
        self._links = links
        self._now_ns = now_ns
        self._stall_ns = stall_ns
        self._reports = (on_done, on_starved, on_compared)

    # -- what the engine does --------------------------------------------------------------------

    def post(
        self,
        operation: OperationId,
        memory: StateMemory,
        stock: Stock,
        ring: tuple[PeerId, ...],
        own: PeerId,
    ) -> StateSession:
        """Lend a shared state to an operation; whoever asks gets pieces of it from now on."""
        session = self.sessions[operation] = StateSession(
            operation,
            memory,
            stock,
            ring,
            own,
            self._links,
            self._now_ns,
            self._stall_ns,
            *self._reports,
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

    def show(self, memory: StateMemory, group: int) -> None:
        """Let newcomers fetch this state, as it is now, until another one takes its place."""
        operation = idle_operation(memory.layout, group)
        before = self.exhibits.get(operation)
        if before is not None:
            before.close()
        self.exhibits[operation] = Exhibit(memory, operation, self._links)

    def begin_prefetch(
        self, memory: StateMemory, stock: Stock, group: int, on_ready: Callable[[], None]
    ) -> Prefetch:
        """Fetch what the members show, until ``end_prefetch``."""
        operation = idle_operation(memory.layout, group)
        self.prefetch = Prefetch(
            memory, stock, operation, self._links, self._now_ns, self._stall_ns, on_ready
        )
        return self.prefetch

    def end_prefetch(self) -> None:
        """Fetch nothing more; what is here stays in the stock."""
        if self.prefetch is not None:
            self.prefetch.close()
            self.prefetch = None

    def close(self) -> None:
        """Give and take nothing more."""
        self.end_prefetch()
        for operation in list(self.sessions):
            self.end(operation)
        for exhibit in self.exhibits.values():
            exhibit.close()
        self.exhibits.clear()

    def tick(self) -> None:
        """Time has passed."""
        for part in self._parts():
            part.tick()

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
            if header.kind in _QUESTIONS and header.operation in self.exhibits:
                return self.exhibits[header.operation].frame_started(peer, header)
            prefetch = self.prefetch
            if prefetch is not None and header.operation == prefetch.operation:
                return prefetch.frame_started(peer, header)
        if session is not None and peer in session.ring:
            return session.frame_started(peer, header)
        if header.kind in _QUESTIONS:
            answer = FrameHeader(FrameKind.PIECE_LACK, header.operation, 0, 0, 0)
            lane.say(answer)
        return Drain(header.length)

    def lane_lost(self, lane: Lane) -> None:
        """A lane is gone, with what was on it."""
        for part in self._parts():
            part.lost_lane(lane.link.peer)

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """The link to a peer has come up, or is down."""
        for part in self._parts():
            part.link_changed(peer, up=up)
        if not up:
            for exhibit in self.exhibits.values():
                exhibit.forget(peer)

    def uses(self, peer: PeerId) -> bool:
        """Whether something is expected of ``peer``, or goes to it."""
        return any(part.uses(peer) for part in self._parts()) or any(
            exhibit.owes(peer) for exhibit in self.exhibits.values()
        )

    def _parts(self) -> list[StateSession | Prefetch]:
        prefetching = [] if self.prefetch is None else [self.prefetch]
        return [*self.sessions.values(), *prefetching]
