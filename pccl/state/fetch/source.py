"""One source of pieces: what it has, its outstanding pieces, and its rate."""

from __future__ import annotations

from pccl.protocol.shared_state import PIECE_BYTES
from pccl.protocol.types import NS_PER_S, PeerId
from pccl.state.fetch.slots import SlotSet

WINDOW_MIN_BYTES = 4 << 20
WINDOW_MAX_BYTES = 64 << 20
"""Bounds of a window: the bytes requested from a source and not received. A window is what the
source sends in a second. This covers the round trip of any link, and a lost source costs little."""

SPARE_BYTES = 256 << 10
"""A full source is asked for that much at a time beyond the share of a fetcher."""

OUTSTANDING_MAX = 4096
"""Limit of outstanding pieces of one source; a window has room for many thousands of tiny ones."""

ASK_PIECES_MAX = 64
"""Largest number of pieces in one request."""

STRIKES_MAX = 3
"""Wrong pieces after which a fetcher never asks the source again."""

SAMPLE_NS = NS_PER_S // 10
"""Shortest time over which a rate is measured."""

SMOOTHING_NS = NS_PER_S
"""Smoothing time of a rate: older samples count for less than half."""

SILENCE_NS = NS_PER_S
"""Time without a first byte after which a source of unknown rate gets ``RATE_MIN``."""

UNKNOWN_S = 1.0
"""Seconds that a source of unknown rate is assumed to need for any number of bytes."""

RATE_MIN = 16 << 10
"""Lowest rate in bytes per second; slower sources count as if they had it."""


class Source:
    """The state of one source.

    Attributes:
        live: whether it is available: added, and not lost or withdrawn.
        held: slots that it has; None: all.
        partial: whether it announces its slots one by one, because it is a fetcher too.
        outstanding: requested slot -> its bytes, in the order of the requests.
        late: slots that are no longer expected from it, but may still arrive. May hold slots
            that have arrived or are outstanding again.
        stalled: whether it was silent for a stall time; cleared when bytes arrive from it.
        overdue: whether it stalled with its present outstanding slots.
        probing: whether it gets one piece at a time, until all outstanding pieces are here.
        rate: bytes per second while it has outstanding slots; None: not known yet.
        got_bytes: bytes of valid pieces that arrived from it first.
        strikes: number of wrong pieces that it has sent; a single wrong piece makes it distrusted.
    """

    def __init__(self, peer: PeerId, window_bytes_max: int = WINDOW_MAX_BYTES) -> None:
        self.peer = peer
        self._window_bytes_max = window_bytes_max
        self.got_bytes = 0
        self.strikes = 0
        self.revive(0, None)
        self.live = False

    def revive(self, now_ns: int, held: SlotSet | None) -> None:
        """Reset the source, because it is available again. Keep ``strikes`` and ``got_bytes``."""
        self.live = True
        self.held = held
        self.partial = held is not None
        self.outstanding: dict[int, int] = {}
        self.outstanding_bytes = 0
        self.late: dict[int, None] = {}
        self.stalled = self.overdue = self.probing = False
        self.rate: float | None = None
        self.window_bytes = min(WINDOW_MIN_BYTES, self._window_bytes_max)
        self.silent_since_ns = now_ns
        self._idle_since_ns = now_ns
        self._sample_since_ns = now_ns
        self._sample_bytes = 0
        self._begun_bytes = 0
        """Bytes received of its incomplete piece."""

    @property
    def good(self) -> bool:
        """Whether the source is live, has not stalled, and has sent no wrong piece."""
        return self.live and not self.stalled and not self.strikes

    @property
    def askable(self) -> bool:
        """Whether the fetcher may ask this source, if only for pieces that no good source has."""
        return self.live and self.strikes < STRIKES_MAX

    @property
    def has_room(self) -> bool:
        """Whether the window has room for a piece, and for a whole request of tiny pieces."""
        if not self.outstanding:
            return self.askable
        return (
            self.outstanding_bytes + min(PIECE_BYTES, self.window_bytes // 2) <= self.window_bytes
            and len(self.outstanding) + ASK_PIECES_MAX <= OUTSTANDING_MAX
            and self.askable
        )

    def fits(self, nbytes: int) -> bool:
        """Whether the window has room for one more piece of this size."""
        if not self.outstanding:
            return True
        return (
            self.outstanding_bytes + nbytes <= self.window_bytes
            and len(self.outstanding) < OUTSTANDING_MAX
            and not self.probing
        )

    @property
    def may_exceed(self) -> bool:
        """Whether it may be asked for more than the share of this fetcher."""
        return self.partial or self.outstanding_bytes < min(SPARE_BYTES, self._window_bytes_max)

    def has(self, slot: int) -> bool:
        """Whether the source has ``slot``, as far as it has announced."""
        return self.held is None or slot in self.held

    def bits(self, block: int) -> int:
        """Return the bits of a block for the slots that the source has."""
        return -1 if self.held is None else self.held.blocks[block]

    def take(self, slot: int, nbytes: int, now_ns: int) -> None:
        """Record that ``slot`` is requested from the source."""
        if not self.outstanding:
            self.silent_since_ns = now_ns
            self.overdue = False
            self._sample_since_ns += now_ns - self._idle_since_ns
        self.outstanding[slot] = nbytes
        self.outstanding_bytes += nbytes

    def drop(self, slot: int, now_ns: int) -> None:
        """Record that ``slot`` is no longer outstanding."""
        self.outstanding_bytes -= self.outstanding.pop(slot)
        if not self.outstanding:
            self._idle_since_ns = now_ns

    def sent(self, nbytes: int, now_ns: int) -> None:
        """Record that bytes of pieces arrived."""
        self._begun_bytes = min(self._begun_bytes + nbytes, PIECE_BYTES)
        if self.outstanding:
            self._sample_bytes += nbytes
            self.measure(now_ns)

    def completed(self, nbytes: int) -> None:
        """Record that a piece of this size is complete."""
        self._begun_bytes = max(self._begun_bytes - nbytes, 0)

    def measure(self, now_ns: int) -> None:
        """Update rate and window, at most once in ``SAMPLE_NS``."""
        elapsed_ns = now_ns - self._sample_since_ns
        if not self.outstanding or elapsed_ns < SAMPLE_NS:
            return
        if self.rate is None and not self._sample_bytes and elapsed_ns < SILENCE_NS:
            return
        sample = self._sample_bytes * NS_PER_S / elapsed_ns
        if self.rate is None:
            self.rate = sample
        else:
            self.rate += (sample - self.rate) * elapsed_ns / (elapsed_ns + SMOOTHING_NS)
        self.rate = max(self.rate, RATE_MIN)
        self.window_bytes = min(max(int(self.rate), WINDOW_MIN_BYTES), self._window_bytes_max)
        self._sample_since_ns = now_ns
        self._sample_bytes = 0

    def seconds_for(self, nbytes: int) -> float:
        """Return the seconds that the source needs for its first ``nbytes`` outstanding bytes.

        An idle source has begun no piece. So of several idle sources the fastest needs the
        shortest time for any piece; ``PieceFetch`` relies on this.
        """
        if self.rate is None:
            return UNKNOWN_S
        return max(nbytes - min(self._begun_bytes, self.outstanding_bytes), 0) / self.rate
