"""``LinkWindow``: how much of one link may be on the way, so that little queues on a slow line.

The queue of a home router or of a provider takes seconds to empty on a slow line, and all traffic
of the line waits in it: heartbeats, handshakes, signs of life. The kernel's congestion controls
fill it, each connection for itself. So a link hands over what its line delivers in a round trip
and ``QUEUE_NS``, and no more. A line that proves fast has no window.

Links that share a line each see their part of its rate, so that together they keep to one queue.
Each adds ``SHARE_BYTES`` to it, the same for all, as in TCP Vegas (Brakmo & Peterson 1995): so a
link with a smaller part gains more, and the parts become equal.

Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pccl.protocol.types import NS_PER_MS, NS_PER_S

QUEUE_NS = 250 * NS_PER_MS
"""What all links together keep in the queue of their line, besides their shares. An application
that holds the interpreter lock for longer than this costs some of the rate."""

SHARE_BYTES = 8 << 10
"""What each link keeps in the queue. With fewer packets on the way, a lost one is found late."""

FIRST_BYTES = 96 << 10
"""What all new links together hand over before anything is known of their lines: 0.8 s at 1 Mbit/s.
A fast line has proven itself after three round trips."""

LONG_QUEUE_NS = 500 * NS_PER_MS
"""A queue for which a link without a window gets one again."""

FAST_BYTES_PER_S = 2_000_000
"""A line that delivers as much needs no window: its queue is short in time."""

SLOW_BYTES_PER_S = 1_000_000
"""A line without a window gets one again if it delivers less, and a long queue."""

PERIOD_NS = 250 * NS_PER_MS
"""Length of a measurement, at least. A shorter one would see how acknowledgements bunch."""

PERIODS = 8
"""Measurements that count: the best of them, because a pause of either process lowers some."""

SLOW_PERIODS_MIN = 4
"""Measurements before a link without a window gets one."""


@dataclass(frozen=True, slots=True)
class LineFacts:
    """What the kernel knows of all lanes of a link.

    Attributes:
        acked_bytes: bytes that the other system has acknowledged since the last look.
        outstanding_bytes: bytes that the kernel has, and the other system has not acknowledged.
        rtt_ns: the shortest round trip.
    """

    acked_bytes: int
    outstanding_bytes: int
    rtt_ns: int


class LinkWindow:
    """The window of one link.

    Args:
        first_bytes: the window before anything is known of the line.

    Attributes:
        nbytes: most bytes on the way; None: no limit.
    """

    def __init__(self, first_bytes: int) -> None:
        self.nbytes: int | None = max(SHARE_BYTES, first_bytes)
        self._is_new = True
        self._since_ns: int | None = None
        """When the measurement began; None: the link had nothing to send since."""
        self._acked_bytes = 0
        self._rates: deque[int] = deque(maxlen=PERIODS)

    def look(self, facts: LineFacts, now_ns: int, *, is_busy: bool) -> None:
        """Measure the line, and adapt the window.

        Args:
            facts: what is known now.
            now_ns: current time.
            is_busy: whether bytes wait for the line. Otherwise it may be faster than it looks.
        """
        if not is_busy:
            self._since_ns = None
            return
        if self._since_ns is None:
            self._since_ns, self._acked_bytes = now_ns, 0
            return
        self._acked_bytes += facts.acked_bytes
        elapsed_ns = now_ns - self._since_ns
        if self._is_new and self.nbytes is not None:
            if 2 * self._acked_bytes < self.nbytes or not elapsed_ns:
                return
        elif elapsed_ns < max(PERIOD_NS, facts.rtt_ns):
            return
        acked_bytes, self._acked_bytes, self._since_ns = self._acked_bytes, 0, now_ns
        if acked_bytes:  # otherwise it stands still, which says nothing of its rate
            self._rates.append(acked_bytes * NS_PER_S // elapsed_ns)
            self._adapt(facts)

    def _adapt(self, facts: LineFacts) -> None:
        rate = max(self._rates)
        wanted = SHARE_BYTES + rate * (facts.rtt_ns + QUEUE_NS) // NS_PER_S
        if self.nbytes is None:
            long = rate * (facts.rtt_ns + LONG_QUEUE_NS) // NS_PER_S
            is_known = len(self._rates) >= SLOW_PERIODS_MIN
            if is_known and rate < SLOW_BYTES_PER_S and facts.outstanding_bytes > long:
                self.nbytes = wanted
        elif rate >= FAST_BYTES_PER_S:
            self.nbytes, self._is_new = None, False
            self._rates.clear()
        else:
            self._is_new &= wanted > self.nbytes
            self.nbytes = wanted
