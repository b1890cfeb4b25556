"""``StateSession``: one shared state that takes part in an operation: uploaded, compared, fetched.

Peers that ask for pieces get them straight from the memory of the state, or from what was fetched
and verified here. What is elected is fetched into memory of its own, from all members that have it
at once. Nothing of the caller's is overwritten before the outcome is known, unless it said so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pccl.machines.peer.events import ComparisonDone, ReduceDone, SyncStarved
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.messages import Progress
from pccl.protocol.shared_state import Difference, Elected
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.state.comparison import StateComparison
from pccl.runtime.state.frames import StateSender, numbers_of
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.receiver import StateReceiver
from pccl.runtime.state.upload import StateUpload
from pccl.state.fetch.download import DownloadDone, DownloadFailed, PiecesComplete
from pccl.state.fetch.target import ElectedTarget
from pccl.transports.link import Links
from pccl.transports.sinks import Sink

StateNews: TypeAlias = ReduceDone | SyncStarved | ComparisonDone
"""All that is elected is here; nobody gives what is missing; the answer of ``compare``."""


class StateSession:
    """One operation's part in shared state on this peer.

    Args:
        operation: its id.
        memory: of the state; hashed.
        fetched: where fetched pieces go, with those that attempts before this one have left.
        ring: all members of the operation, in ring order.
        own: this peer.
        links: of this peer.
        now_ns: the present.
        stall_ns: a source that sends nothing for so long is passed over.
        report: given what the machine has to know of it.
    """

    def __init__(
        self,
        operation: OperationId,
        memory: StateMemory,
        fetched: FetchedPieces,
        ring: tuple[PeerId, ...],
        own: PeerId,
        links: Links,
        now_ns: Callable[[], int],
        stall_ns: int,
        report: Callable[[StateNews], None],
    ) -> None:
        self.operation = operation
        self.memory = memory
        self.fetched = fetched
        self.ring = ring
        self.elected: Elected | None = None
        self._own = own
        self._sender = StateSender(operation, links)
        self._upload = StateUpload(
            memory.layout, memory.piece_map, self._read, self._holds, self._sender
        )
        self.receiver = StateReceiver(
            memory, fetched, own, self._sender, now_ns, stall_ns, self._note_end
        )
        self.download = self.receiver.download
        self._now_ns = now_ns
        self._report = report
        self._comparison: StateComparison | None = None

    # -- what the engine does --------------------------------------------------------------------

    def begin(self, elected: Elected) -> None:
        """This is elected, or has become so meanwhile."""
        self.elected = elected
        mine = self.memory.piece_map
        self.receiver.begin(ElectedTarget(elected, self._own, self.ring, mine))

    def _note_end(self, how: PiecesComplete | DownloadDone | DownloadFailed) -> None:
        if isinstance(how, DownloadFailed):
            self._report(SyncStarved(self.operation, how.reason))
        elif isinstance(how, DownloadDone):
            assert self.elected is not None
            if self.download.map is not None:
                self._upload.piece_map = self.download.map
            self._report(ReduceDone(self.operation, self.elected.content))

    def compare(self, reference: PeerId) -> None:
        """Find out how the own state differs from that of ``reference``."""
        now_ns = self._now_ns()
        self._comparison = StateComparison(
            self.memory, self._sender, reference, now_ns, self._answer_comparison
        )
        self._comparison.begin()

    def _answer_comparison(self, found: Difference) -> None:
        self._comparison = None
        self._report(ComparisonDone(self.operation, found))

    def detach(self) -> None:
        """The caller leaves: its memory is not read any more; peers that wait for it hear so."""
        self._upload.withdraw()

    def end(self) -> None:
        """The operation is over: the memory is neither read nor written after this."""
        self.receiver.close()
        self._upload.close()

    @property
    def tx_bytes(self) -> int:
        """Bytes of pieces given to others."""
        return self._upload.tx_bytes

    @property
    def progress(self) -> Progress:
        """How far it is, in pieces; the bytes are also those of maps."""
        download = self.download
        received = len(download.wanted) - download.missing
        moved_bytes = download.map_bytes + download.rx_bytes + self.receiver.arriving_bytes
        return Progress(self.operation, received, 0, moved_bytes)

    def uses(self, peer: PeerId) -> bool:
        """Whether something is expected of ``peer``, or goes to it."""
        return self.download.uses(peer) or self._upload.owes(peer)

    def lane_lost(self, peer: PeerId) -> None:
        """A lane to a peer is gone, and perhaps questions, answers and news with it."""
        self.receiver.lane_lost(peer)
        if self._compares(peer) and self._comparison is not None:
            self._comparison.ask()

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """The link to a peer has come up, or is down."""
        if not up:
            self._upload.forget(peer)
            if self._compares(peer) and self._comparison is not None:
                self._comparison.fail("the link to it broke")
        self.receiver.link_changed(peer, up=up)

    def tick(self) -> None:
        """Time has passed."""
        self.receiver.tick()

    # -- frames ----------------------------------------------------------------------------------

    def frame_started(self, peer: PeerId, header: FrameHeader) -> Sink:
        """Where the frame goes.

        Raises:
            RemoteProtocolError: the sender may not send this.
        """
        awaited = self._awaits(peer, header.kind)
        return self.receiver.frame_started(peer, header, self.take, awaited=awaited)

    def _awaits(self, peer: PeerId, kind: FrameKind) -> bool:
        """Whether a frame that is an answer has been asked for."""
        match kind:
            case FrameKind.MAP:
                return self._compares(peer) or self.download.awaits_map(peer)
            case FrameKind.LAYOUT:
                return self._compares(peer)
            case _:
                return True

    def _compares(self, peer: PeerId) -> bool:
        return self._comparison is not None and self._comparison.reference == peer

    def take(self, peer: PeerId, header: FrameHeader, payload: bytearray) -> None:
        """A frame is here that is no piece.

        Raises:
            RemoteProtocolError: it makes no sense.
        """
        comparison = self._comparison if self._compares(peer) else None
        match header.kind:
            case FrameKind.MAP_ASK:
                self._upload.send_map(peer)
            case FrameKind.PIECE_ASK:
                self._upload.send_pieces(peer, numbers_of(payload))
            case FrameKind.LAYOUT_ASK:
                self._upload.send_layout(peer)
            case FrameKind.LAYOUT:
                if comparison is not None:
                    comparison.take_layout(payload)
            case FrameKind.MAP:
                if comparison is not None:
                    comparison.take_map(header, payload)
                self.receiver.take(peer, header, payload)
            case FrameKind.PIECE_LACK:
                if comparison is not None and not payload:
                    comparison.fail("it does not answer any more")
                self.receiver.take(peer, header, payload)
            case _:
                self.receiver.take(peer, header, payload)

    # -- uploads ---------------------------------------------------------------------------------

    def _holds(self, number: int) -> bool:
        """Whether the elected piece can be had here, as far as is known."""
        return self._has_fetched(number) or self.download.owns(number)

    def _read(self, number: int) -> memoryview:
        if self._has_fetched(number):
            return self.fetched.slot(number)
        return self.memory.view(self.memory.layout.piece(number))

    def _has_fetched(self, number: int) -> bool:
        """Whether the elected piece has been fetched, as far as is known."""
        return self.download.pieces is not None and number in self.fetched.verified
