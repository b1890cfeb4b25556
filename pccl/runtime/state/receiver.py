"""``StateReceiver``: carries out the decisions of a ``Download``, and passes received frames to it.

It reads each piece directly into its slot, and hashes it. While two lanes carry copies of the same
piece, the newer copy gets the slot; the receiver discards the older copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import PeerId
from pccl.runtime.state.frames import (
    QUEUED_PIECES_MAX,
    StateSender,
    check_length,
    numbers_of,
    pack_numbers,
)
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.state.digests import PieceMap, piece_digest
from pccl.state.fetch.download import (
    AnnouncePieces,
    AskMap,
    Decision,
    Download,
    DownloadDone,
    DownloadFailed,
    KeepPiece,
    PiecesComplete,
    StagePieces,
)
from pccl.state.fetch.pieces import Ask
from pccl.state.fetch.published import Target
from pccl.state.fetch.target import Present
from pccl.transports.sinks import Collect, Drain, Sink, discard


@dataclass(slots=True)
class _Arrival:
    """The sink of a piece that is missing."""

    receiver: StateReceiver
    source: PeerId
    number: int
    slot: memoryview
    is_advisory: bool
    """Whether the piece is part of a prefetch."""
    received: int = 0

    def memory(self, received: int) -> memoryview:
        """Return the rest of the slot, or scratch memory if a newer copy has the slot."""
        self.note(received)
        if not self.receiver.is_current(self):
            return discard(len(self.slot) - received)
        return self.slot[received:]

    def counts(self) -> bool:
        """Whether no newer copy has the slot, and the piece is not advisory.

        A program may change an advisory piece during the transfer. The digest of the piece is
        then wrong, and the source is not to blame.
        """
        return self.receiver.is_current(self) and not self.is_advisory

    def complete(self) -> None:
        """Report the last bytes, and verify the piece unless a newer copy has the slot."""
        self.note(len(self.slot))
        self.receiver.complete(self)

    def lost(self) -> None:
        """Give up the slot, unless a newer copy has it."""
        self.receiver.drop(self)

    def note(self, received: int) -> None:
        """Report new bytes to the download; ``received`` counts all bytes of this piece."""
        if received > self.received:
            self.receiver.progressed(self.source, received - self.received)
            self.received = received


@dataclass(slots=True)
class _MapPart:
    """The sink of a part of a map; it reports progress, because a slow link takes long for a part.

    It calls ``progressed`` with the number of bytes received so far.
    """

    part: Collect
    progressed: Callable[[int], None]
    received: int = 0

    def memory(self, received: int) -> memoryview:
        """Report new bytes as progress, and return memory for the next ones."""
        if received > self.received:
            self.received = received
            self.progressed(received)
        return self.part.memory(received)

    def counts(self) -> bool:
        """Return True, because the download uses the whole part."""
        return self.part.counts()

    def complete(self) -> None:
        """Report the last bytes as progress, and complete the part."""
        if self.received < len(self.part.payload):
            self.progressed(len(self.part.payload))
        self.part.complete()

    def lost(self) -> None:
        """Do nothing: ``StateReceiver.lane_lost`` lets the download ask for the map again."""


class StateReceiver:
    """Connects one download with its frames and its memory.

    Args:
        memory: memory of the state; its digests are up to date.
        fetched: stores the pieces.
        peer: this peer; None: it is not a member yet.
        sender: sends requests.
        now_ns: returns the current time in nanoseconds.
        stall_ns: nanoseconds without a byte after which a source counts as stalled.
        report: receives the end of the download.
    """

    def __init__(
        self,
        memory: StateMemory,
        fetched: FetchedPieces,
        peer: PeerId | None,
        sender: StateSender,
        now_ns: Callable[[], int],
        stall_ns: int,
        report: Callable[[PiecesComplete | DownloadDone | DownloadFailed], None],
    ) -> None:
        self.download = Download(memory.piece_map, peer, stall_ns=stall_ns)
        self.fetched = fetched
        self.no_room: OSError | MemoryError | None = None
        """The error that ended the download, if there was no room for the missing pieces."""
        self.watches = False
        """Whether each map request also asks the member to announce results."""
        self._layout = memory.layout
        self._sender = sender
        self._now_ns = now_ns
        self._report = report
        self._arrivals: dict[int, _Arrival] = {}
        """Number of a piece -> its newest copy that is being received."""

    @property
    def arriving_bytes(self) -> int:
        """Bytes received of incomplete pieces."""
        return sum(arrival.received for arrival in self._arrivals.values())

    # -- events ------------------------------------------------------------------------------------

    def begin(self, target: Target) -> None:
        """Fetch ``target`` from now on."""
        self._arrivals.clear()
        self._carry_out(self.download.begin(target, self._present()))

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """Report to the download that a link came up or broke."""
        self._carry_out(self.download.link_changed(peer, self._present(), up=up))

    def lane_lost(self, peer: PeerId) -> None:
        """Repeat requests to ``peer``, because a lost lane may have lost them or their answers."""
        self._carry_out(self.download.lane_lost(peer, self._present()))

    def tick(self) -> None:
        """Let the download check its timeouts."""
        self._carry_out(self.download.tick(self._present()))

    def close(self) -> None:
        """Stop the download. Its pieces stay in ``fetched``."""
        self.download.stop()
        self._arrivals.clear()

    # -- frames ------------------------------------------------------------------------------------

    def frame_started(
        self,
        peer: PeerId,
        header: FrameHeader,
        take: Callable[[PeerId, FrameHeader, bytearray], None],
        *,
        awaited: bool,
    ) -> Sink:
        """Return the sink of a frame. An awaited piece goes to its slot, another frame to ``take``.

        Raises:
            RemoteProtocolError: the frame has a wrong length, or names a piece that does not exist.
        """
        if header.kind is FrameKind.PIECE:
            return self._place(peer, header)
        check_length(header)
        if not awaited:
            return Drain(header.length)
        part = Collect(bytearray(header.length), partial(take, peer, header))
        if header.kind is not FrameKind.MAP:
            return part
        self._map_progressed(peer, header, 0)
        return _MapPart(part, partial(self._map_progressed, peer, header))

    def _place(self, peer: PeerId, header: FrameHeader) -> Sink:
        number = header.offset
        count = self._layout.piece_count
        if number >= count or header.length != self._layout.piece(number).length:
            raise RemoteProtocolError(func="lane", reason=f"the layout has no such piece {number}")
        if not self.download.expects(peer, number):
            return Drain(header.length)
        slot = self.fetched.slot(number)
        arrival = _Arrival(self, peer, number, slot, is_advisory=header.operation.term == 0)
        self._arrivals[number] = arrival
        return arrival

    def take(self, peer: PeerId, header: FrameHeader, payload: bytearray) -> None:
        """Pass a complete map part, refusal or announcement to the download.

        Raises:
            RemoteProtocolError: the frame is malformed, or of an unexpected kind.
        """
        present = self._present()
        match header.kind:
            case FrameKind.MAP:
                first, count = header.offset, header.what
                self._carry_out(self.download.map_came(peer, first, count, payload, present))
            case FrameKind.PIECE_LACK:
                self._carry_out(self.download.refused(peer, numbers_of(payload), present))
            case FrameKind.PIECE_HAVE:
                self._carry_out(self.download.has(peer, numbers_of(payload), present))
            case _:
                raise RemoteProtocolError(func="lane", reason=f"unexpected {header.kind.name}")

    def _map_progressed(self, peer: PeerId, header: FrameHeader, received: int) -> None:
        self.download.map_progressed(peer, header.offset, received, self._now_ns())

    # -- pieces on their way -----------------------------------------------------------------------

    def is_current(self, arrival: _Arrival) -> bool:
        """Whether ``arrival`` is the newest copy of its piece, so that it has the slot."""
        return self._arrivals.get(arrival.number) is arrival

    def drop(self, arrival: _Arrival) -> None:
        """Forget a copy that will not be complete."""
        if self.is_current(arrival):
            del self._arrivals[arrival.number]

    def progressed(self, source: PeerId, nbytes: int) -> None:
        """Report to the download that bytes of a piece arrived, perhaps of an older copy."""
        self.download.progressed(source, nbytes, self._now_ns())

    def complete(self, arrival: _Arrival) -> None:
        """Verify a complete piece, if it is the newest copy and still missing."""
        if not self.is_current(arrival):
            return
        source, number = arrival.source, arrival.number
        del self._arrivals[number]
        if self.download.wants(number):
            digest = piece_digest(arrival.slot)
            self._carry_out(self.download.arrived(source, number, digest, self._present()))

    # -- decisions ---------------------------------------------------------------------------------

    def _present(self) -> Present:
        return Present(self._now_ns(), self._sender.links())

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        send = self._sender.send
        for decision in decisions:
            match decision:
                case Ask(source, pieces):
                    send(source, FrameKind.PIECE_ASK, pack_numbers(pieces))
                case AskMap(peer):
                    if self.watches:
                        send(peer, FrameKind.WATCH)  # an earlier one may have been lost
                    send(peer, FrameKind.MAP_ASK)
                case KeepPiece(number, digest):
                    self.fetched.put(number, digest)
                case AnnouncePieces(peers, pieces):
                    for peer in peers:
                        for first in range(0, len(pieces), QUEUED_PIECES_MAX):
                            part = pieces[first : first + QUEUED_PIECES_MAX]
                            send(peer, FrameKind.PIECE_HAVE, pack_numbers(part))
                case StagePieces(pieces, digests):
                    self._carry_out(self._stage(pieces, digests))
                case PiecesComplete() | DownloadDone() | DownloadFailed():
                    self._report(decision)

    def _stage(self, pieces: tuple[int, ...], digests: PieceMap) -> list[Decision]:
        self._arrivals.clear()
        try:
            self.fetched.prepare(pieces, digests)
        except (OSError, MemoryError) as error:
            self.no_room = error
            return self.download.no_room(str(error), self._present())
        return self.download.staged(list(self.fetched.verified), self._present())
