"""What a download is to bring: what a synchronization has elected, or what the members show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pccl.protocol.shared_state import Elected
from pccl.protocol.types import NS_PER_S, PeerId
from pccl.state.digests import PieceMap
from pccl.state.fetch.maps import MapRequest
from pccl.state.fetch.source import STRIKES_MAX

REFRESH_NS = 2 * NS_PER_S
"""After a prefetch is done, the members are asked this often whether they hold other contents."""

SILENT_STALLS = 2
"""A prefetch gives up after so many stalls without a byte: other members were asked after the
first, or a link came back."""


@dataclass(frozen=True, slots=True)
class Present:
    """The facts with which an event comes.

    Attributes:
        now_ns: the time; it never goes back.
        links: this peer's links by the other end, and whether each is up.
    """

    now_ns: int
    links: Mapping[PeerId, bool]

    def is_up(self, peer: PeerId) -> bool:
        """Whether ``peer`` can be asked."""
        return self.links.get(peer, False)


class ElectedTarget:
    """What a synchronization has elected: verified, and whoever sends anything else is distrusted.

    One source at a time is asked for each map that is needed.

    Args:
        elected: what every member is to have.
        own: this peer.
        ring: all members of the operation.
        mine: the own digests.
    """

    blames = True
    """A source that sends a wrong piece is distrusted."""
    lives_on = False
    """Nothing else is fetched after this."""
    silent_stalls: int | None = None
    """It waits for a source that says nothing: the master judges."""

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
        """Whether the shared contents (False) are needed, and the extra ones (True)."""
        self._lacks_map = dict(self._lacks)
        """Likewise whether their digests are unknown."""
        self._map = mine.copy()
        """Of the elected contents, as far as they are known; otherwise the own ones."""
        self._wrong_maps: Counter[PeerId] = Counter()
        """How often a peer has refused a map, or given one of other contents."""
        self._passed: set[PeerId] = set()
        """Peers that are not asked for a map again before the next tick."""
        self.fetchers = tuple(sorted({*elected.behind, *elected.outdated}))

    @property
    def is_met(self) -> bool:
        """Whether the own contents are right already."""
        return not any(self._lacks.values())

    @property
    def lacks_map(self) -> bool:
        """Whether the digests of the pieces are unknown."""
        return any(self._lacks_map.values())

    def lacks(self, *, may_differ: bool) -> bool:
        """Whether contents of this kind are to be fetched."""
        return self._lacks[may_differ]

    def next_maps(self, requests: Mapping[PeerId, MapRequest], present: Present) -> list[PeerId]:
        """The peers to ask for their maps now: a holder, or one that may have become one."""
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
        """A map is complete; returns the digests of all pieces once they are known."""
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
        """Whether ``peer`` has the contents that must be equal, and those that may differ."""
        return peer in self._elected.sources, peer in self._elected.extra_sources

    def sources(self) -> tuple[PeerId, ...]:
        """Peers that may have pieces: around the ring, so that not all ask the same one first."""
        rank = self._ring.index(self._own)
        return self._ring[rank + 1 :] + self._ring[:rank]

    def has_hope(self, present: Present, *, fetching: bool) -> bool:
        """Whether a fetcher may get what is missing, a link come back, a source find the truth."""
        if any(present.is_up(peer) for peer in self._others):
            return True
        sources = {*self._elected.sources, *self._elected.extra_sources} - {self._own}
        return any(not present.is_up(peer) or peer in self._passed for peer in sources)

    @property
    def _others(self) -> list[PeerId]:
        """Other members that fetch, or have done so, in ring order."""
        return [peer for peer in self._ring if peer in self.fetchers and peer != self._own]

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """The link to ``peer`` has come up, or is down."""

    def has_no_map(self, peer: PeerId) -> None:
        """A peer that was asked for its map refuses."""
        self._passed.add(peer)
        self._wrong_maps[peer] += 1

    def withdrew(self, peer: PeerId) -> None:
        """A peer gives nothing any more."""

    def ticked(self, present: Present, *, looks_again: bool) -> None:
        """Time has passed; ``looks_again``: the members are to be asked for their maps again."""
        if self.lacks_map:
            self._passed.clear()


class ShownTarget:
    """What the members show while they go on working: the first map that comes, and newer ones.

    A member may change a piece while it is sent, and nobody is to blame. Contents that may differ
    are not fetched.

    Args:
        mine: the own digests; they may change.
    """

    blames = False
    lives_on = True
    silent_stalls: int | None = SILENT_STALLS
    fetchers: tuple[PeerId, ...] = ()
    is_met = False

    def __init__(self, mine: PieceMap) -> None:
        self.content = b""
        """Digest of what is fetched."""
        self.here = b""
        """Digest of what the tensors hold, if the program has changed them."""
        self._mine = mine
        self._shown: dict[PeerId, bytes] = {}
        """What each member has shown last."""
        self._lost: set[PeerId] = set()
        """Members whose link has broken."""
        self._due: dict[PeerId, None] = {}
        """Members that are to be asked for their maps."""

    @property
    def lacks_map(self) -> bool:
        """Whether the digests of the pieces are unknown."""
        return not self.content

    def lacks(self, *, may_differ: bool) -> bool:
        """Whether contents of this kind are to be fetched."""
        return not may_differ

    def next_maps(self, requests: Mapping[PeerId, MapRequest], present: Present) -> list[PeerId]:
        """The peers to ask for their maps now: every member whose turn it is."""
        due, self._due = self._due, {}
        return [peer for peer in due if peer not in requests and present.is_up(peer)]

    def take_map(self, peer: PeerId, theirs: PieceMap, *, idle: bool) -> PieceMap | None:
        """A map is complete: the first one is fetched, or another one when nothing is under way."""
        content = self._shown[peer] = theirs.digest(may_differ=False)
        if self.content and (not idle or content in (self.content, self.here)):
            return None
        self.content = content
        for number in theirs.layout.numbers(may_differ=True):
            theirs[number] = self._mine[number]
        return theirs

    def offers(self, peer: PeerId) -> tuple[bool, ...]:
        """Whether ``peer`` has the contents that must be equal, and those that may differ."""
        return self._shown.get(peer) == self.content, False

    def sources(self) -> tuple[PeerId, ...]:
        """The members that have shown anything."""
        return tuple(self._shown)

    def has_hope(self, present: Present, *, fetching: bool) -> bool:
        """Whether a link may come up, again or as the first one of all."""
        if fetching:
            return any(self._shown.get(peer) == self.content for peer in self._lost)
        return bool(self._lost) or not all(present.links.values()) or not present.links

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """The link to ``peer`` has come up, or is down."""
        if up:
            self._due[peer] = None
            self._lost.discard(peer)
        else:
            self._lost.add(peer)

    def has_no_map(self, peer: PeerId) -> None:
        """A peer that was asked for its map refuses."""

    def withdrew(self, peer: PeerId) -> None:
        """A peer gives nothing any more."""
        self._shown.pop(peer, None)

    def ticked(self, present: Present, *, looks_again: bool) -> None:
        """Time has passed; ``looks_again``: the members are to be asked for their maps again."""
        if looks_again:
            self._due.update(dict.fromkeys(present.links))


Target = ElectedTarget | ShownTarget
