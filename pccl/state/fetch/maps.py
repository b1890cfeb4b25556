"""The maps that a peer has requested, until they are complete."""

from __future__ import annotations

from collections import Counter

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.shared_state import DIGEST_BYTES
from pccl.protocol.types import PeerId
from pccl.state.digests import PieceMap
from pccl.state.layout import StateLayout


class MapRequest:
    """A request for the map of one peer.

    If no bytes arrive for a while, the download asks other peers too. The request stays open, and
    its map still counts once it is complete.

    Args:
        layout: layout of the state.
        now_ns: the current time in nanoseconds.
    """

    def __init__(self, layout: StateLayout, now_ns: int) -> None:
        self.is_overdue = False
        """Whether no bytes of the map have arrived for a stall time."""
        self._moved_ns = self._asked_ns = now_ns
        self._has_begun = False
        """Whether bytes of the map have arrived since the last request."""
        self._layout = layout
        self._digests = bytearray(layout.piece_count * DIGEST_BYTES)
        self._missing = len(self._digests)
        self._here: set[int] = set()

    def asked(self, now_ns: int) -> None:
        """Record that the peer is asked for the whole map again."""
        self._asked_ns = now_ns
        self._has_begun = False

    def progressed(self, now_ns: int) -> None:
        """Record that bytes of the map arrived, perhaps of an incomplete frame."""
        self._moved_ns = now_ns
        self._has_begun = True
        self.is_overdue = False

    def look(self, now_ns: int, stall_ns: int) -> bool:
        """Update ``is_overdue``. Return whether to repeat the request, because it had no effect."""
        self.is_overdue = now_ns - self._moved_ns >= stall_ns
        return self.is_overdue and not self._has_begun and now_ns - self._asked_ns >= stall_ns

    def take(self, first: int, count: int, digests: bytearray) -> PieceMap | None:
        """Store a part of the map. Return the map once all parts arrived, else None.

        Args:
            first: number of the first piece in this part.
            count: number of pieces in the whole map, as the peer states it.
            digests: digests of consecutive pieces.

        Raises:
            RemoteProtocolError: the part does not fit this layout.
        """
        start = first * DIGEST_BYTES
        fits = count == self._layout.piece_count and not len(digests) % DIGEST_BYTES
        if not fits or start + len(digests) > len(self._digests):
            raise RemoteProtocolError(func="lane", reason="its map does not fit this state")
        if first not in self._here:
            self._here.add(first)
            self._digests[start : start + len(digests)] = digests
            self._missing -= len(digests)
        return PieceMap(self._layout, self._digests) if self._missing <= 0 else None


class MapMeter:
    """Counts received bytes of maps as a sign of progress. A repeated part counts once.

    Args:
        layout: layout of the state.
    """

    def __init__(self, layout: StateLayout) -> None:
        self._whole = layout.piece_count * DIGEST_BYTES
        self._before = 0
        self._furthest: Counter[PeerId] = Counter()
        """Largest number of bytes that each peer's map has reached."""

    @property
    def bytes(self) -> int:
        """Bytes of all maps together."""
        return self._before + self._furthest.total()

    def begin(self) -> None:
        """Count the next maps in addition, because they describe other contents."""
        self._before = self.bytes
        self._furthest.clear()

    def progressed(self, source: PeerId, first: int, received: int) -> None:
        """Record ``received`` bytes of the part that begins with piece ``first``."""
        here = min(first * DIGEST_BYTES + received, self._whole)
        self._furthest[source] = max(self._furthest[source], here)
