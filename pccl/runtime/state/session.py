"""``StateSession``: uploads, compares and downloads one shared state in one operation.

A session sends pieces directly from the tensors, or from the verified pieces that it has fetched.
It fetches the elected contents into separate memory, from several members at once. It overwrites no
tensor before the operation is committed, unless the caller has set ``in_place``.
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
"""Events for the machine: all data is here, missing data has no source, ``compare`` is done."""

_OVERWRITTEN = "the election changed after this peer had overwritten its state in place"


class StateSession:
    """One shared state of this peer in one operation.

    Args:
        operation: id of the operation.
        memory: memory of the state; its digests are up to date.
        fetched: stores fetched pieces; may hold pieces of earlier attempts.
        ring: all members of the operation, in ring order.
        own: this peer.
        links: links of this peer.
        now_ns: returns the current time in nanoseconds.
        stall_ns: nanoseconds without a byte after which a source counts as stalled.
        report: receives the events for the machine.
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
        """Fetch the contents that ``elected`` names. A later call replaces the target.

        In place it cannot: the tensors may hold pieces of the first target.
        """
        begun, self.elected = self.elected, elected
        has_changed = begun is not None and begun.content != elected.content
        if has_changed and self.fetched.in_place and self.download.wanted:
            self.detach()
            self._report(SyncStarved(self.operation, _OVERWRITTEN))
            return
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
        """Find where this peer's state differs from that of ``reference``."""
        now_ns = self._now_ns()
        self._comparison = StateComparison(
            self.memory, self._sender, reference, now_ns, self._answer_comparison
        )
        self._comparison.begin()

    def _answer_comparison(self, found: Difference) -> None:
        self._comparison = None
        self._report(ComparisonDone(self.operation, found))

    def detach(self) -> None:
        """Stop reading the tensors, because the caller left; refuse pending requests of peers."""
        self._upload.withdraw()

    def end(self) -> None:
        """End the session. It neither reads nor writes the memory after this."""
        self.receiver.close()
        self._upload.close()

    @property
    def tx_bytes(self) -> int:
        """Bytes of pieces that this session has sent."""
        return self._upload.tx_bytes

    @property
    def progress(self) -> Progress:
        """Number of verified pieces, and received bytes of maps, pieces and incomplete pieces."""
        download = self.download
        received = len(download.wanted) - download.missing
        moved_bytes = download.map_bytes + download.rx_bytes + self.receiver.arriving_bytes
        return Progress(self.operation, received, 0, moved_bytes)

    def uses(self, peer: PeerId) -> bool:
        """Whether this session expects data from ``peer``, or has pieces queued for it."""
        return self.download.uses(peer) or self._upload.owes(peer)

    def lane_lost(self, peer: PeerId) -> None:
        """Repeat requests to ``peer``, because a lost lane may have lost them or their answers."""
        self.receiver.lane_lost(peer)
        if self._compares(peer) and self._comparison is not None:
            self._comparison.ask()

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """Adapt upload, comparison and download to a link that came up or broke."""
        if not up:
            self._upload.forget(peer)
            if self._compares(peer) and self._comparison is not None:
                self._comparison.fail("the link to it broke")
        self.receiver.link_changed(peer, up=up)

    def tick(self) -> None:
        """Let the download check its timeouts."""
        self.receiver.tick()

    # -- frames ----------------------------------------------------------------------------------

    def frame_started(self, peer: PeerId, header: FrameHeader) -> Sink:
        """Return the sink that receives the payload of a frame.

        Raises:
            RemoteProtocolError: ``peer`` may not send such a frame.
        """
        awaited = self._awaits(peer, header.kind)
        return self.receiver.frame_started(peer, header, self.take, awaited=awaited)

    def _awaits(self, peer: PeerId, kind: FrameKind) -> bool:
        """Whether this session expects such a frame; only MAP and LAYOUT may be unexpected."""
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
        """Process a complete frame of any kind except PIECE.

        Raises:
            RemoteProtocolError: the frame is malformed or unexpected, or asks for too many pieces.
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
                    comparison.fail("it has left the call")
                self.receiver.take(peer, header, payload)
            case _:
                self.receiver.take(peer, header, payload)

    # -- uploads ---------------------------------------------------------------------------------

    def _holds(self, number: int) -> bool:
        """Whether this peer can send the elected piece ``number``, as far as it knows."""
        return self._has_fetched(number) or self.download.owns(number)

    def _read(self, number: int) -> memoryview:
        if self._has_fetched(number):
            return self.fetched.slot(number)
        return self.memory.view(self.memory.layout.piece(number))

    def _has_fetched(self, number: int) -> bool:
        """Whether this peer has fetched and verified the elected piece ``number``."""
        return self.download.pieces is not None and number in self.fetched.verified
