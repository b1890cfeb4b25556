"""How gradients are dealt out to buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")  # the package needs it

from pccl.bindings.gradient_averager.bucket_plan import (
    BucketPiece,
    BucketPlan,
    BucketSlot,
    plan_buckets,
)

ITEMSIZES = {"float16": 2, "float32": 4, "float64": 8}


def piece_of(numel: int, dtype: str) -> BucketPiece:
    return BucketPiece(numel, dtype, ITEMSIZES[dtype])


pieces = st.builds(piece_of, st.integers(0, 50), st.sampled_from(sorted(ITEMSIZES)))
plans = st.tuples(st.lists(pieces, max_size=30), st.integers(1, 400))


def test_an_example() -> None:
    """Weight and bias of three layers, 16 bytes a bucket; the middle layer is in halves."""
    weight, bias = BucketPiece(4, "float32", 4), BucketPiece(1, "float32", 4)
    half_weight, half_bias = BucketPiece(4, "float16", 2), BucketPiece(1, "float16", 2)
    found = plan_buckets([weight, bias, half_weight, half_bias, weight, bias], 16)
    assert found == [
        BucketPlan("float32", (BucketSlot(5, 0, 1),)),
        BucketPlan("float32", (BucketSlot(4, 0, 4),)),
        BucketPlan("float16", (BucketSlot(3, 0, 1), BucketSlot(2, 1, 5))),
        BucketPlan("float32", (BucketSlot(1, 0, 1),)),
        BucketPlan("float32", (BucketSlot(0, 0, 4),)),
    ]


@given(plans)
def test_every_element_has_one_place(given_plan: tuple[list[BucketPiece], int]) -> None:
    given_pieces, bucket_bytes = given_plan
    numbers: list[int] = []
    for plan in plan_buckets(given_pieces, bucket_bytes):
        end = 0
        for slot in plan.slots:
            piece = given_pieces[slot.parameter]
            assert (slot.begin, slot.end) == (end, end + piece.numel)
            assert piece.dtype == plan.dtype
            numbers.append(slot.parameter)
            end = slot.end
        assert plan.numel == end > 0
    assert sorted(numbers) == [n for n, piece in enumerate(given_pieces) if piece.numel]


@given(plans)
def test_buckets_are_as_full_as_they_may_be(given_plan: tuple[list[BucketPiece], int]) -> None:
    given_pieces, bucket_bytes = given_plan
    found = plan_buckets(given_pieces, bucket_bytes)
    for plan in found:
        itemsize = ITEMSIZES[plan.dtype]
        assert plan.numel * itemsize <= bucket_bytes or len(plan.slots) == 1
        after = min(slot.parameter for slot in plan.slots) - 1
        following = [p for p in given_pieces[: after + 1] if p.dtype == plan.dtype and p.numel]
        if following:
            assert (plan.numel + following[-1].numel) * itemsize > bucket_bytes


@given(plans)
def test_buckets_come_in_the_order_in_which_backward_completes_them(
    given_plan: tuple[list[BucketPiece], int],
) -> None:
    found = plan_buckets(*given_plan)
    completed = [min(slot.parameter for slot in plan.slots) for plan in found]
    assert completed == sorted(completed, reverse=True)
    for plan in found:
        numbers = [slot.parameter for slot in plan.slots]
        assert numbers == sorted(numbers, reverse=True)
