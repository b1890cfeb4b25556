"""The window of a link on a line whose rate and queue a test plays."""

from __future__ import annotations

from collections import deque

import pytest

from pccl.protocol.types import NS_PER_MS, NS_PER_S
from pccl.topology.link_window import (
    FAST_BYTES_PER_S,
    FIRST_BYTES,
    LONG_QUEUE_NS,
    PERIODS,
    QUEUE_NS,
    SHARE_BYTES,
    LineFacts,
    LinkWindow,
)

LOOK_NS = 20 * NS_PER_MS
RTT_NS = 40 * NS_PER_MS
SLOW = 125_000
"""1 Mbit/s."""


class Line:
    """Delivers at a rate, in order, what links hand over."""

    def __init__(self, bytes_per_s: int, *links: LinkWindow, rtt_ns: int = RTT_NS) -> None:
        self.bytes_per_s, self.links, self.rtt_ns = bytes_per_s, links, rtt_ns
        self.now_ns = self._free_ns = 0
        self._sent: list[deque[tuple[int, int]]] = [deque() for _ in links]
        """Of each link: when bytes are acknowledged, and how many."""

    @property
    def queue_s(self) -> float:
        return max(0, self._free_ns - self.now_ns) / NS_PER_S

    def send(self, number: int, nbytes: int) -> None:
        self._free_ns = max(self._free_ns, self.now_ns) + nbytes * NS_PER_S // self.bytes_per_s
        self._sent[number].append((self._free_ns + self.rtt_ns, nbytes))

    def run(self, seconds: float) -> None:
        """Let links send as much as they may, but not more than a kernel takes."""
        until_ns = self.now_ns + round(seconds * NS_PER_S)
        while self.now_ns < until_ns:
            rooms: list[int] = []
            for link, sent in zip(self.links, self._sent, strict=True):
                acked = 0
                while sent and sent[0][0] <= self.now_ns:
                    acked += sent.popleft()[1]
                outstanding = sum(nbytes for _, nbytes in sent)
                link.look(LineFacts(acked, outstanding, self.rtt_ns), self.now_ns, is_busy=True)
                rooms.append((4 << 20 if link.nbytes is None else link.nbytes) - outstanding)
            while max(rooms) > 0:
                for number, room in enumerate(rooms):
                    if room > 0:
                        part = min(room, max(1000, self.bytes_per_s // 1000))
                        self.send(number, part)
                        rooms[number] -= part
            self.now_ns += LOOK_NS


@pytest.mark.parametrize("links", [1, 3])
@pytest.mark.parametrize("rate", [SLOW, 10 * SLOW])
def test_a_slow_line_is_full_and_its_queue_short(rate: int, links: int) -> None:
    windows = [LinkWindow(FIRST_BYTES // links) for _ in range(links)]
    line = Line(rate, *windows)
    line.run(0.5)
    assert line.queue_s < FIRST_BYTES / SLOW
    line.run(20)
    on_way = sum((window.nbytes or 0) - SHARE_BYTES for window in windows)
    assert on_way * NS_PER_S / (RTT_NS + QUEUE_NS) == pytest.approx(rate, rel=0.2)
    spare_s = links * SHARE_BYTES / rate
    assert 0 < line.queue_s < 1.2 * (QUEUE_NS / NS_PER_S + spare_s)


def test_links_that_share_a_line_come_to_have_equal_parts() -> None:
    large, small = windows = LinkWindow(4 * FIRST_BYTES), LinkWindow(FIRST_BYTES // 8)
    Line(SLOW, *windows).run(60)
    assert large.nbytes is not None
    assert small.nbytes is not None
    assert large.nbytes == pytest.approx(small.nbytes, rel=0.15)


@pytest.mark.parametrize("rtt_ns", [1 * NS_PER_MS, 100 * NS_PER_MS])
def test_a_fast_line_has_no_window_after_a_few_round_trips(rtt_ns: int) -> None:
    window = LinkWindow(FIRST_BYTES // 3)
    line = Line(20 * FAST_BYTES_PER_S, window, rtt_ns=rtt_ns)
    line.run(8 * max(rtt_ns, LOOK_NS) / NS_PER_S)
    assert window.nbytes is None
    line.run(10)
    assert window.nbytes is None


def test_a_line_that_becomes_slow_gets_a_window_and_one_that_recovers_loses_it() -> None:
    window = LinkWindow(FIRST_BYTES)
    line = Line(4 * FAST_BYTES_PER_S, window)
    line.run(5)
    assert window.nbytes is None
    line.bytes_per_s = SLOW
    line.run(4)
    assert window.nbytes is not None
    line.run(40)
    assert line.queue_s < LONG_QUEUE_NS / NS_PER_S
    line.bytes_per_s = 4 * FAST_BYTES_PER_S
    line.run(8)
    assert window.nbytes is None


def test_neither_a_pause_nor_a_link_with_little_to_send_says_anything_of_the_rate() -> None:
    window = LinkWindow(FIRST_BYTES)
    line = Line(SLOW, window)
    line.run(20)
    before = window.nbytes
    still = LineFacts(0, before or 0, RTT_NS)
    for second in range(60):  # the other process is stopped
        window.look(still, line.now_ns + second * NS_PER_S, is_busy=True)
    assert window.nbytes == before
    for second in range(60):
        window.look(LineFacts(10, 10, RTT_NS), line.now_ns + second * NS_PER_S, is_busy=False)
    assert window.nbytes == before


def test_the_best_of_the_last_measurements_counts() -> None:
    window = LinkWindow(FIRST_BYTES)
    line = Line(SLOW, window)
    line.run(20)
    before = window.nbytes or 0
    line.bytes_per_s = SLOW // 4
    line.run(1)
    assert (window.nbytes or 0) > before // 2
    line.run(PERIODS)
    assert (window.nbytes or 0) < before // 2
