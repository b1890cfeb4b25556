"""What the peers of a chaos run reduce: exact in every dtype, and told apart."""

from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np
import pytest

from pccl.protocol.types import ReduceOp
from pccl.stress.chaos.inputs import (
    TAGS_MAX,
    VALUE_MAX,
    PlannedReduce,
    ReduceStyle,
    input_of,
    iteration,
    result_of,
    values,
)

FOLDS: dict[ReduceOp, Callable[[Iterable[int]], int]] = {
    ReduceOp.SUM: sum,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
}
PEERS = (3, 8, 1_048_581)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX])
def test_results_are_what_plain_numbers_say(dtype: str, op: ReduceOp) -> None:
    what = PlannedReduce(1, 257, dtype, op, in_place=True)
    columns = zip(*(values(5, peer, 9, what).tolist() for peer in PEERS), strict=True)
    fold = FOLDS[op]
    result = result_of(5, PEERS, 9, what)
    assert result.dtype == np.dtype(dtype)
    assert result.tolist() == [fold(column) for column in columns]


def test_averages_of_whole_numbers_go_toward_zero() -> None:
    what = PlannedReduce(0, 500, "int32", ReduceOp.AVG, in_place=False)
    columns = zip(*(values(5, peer, 2, what).tolist() for peer in PEERS), strict=True)
    expected = [int(Fraction(sum(column), 3)) for column in columns]  # int() cuts
    assert min(expected) < 0 < max(expected)
    assert result_of(5, PEERS, 2, what).tolist() == expected


def test_values_are_small_and_differ_by_everything() -> None:
    what = PlannedReduce(0, 2000, "float32", ReduceOp.SUM, in_place=True)
    other_tag = PlannedReduce(1, 2000, "float32", ReduceOp.SUM, in_place=True)
    found = [
        input_of(*where).tobytes()
        for where in ((1, 1, 1, what), (2, 1, 1, what), (1, 2, 1, what), (1, 1, 2, what))
    ]
    found.append(input_of(1, 1, 1, other_tag).tobytes())
    assert len(set(found)) == 5
    drawn = values(1, 1, 1, what)
    assert -VALUE_MAX < drawn.min() < -400
    assert 400 < drawn.max() < VALUE_MAX
    assert len(set(drawn.tolist())) > 500
    assert 64 * VALUE_MAX < 2**24  # a float32 holds it exactly


def test_all_members_draw_the_same_iterations_and_all_styles_come() -> None:
    drawn = [iteration(7, number) for number in range(200)]
    assert drawn == [iteration(7, number) for number in range(200)]
    assert {each.style for each in drawn} == set(ReduceStyle)
    assert {len(each.reduces) for each in drawn} == set(range(1, TAGS_MAX + 1))
    assert [reduce.tag for reduce in drawn[0].reduces] == list(range(len(drawn[0].reduces)))
    averaged = [r for each in drawn for r in each.reduces if r.op is ReduceOp.AVG]
    assert averaged
    assert all(reduce.dtype.startswith("int") for reduce in averaged)
