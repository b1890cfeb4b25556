"""How many lanes one side of a link sends on, found by trying: hill climbing on the rate.

Pure: samples of what the link has sent go in, a number comes out. A search measures the rate with
the present number, then tries twice as many for as long as that pays, then the fewest that may do
as well. A new number has time to get up to speed before it is measured. What was found stays, and
is searched for again when the rate has changed, or after a pause that doubles: lines change, and a
try costs something.

Only time counts in which the link was the limit: it had something to send all the time. A link that
carries a little, or waits for slower ones, is never tried.

Invariants:

* From 1 to ``lanes_max``.
* A search ends after a bounded number of tries, and two searches are ``PAUSE_MIN_NS`` apart.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

from pccl.protocol.limits import AUTO_LANES_MAX
from pccl.protocol.types import NS_PER_S

GAIN = 1.10
"""More lanes are kept if the rate is so much higher: twice as many that bring less are not worth
their descriptors, and noise is less."""

KEEP = 0.95
"""Fewer lanes are enough if they have this part of the best rate that was measured."""

SETTLE_ROUND_TRIPS = 8
"""Of busy time before a new number is measured: slow start doubles from 14 KB in each, so a
connection has reached 100 Mbit/s at 100 ms by then."""

RESUME_ROUND_TRIPS = 2
"""The same after a pause of the application, and at the beginning of a later search. Few, so that
short calls count, too."""

MEASURE_ROUND_TRIPS = 6
"""A connection that is held back by its window sends one burst in each."""

MEASURE_MIN_NS = NS_PER_S // 5
"""Of busy time at least, both to settle and to measure: a busy machine is averaged."""

PATIENCE_NS = 10 * NS_PER_S
"""For lanes that were asked for: two dials."""

PAUSE_MIN_NS = 10 * NS_PER_S
PAUSE_DOUBLINGS_MAX = 5
HASTE_DOUBLINGS_MAX = 3
"""Between two searches: from 10 s to 320 s, and if the rate has changed no more than 80 s."""

CHANGED = 0.25
"""Two measurements in a row that are off by so much show that the line has changed."""

TRUSTED_SEARCHES = 4
"""So often what was too few is believed from the last search: to try fewer costs throughput."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a link has sent in a while."""

    now_ns: int
    """Its end."""
    elapsed_ns: int
    sent_bytes: int
    lanes: int
    """That were in use all the time, and are."""
    busy: bool
    """Whether something waited to be sent all the time."""
    rtt_ns: int
    """Round trip of the link without queues."""


@dataclass(slots=True)
class _Few:
    """The most lanes that are known to be too few; 0: none is known."""

    lanes: int = 0
    rate: float = 0.0
    searches: int = 0


class _Meter:
    """Measures the rate while the link is busy, once it is up to speed.

    Args:
        lanes: that have to be in use.
        settle_round_trips: of busy time that come before; 0: it is up to speed.
    """

    def __init__(self, lanes: int, settle_round_trips: int) -> None:
        self.gave_up = False
        """Whether the lanes can't be had."""
        self._lanes = lanes
        self._settle_round_trips = settle_round_trips
        self._settled_ns = 0
        self._resuming_ns = 0
        self._busy_ns = 0
        self._bytes = 0
        self._short_since_ns: int | None = None

    def take(self, sample: Sample) -> float | None:
        """Bytes per second, once they are known."""
        if sample.lanes < self._lanes:
            if self._short_since_ns is None:
                self._short_since_ns = sample.now_ns
            self.gave_up = sample.now_ns - self._short_since_ns >= PATIENCE_NS
            self._settled_ns = self._busy_ns = self._bytes = 0
            return None
        self._short_since_ns = None
        rtt_ns, elapsed_ns = sample.rtt_ns, sample.elapsed_ns
        settle_ns = max(self._settle_round_trips * rtt_ns, MEASURE_MIN_NS)
        if not sample.busy:
            self._resuming_ns = RESUME_ROUND_TRIPS * rtt_ns
        elif self._resuming_ns > 0:
            self._resuming_ns -= elapsed_ns
        elif self._settle_round_trips and self._settled_ns < settle_ns:
            self._settled_ns += elapsed_ns
        else:
            self._busy_ns += elapsed_ns
            self._bytes += sample.sent_bytes
        if self._busy_ns < max(MEASURE_ROUND_TRIPS * rtt_ns, MEASURE_MIN_NS):
            return None
        return self._bytes * NS_PER_S / self._busy_ns


_Search = Generator[int, float | None, None]
"""Yields a number of lanes to be tried; is sent the rate, or None if they can't be had."""


class LaneCount:
    """The number of lanes of one side of one link.

    Args:
        lanes_max: never more.

    Attributes:
        lanes: to be used now.
        reason: why it is this number, for people.
    """

    def __init__(self, lanes_max: int = AUTO_LANES_MAX) -> None:
        self.lanes = 1
        self.reason = "begins"
        self._max = lanes_max
        self._few = _Few()
        self._best = 1
        """The number that the present or last search has found so far."""
        self._top_rate = 0.0
        """The highest rate in this search."""
        self._held_rate = 0.0
        """The rate with the number that was found."""
        self._off = 0
        """How many measurements in a row were off that."""
        self._searching: _Search | None = None
        self._found_before = 1
        self._fruitless = 0
        """How many searches in a row have found nothing new."""
        self._due_ns = 0
        """When to search again."""
        self._due_if_changed_ns = 0
        self._changed = False
        """Whether the rate is not what it was when the last search ended."""
        self._meter: _Meter | None = None

    @property
    def is_settled(self) -> bool:
        """Whether a search has ended and none is under way."""
        return self._searching is None and self._held_rate > 0

    def take(self, sample: Sample) -> bool:
        """Take note of what was sent; return whether ``lanes`` has changed."""
        due_ns = self._due_if_changed_ns if self._changed else self._due_ns
        if self._searching is None and sample.busy and sample.now_ns >= due_ns:
            self._begin()
        if self._meter is None:
            self._meter = _Meter(self.lanes, 0)
        rate = self._meter.take(sample)
        if self._searching is not None:
            if rate is None and not self._meter.gave_up:
                return False
            return self._go_on(sample.now_ns, rate)
        if rate is not None:
            self._watch(rate)
            self._meter = None
        return False

    # -- while a number is held --------------------------------------------------------------------

    def _watch(self, rate: float) -> None:
        if abs(rate - self._held_rate) <= CHANGED * self._held_rate:
            self._held_rate += (rate - self._held_rate) / 8
            self._off = 0
            return
        self._off += 1
        self._changed = self._changed or self._off >= 2

    # -- a search ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._few.searches += 1
        if self._changed or self._few.searches > TRUSTED_SEARCHES:
            self._few = _Few()
        self._found_before, self._top_rate = self.lanes, 0.0
        self._searching = self._search()
        self.lanes = next(self._searching)
        is_fresh = not self._held_rate
        settle = SETTLE_ROUND_TRIPS if is_fresh else RESUME_ROUND_TRIPS
        self._meter = _Meter(self.lanes, settle)

    def _go_on(self, now_ns: int, rate: float | None) -> bool:
        assert self._searching is not None
        before = self.lanes
        try:
            self.lanes = self._searching.send(rate)
            self._meter = _Meter(self.lanes, SETTLE_ROUND_TRIPS)
        except StopIteration:
            self._end(now_ns)
        return self.lanes != before

    def _end(self, now_ns: int) -> None:
        self.lanes = self._best
        self._searching = self._meter = None
        found_new = self._changed and self.lanes != self._found_before
        self._fruitless = 0 if found_new else self._fruitless + 1
        self._changed, self._off = False, 0
        haste = min(self._fruitless, HASTE_DOUBLINGS_MAX)
        self._due_if_changed_ns = now_ns + (PAUSE_MIN_NS << haste)
        self._due_ns = now_ns + (PAUSE_MIN_NS << min(self._fruitless, PAUSE_DOUBLINGS_MAX))

    def _search(self) -> _Search:
        rate = yield self.lanes
        self._best = self.lanes
        if rate is None:
            self.reason = f"{self.lanes} can't be had any more"
            self._best = 1
            return
        self._held_rate = self._top_rate = rate
        yield from self._climb()
        yield from self._descend()

    def _climb(self) -> Generator[int, float | None, None]:
        while self._best < self._max:
            more = min(2 * self._best, self._max)
            rate = yield more
            if rate is None:
                self.reason = f"{more} can't be had"
                return
            self._top_rate = max(self._top_rate, rate)
            if rate < GAIN * self._held_rate:
                self.reason = f"with {more} it is {_compared(rate, self._held_rate)}"
                return
            self.reason = f"with {self._best} it is {_compared(self._held_rate, rate)}"
            self._few = _Few(self._best, self._held_rate)
            self._best, self._held_rate = more, rate

    def _descend(self) -> Generator[int, float | None, None]:
        while True:
            fewer = self._fewest()
            if fewer >= self._best:
                return
            rate = yield fewer
            if rate is None:
                return
            if rate >= KEEP * self._top_rate:
                self.reason = f"with {self._best} it is {_compared(self._held_rate, rate)}"
                self._best, self._held_rate = fewer, rate
            else:
                self._few = _Few(fewer, rate)

    def _fewest(self) -> int:
        """The fewest lanes that may do: a lane gets no more when there are others beside it."""
        if self._few.lanes >= self._best:
            self._few = _Few()
        few = self._few
        if not few.lanes or not few.rate:
            return (self._best + 1) // 2
        needed = KEEP * self._top_rate * few.lanes / few.rate
        return max(few.lanes + 1, math.ceil(needed))


def _compared(rate: float, other: float) -> str:
    return f"{rate / other - 1:+.0%}" if other else "more"
