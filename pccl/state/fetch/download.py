"""``Download``: fetches a shared state from several sources, for a synchronization or a prefetch.

It is pure: it takes events, each with a ``Present``, and returns decisions. Its ``Target`` says
which contents to fetch, and which peers have them.

    AskMap -> StagePieces that differ -> Ask for them, KeepPiece if it is valid -> DownloadDone

If no source sends missing data, the download fails: at once if no other source can be expected,
else after ``stall_ns``. A failed download still accepts pieces that arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.types import PeerId
from pccl.state.digests import PieceMap
from pccl.state.fetch.maps import MapMeter, MapRequest
from pccl.state.fetch.pieces import Ask, PieceFetch
from pccl.state.fetch.published import Target
from pccl.state.fetch.target import REFRESH_NS, Present


@dataclass(frozen=True, slots=True)
class AskMap:
    """Ask this peer for the digests of its pieces."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class StagePieces:
    """Reserve memory for these pieces, which must have these digests; then call ``staged``."""

    pieces: tuple[int, ...]
    digests: PieceMap


@dataclass(frozen=True, slots=True)
class KeepPiece:
    """Store the digest of this piece, which has arrived and is valid."""

    piece: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class AnnouncePieces:
    """Announce to these peers, which fetch the same contents, that this peer has these pieces."""

    peers: tuple[PeerId, ...]
    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PiecesComplete:
    """All pieces are here. This decision may repeat."""


@dataclass(frozen=True, slots=True)
class DownloadDone:
    """All pieces are here, and no pending map may change that. Returned once."""


@dataclass(frozen=True, slots=True)
class DownloadFailed:
    """No source sends missing data, or this peer has no room for it. Returned once."""

    reason: str


Decision = (
    AskMap
    | StagePieces
    | Ask
    | KeepPiece
    | AnnouncePieces
    | PiecesComplete
    | DownloadDone
    | DownloadFailed
)


class Download:
    """The download of one state by one peer.

    Args:
        own: digests of the peer's own pieces; they may change.
        peer: this peer; None: it is not a member yet.
        stall_ns: nanoseconds without a byte after which a source counts as stalled.
    """

    def __init__(self, own: PieceMap, peer: PeerId | None, *, stall_ns: int) -> None:
        self.target: Target | None = None
        self.map: PieceMap | None = None
        """Digests of the contents to fetch; None: unknown."""
        self.pieces: PieceFetch | None = None
        """Spreads requests over the sources; None: the pieces to fetch are unknown."""
        self.wanted: tuple[int, ...] = ()
        """Pieces whose own contents differ from the contents to fetch, in order."""
        self.wanted_bytes = 0
        self.rx_bytes = 0
        """Bytes of valid pieces that arrived."""
        self.wrong_pieces = 0
        self.is_done = False
        self.has_failed = False
        self.is_deserted = False
        """Whether a peer has withdrawn; it may send pieces in the next attempt."""
        self.is_held = False
        """Whether fetched pieces are in use, so that the download must not start other contents."""
        self._own = own
        self._peer = peer
        self._stall_ns = stall_ns
        self._has_room = True
        self._maps: dict[PeerId, MapRequest] = {}
        """Requested maps that are not complete."""
        self._meter = MapMeter(own.layout)
        self._here: list[int] = []
        """Wanted pieces that are here."""
        self._news: list[int] = []
        """New pieces that are not announced to the other fetchers yet."""
        self._haves: dict[PeerId, list[int]] = {}
        """Pieces that each other fetcher has announced."""
        self.starving_since_ns: int | None = None  # since when no source may send what is missing
        self.moved_ns = 0
        """Time of the last byte of a piece."""
        self._ended_ns = 0
        """Time of the end, or of the last refresh of the maps after the end."""

    # -- questions ---------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether all pieces to fetch are here."""
        return self.pieces is not None and self.pieces.complete

    @property
    def missing(self) -> int:
        """Number of pieces that are still missing; 0 while this is unknown."""
        return self.pieces.missing if self.pieces is not None else 0

    @property
    def map_bytes(self) -> int:
        """Received bytes of maps."""
        return self._meter.bytes

    @property
    def source_count(self) -> int:
        """Number of peers that this one can ask for pieces."""
        sources = self.pieces.sources() if self.pieces is not None else ()
        return sum(source.live for source in sources)

    def awaits_map(self, peer: PeerId) -> bool:
        """Whether a map request to ``peer`` is open."""
        return peer in self._maps

    def uses(self, peer: PeerId) -> bool:
        """Whether the download expects a map or a piece from ``peer``."""
        return peer in self._maps or (
            self.pieces is not None and bool(self.pieces.outstanding(peer))
        )

    def expects(self, source: PeerId, piece: int) -> bool:
        """Whether ``piece`` is missing and was requested from ``source``."""
        return self.pieces is not None and self.pieces.expects(source, piece)

    def wants(self, piece: int) -> bool:
        """Whether ``piece`` is still missing."""
        return self.pieces is not None and self.pieces.wants(piece)

    def owns(self, piece: int) -> bool:
        """Whether the peer's own ``piece`` has the contents to fetch, as far as is known."""
        layout = self._own.layout
        entry = layout.entries[layout.piece(piece).entry]
        if self.target is None or not self.target.lacks(may_differ=entry.may_differ):
            return True
        if self.pieces is None or self.map is None:
            return False
        return self.map[piece] == self._own[piece]

    # -- beginning ---------------------------------------------------------------------------------

    def begin(self, target: Target, present: Present) -> list[Decision]:
        """Fetch ``target`` from now on."""
        self.target = target
        if self.is_done:  # a new fetcher does not know the pieces that are here
            return self._announce(target.fetchers, self._here, present)
        self.pieces = self.map = self.starving_since_ns = None
        self.wanted, self.wanted_bytes = (), 0
        self._maps.clear()
        self._news.clear()  # ``_haves`` stays: other fetchers may have begun before this peer
        self._meter.begin()
        if target.is_met:
            return self._finish(present)
        for peer, up in present.links.items():
            if up:
                target.link_changed(peer, up=True)
        return self._ask_maps(present) + self._conclude(present)

    def staged(self, here: Iterable[int], present: Present) -> list[Decision]:
        """Request the pieces of ``StagePieces`` from now on, except verified pieces in ``here``."""
        assert self.target is not None
        layout, fetchers, now_ns = self._own.layout, self.target.fetchers, present.now_ns
        self._here = list(here)
        self.moved_ns = now_ns
        self.starving_since_ns = None
        known = set(self._here)
        sizes = {n: layout.piece(n).length for n in self.wanted if n not in known}
        rank, count = self.target.place
        most = self.target.window_bytes_max(sum(sizes.values()))
        self.pieces = PieceFetch(sizes, rank, count, now_ns, stall_ns=self._stall_ns, most=most)
        decisions: list[Decision] = []
        for peer in self.target.sources():
            if present.is_up(peer):
                decisions += self._add_source(self.pieces, peer, present)
        return decisions + self._announce(fetchers, self._here, present) + self._conclude(present)

    def no_room(self, why: str, present: Present) -> list[Decision]:
        """Fail permanently, because this peer has no room for the pieces of ``StagePieces``."""
        self._has_room = False
        self.pieces = None
        self.wanted, self.wanted_bytes = (), 0
        return self._fail(f"this peer has no room for the missing pieces: {why}", present)

    # -- links and time ----------------------------------------------------------------------------

    def link_changed(self, peer: PeerId, present: Present, *, up: bool) -> list[Decision]:
        """Use a peer whose link came up, or stop using a peer whose link broke."""
        if not up:
            self._maps.pop(peer, None)
        if self.target is None:
            return []
        if self._is_over:
            return self._announce([peer], self._here, present) if up else []
        self.target.link_changed(peer, up=up)
        decisions: list[Decision] = []
        if self.pieces is None:
            decisions += self._ask_maps(present)
        elif up:
            decisions += self._add_source(self.pieces, peer, present)
            decisions += self._announce([peer], self._here, present)
            decisions += self._ask_maps(present)
        else:
            decisions += self.pieces.lose_source(peer, present.now_ns)
        return decisions + self._conclude(present)

    def lane_lost(self, peer: PeerId, present: Present) -> list[Decision]:
        """Repeat requests and announcements to ``peer``, because a lost lane may have lost them."""
        decisions: list[Decision] = []
        if peer in self._maps:
            self._maps[peer].asked(present.now_ns)
            decisions.append(AskMap(peer))
        if self.pieces is not None:
            decisions += self.pieces.ask_again(peer, present.now_ns)
            decisions += self._announce([peer], self._here, present)
        return decisions + self._conclude(present)

    def tick(self, present: Present) -> list[Decision]:
        """Check timeouts, and announce new pieces."""
        decisions: list[Decision] = []
        now_ns = present.now_ns
        if self.target is not None and not self._is_over:
            if self.pieces is not None:
                decisions += self.pieces.tick(now_ns)
            for peer, request in self._maps.items():
                if request.look(now_ns, self._stall_ns):
                    request.asked(now_ns)
                    decisions.append(AskMap(peer))
            has_ended = self.is_done or self.has_failed
            looks_again = has_ended and now_ns - self._ended_ns >= REFRESH_NS
            if looks_again:
                self._ended_ns = now_ns
            self.target.ticked(present, looks_again=looks_again)
            decisions += self._ask_maps(present)
        return decisions + self._tell_news(present) + self._conclude(present)

    def stop(self) -> None:
        """Stop the download."""
        self.target = self.pieces = None
        self._maps.clear()

    # -- what comes --------------------------------------------------------------------------------

    def map_progressed(self, peer: PeerId, first: int, received: int, now_ns: int) -> None:
        """Record ``received`` bytes of the map part that begins with piece ``first``."""
        if peer in self._maps:
            self._maps[peer].progressed(now_ns)
            self._meter.progressed(peer, first, received)

    def map_came(
        self, peer: PeerId, first: int, count: int, digests: bytearray, present: Present
    ) -> list[Decision]:
        """Store a part of a map. Use the map once it is complete.

        Raises:
            RemoteProtocolError: the part does not fit this layout.
        """
        request, target = self._maps.get(peer), self.target
        theirs = request.take(first, count, digests) if request is not None else None
        if theirs is None or target is None:
            return []
        del self._maps[peer]
        ends = self.pieces is not None and (self.complete or self.pieces.starved)
        idle = ends and not self.is_held
        found = target.take_map(peer, theirs, idle=idle)
        decisions = self._ask_maps(present)
        if found is not None:
            if not target.lives_on:
                self._maps.clear()
            self.map = found
            numbers = range(self._own.layout.piece_count)
            self.wanted = tuple(n for n in numbers if found[n] != self._own[n])
            self.wanted_bytes = self._own.layout.bytes_of(self.wanted)
            return [*decisions, StagePieces(self.wanted, found)]
        if self.pieces is not None:
            decisions += self._add_source(self.pieces, peer, present)
        return decisions + self._conclude(present)

    def refused(self, peer: PeerId, numbers: list[int], present: Present) -> list[Decision]:
        """Stop asking ``peer`` for these pieces. No numbers: it has left the call."""
        target = self.target
        if not numbers:
            self.is_deserted = True
            self._maps.pop(peer, None)
        if target is None:
            return []
        if not numbers:
            target.withdrew(peer)
        decisions: list[Decision] = []
        if self.pieces is None:
            target.has_no_map(peer)
            decisions += self._ask_maps(present)
        elif numbers:
            decisions += self.pieces.refuse(peer, numbers, present.now_ns)
        else:
            decisions += self.pieces.lose_source(peer, present.now_ns)
        return decisions + self._conclude(present)

    def has(self, peer: PeerId, numbers: list[int], present: Present) -> list[Decision]:
        """Record pieces that another fetcher announces, and request missing pieces from it.

        Raises:
            RemoteProtocolError: a number is above the last piece of the state.
        """
        count = self._own.layout.piece_count
        if max(numbers, default=-1) >= count:
            raise RemoteProtocolError(func="lane", reason=f"it announced a piece above {count - 1}")
        if self._is_over:
            return []
        known = self._haves.setdefault(peer, [])
        known += numbers
        if len(known) > 2 * count:
            self._haves[peer] = list(dict.fromkeys(known))
        if self.pieces is None:
            return []
        wanted = [number for number in numbers if self.pieces.wants(number)]
        if not wanted:
            return []
        asks = self.pieces.add_source(peer, present.now_ns, wanted)
        return [*asks, *self._conclude(present)]

    def progressed(self, source: PeerId, nbytes: int, now_ns: int) -> None:
        """Record that bytes of pieces arrived, also of copies and of incomplete pieces."""
        self.moved_ns = now_ns
        if self.pieces is not None:
            self.pieces.progressed(source, nbytes, now_ns)

    def arrived(
        self, source: PeerId, number: int, digest: bytes, present: Present
    ) -> list[Decision]:
        """Verify a missing piece by its digest, and keep it if it is valid."""
        pieces, now_ns = self.pieces, present.now_ns
        assert pieces is not None
        assert self.map is not None
        assert self.target is not None
        decisions: list[Decision] = []
        if digest == self.map[number]:
            others = pieces.others_asked(number, source) if self.target.cancels else ()
            if others:
                decisions.append(AnnouncePieces(others, (number,)))
            asks = pieces.arrived(source, number, now_ns, sound=True)
            if not pieces.wants(number):
                self.rx_bytes += self._own.layout.piece(number).length
                self._here.append(number)
                self._news.append(number)
                decisions.append(KeepPiece(number, digest))
            decisions += asks
        elif self.target.blames:
            self.wrong_pieces += 1
            decisions += pieces.arrived(source, number, now_ns, sound=False)
        else:  # the member is changing this piece
            decisions += pieces.refuse(source, [number], now_ns)
        if len(self._news) >= self.target.news_pieces(len(self.wanted)):
            decisions += self._tell_news(present)
        return decisions + self._conclude(present)

    # -- what follows ------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        """Whether the complete download is final."""
        return self.is_done and self.target is not None and not self.target.lives_on

    def _ask_maps(self, present: Present) -> list[Decision]:
        if self.target is None or not self._has_room:
            return []
        peers = self.target.next_maps(self._maps, present)
        for peer in peers:
            self._maps[peer] = MapRequest(self._own.layout, present.now_ns)
        return [AskMap(peer) for peer in peers]

    def _add_source(self, pieces: PieceFetch, peer: PeerId, present: Present) -> list[Ask]:
        """Add ``peer`` as a source of the missing pieces that it has."""
        target, layout = self.target, self._own.layout
        assert target is not None
        lacked = [kind for kind in (False, True) if target.lacks(may_differ=kind)]
        gives = target.offers(peer)
        if all(gives[kind] for kind in lacked):
            return pieces.add_source(peer, present.now_ns)
        numbers = [n for n in self._haves.get(peer, ()) if pieces.wants(n)]
        for kind in lacked:
            if gives[kind]:
                numbers += [n for n in layout.numbers(may_differ=kind) if pieces.wants(n)]
        return pieces.add_source(peer, present.now_ns, numbers) if numbers else []

    def _announce(
        self, peers: Iterable[PeerId], numbers: list[int], present: Present
    ) -> list[Decision]:
        if not numbers or self.target is None or not self.target.fetchers:
            return []
        members = self.target.sources()
        told = tuple(peer for peer in peers if peer in members and present.is_up(peer))
        return [AnnouncePieces(told, tuple(numbers))] if told else []

    def _tell_news(self, present: Present) -> list[Decision]:
        news, self._news = self._news, []
        return self._announce(self.target.fetchers, news, present) if self.target else []

    @property
    def _awaits_maps(self) -> bool:
        """Whether a map may still arrive. With ``silent_stalls``, overdue maps do not count."""
        assert self.target is not None
        if self.target.silent_stalls is None:
            return bool(self._maps)
        return any(not request.is_overdue for request in self._maps.values())

    @property
    def _starves(self) -> bool:
        """Whether a piece or a map is missing that no source is expected to send."""
        if self.target is None or self._awaits_maps:
            return False
        return self.target.lacks_map if self.pieces is None else self.pieces.starved

    def _conclude(self, present: Present) -> list[Decision]:
        """Check whether the download is complete, or has failed."""
        target = self.target
        if target is None or self._is_over:
            return []
        if self.complete:
            self.starving_since_ns = None
            done = not self.is_done and not self._awaits_maps
            return [PiecesComplete(), *(self._finish(present) if done else ())]
        now_ns, fetching = present.now_ns, self.pieces is not None
        if self._starves:
            since_ns = self.starving_since_ns
            self.starving_since_ns = since_ns = now_ns if since_ns is None else since_ns
            waits = now_ns - since_ns < self._stall_ns
            ends = not waits or not target.has_hope(present, fetching=fetching)
        else:
            if fetching:  # else keep it: members may ask each other in turn for maps that none has
                self.starving_since_ns = None
            stalls, silent_ns = target.silent_stalls, now_ns - self.moved_ns
            ends = fetching and stalls is not None and silent_ns >= stalls * self._stall_ns
        if not ends:
            return []
        lack = f"{self.pieces.missing} pieces" if self.pieces is not None else "the map"
        reason = (
            f"no member sends {lack} of the shared state that this peer needs; "
            f"{self.wrong_pieces} pieces arrived with wrong bytes"
        )
        return self._fail(reason, present)

    def _finish(self, present: Present) -> list[Decision]:
        news = self._tell_news(present)
        self._note_end(present)
        self.is_done = True
        return [*news, DownloadDone()]

    def _note_end(self, present: Present) -> None:
        if not (self.is_done or self.has_failed):
            self._ended_ns = present.now_ns

    def _fail(self, reason: str, present: Present) -> list[Decision]:
        if self.has_failed:
            return []
        self._note_end(present)
        self.has_failed = True
        return [DownloadFailed(reason)]
