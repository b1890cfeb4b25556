"""The number of lanes on modelled links: it is found, it stays, and it is found again."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.types import NS_PER_S
from pccl.topology.lane_count import LaneCount, Sample

MS = NS_PER_S // 1000
INTERVAL_NS = 50 * MS
MBIT = 125_000


@dataclass
class Line:
    """A link with a cap for each connection and one for all; both in bytes per second.

    A new connection speeds up evenly over ``ramp`` round trips.
    """

    flow: float
    total: float
    rtt_ns: int
    noise: float = 0.0
    ramp: int = 6
    lanes_max: int = 1000
    """That come up, however many are asked for."""

    def best(self, bound: int) -> float:
        return min(self.flow * bound, self.total)


class Run:
    """A link that is always busy, and what one side makes of it."""

    def __init__(self, line: Line, *, seed: int = 0, lanes_max: int = 16) -> None:
        self.line = line
        self.count = LaneCount(lanes_max)
        self.bound = lanes_max
        self.now_ns = 0
        self.history: list[tuple[int, int]] = [(0, 1)]
        """When there were how many."""
        self._rng = Random(seed)
        self._since_ns: list[int] = []
        """When each lane began."""

    def rate(self) -> float:
        """What the present number gives once it has settled."""
        return min(self.count.lanes * self.line.flow, self.line.total)

    def run(self, seconds: float, *, busy: bool = True) -> None:
        end_ns = self.now_ns + round(seconds * NS_PER_S)
        while self.now_ns < end_ns:
            line = self.line
            up = min(self.count.lanes, line.lanes_max)
            before = len(self._since_ns)
            self._since_ns = self._since_ns[:up]
            self._since_ns += [self.now_ns + line.rtt_ns] * (up - before)
            self.now_ns += INTERVAL_NS
            parts = [
                min(1.0, max(0.0, (self.now_ns - since) / (line.ramp * line.rtt_ns)))
                for since in self._since_ns
            ]
            rate = min(line.flow * sum(parts), line.total)
            rate *= 1 + line.noise * self._rng.uniform(-1, 1)
            sent = round(rate * INTERVAL_NS / NS_PER_S)
            sample = Sample(self.now_ns, INTERVAL_NS, sent if busy else 0, up, busy, line.rtt_ns)
            if self.count.take(sample):
                self.history.append((self.now_ns, self.count.lanes))
            assert 1 <= self.count.lanes <= self.bound


def test_growth_and_stop_on_a_long_fat_link() -> None:
    """800 Mbit/s, of which each connection may have 200: it takes a few seconds to find four."""
    run = Run(Line(200 * MBIT, 800 * MBIT, 100 * MS))
    run.run(8)
    assert [lanes for _, lanes in run.history] == [1, 2, 4, 8, 4]
    assert run.history[2][0] <= 3 * NS_PER_S  # four are asked for
    assert run.count.is_settled
    assert run.count.reason == "with 8 it is +0%"


def test_one_lane_stays_where_it_is_enough() -> None:
    run = Run(Line(100 * MBIT, 100 * MBIT, 20 * MS))
    run.run(5)
    assert [lanes for _, lanes in run.history] == [1, 2, 1]


def test_the_fewest_that_do_are_found() -> None:
    run = Run(Line(100 * MBIT, 500 * MBIT, 60 * MS))
    run.run(20)
    assert [lanes for _, lanes in run.history] == [1, 2, 4, 8, 16, 5]


def test_the_bound_is_kept() -> None:
    run = Run(Line(10 * MBIT, 800 * MBIT, 60 * MS), lanes_max=6)
    run.run(1000)
    assert max(lanes for _, lanes in run.history) == 6
    assert run.count.lanes == 6


def test_an_idle_link_is_left_alone() -> None:
    run = Run(Line(10 * MBIT, 800 * MBIT, 60 * MS))
    run.run(1000, busy=False)
    assert run.history == [(0, 1)]


def test_short_calls_count_too() -> None:
    """Half a second of work, a second of something else."""
    run = Run(Line(200 * MBIT, 800 * MBIT, 50 * MS))
    for _ in range(40):
        run.run(0.5)
        run.run(1.0, busy=False)
    assert run.count.lanes == 4


def test_calls_that_are_over_before_anything_can_be_measured_change_nothing() -> None:
    run = Run(Line(200 * MBIT, 800 * MBIT, 100 * MS))
    for _ in range(200):
        run.run(0.2)
        run.run(1.0, busy=False)
    assert run.history == [(0, 1)]


def test_lanes_that_do_not_come_up_are_given_up() -> None:
    run = Run(Line(100 * MBIT, 800 * MBIT, 20 * MS, lanes_max=3))
    run.run(60)
    settled = [lanes for _, lanes in run.history]
    assert settled[:4] == [1, 2, 4, 2]
    assert run.count.reason == "4 can't be had"
    tried = [
        later - earlier
        for (earlier, lanes), (later, _) in zip(run.history, run.history[1:], strict=False)
        if lanes == 4
    ]
    assert all(10 * NS_PER_S <= duration <= 11 * NS_PER_S for duration in tried)


def test_lanes_that_go_and_never_come_back_are_not_waited_for() -> None:
    line = Line(100 * MBIT, 400 * MBIT, 20 * MS)
    run = Run(line)
    run.run(10)
    assert run.count.lanes == 4
    line.lanes_max = 1
    run.run(1000)
    assert run.history[-1][1] == 1


@pytest.mark.parametrize(("lanes", "reduced_to"), [(4, 200), (4, 100)])
def test_lanes_go_when_the_line_becomes_thin(lanes: int, reduced_to: int) -> None:
    line = Line(200 * MBIT, 800 * MBIT, 50 * MS)
    run = Run(line)
    run.run(10)
    assert run.count.lanes == lanes
    line.total = line.flow = reduced_to * MBIT
    run.run(60)
    assert run.count.lanes == 1


def test_lanes_come_when_the_line_becomes_fat() -> None:
    line = Line(200 * MBIT, 200 * MBIT, 50 * MS)
    run = Run(line)
    run.run(10)
    assert run.count.lanes == 1
    line.total = 1600 * MBIT
    run.run(120)
    assert run.count.lanes == 8


def test_fewer_lanes_are_found_to_do_when_each_may_have_more() -> None:
    """The rate stays, so nothing shows it but a try."""
    line = Line(100 * MBIT, 800 * MBIT, 50 * MS)
    run = Run(line)
    run.run(10)
    assert run.count.lanes == 8
    line.flow = 400 * MBIT
    run.run(1500)
    assert run.count.lanes == 2


LINES = st.builds(
    Line,
    flow=st.floats(5, 500).map(lambda mbit: mbit * MBIT),
    total=st.floats(5, 2000).map(lambda mbit: mbit * MBIT),
    rtt_ns=st.integers(1, 300).map(lambda ms: ms * MS),
    noise=st.sampled_from((0.0, 0.02, 0.05)),
)


@given(line=LINES, seed=st.integers(0, 1000), lanes_max=st.integers(1, 16))
@settings(max_examples=50, deadline=None)
def test_nine_tenths_of_the_best_are_found_and_kept(line: Line, seed: int, lanes_max: int) -> None:
    line.flow = min(line.flow, line.total)
    run = Run(line, seed=seed, lanes_max=lanes_max)
    run.run(100)
    began = len(run.history)
    good = steps = 0
    while steps < 400:
        run.run(1)
        steps += 1
        good += run.rate() >= 0.9 * line.best(lanes_max)
    assert good >= 0.85 * steps  # tries included
    assert len(run.history) - began <= 30  # it does not go up and down for ever


@given(line=LINES, later=LINES, seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_a_line_that_changes_is_learned_again(line: Line, later: Line, seed: int) -> None:
    for each in (line, later):
        each.flow = min(each.flow, each.total)
    run = Run(line, seed=seed)
    run.run(100)
    run.line = later
    run.run(900)
    good = 0
    for _ in range(200):
        run.run(1)
        good += run.rate() >= 0.9 * later.best(16)
    assert good >= 170


@given(seed=st.integers(0, 1000))
@settings(max_examples=4, deadline=None)
def test_on_a_line_without_rest_searches_are_rare(seed: int) -> None:
    """The rate doubles and halves all the time."""
    rng = Random(seed)
    run = Run(Line(100 * MBIT, 400 * MBIT, 50 * MS), seed=seed)
    for _ in range(200):
        run.line.total = rng.choice((100, 200, 400, 800)) * MBIT
        run.run(rng.uniform(1, 10))
    searches = 1 + run.now_ns // (10 * NS_PER_S)
    assert len(run.history) <= 8 * searches
