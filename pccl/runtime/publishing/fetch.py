"""``VersionFetch``: downloads one published state, and serves its pieces at the same time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.publication.versions import StateName
from pccl.protocol.types import PeerId
from pccl.runtime.state.exchange import refuse
from pccl.runtime.state.frames import StateSender, numbers_of
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.receiver import StateReceiver
from pccl.runtime.state.upload import StateUpload
from pccl.state.fetch.download import DownloadDone, DownloadFailed, PiecesComplete
from pccl.state.fetch.published import LayoutRequest, PublishedTarget
from pccl.state.fetch.target import Present
from pccl.state.layout import StateLayout
from pccl.state.versions import version_operation
from pccl.transports.link import Lane, Links
from pccl.transports.sinks import Collect, Drain, Sink


class VersionFetch:
    """The download of one state: first its layout, then its map, then the pieces that differ.

    Args:
        name: the state.
        group: the peer group.
        own: this reader.
        links: the links to members and readers.
        now_ns: returns the current time in nanoseconds.
        stall_ns: nanoseconds without a byte after which a source counts as stalled.
        on_layout: called once with the layout; makes memory, and passes it to ``begin``.
        on_done: called once when ``memory`` has the whole state, with its digests.
    """

    def __init__(
        self,
        name: StateName,
        group: int,
        own: PeerId,
        links: Links,
        now_ns: Callable[[], int],
        stall_ns: int,
        on_layout: Callable[[VersionFetch, StateLayout], None],
        on_done: Callable[[VersionFetch], None],
    ) -> None:
        self.name = name
        self.operation = version_operation(name, group)
        self.target = PublishedTarget(name.content, own)
        self.memory: StateMemory | None = None
        self._own = own
        self._sender = StateSender(self.operation, links)
        self._now_ns = now_ns
        self._stall_ns = stall_ns
        self._on_layout = on_layout
        self._on_done = on_done
        self._layout: LayoutRequest | None = LayoutRequest(name.layout, stall_ns)
        self._receiver: StateReceiver | None = None
        self._upload: StateUpload | None = None

    def knows_layout(self, layout: StateLayout) -> None:
        """Use a layout that is known already: ask no peer for it."""
        self._layout = None
        self._on_layout(self, layout)

    def begin(self, memory: StateMemory) -> None:
        """Fetch into ``memory`` the pieces that it lacks according to its digests."""
        self.memory = memory
        fetched = FetchedPieces(memory, 0, in_place=True)
        receiver = self._receiver = StateReceiver(
            memory, fetched, self._own, self._sender, self._now_ns, self._stall_ns, self._ended
        )
        self._upload = StateUpload(
            memory.layout,
            memory.piece_map,
            lambda number: memory.view(memory.layout.piece(number)),
            lambda number: number in fetched.verified or receiver.download.owns(number),
            self._sender,
        )
        for peer in self.target.readers:
            self._watch(peer)
        receiver.begin(self.target)

    def _ended(self, how: PiecesComplete | DownloadDone | DownloadFailed) -> None:
        if isinstance(how, DownloadDone) and self._receiver is not None:
            found = self._receiver.download.map
            assert found is not None
            assert self.memory is not None
            self.memory.piece_map = found
            self._on_done(self)

    @property
    def moves(self) -> bool:
        """Whether a piece has arrived, and the last byte of one is not a stall time old."""
        if self._receiver is None:
            return False
        download = self._receiver.download
        return download.rx_bytes > 0 and self._now_ns() - download.moved_ns < self._stall_ns

    @property
    def starves(self) -> bool:
        """Whether no source has been able to send what is missing, for a stall time."""
        since_ns = None
        if self._layout is not None:
            since_ns = self._layout.starving_since_ns
        elif self._receiver is not None:
            since_ns = self._receiver.download.starving_since_ns
        return since_ns is not None and self._now_ns() - since_ns >= self._stall_ns

    def uses(self, peer: PeerId) -> bool:
        """Whether something is expected from ``peer``."""
        if self._layout is not None:
            return self._layout.awaits(peer)
        return self._receiver is not None and self._receiver.download.uses(peer)

    def set_sources(self, holders: tuple[PeerId, ...], place: tuple[int, int]) -> None:
        """Record which members have the state; all other linked peers are readers.

        ``place``: rank of this reader, and the number of readers.
        """
        self.target.place = place
        new = [peer for peer in holders if peer not in self.target.holders]
        self.target.holders = holders
        linked = self._sender.links()
        self.target.readers = tuple(peer for peer in linked if peer not in holders)
        for peer in new:
            if linked.get(peer) and self._receiver is not None:
                self._receiver.link_changed(peer, up=True)
        self._ask_layout()

    def link_changed(self, peer: PeerId, *, up: bool, is_new: bool) -> None:
        """Adapt to a link that came up, perhaps again, or broke."""
        if not up or not is_new:
            self._sender.drop(peer)
            if self._upload is not None:
                self._upload.forget(peer)
            if self._layout is not None:
                self._layout.lost(peer)
        others = [one for one in self.target.readers if one != peer]
        is_reader = up and peer not in self.target.holders
        self.target.readers = (*others, peer) if is_reader else tuple(others)
        if is_reader:
            self._watch(peer)
        if self._receiver is not None:
            if up and not is_new:
                self._receiver.lane_lost(peer)
            else:
                self._receiver.link_changed(peer, up=up)
        self._ask_layout()

    def _watch(self, peer: PeerId) -> None:
        """Ask a reader which pieces it has."""
        if self._receiver is not None and self._sender.is_up(peer):
            self._sender.send(peer, FrameKind.WATCH)

    def tick(self) -> None:
        """Check timeouts."""
        if self._layout is not None:
            self._layout.ticked()
        self._ask_layout()
        if self._receiver is not None:
            self._receiver.tick()

    def close(self) -> None:
        """Stop reading and writing the memory."""
        self._layout = None
        if self._receiver is not None:
            self._receiver.close()
        if self._upload is not None:
            self._upload.withdraw()  # it ends the frames, and refuses what readers have asked
        else:
            self._sender.end()

    def _ask_layout(self) -> None:
        if self._layout is None:
            return
        present = Present(self._now_ns(), self._sender.links())
        peer = self._layout.next(self.target.sources(), present)
        if peer is not None:
            self._sender.send(peer, FrameKind.LAYOUT_ASK)

    # -- frames ----------------------------------------------------------------------------------

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """Return the sink of a frame, whose length is checked unless it is a piece.

        Raises:
            RemoteProtocolError: the frame names a piece that does not exist.
        """
        peer, receiver = lane.link.peer, self._receiver
        if header.kind is FrameKind.LAYOUT:
            if self._layout is None or not self._layout.awaits(peer):
                return Drain(header.length)
            return Collect(bytearray(header.length), partial(self._take_layout, peer))
        if receiver is None:
            if header.kind is FrameKind.PIECE_LACK and self._layout is not None:
                self._layout.refused(peer)
                self._ask_layout()
            is_answer = header.kind in (FrameKind.MAP, FrameKind.PIECE, FrameKind.PIECE_LACK)
            if is_answer or header.kind is FrameKind.PIECE_HAVE:
                return Drain(header.length)
            return refuse(lane, header)
        awaited = header.kind is not FrameKind.MAP or receiver.download.awaits_map(peer)
        return receiver.frame_started(peer, header, partial(self._take, lane), awaited=awaited)

    def _take(self, lane: Lane, peer: PeerId, header: FrameHeader, payload: bytearray) -> None:
        receiver, upload = self._receiver, self._upload
        if receiver is None or upload is None:
            return
        if receiver.download.map is not None:
            upload.piece_map = receiver.download.map
        match header.kind:
            case FrameKind.LAYOUT_ASK:
                upload.send_layout(peer)
            case FrameKind.MAP_ASK if receiver.download.map is None:
                refuse(lane, header)
            case FrameKind.MAP_ASK:
                upload.send_map(peer)
            case FrameKind.WATCH:
                upload.send_have(peer)
            case FrameKind.PIECE_ASK:
                upload.send_pieces(peer, numbers_of(payload))
            case FrameKind.PIECE_HAVE:
                upload.cancel(peer, numbers_of(payload))
                receiver.take(peer, header, payload)
            case FrameKind.PIECE_LACK | FrameKind.MAP:
                receiver.take(peer, header, payload)
            case _:
                raise RemoteProtocolError(func="lane", reason=f"unexpected {header.kind.name}")

    def _take_layout(self, peer: PeerId, packed: bytearray) -> None:
        layout = self._layout.take(peer, packed) if self._layout is not None else None
        if layout is not None:
            self.knows_layout(layout)
        else:
            self._ask_layout()
