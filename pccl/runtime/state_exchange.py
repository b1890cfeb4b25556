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
from pccl.runtime.state_memory import StateMemory
from pccl.runtime.state_session import Drain, StateSession
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


_UNREAD_BYTES_MAX = 16 << 10
"""Who does not read is told no more about operations that are unknown here."""


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

    def tick(self) -> None:
        """Time has passed."""
        for session in list(self.sessions.values()):
            session.tick()

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
        if session is not None and peer in session.ring:
            return session.frame_started(peer, header)
        if header.kind in _QUESTIONS and lane.backlog_bytes < _UNREAD_BYTES_MAX:
            answer = FrameHeader(FrameKind.PIECE_LACK, header.operation, 0, 0, 0)
            lane.say(answer)
        return Drain(header.length)

    def lane_lost(self, lane: Lane) -> None:
        """A lane is gone, with what was on it."""
        for session in list(self.sessions.values()):
            session.lost_lane(lane.link.peer)

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """The link to a peer has come up, or is down."""
        for session in list(self.sessions.values()):
            session.link_changed(peer, up=up)

    def uses(self, peer: PeerId) -> bool:
        """Whether something is expected of ``peer``, or goes to it."""
        return any(session.uses(peer) for session in self.sessions.values())
