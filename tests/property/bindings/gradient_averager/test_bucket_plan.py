"""How gradients are dealt out to buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")  # the package needs it

from pccl.bindings.gradient_averager.bucket_plan import BucketPiece, plan_buckets

pieces = st.builds(BucketPiece, st.sampled_from(("float16", "float32")), st.integers(0, 200))
plans = st.tuples(st.lists(pieces, max_size=30), st.integers(1, 400))


def test_an_example() -> None:
    """Weight and bias of three layers, 16 bytes a bucket; the middle layer is in halves."""
    weight, bias = BucketPiece("float32", 16), BucketPiece("float32", 4)
    half_weight, half_bias = BucketPiece("float16", 8), BucketPiece("float16", 2)
    found = plan_buckets([weight, bias, half_weight, half_bias, weight, bias], 16)
    assert found == [[5], [4], [3, 2], [1], [0]]


@given(plans)
def test_every_gradient_is_in_one_bucket(given_plan: tuple[list[BucketPiece], int]) -> None:
    given_pieces, bucket_bytes = given_plan
    found = plan_buckets(given_pieces, bucket_bytes)
    numbers = [number for plan in found for number in plan]
    assert sorted(numbers) == [n for n, piece in enumerate(given_pieces) if piece.nbytes]
    assert all(len({given_pieces[n].dtype for n in plan}) == 1 for plan in found)


@given(plans)
def test_buckets_are_as_full_as_they_may_be(given_plan: tuple[list[BucketPiece], int]) -> None:
    given_pieces, bucket_bytes = given_plan
    for plan in plan_buckets(given_pieces, bucket_bytes):
        nbytes = sum(given_pieces[number].nbytes for number in plan)
        assert nbytes <= bucket_bytes or len(plan) == 1
        dtype = given_pieces[plan[0]].dtype
        following = [p for p in given_pieces[: min(plan)] if p.dtype == dtype and p.nbytes]
        if following:
            assert nbytes + following[-1].nbytes > bucket_bytes


@given(plans)
def test_buckets_come_in_the_order_in_which_backward_completes_them(
    given_plan: tuple[list[BucketPiece], int],
) -> None:
    found = plan_buckets(*given_plan)
    completed = [min(plan) for plan in found]
    assert completed == sorted(completed, reverse=True)
    assert all(plan == sorted(plan, reverse=True) for plan in found)
