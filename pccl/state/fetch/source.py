"""One source of pieces: what it has, what it has been asked for, how fast it is."""

from __future__ import annotations

from pccl.protocol.shared_state import PIECE_BYTES
from pccl.protocol.types import NS_PER_S, PeerId
from pccl.state.fetch.slots import SlotSet

WINDOW_MIN_BYTES = 4 << 20
WINDOW_MAX_BYTES = 64 << 20
"""A source has as much to send as it sends in a second, within these bounds: that covers the round
trip of any line, and what is lost with a source stays small."""

OUTSTANDING_MAX = 4096
"""Pieces asked of one source: tiny ones would fill a window by the ten thousand."""

ASK_PIECES_MAX = 64
"""Pieces in one request."""

STRIKES_MAX = 3
"""Wrong pieces after which a source is asked for nothing more."""

SAMPLE_NS = NS_PER_S // 10
"""A rate is measured over so much time at least."""

SMOOTHING_NS = NS_PER_S
"""What is older than this counts for less than half in a rate."""

SILENCE_NS = NS_PER_S
"""So long may the first byte take before that says something about the rate."""

UNKNOWN_S = 1.0
"""How long a source of unknown rate is thought to need for a first piece."""

RATE_MIN = 16 << 10
"""In bytes per second; slower ones are treated as if they had it."""


class Source:
    """What is known of one source.

    Attributes:
        live: whether it may be asked at all.
        held: what it has; None: everything.
        partial: whether it has told piece by piece what it has: another one that fetches.
        outstanding: the slots that it was asked for, in that order, with their bytes.
        late: slots that it was asked for and then others: what comes first counts. May hold some
            that have come or are outstanding again.
        stalled: it has let the time go by; cleared when anything comes from it.
        overdue: it has done so with what is outstanding.
        probing: it gets one piece at a time until it has worked off what it has been asked for.
        rate: bytes per second while it has something to send; None: not known yet.
        got_bytes: of pieces that came from it and counted.
        strikes: wrong pieces that came from it: one that has sent any is distrusted.
    """

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.got_bytes = 0
        self.strikes = 0
        self.revive(0, None)
        self.live = False

    def revive(self, now_ns: int, held: SlotSet | None) -> None:
        """Begin anew; what it has done wrong, and what it has given, is remembered."""
        self.live = True
        self.held = held
        self.partial = held is not None
        self.outstanding: dict[int, int] = {}
        self.outstanding_bytes = 0
        self.late: dict[int, None] = {}
        self.stalled = self.overdue = self.probing = False
        self.rate: float | None = None
        self.window_bytes = WINDOW_MIN_BYTES
        self.silent_since_ns = now_ns
        self._idle_since_ns = now_ns
        self._sample_since_ns = now_ns
        self._sample_bytes = 0
        self._begun_bytes = 0
        """Of what is not complete yet."""

    @property
    def good(self) -> bool:
        """Whether it is asked like any other: it answers, and was never wrong."""
        return self.live and not self.stalled and not self.strikes

    @property
    def askable(self) -> bool:
        """Whether it is asked, if only for what nobody better has."""
        return self.live and self.strikes < STRIKES_MAX

    @property
    def has_room(self) -> bool:
        """Whether more should be asked of it now: tiny pieces are not asked for one by one."""
        if not self.outstanding:
            return self.askable
        return (
            self.outstanding_bytes + PIECE_BYTES <= self.window_bytes
            and len(self.outstanding) + ASK_PIECES_MAX <= OUTSTANDING_MAX
            and self.askable
        )

    def fits(self, nbytes: int) -> bool:
        """Whether its window has room for one more piece."""
        if not self.outstanding:
            return True
        return (
            self.outstanding_bytes + nbytes <= self.window_bytes
            and len(self.outstanding) < OUTSTANDING_MAX
            and not self.probing
        )

    def has(self, slot: int) -> bool:
        """Whether it has that one, as far as it has told."""
        return self.held is None or slot in self.held

    def bits(self, block: int) -> int:
        """What it has in a block."""
        return -1 if self.held is None else self.held.blocks[block]

    def take(self, slot: int, nbytes: int, now_ns: int) -> None:
        """It is asked for this."""
        if not self.outstanding:
            self.silent_since_ns = now_ns
            self.overdue = False
            self._sample_since_ns += now_ns - self._idle_since_ns
        self.outstanding[slot] = nbytes
        self.outstanding_bytes += nbytes

    def drop(self, slot: int, now_ns: int) -> None:
        """This is not expected from it any more."""
        self.outstanding_bytes -= self.outstanding.pop(slot)
        if not self.outstanding:
            self._idle_since_ns = now_ns

    def sent(self, nbytes: int, now_ns: int) -> None:
        """So many bytes of pieces have come."""
        self._begun_bytes = min(self._begun_bytes + nbytes, PIECE_BYTES)
        if self.outstanding:
            self._sample_bytes += nbytes
            self.measure(now_ns)

    def completed(self, nbytes: int) -> None:
        """A piece of so many bytes is complete."""
        self._begun_bytes = max(self._begun_bytes - nbytes, 0)

    def measure(self, now_ns: int) -> None:
        """Bring the rate up to date, if it is time."""
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
        self.window_bytes = min(max(int(self.rate), WINDOW_MIN_BYTES), WINDOW_MAX_BYTES)
        self._sample_since_ns = now_ns
        self._sample_bytes = 0

    def seconds_for(self, nbytes: int) -> float:
        """How long it needs for the first so many bytes of what it has to send.

        Who has nothing to send has begun nothing: then the one with the highest rate has the
        shortest time for any piece, which ``PieceFetch`` relies on.
        """
        if self.rate is None:
            return UNKNOWN_S
        return max(nbytes - min(self._begun_bytes, self.outstanding_bytes), 0) / self.rate
