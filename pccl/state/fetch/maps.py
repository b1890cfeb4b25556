"""Maps of other members' shared states, as far as they have come."""

from __future__ import annotations

from collections import Counter

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.shared_state import DIGEST_BYTES
from pccl.protocol.types import PeerId
from pccl.state.digests import PieceMap
from pccl.state.layout import StateLayout


class MapRequest:
    """A map that one peer was asked for.

    It stays open if nothing comes for a while: other peers are asked then, and the map counts all
    the same when it is complete.

    Args:
        layout: of the state.
        now_ns: the present.
    """

    def __init__(self, layout: StateLayout, now_ns: int) -> None:
        self.is_overdue = False
        """Whether nothing has come for long."""
        self._moved_ns = self._asked_ns = now_ns
        self._has_begun = False
        """Whether something has come since the last question."""
        self._layout = layout
        self._digests = bytearray(layout.piece_count * DIGEST_BYTES)
        self._missing = len(self._digests)
        self._here: set[int] = set()

    def asked(self, now_ns: int) -> None:
        """The peer is asked again for all of it."""
        self._asked_ns = now_ns
        self._has_begun = False

    def progressed(self, now_ns: int) -> None:
        """Bytes of it have come, perhaps of a frame that is not complete."""
        self._moved_ns = now_ns
        self._has_begun = True
        self.is_overdue = False

    def look(self, now_ns: int, stall_ns: int) -> bool:
        """Time has passed; returns whether the question has to be repeated: nothing came of it."""
        self.is_overdue = now_ns - self._moved_ns >= stall_ns
        return self.is_overdue and not self._has_begun and now_ns - self._asked_ns >= stall_ns

    def take(self, first: int, count: int, digests: bytearray) -> PieceMap | None:
        """Store a part of the map. Return the map once all parts arrived, else None.

        Args:
            first: number of the first piece in this part.
            count: number of pieces in the whole map, as the peer states it.
            digests: digests of consecutive pieces.

        Raises:
            RemoteProtocolError: the part is of another state.
        """
        start = first * DIGEST_BYTES
        fits = count == self._layout.piece_count and not len(digests) % DIGEST_BYTES
        if not fits or start + len(digests) > len(self._digests):
            raise RemoteProtocolError(func="lane", reason="a map of another state")
        if first not in self._here:
            self._here.add(first)
            self._digests[start : start + len(digests)] = digests
            self._missing -= len(digests)
        return PieceMap(self._layout, self._digests) if self._missing <= 0 else None


class MapMeter:
    """Counts bytes of maps as a sign of progress: a part that comes again counts once.

    Args:
        layout: of the state.
    """

    def __init__(self, layout: StateLayout) -> None:
        self._whole = layout.piece_count * DIGEST_BYTES
        self._before = 0
        self._furthest: Counter[PeerId] = Counter()
        """How far each peer's map has ever come."""

    @property
    def bytes(self) -> int:
        """All together."""
        return self._before + self._furthest.total()

    def begin(self) -> None:
        """From now on maps are of other contents."""
        self._before = self.bytes
        self._furthest.clear()

    def progressed(self, source: PeerId, first: int, received: int) -> None:
        """So many bytes of the part that begins with piece ``first`` are here."""
        here = min(first * DIGEST_BYTES + received, self._whole)
        self._furthest[source] = max(self._furthest[source], here)
