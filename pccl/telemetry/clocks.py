"""The clock of a master as one of its peers knows it, with bounds that hold whatever was delayed.

A heartbeat carries the time at which its peer made it. The master's next heartbeat returns that
time, and how long the master has held it. The peer's heartbeat arrived after it was made, and the
master's was made before it arrived. So each exchange gives a lower and an upper bound of the
difference between the clocks, as in Marzullo's algorithm (Marzullo, "Maintaining the time in a
distributed system", 1984). Between exchanges the bounds widen by ``DRIFT``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

SAMPLES_MAX = 512
"""Exchanges that a peer keeps: eight minutes of heartbeats. It forgets the oldest."""

DRIFT = 500e-6
"""How much two clocks may drift apart, in seconds per second. Quartz clocks stay below 100e-6."""


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
        low_ns, high_ns = masters_ns - now_ns, masters_ns - held_ns - echo_ns
        if 0 < echo_ns <= now_ns and held_ns >= 0 and low_ns <= high_ns:
            self.kept.append(ClockSample(now_ns, low_ns, high_ns))

    def reset(self) -> None:
        """Forget all exchanges, because another master may answer now."""
        self.kept.clear()


def clock_offset(samples: Iterable[ClockSample], at_ns: int) -> tuple[int, int] | None:
    """Return the master's clock less the peer's at a time, and the largest error of that.

    Args:
        samples: exchanges, in any order.
        at_ns: the time, by the peer's clock.

    Returns:
        Offset and error in nanoseconds; None: there are no exchanges.
    """
    widened = [
        (sample.low_ns - slack, sample.high_ns + slack)
        for sample in samples
        for slack in (round(DRIFT * abs(at_ns - sample.at_ns)),)
    ]
    if not widened:
        return None
    low_ns, high_ns = max(low for low, _ in widened), min(high for _, high in widened)
    if low_ns > high_ns:  # the clock has jumped: trust the tightest
        low_ns, high_ns = min(widened, key=lambda bounds: bounds[1] - bounds[0])
    return (low_ns + high_ns) // 2, (high_ns - low_ns + 1) // 2
