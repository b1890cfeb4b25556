"""The clock of a master as one of its peers knows it, with bounds that hold whatever was delayed.

A heartbeat carries the time at which its peer made it. The master's next heartbeat returns that
time, and how long the master has held it. The peer's heartbeat arrived after it was made, and the
master's was made before it arrived. So each exchange gives a lower and an upper bound of the
difference between the clocks, as in Marzullo's algorithm (Marzullo, "Maintaining the time in a
distributed system", 1984). Between exchanges the bounds widen by ``DRIFT``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import ceil
from operator import add, sub
from typing import NamedTuple

SAMPLES_MAX = 512
"""Exchanges that a peer keeps: eight minutes of heartbeats. It forgets the oldest."""

DRIFT = 500e-6
"""How much two clocks may drift apart, in seconds per second. Quartz clocks stay below 100e-6."""

_PER_DRIFT = round(1 / DRIFT)

SHIFT_ROUNDS_MAX = 100
"""How often ``order_shifts`` goes through all pairs."""


class ClockSample(NamedTuple):
    """One exchange of heartbeats: bounds of the master's clock less the peer's, at ``at_ns``."""

    at_ns: int
    low_ns: int
    high_ns: int


class ClockSamples:
    """The exchanges of one peer with its present master."""

    def __init__(self) -> None:
        self.kept: deque[ClockSample] = deque(maxlen=SAMPLES_MAX)

    def note(self, masters_ns: int, echo_ns: int, held_ns: int, now_ns: int) -> None:
        """Record an exchange.

        Args:
            masters_ns: when the master made its heartbeat, by its clock.
            echo_ns: when this peer made the heartbeat that it answers; 0: it answers none.
            held_ns: how long the master has held that.
            now_ns: when the master's heartbeat arrived, by the peer's clock.
        """
        drifted_ns = round(DRIFT * (now_ns - echo_ns))  # the upper bound is one of ``echo_ns``
        low_ns, high_ns = masters_ns - now_ns, masters_ns - held_ns - echo_ns + drifted_ns
        if 0 < echo_ns <= now_ns and held_ns >= 0 and low_ns <= high_ns:
            self.kept.append(ClockSample(now_ns, low_ns, high_ns))

    def reset(self) -> None:
        """Forget all exchanges, because another master may answer now."""
        self.kept.clear()


class Alignment:
    """The master's clock less that of one peer, at any time.

    Args:
        samples: exchanges of heartbeats, in any order.
    """

    def __init__(self, samples: Iterable[ClockSample]) -> None:
        self._samples = sorted(samples)
        self._times = [sample.at_ns for sample in self._samples]
        # Bounds widen by 1 for each _PER_DRIFT of time, so that multiples of them need no fraction.
        lows = [sample.low_ns * _PER_DRIFT for sample in self._samples]
        highs = [sample.high_ns * _PER_DRIFT for sample in self._samples]
        times = self._times
        self._low_before = [*accumulate(map(add, lows, times), max)]
        self._high_before = [*accumulate(map(sub, highs, times), min)]
        self._low_after = [*accumulate(map(sub, reversed(lows), reversed(times)), max)][::-1]
        self._high_after = [*accumulate(map(add, reversed(highs), reversed(times)), min)][::-1]

    def __bool__(self) -> bool:
        return bool(self._samples)

    def at(self, at_ns: int) -> tuple[int, int]:
        """Return the difference of the clocks at a time of the peer's clock, and its largest error.

        There must be a sample. All numbers are nanoseconds.
        """
        place = bisect_right(self._times, at_ns)
        lows: list[int] = []
        highs: list[int] = []
        if place:
            lows.append(self._low_before[place - 1] - at_ns)
            highs.append(self._high_before[place - 1] + at_ns)
        if place < len(self._times):
            lows.append(self._low_after[place] + at_ns)
            highs.append(self._high_after[place] - at_ns)
        low_ns, high_ns = max(lows) // _PER_DRIFT, -(-min(highs) // _PER_DRIFT)
        if low_ns > high_ns:  # the clock has jumped: trust the tightest
            slack_ns, sample = min(
                (
                    sample.high_ns - sample.low_ns + 2 * abs(at_ns - sample.at_ns) / _PER_DRIFT,
                    sample,
                )
                for sample in self._samples
            )
            middle_ns = (sample.low_ns + sample.high_ns) // 2
            return middle_ns, ceil(slack_ns / 2)
        return (low_ns + high_ns) // 2, (high_ns - low_ns + 1) // 2


def clock_offset(samples: Iterable[ClockSample], at_ns: int) -> tuple[int, int] | None:
    """Return the master's clock less the peer's at a time, and the largest error of that.

    Args:
        samples: exchanges, in any order.
        at_ns: the time, by the peer's clock.

    Returns:
        Offset and error in nanoseconds; None: there are no exchanges.
    """
    alignment = Alignment(samples)
    return alignment.at(at_ns) if alignment else None


def order_shifts(limits_ns: Sequence[int], least_ns: Mapping[tuple[int, int], int]) -> list[int]:
    """Return by how much to shift each clock within its error, so that causes precede effects.

    Clocks that are aligned within errors may still show that a message arrived before it was sent.

    Args:
        limits_ns: the largest shift of each clock, in either direction.
        least_ns: for pairs of clocks, by how much the second one's shift must be larger than the
            first one's, at least. Where that is not possible, the shifts come as near as they can.
    """
    shifts = [0] * len(limits_ns)
    for _ in range(SHIFT_ROUNDS_MAX):
        moved = False
        for (first, second), least in least_ns.items():
            lack_ns = least - (shifts[second] - shifts[first])
            if lack_ns <= 0:
                continue
            up_ns = min((lack_ns + 1) // 2, limits_ns[second] - shifts[second])
            down_ns = min(lack_ns - up_ns, limits_ns[first] + shifts[first])
            up_ns = min(lack_ns - down_ns, limits_ns[second] - shifts[second])
            shifts[second] += up_ns
            shifts[first] -= down_ns
            moved = moved or up_ns > 0 or down_ns > 0
        if not moved:
            break
    return shifts
