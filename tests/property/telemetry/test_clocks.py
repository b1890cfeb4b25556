"""The true difference of two clocks lies within the stated error, whatever was delayed."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from pccl.telemetry.clocks import (
    DRIFT,
    Alignment,
    ClockSample,
    ClockSamples,
    clock_offset,
    order_shifts,
)

S = 10**9

delays = st.integers(0, S)
exchanges = st.lists(st.tuples(delays, delays, delays, st.integers(1, 10 * S)), max_size=30)


@given(
    exchanges=exchanges,
    ahead_ns=st.integers(0, 10**15),
    ppm=st.integers(-100, 100),
    asked=st.lists(st.integers(-(10**11), 10**12), min_size=1, max_size=5),
)
def test_the_true_offset_is_within_the_error(
    exchanges: list[tuple[int, int, int, int]], ahead_ns: int, ppm: int, asked: list[int]
) -> None:
    """A heartbeat takes some time there, is held for a while, and the answer takes some time."""

    def master(peers_ns: int) -> int:
        return peers_ns + ahead_ns + round(Fraction(peers_ns * ppm, 10**6))

    samples, now_ns = ClockSamples(), S
    for there_ns, held_ns, back_ns, pause_ns in exchanges:
        arrived_ns = now_ns + there_ns
        answered_ns = arrived_ns + held_ns
        held_by_masters_clock_ns = master(answered_ns) - master(arrived_ns)
        sent_ns, now_ns = now_ns, answered_ns + back_ns
        samples.note(master(answered_ns), sent_ns, held_by_masters_clock_ns, now_ns)
        now_ns += pause_ns
    assert len(samples.kept) == len(exchanges)
    for at_ns in asked:
        found = clock_offset(samples.kept, at_ns)
        assert (found is None) == (not exchanges)
        if found is not None:
            offset_ns, error_ns = found
            assert abs(master(at_ns) - at_ns - offset_ns) <= error_ns + 1


bounds = st.tuples(st.integers(0, 10**6), st.integers(-(10**4), 10**4), st.integers(0, 10**4))


@given(rows=st.lists(bounds, min_size=1, max_size=20), at_ns=st.integers(-(10**7), 10**7))
def test_the_bounds_are_those_of_the_widened_samples(
    rows: list[tuple[int, int, int]], at_ns: int
) -> None:
    samples = [ClockSample(at, low, low + width) for at, low, width in rows]
    offset_ns, error_ns = Alignment(samples).at(at_ns)
    slacks = [DRIFT * abs(at_ns - sample.at_ns) for sample in samples]
    low = max(sample.low_ns - slack for sample, slack in zip(samples, slacks, strict=True))
    high = min(sample.high_ns + slack for sample, slack in zip(samples, slacks, strict=True))
    if low <= high:
        assert abs(offset_ns - (low + high) / 2) <= 1
        assert 0 <= error_ns - (high - low) / 2 <= 2
    else:
        widths = [
            sample.high_ns - sample.low_ns + 2 * slack
            for sample, slack in zip(samples, slacks, strict=True)
        ]
        assert abs(error_ns - min(widths) / 2) <= 1


pairs = st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda pair: pair[0] != pair[1])


@given(
    limits=st.lists(st.integers(0, 1000), min_size=5, max_size=5),
    least=st.dictionaries(pairs, st.integers(-1000, 3000), max_size=8),
)
def test_shifts_stay_within_their_limits(
    limits: list[int], least: dict[tuple[int, int], int]
) -> None:
    shifts = order_shifts(limits, least)
    assert all(abs(shift) <= limit for shift, limit in zip(shifts, limits, strict=True))


@given(true=st.lists(st.integers(-1000, 1000), min_size=5, max_size=5), ways=st.sets(pairs))
def test_shifts_put_messages_in_order_if_errors_allow_it(
    true: list[int], ways: set[tuple[int, int]]
) -> None:
    """Clocks that are wrong by ``true``: each message seems to arrive as early as it can."""
    least = {(first, second): true[second] - true[first] for first, second in ways}
    shifts = order_shifts([10**6] * 5, least)
    assert all(shifts[second] - shifts[first] >= least[first, second] - 5 for first, second in ways)
