"""The clock of the master as a peer knows it: the truth is within the stated error."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from pccl.telemetry.clocks import DRIFT, SAMPLES_MAX, ClockSample, ClockSamples, clock_offset

SECOND = 1_000_000_000
BEGIN_NS = 1000 * SECOND
"""Clocks of machines that run for a while: none is negative."""
DELAYS = st.integers(0, 2 * SECOND) | st.integers(0, SECOND // 1000)
CREDIBLE = 4 * 10**-4
"""Two clocks drift apart by less than ``DRIFT``."""


class Exchange(NamedTuple):
    """A heartbeat of the peer and the next of the master; times in ns of an ideal clock."""

    pause: int
    there: int
    held: int
    back: int


EXCHANGES = st.lists(st.builds(Exchange, DELAYS, DELAYS, DELAYS, DELAYS), min_size=1, max_size=20)


def master_ns(ideal_ns: int, offset_ns: int, drift: float) -> int:
    """What the master's clock shows; the peer's is the ideal one."""
    return ideal_ns + offset_ns + round(drift * (ideal_ns - BEGIN_NS))


@given(
    EXCHANGES,
    st.integers(-500 * SECOND, 500 * SECOND),
    st.floats(-CREDIBLE, CREDIBLE),
    st.floats(0, 1),
)
@example([Exchange(0, 0, SECOND, 0)], 0, CREDIBLE, 1.0)
@example([Exchange(0, SECOND, 0, 0)], 0, -CREDIBLE, 1.0)
def test_the_true_offset_is_within_the_error_at_any_time(
    exchanges: list[Exchange], offset_ns: int, drift: float, when: float
) -> None:
    samples, now_ns = ClockSamples(), BEGIN_NS
    for pause, there, held, back in exchanges:
        sent_ns = now_ns + pause
        heard_ns = sent_ns + there
        answered_ns = heard_ns + held
        now_ns = answered_ns + back
        held_ns = master_ns(answered_ns, offset_ns, drift) - master_ns(heard_ns, offset_ns, drift)
        samples.note(master_ns(answered_ns, offset_ns, drift), sent_ns, held_ns, now_ns)
    assert len(samples.kept) == len(exchanges)
    at_ns = BEGIN_NS + round(when * (now_ns - BEGIN_NS))
    found = clock_offset(samples.kept, at_ns)
    assert found is not None
    true_ns = master_ns(at_ns, offset_ns, drift) - at_ns
    assert abs(true_ns - found[0]) <= found[1] + 3, "3 ns: each reading is rounded"
    shortest_ns = min(one.there + one.back for one in exchanges)
    longest_ns = now_ns - BEGIN_NS
    assert found[1] <= shortest_ns / 2 + 3 * DRIFT * longest_ns + 3


def test_without_delays_and_drift_the_offset_is_exact() -> None:
    samples = ClockSamples()
    samples.note(7 * SECOND, 2 * SECOND, 0, 2 * SECOND)
    assert clock_offset(samples.kept, 2 * SECOND) == (5 * SECOND, 0)
    offset_ns, error_ns = clock_offset(samples.kept, 102 * SECOND) or (0, 0)
    assert (offset_ns, error_ns) == (5 * SECOND, round(100 * SECOND * DRIFT))


def test_one_direction_that_is_slow_costs_nothing_if_another_exchange_had_it_fast() -> None:
    samples = ClockSamples()
    samples.note(100, 50, 0, 100)  # the first half was slow: from 0 to 50 ahead
    samples.note(200, 200, 0, 250)  # the second half was slow: from 50 behind to 0
    assert clock_offset(samples.kept, 175) == (0, 1)  # rounded to the safe side


def test_no_exchange_no_offset() -> None:
    samples = ClockSamples()
    assert clock_offset(samples.kept, 0) is None
    samples.note(100, 0, 0, 50)  # answers no heartbeat
    samples.note(100, 60, 0, 50)  # answers one that is not made yet
    samples.note(100, 10, -1, 50)
    samples.note(100, 10, 1 << 62, 50)  # held for longer than it was under way
    assert clock_offset(samples.kept, 0) is None


def test_the_oldest_exchanges_are_forgotten() -> None:
    samples = ClockSamples()
    for number in range(SAMPLES_MAX + 9):
        samples.note(number + 1, number + 1, 0, number + 1)
    assert [sample.at_ns for sample in samples.kept] == list(range(10, SAMPLES_MAX + 10))
    samples.reset()
    assert list(samples.kept) == []


def test_a_clock_that_has_jumped_is_known_by_the_tightest_exchange() -> None:
    samples = [ClockSample(0, 0, 100), ClockSample(0, 990_000, 990_040), ClockSample(0, 0, 90)]
    assert clock_offset(samples, 0) == (990_020, 20)
