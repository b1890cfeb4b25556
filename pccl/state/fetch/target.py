"""What a download fetches: the elected contents, or the members' snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pccl.protocol.shared_state import Elected
from pccl.protocol.types import NS_PER_S, PeerId
from pccl.state.digests import PieceMap
from pccl.state.fetch.maps import MapRequest
from pccl.state.fetch.source import STRIKES_MAX, WINDOW_MAX_BYTES

REFRESH_NS = 2 * NS_PER_S
"""Interval at which a newcomer asks the members for newer maps, once its prefetch has ended."""

SILENT_STALLS = 2
"""A prefetch fails after this number of stall times without a byte. After the first stall time, it
asks other members, and a broken link may come up again."""


@dataclass(frozen=True, slots=True)
class Present:
    """The time and the links at the time of an event.

    Attributes:
        now_ns: the current time in nanoseconds; it never goes back.
        links: each peer to which this one has a link -> whether the link is up.
    """

    now_ns: int
    links: Mapping[PeerId, bool]

    def is_up(self, peer: PeerId) -> bool:
        """Whether the link to ``peer`` is up."""
        return self.links.get(peer, False)


NEWS_PIECES_MAX = 64
"""A fetcher announces new pieces to other fetchers once it has this many, or at the next tick."""


class ElectedTarget:
    """The target of a synchronization: the elected contents.

    A source that sends other contents is distrusted. One source at a time is asked for each map.

    Args:
        elected: contents that every member must have.
        own: this peer.
        ring: all members of the operation, in ring order.
        mine: digests of this peer's pieces.
    """

    blames = True
    """Whether a wrong piece makes its source distrusted."""
    lives_on = False
    """Whether a complete download may continue with newer contents."""
    silent_stalls: int | None = None
    """Stall times without a byte after which the download fails; None: the master decides."""
    cancels = False
    """Whether it tells sources that a piece has come from another one."""

    def __init__(
        self, elected: Elected, own: PeerId, ring: tuple[PeerId, ...], mine: PieceMap
    ) -> None:
        self._elected = elected
        self._own = own
        self._ring = ring
        self._lacks = {
            False: own in elected.behind,
            True: own in elected.outdated
            and bool(elected.extra_sources)
            and mine.digest(may_differ=True) != elected.extra,
        }
        """Whether this peer needs the shared contents (False), and the extra ones (True)."""
        self._lacks_map = dict(self._lacks)
        """Whether this peer still needs the digests of these contents, by the same keys."""
        self._map = mine.copy()
        """Digests of the elected pieces where they are known, else of this peer's pieces."""
        self._wrong_maps: Counter[PeerId] = Counter()
        """Number of each peer's refused maps, and of each source's maps of other contents."""
        self._passed: set[PeerId] = set()
        """Peers not to ask for a map again before the next tick."""
        self.fetchers = tuple(sorted({*elected.behind, *elected.outdated}))

    def window_bytes_max(self, nbytes: int) -> int:
        """Return the longest window of one source in a download of ``nbytes``."""
        return WINDOW_MAX_BYTES

    def news_pieces(self, count: int) -> int:
        """Return how many new pieces are announced together, of ``count``."""
        return NEWS_PIECES_MAX

    @property
    def place(self) -> tuple[int, int]:
        """Return the rank of this peer among the fetchers, and their number."""
        rank = self.fetchers.index(self._own) if self._own in self.fetchers else 0
        return rank, max(len(self.fetchers), 1)

    @property
    def is_met(self) -> bool:
        """Whether this peer already has the elected contents."""
        return not any(self._lacks.values())

    @property
    def lacks_map(self) -> bool:
        """Whether the digests of the pieces to fetch are still unknown."""
        return any(self._lacks_map.values())

    def lacks(self, *, may_differ: bool) -> bool:
        """Whether the download fetches contents of this kind."""
        return self._lacks[may_differ]

    def next_maps(self, requests: Mapping[PeerId, MapRequest], present: Present) -> list[PeerId]:
        """Return the peers to ask for their maps now: sources first, then other fetchers."""
        asked: list[PeerId] = []
        awaited = {peer for peer, request in requests.items() if not request.is_overdue}
        holders = {False: self._elected.sources, True: self._elected.extra_sources}
        for may_differ, lacks in self._lacks_map.items():
            candidates = dict.fromkeys((*holders[may_differ], *self._others))
            if not lacks or not candidates.keys().isdisjoint({*awaited, *asked}):
                continue
            up = [
                peer
                for peer in candidates
                if peer not in (self._own, *requests, *asked, *self._passed)
                and self._wrong_maps[peer] < STRIKES_MAX
                and present.is_up(peer)
            ]
            up = [peer for peer in up if peer in holders[may_differ]] or up
            if up:
                asked.append(up[self._ring.index(self._own) % len(up)])  # not all the same
        return asked

    def take_map(self, peer: PeerId, theirs: PieceMap, *, idle: bool) -> PieceMap | None:
        """Use a complete map. Return the digests of all pieces once they are known, else None."""
        is_right = False
        wanted = {False: self._elected.content, True: self._elected.extra}
        for may_differ, digest in wanted.items():
            if self._lacks_map[may_differ] and theirs.digest(may_differ=may_differ) == digest:
                self._lacks_map[may_differ] = False
                is_right = True
                for number in theirs.layout.numbers(may_differ=may_differ):
                    self._map[number] = theirs[number]
        if not is_right:
            self._passed.add(peer)
            self._wrong_maps[peer] += peer in self._elected.sources
        return None if self.lacks_map else self._map

    def offers(self, peer: PeerId) -> tuple[bool, ...]:
        """Return whether ``peer`` has the shared contents, and whether it has the extra ones."""
        return peer in self._elected.sources, peer in self._elected.extra_sources

    def sources(self) -> tuple[PeerId, ...]:
        """Return the other members, the next one in the ring first, so that requests spread."""
        rank = self._ring.index(self._own)
        return self._ring[rank + 1 :] + self._ring[:rank]

    def has_hope(self, present: Present, *, fetching: bool) -> bool:
        """Whether another fetcher, a returning link or a further map may bring missing data."""
        if any(present.is_up(peer) for peer in self._others):
            return True
        sources = {*self._elected.sources, *self._elected.extra_sources} - {self._own}
        return any(not present.is_up(peer) or peer in self._passed for peer in sources)

    @property
    def _others(self) -> list[PeerId]:
        """Other members that fetch, or have fetched, in ring order."""
        return [peer for peer in self._ring if peer in self.fetchers and peer != self._own]

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """Do nothing: this target looks at the links when it needs them."""

    def has_no_map(self, peer: PeerId) -> None:
        """Record that ``peer`` refused to send its map."""
        self._passed.add(peer)
        self._wrong_maps[peer] += 1

    def withdrew(self, peer: PeerId) -> None:
        """Do nothing: the download drops a withdrawn peer from its sources."""

    def ticked(self, present: Present, *, looks_again: bool) -> None:
        """If a map is missing, allow new requests to peers that refused or sent a wrong map."""
        if self.lacks_map:
            self._passed.clear()


class ShownTarget:
    """The target of a prefetch: the members' snapshot. The first complete map defines the contents.

    A member may change a piece while sending it, so a wrong piece does not make it distrusted. The
    download does not fetch contents that may differ.

    Args:
        mine: digests of this peer's pieces; they may change.
        only: digest of the contents to fetch; maps of other contents are ignored. Empty: the first
            map defines them.
    """

    blames = False
    lives_on = True
    silent_stalls: int | None = SILENT_STALLS
    fetchers: tuple[PeerId, ...] = ()
    is_met = False
    cancels = False
    place: tuple[int, int] = 0, 1

    def __init__(self, mine: PieceMap, only: bytes = b"") -> None:
        self._only = only
        self.content = b""
        """Digest of the contents to fetch; empty until a map is complete."""
        self.here = b""
        """Digest of the tensors, if the program has changed them."""
        self._mine = mine
        self._shown: dict[PeerId, bytes] = {}
        """Digest of each member's last map."""
        self._lost: set[PeerId] = set()
        """Members whose link is broken."""
        self._due: dict[PeerId, None] = {}
        """Members to ask for their maps."""

    @property
    def lacks_map(self) -> bool:
        """Whether the digests of the pieces to fetch are still unknown."""
        return not self.content

    def window_bytes_max(self, nbytes: int) -> int:
        """Return the longest window of one source in a download of ``nbytes``."""
        return WINDOW_MAX_BYTES

    def news_pieces(self, count: int) -> int:
        """Return how many new pieces are announced together, of ``count``."""
        return NEWS_PIECES_MAX

    def lacks(self, *, may_differ: bool) -> bool:
        """Whether the download fetches contents of this kind."""
        return not may_differ

    def next_maps(self, requests: Mapping[PeerId, MapRequest], present: Present) -> list[PeerId]:
        """Return the peers to ask for their maps now: all due members whose link is up."""
        due, self._due = self._due, {}
        return [peer for peer in due if peer not in requests and present.is_up(peer)]

    def take_map(self, peer: PeerId, theirs: PieceMap, *, idle: bool) -> PieceMap | None:
        """Use a complete map. Return it if it is the first, or new while no fetch is running."""
        content = self._shown[peer] = theirs.digest(may_differ=False)
        if self._only not in (b"", content):
            return None
        if self.content and (not idle or content in (self.content, self.here)):
            return None
        self.content = content
        for number in theirs.layout.numbers(may_differ=True):
            theirs[number] = self._mine[number]
        return theirs

    def offers(self, peer: PeerId) -> tuple[bool, ...]:
        """Return whether ``peer`` has the shared contents, and whether it has the extra ones."""
        return self._shown.get(peer) == self.content, False

    def sources(self) -> tuple[PeerId, ...]:
        """Return the members that have sent a map."""
        return tuple(self._shown)

    def has_hope(self, present: Present, *, fetching: bool) -> bool:
        """Whether a link may still come up to a member that may have the contents."""
        if fetching:
            return any(self._shown.get(peer) == self.content for peer in self._lost)
        return bool(self._lost) or not all(present.links.values()) or not present.links

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """Ask ``peer`` for its map if its link came up, else record that it broke."""
        if up:
            self._due[peer] = None
            self._lost.discard(peer)
        else:
            self._lost.add(peer)

    def has_no_map(self, peer: PeerId) -> None:
        """Do nothing: the next refresh asks ``peer`` again."""

    def withdrew(self, peer: PeerId) -> None:
        """Forget the map of a peer that sends nothing."""
        self._shown.pop(peer, None)

    def ticked(self, present: Present, *, looks_again: bool) -> None:
        """If ``looks_again``, ask all members for their maps again."""
        if looks_again:
            self._due.update(dict.fromkeys(present.links))
