"""The guard of weighted averages, against a twin that takes the definition literally."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pccl.machines.master.ballots.norms import NORMS_KEPT_MAX, NormHistory, judge
from pccl.protocol.data_type import DataType
from pccl.protocol.guards.contributions import (
    GUARD_ROUNDS_MAX,
    NORM_MAX,
    ContributionGuard,
    FlaggedContribution,
    GuardAction,
)
from pccl.protocol.types import Descriptor, OperationId, ReduceOp

EXCLUDE = ContributionGuard(GuardAction.EXCLUDE, GuardAction.EXCLUDE, 4.0, 8)
CAREFUL = ContributionGuard(GuardAction.EXCLUDE, GuardAction.WARN, 4.0, 8)

NORMS = st.none() | st.sampled_from([0.0, 1.0, 1.5, 2.0, 1e3, NORM_MAX]) | st.floats(0, 1e9)
GUARDS = st.builds(
    ContributionGuard,
    st.sampled_from(GuardAction),
    st.sampled_from(GuardAction),
    st.floats(1, 100),
    st.integers(0, GUARD_ROUNDS_MAX),
)


def middle_of(values: Sequence[float]) -> float:
    """The median: as many values below as above it."""
    ordered = sorted(values)
    upper, lower = ordered[len(ordered) // 2], ordered[(len(ordered) - 1) // 2]
    return (lower + upper) / 2


def above_limit(norm: float, norms: list[float], deviations: float) -> bool:
    if len(norms) < 5 or middle_of(norms) == 0:
        return False
    middle = middle_of(norms)
    off = [abs(one - middle) for one in norms]
    spread = max(1.4826 * middle_of(off), 0.05 * middle)
    return norm > min(middle + deviations * spread, NORM_MAX)


def twin(
    guard: ContributionGuard, weights: list[float], norms: list[float | None], past: list[float]
) -> dict[int, bool]:
    """Rank -> whether it is excluded, for all that are flagged."""
    counted = {rank: norm for rank, norm in enumerate(norms) if weights[rank] > 0}
    finite = [norm for norm in counted.values() if norm is not None]
    large = [norm for norm in finite if above_limit(norm, past + finite, guard.deviations)]
    base = finite if len(large) > len(finite) - len(large) else past + finite
    found: dict[int, bool] = {}
    for rank, norm in counted.items():
        action = guard.not_finite
        if norm is not None:
            is_out = above_limit(norm, base, guard.deviations)
            action = guard.outliers if is_out else GuardAction.OFF
        if action is not GuardAction.OFF:
            found[rank] = action is GuardAction.EXCLUDE
    return found


ROUNDS = st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.5]), NORMS), min_size=1, max_size=9)


@given(GUARDS, ROUNDS, st.lists(st.floats(0, 1e9), max_size=30))
def test_it_flags_what_the_definition_says(
    guard: ContributionGuard, contributions: list[tuple[float, float | None]], past: list[float]
) -> None:
    weights = [weight for weight, _ in contributions]
    norms = [norm for _, norm in contributions]
    flagged = judge(guard, weights, norms, past)
    assert {one.rank: one.excluded for one in flagged} == twin(guard, weights, norms, past)
    for one in flagged:
        assert one.norm == norms[one.rank]
        assert (one.limit is None) == (one.norm is None)
        assert one.norm is None or (one.limit is not None and one.limit < one.norm)
    outliers = [one for one in flagged if one.norm is not None]
    assert 2 * len(outliers) <= sum(w > 0 and n is not None for w, n in contributions)


@given(
    st.lists(st.floats(0.9, 1.1), min_size=10, max_size=40),
    st.lists(st.floats(0.9, 1.1), min_size=2, max_size=8),
    st.floats(1e3, 1e300),
)
def test_one_that_explodes_is_out_and_the_rest_stays(
    past: list[float], rest: list[float], huge: float
) -> None:
    flagged = judge(EXCLUDE, [1.0] * (len(rest) + 1), [*rest, huge], past)
    assert [(one.rank, one.norm, one.excluded) for one in flagged] == [(len(rest), huge, True)]


@given(st.integers(1, 9), st.floats(1e-3, 1e6))
def test_norms_that_all_change_at_once_are_no_outliers(size: int, change: float) -> None:
    past = [1.0, 1.1, 0.9, 1.05, 0.95] * 8
    norms = [change * (1 + rank / 100) for rank in range(size)]
    assert judge(EXCLUDE, [1.0] * size, norms, past) == ()


def test_of_two_the_one_that_differs_from_the_past_is_out() -> None:
    past = [1.0, 1.1, 0.9, 1.05]
    (flagged,) = judge(EXCLUDE, [1.0, 1.0], [1.0, 50.0], past)
    assert flagged.rank == 1


def test_few_norms_give_no_limit_but_what_is_not_finite_is_out() -> None:
    flagged = judge(EXCLUDE, [1.0, 1.0, 1.0], [1.0, 1e30, None], [])
    assert flagged == (FlaggedContribution(2, None, None, True),)


def test_the_actions_differ_for_the_two_kinds() -> None:
    flagged = judge(CAREFUL, [1.0] * 6, [1.0, 1.0, 1.0, 1.0, 99.0, None], [])
    assert [(one.rank, one.excluded) for one in flagged] == [(4, False), (5, True)]


# -- the past ----------------------------------------------------------------------------------


def asked(count: int = 8, rounds: int = 3) -> Descriptor:
    guard = ContributionGuard(GuardAction.EXCLUDE, GuardAction.EXCLUDE, 4.0, rounds)
    return Descriptor(DataType.FLOAT, ReduceOp.AVG, count, weighted=True, guard=guard)


def op(n: int = 0, tag: int = 1, group: int = 0) -> OperationId:
    return OperationId(1, group, 1, tag, n)


def test_the_last_rounds_of_the_same_tag_and_group_count() -> None:
    history = NormHistory()
    for n in range(5):
        history.note(op(n), 8, (float(n), n + 0.5))
    history.note(op(tag=2), 8, (70.0,))
    history.note(op(group=3), 8, (80.0,))
    assert history.past(op(5), asked()) == [2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
    assert history.past(op(5), asked(rounds=0)) == []
    assert history.past(op(5, group=3), asked()) == [80.0]
    assert history.past(op(5, tag=9), asked()) == []


def test_a_tensor_of_another_size_has_another_past() -> None:
    history = NormHistory()
    history.note(op(0), 8, (1.0,))
    assert history.past(op(1), asked(count=9)) == []
    history.note(op(1), 9, (5.0,))
    assert history.past(op(2), asked(count=9)) == [5.0]
    assert history.past(op(2), asked(count=8)) == []
    assert len(history) == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9000)), max_size=40))
def test_the_past_is_bounded(rounds: list[tuple[int, int]]) -> None:
    history = NormHistory()
    for n, (tag, size) in enumerate(rounds):
        history.note(op(n, tag), 8, (1.0,) * size)
        assert len(history) <= NORMS_KEPT_MAX
        assert len(history.past(op(n + 1, tag), asked(rounds=1))) == size
