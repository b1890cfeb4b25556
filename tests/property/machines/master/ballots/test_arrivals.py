"""The adaptive grace, against a twin that takes its definition literally, with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.machines.master.ballots.arrivals import ArrivalHistory, Arrivals
from pccl.protocol.types import Quorum

SECOND = 1_000_000_000
SHORTEST, LONGEST, FIRST = SECOND // 10, 10 * SECOND, SECOND
LAST = 256
"""How many lags count."""
CALLS = 1024
"""How many calls are remembered."""
ADAPTIVE = Quorum(2)

LAGS = st.none() | st.integers(-SECOND, 20 * SECOND) | st.integers(0, SECOND // 2)
TIMES = st.integers(0, 40 * SECOND)


def twin(lags: list[int | None], enough_ns: int) -> float:
    """When a call goes on without the members that are missing."""
    if not lags:
        return enough_ns + FIRST
    known = [LONGEST if lag is None else min(max(lag, 0), LONGEST) for lag in lags[-LAST:]]
    values = np.array(known, np.float64)
    middle = np.median(values)
    deviation = 1.4826 * np.median(np.abs(values - middle))
    return enough_ns + float(np.clip(middle + 4 * deviation, SHORTEST, LONGEST))


def after(lags: list[int | None]) -> Arrivals:
    arrivals = Arrivals()
    for lag in lags:
        arrivals.note(lag)
    return arrivals


@given(st.lists(LAGS, max_size=40), TIMES)
def test_it_expects_what_the_definition_says(lags: list[int | None], enough_ns: int) -> None:
    found_ns = after(lags).goes_on_ns(ADAPTIVE, enough_ns)
    assert found_ns == pytest.approx(twin(lags, enough_ns), abs=1)


@given(st.lists(LAGS, min_size=1, max_size=30), st.lists(LAGS, min_size=1, max_size=30))
def test_lags_that_come_later_change_what_is_expected(
    lags: list[int | None], more: list[int | None]
) -> None:
    arrivals = after(lags)
    arrivals.goes_on_ns(ADAPTIVE, 0)  # what it has computed must not stay
    for lag in more:
        arrivals.note(lag)
    assert arrivals.goes_on_ns(ADAPTIVE, 0) == pytest.approx(twin([*lags, *more], 0), abs=1)


@pytest.mark.parametrize("slow", [LAST, LAST - 1])
def test_only_the_last_lags_count(slow: int) -> None:
    lags: list[int | None] = [*[3 * SECOND] * LAST, *[SECOND] * slow]
    assert after(lags).goes_on_ns(ADAPTIVE, 0) == pytest.approx(twin(lags, 0), abs=1)
    forgotten = [*[None] * LAST, *[SECOND] * LAST]
    assert after(forgotten).goes_on_ns(ADAPTIVE, 0) == SECOND


@given(
    st.lists(st.integers(0, SECOND // 5), min_size=3, max_size=40),
    st.data(),
)
def test_fewer_than_half_that_are_always_late_make_nobody_wait_long(
    usual: list[int], data: st.DataObject
) -> None:
    """The median and the median deviation stay within the lags of the majority."""
    missing = data.draw(st.integers(0, len(usual) - 1))
    lags: list[int | None] = [*usual, *[None] * missing]
    assert after(lags).goes_on_ns(ADAPTIVE, 0) <= (1 + 4 * 1.4826) * SECOND // 5 + 1


def test_more_than_half_that_are_late_are_waited_for_as_long_as_allowed() -> None:
    lags: list[int | None] = [0, 0, None, None, None]
    assert after(lags).goes_on_ns(ADAPTIVE, SECOND) == SECOND + LONGEST


@given(st.lists(LAGS, max_size=10), st.integers(0, 3600 * 1000), TIMES)
def test_a_grace_that_callers_name_is_kept_whatever_was_before(
    lags: list[int | None], grace_ms: int, enough_ns: int
) -> None:
    named = Quorum(2, grace_ms=grace_ms)
    found_ns = after(lags).goes_on_ns(named, enough_ns)
    assert found_ns == enough_ns + grace_ms * 1_000_000


def test_each_call_has_lags_of_its_own() -> None:
    history = ArrivalHistory()
    history.at((0, 1)).note(2 * SECOND)
    assert history.at((0, 1)).goes_on_ns(ADAPTIVE, 0) == 2 * SECOND
    assert history.at((0, 2)).goes_on_ns(ADAPTIVE, 0) == FIRST
    assert history.at((1, 1)).goes_on_ns(ADAPTIVE, 0) == FIRST


def test_the_call_that_was_unused_for_longest_is_forgotten() -> None:
    history = ArrivalHistory()
    for call in range(CALLS):
        history.at(call).note(2 * SECOND)
    history.at(0)  # used again
    history.at("one more")
    assert history.at(0).goes_on_ns(ADAPTIVE, 0) == 2 * SECOND
    assert history.at(1).goes_on_ns(ADAPTIVE, 0) == FIRST  # which forgets call 2
    assert history.at(3).goes_on_ns(ADAPTIVE, 0) == 2 * SECOND
    assert history.at(2).goes_on_ns(ADAPTIVE, 0) == FIRST
