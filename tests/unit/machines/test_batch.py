"""After which error a reduce is made again, and what becomes of several that are one call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.machines.batch import ReduceBatch, may_succeed_again
from pccl.protocol import errors

LOST = errors.CollectiveAborted(reason="peer 3 lost")


def begin_all(batch: ReduceBatch) -> list[int]:
    """Begin as many as may be in flight."""
    found = [batch.begin_next() for _ in range(batch.width)]
    return [tag for tag in found if tag is not None]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (LOST, True),
        (errors.CollectiveAborted(errors.Result.INTERNAL_ERROR, "f", "results differ"), False),
        (errors.TooFewPeers(reason="alone"), False),
        (errors.LinkError(errors.Result.RANK_CONNECTION_LOST, reason="no link"), False),
        (errors.Evicted(reason="gone"), False),
        (errors.DeadlineExceeded(reason="too late"), False),
    ],
)
def test_only_what_a_loss_has_ended_may_succeed_again(error: errors.PCCLError, again: bool) -> None:
    assert may_succeed_again(error) is again


def test_a_tag_may_occur_once() -> None:
    with pytest.raises(ValueError, match="tag 7 occurs twice; give each tensor a tag of its own"):
        ReduceBatch([7, 8, 7], 2)


@pytest.mark.parametrize(
    "error",
    [
        errors.TooFewPeers(reason="alone"),
        errors.DeadlineExceeded(reason="too late"),
        errors.CollectiveAborted(errors.Result.INTERNAL_ERROR, "f", "results differ"),
        errors.Evicted(reason="gone"),
        errors.LockstepError(reason="who waits where"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_names_what_is_complete(error: errors.PCCLError) -> None:
    batch = ReduceBatch([1, 2, 3, 4], 3)
    assert begin_all(batch) == [1, 2, 3]
    batch.completed(2)
    assert batch.begin_next() == 4
    batch.completed(1)
    assert batch.failed(3, error) == [4]
    named = batch.named_failure()
    assert isinstance(named, errors.PCCLError)
    assert type(named) is type(error)
    assert (named.result, named.func) == (error.result, error.func)
    assert named.completed_tags == (1, 2)  # in the order of the requests
    assert named.reason == (
        f"{error.reason}; tags that completed: 1, 2; the other inputs are intact"
    )
    assert named.__cause__ is error


def test_an_evicted_caller_is_told_why_and_when() -> None:
    error = errors.Evicted(reason="gone")
    error.ago_s = 2.5
    batch = ReduceBatch([1], 1)
    begin_all(batch)
    batch.failed(1, error)
    named = batch.named_failure()
    assert isinstance(named, errors.Evicted)
    assert (named.ago_s, named.completed_tags) == (2.5, ())
    assert "tags that completed: none;" in named.reason


def test_an_error_that_is_not_of_the_run_is_raised_as_it_is() -> None:
    batch, error = ReduceBatch([1, 2], 2), ValueError("another collective still uses this memory")
    begin_all(batch)
    assert batch.failed(2, error) == [1]
    assert batch.named_failure() is error


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (errors.LockstepError(reason="a"), errors.DeadlineExceeded(reason="b"), "a"),
        (errors.LockstepError(reason="a"), errors.OutcomeUnknown(reason="b"), "b"),
        (LOST, errors.Evicted(reason="b"), "b"),
        (errors.OutcomeUnknown(reason="a"), errors.MasterLost(reason="b"), "b"),
        (errors.Evicted(reason="a"), errors.OutcomeUnknown(reason="b"), "a"),
        (errors.MasterLost(reason="a"), errors.Evicted(reason="b"), "a"),
    ],
)
def test_a_lost_place_is_told_whatever_failed_before(
    first: errors.PCCLError, second: errors.PCCLError, told: str
) -> None:
    """Until the caller joins again there is nothing else to do."""
    batch = ReduceBatch([1, 2], 2)
    begin_all(batch)
    assert batch.failed(1, first) == [2]
    assert batch.failed(2, second) == []
    named = batch.named_failure()
    assert isinstance(named, errors.PCCLError)
    assert named.reason.startswith(f"{told}; tags that completed: none;")


@given(
    tags=st.lists(st.integers(0, 99), min_size=1, max_size=12, unique=True),
    in_flight_max=st.integers(1, 20),
    choices=st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=12, max_size=12),
)
def test_every_reduce_that_begins_ends(
    tags: list[int], in_flight_max: int, choices: list[tuple[int, bool]]
) -> None:
    """In the order of the call, so many at a time, and none begins after a failure."""
    batch = ReduceBatch(tags, in_flight_max)
    begun: list[int] = []
    running: list[int] = []
    failed: list[int] = []
    for place, fails in choices:
        while len(running) < min(in_flight_max, len(tags)):
            tag = batch.begin_next()
            if tag is None:
                break
            begun.append(tag)
            running.append(tag)
        assert len(running) == min(in_flight_max, len(tags) - len(begun) + len(running)) or failed
        if not running:
            break
        tag = running.pop(place % len(running))
        if fails:
            assert batch.failed(tag, LOST) == ([] if failed else running)
            failed.append(tag)
        else:
            batch.completed(tag)
        assert batch.goes_on is (not failed)
    assert begun == tags[: len(begun)]
    named = batch.named_failure()
    if failed:
        assert isinstance(named, errors.CollectiveAborted)
        assert set(named.completed_tags) == set(begun) - set(failed) - set(running)
    else:
        assert named is None
        assert begun == tags
