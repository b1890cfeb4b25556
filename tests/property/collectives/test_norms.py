"""The L2 norm of a contribution, against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.collectives.norms import l2_norm
from pccl.protocol.data_type import DataType
from pccl.protocol.guards.contributions import NORM_MAX

FLOATS = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)


def exact_norm(values: npt.NDArray[Any]) -> float:
    squares = sum((Fraction(float(value)) ** 2 for value in values), Fraction())
    scale = 2**2200  # the root of a huge or tiny number is that of an integer
    return float(Fraction(math.isqrt(int(squares * scale)), 2**1100))


@pytest.mark.parametrize("data_type", FLOATS)
@given(st.lists(st.floats(-6e4, 6e4), max_size=40), st.integers(0, 40))
def test_it_is_the_root_of_the_sum_of_squares(
    data_type: DataType, values: list[float], cut: int
) -> None:
    array = np.array(values, np.float64).astype(data_type.to_numpy_dtype())
    norm = l2_norm([array[:cut], array[cut:]])
    assert norm == pytest.approx(exact_norm(array), rel=1e-12, abs=1e-150)


def test_huge_and_tiny_values_count() -> None:
    assert l2_norm([np.full(4, 1e300)]) == pytest.approx(2e300)
    assert l2_norm([np.full(4, 3e38, np.float32)]) == pytest.approx(6e38)
    assert l2_norm([np.full(9, NORM_MAX)]) == NORM_MAX
    assert l2_norm([np.full(4, 1e-40, np.float32)]) == pytest.approx(2e-40, rel=1e-4)
    assert l2_norm([]) == 0.0


@pytest.mark.parametrize("data_type", FLOATS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 65_536, 99_999])
def test_one_value_that_is_not_finite_is_enough(
    data_type: DataType, wrong: float, place: int
) -> None:
    array = np.ones(100_000).astype(data_type.to_numpy_dtype())
    assert l2_norm([array]) == pytest.approx(math.sqrt(100_000))
    array[place] = wrong
    assert l2_norm([np.ones(3).astype(array.dtype), array]) is None
