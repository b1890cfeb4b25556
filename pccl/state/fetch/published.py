"""``PublishedTarget``: what a reader fetches, namely a state whose digest it has from the master.

Members have the state from the start. Other readers fetch it at the same time, and announce the
pieces that they have. Any of them may send the map: the reader verifies it by the digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pccl.protocol.types import PeerId
from pccl.state.digests import PieceMap, layout_digest
from pccl.state.fetch.maps import MapRequest
from pccl.state.fetch.source import STRIKES_MAX, WINDOW_MAX_BYTES
from pccl.state.fetch.target import NEWS_PIECES_MAX, ElectedTarget, Present, ShownTarget
from pccl.state.layout import StateLayout

WINDOW_SHARE_BYTES_MIN = 64 << 10
"""The smallest share for which a reader asks at once."""


class PublishedTarget:
    """The target of a reader.

    Args:
        content: digest of the contents to fetch.
        own: this reader.

    Attributes:
        holders: members that have the contents.
        readers: other readers, which may have pieces of it.
        place: rank of this reader among all, and their number: they begin at different pieces.
    """

    blames = True
    lives_on = False
    silent_stalls: int | None = None
    is_met = False
    cancels = True

    def __init__(self, content: bytes, own: PeerId) -> None:
        self.holders: tuple[PeerId, ...] = ()
        self.readers: tuple[PeerId, ...] = ()
        self.place: tuple[int, int] = 0, 1
        self.lacks_map = True
        """Whether the digests of the pieces to fetch are still unknown."""
        self._content = content
        self._own = own
        self._wrong: Counter[PeerId] = Counter()
        self._passed: set[PeerId] = set()
        """Peers not to ask for the map again before all others have been asked."""
        self._has_asked_all = False

    @property
    def fetchers(self) -> tuple[PeerId, ...]:
        """This reader, and others to which it announces its pieces."""
        return tuple(sorted({self._own, *self.readers}))

    def window_bytes_max(self, nbytes: int) -> int:
        """Return the longest window of one source in a download of ``nbytes``.

        Each reader asks a member for its share first, and so gets the rest from other readers.
        """
        return min(max(nbytes // self.place[1], WINDOW_SHARE_BYTES_MIN), WINDOW_MAX_BYTES)

    def news_pieces(self, count: int) -> int:
        """Return how many new pieces are announced together, of ``count``."""
        return min(max(count // NEWS_PIECES_MAX, 1), NEWS_PIECES_MAX)

    def lacks(self, *, may_differ: bool) -> bool:
        """Whether the download fetches contents of this kind."""
        return not may_differ

    def sources(self) -> tuple[PeerId, ...]:
        """Return all peers that may have pieces: each reader begins with another member."""
        first = self._own % len(self.holders) if self.holders else 0
        return (*self.holders[first:], *self.holders[:first], *self.readers)

    def offers(self, peer: PeerId) -> tuple[bool, ...]:
        """Return whether ``peer`` has the whole state from the start, and no other contents."""
        return peer in self.holders, False

    def next_maps(self, requests: Mapping[PeerId, MapRequest], present: Present) -> list[PeerId]:
        """Return the peer to ask for its map now: one at a time, unless it is overdue."""
        if not self.lacks_map or any(not request.is_overdue for request in requests.values()):
            return []
        up = (
            peer
            for peer in self.sources()
            if peer not in requests
            and peer not in self._passed
            and self._wrong[peer] < STRIKES_MAX
            and present.is_up(peer)
        )
        asked = [peer for peer in (next(up, None),) if peer is not None]
        self._has_asked_all = not asked
        return asked

    def take_map(self, peer: PeerId, theirs: PieceMap, *, idle: bool) -> PieceMap | None:
        """Use a complete map if it is the right one."""
        if not self.lacks_map:
            return None
        if theirs.digest(may_differ=False) != self._content:
            self._passed.add(peer)
            self._wrong[peer] += 1
            return None
        self.lacks_map = False
        return theirs

    def has_hope(self, present: Present, *, fetching: bool) -> bool:
        """Whether a link may still bring what is missing."""
        return not present.links or any(not present.is_up(peer) for peer in self.sources())

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """Ask a peer whose link came up, even if it has refused before."""
        self._passed.discard(peer)

    def has_no_map(self, peer: PeerId) -> None:
        """Record that ``peer`` has refused to send its map."""
        self._passed.add(peer)

    def withdrew(self, peer: PeerId) -> None:
        """Do nothing: the download drops a withdrawn peer from its sources."""

    def ticked(self, present: Present, *, looks_again: bool) -> None:
        """Allow new requests to peers that refused, once all peers have been asked.

        Between two ticks, perhaps only the first peers have answered.
        """
        if self._has_asked_all:
            self._passed.clear()


class LayoutRequest:
    """Asks one peer after another for the layout of a state, until one sends the right one.

    Args:
        digest: digest of the layout.
        stall_ns: nanoseconds after which another peer is asked.
    """

    def __init__(self, digest: bytes, stall_ns: int) -> None:
        self._digest = digest
        self._stall_ns = stall_ns
        self._asked: dict[PeerId, int] = {}
        """Peer -> when it was asked; the newest last."""
        self._passed: set[PeerId] = set()
        """Peers not to ask again before all others have been asked."""
        self.starving_since_ns: int | None = None
        """When all peers that were up had refused, unless another one was asked since."""
        self._ever_asked: set[PeerId] = set()
        self._has_asked_all = False

    def awaits(self, peer: PeerId) -> bool:
        """Whether ``peer`` was asked, and has not answered."""
        return peer in self._asked

    def next(self, sources: tuple[PeerId, ...], present: Present) -> PeerId | None:
        """Return the peer to ask now; None: none, or the last one may still answer."""
        if any(present.now_ns - asked < self._stall_ns for asked in self._asked.values()):
            return None
        up = [one for one in sources if present.is_up(one) and one not in self._passed]
        peer = min(up, key=lambda one: one in self._asked, default=None)
        self._has_asked_all = peer is None or peer in self._asked
        if peer is not None:
            self._asked[peer] = present.now_ns
            if peer not in self._ever_asked:
                self._ever_asked.add(peer)
                self.starving_since_ns = None
        elif self.starving_since_ns is None:
            self.starving_since_ns = present.now_ns
        return peer

    def lost(self, peer: PeerId) -> None:
        """Record that the answer of ``peer`` may be lost."""
        self._asked.pop(peer, None)

    def refused(self, peer: PeerId) -> None:
        """Record that ``peer`` has refused, or has sent another layout."""
        self._passed.add(peer)
        self._asked.pop(peer, None)

    def ticked(self) -> None:
        """Allow new requests to peers that refused, once all peers have been asked."""
        if self._has_asked_all:
            self._passed.clear()

    def take(self, peer: PeerId, packed: bytes | bytearray) -> StateLayout | None:
        """Return the layout that ``peer`` has sent, if it is the right one."""
        try:
            layout = StateLayout.unpack(packed)
            if layout_digest(layout) == self._digest:
                return layout
        except ValueError:
            pass
        self.refused(peer)
        return None


Target = ElectedTarget | ShownTarget | PublishedTarget
