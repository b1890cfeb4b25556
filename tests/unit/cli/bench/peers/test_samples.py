"""Random values of a benchmark, and the errors that formats may make: bounds by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from pccl.cli.bench.peers.bounds import STEP_SLACK, bound_of
from pccl.cli.bench.peers.ours import Ours, split
from pccl.cli.bench.peers.samples import Approximate, Samples, draw
from pccl.cli.bench.peers.values import PERIOD
from pccl.cli.bench.variants import Variant, variants_of

FLOAT32 = np.dtype(np.float32)
INT8 = Variant("mesh", "int8")
COUNT = 100_000


# -- values ----------------------------------------------------------------------------------------


def test_values_are_normal_and_independent() -> None:
    one, other = draw("normal", 0), draw("normal", 1)
    assert one.shape == (PERIOD,)
    assert abs(one.mean()) < 0.02
    assert one.std() == pytest.approx(1.0, abs=0.02)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.02
    assert (draw("normal", 0) == one).all()


def test_one_of_a_hundred_is_an_outlier() -> None:
    values = draw("outliers", 3)
    far = np.abs(values) == 20.0
    assert far.mean() == pytest.approx(0.01, abs=0.002)
    assert np.abs(values[~far]).max() < 6.0
    assert 0.3 < (values[far] > 0).mean() < 0.7


# -- errors ----------------------------------------------------------------------------------------


def approximate(algorithm: str = "mesh", kind: str = "normal") -> tuple[Approximate, np.ndarray]:
    """What peer 0 of two checks, and the exact sum of round 1, shape (COUNT,), float64."""
    samples = Samples(FLOAT32, 0, 2, kind)
    told = cast(Ours, SimpleNamespace(algorithm=algorithm))
    checked = Approximate(samples, samples.bounds(INT8), told)
    tensors = [np.zeros(COUNT, np.float32) for _ in range(2)]
    checked.fill(tensors[0], 1)
    other = Samples(FLOAT32, 1, 2, kind)
    Approximate(other, {}, told).fill(tensors[1], 1)
    assert (tensors[0] != tensors[1]).any()
    return checked, tensors[0].astype(np.float64) + tensors[1]


def test_the_error_is_relative_to_the_exact_sum() -> None:
    checked, exact = approximate()
    assert checked.error == 0.0
    assert checked.check_sum((exact * 1.005).astype(np.float32), 1) is None
    assert checked.error == pytest.approx(0.005, rel=1e-3)


def test_a_missing_peer_is_no_rounding() -> None:
    checked, _ = approximate()
    alone = np.zeros(COUNT, np.float32)
    checked.fill(alone, 1)
    wrong = checked.check_sum(alone, 1)
    assert wrong is not None
    # Half of the sum's variance is missing, and int8 may cost about 1.2 %.
    assert wrong.startswith("the relative error is 7.")
    assert wrong.endswith("is the most that the format may cost by mesh")


def test_a_result_of_another_round_is_wrong() -> None:
    checked, exact = approximate()
    assert checked.check_sum(exact.astype(np.float32), 2) is not None


def test_nan_is_wrong() -> None:
    checked, exact = approximate()
    result = exact.astype(np.float32)
    result[77] = np.nan
    assert checked.check_sum(result, 1) is not None


def test_digests_tell_bits_apart() -> None:
    digests: list[str] = []
    for change in (0.0, 0.0, 1e-6):
        checked, exact = approximate()
        result = exact.astype(np.float32)
        result[5] += change
        assert checked.check_sum(result, 1) is None
        digests.append(checked.digest)
    assert digests[0] == digests[1] != digests[2]


def test_an_input_that_was_changed_is_seen() -> None:
    checked, _ = approximate()
    tensor = np.zeros(COUNT, np.float32)
    checked.fill(tensor, 4)
    assert checked.check_input(tensor, 4) is None
    tensor[9] += 1.0
    found = checked.check_input(tensor, 4)
    assert found is not None
    assert found.element == 9


def test_each_variant_has_other_values() -> None:
    samples = Samples(FLOAT32, 0, 2, "normal")
    told = cast(Ours, SimpleNamespace(algorithm="mesh"))
    one, other = np.zeros(50, np.float32), np.zeros(50, np.float32)
    Approximate(samples, {}, told, 3).fill(one, 1)
    Approximate(samples, {}, told).fill(other, 4)
    assert (one == other).all()
    Approximate(samples, {}, told).fill(other, 1)
    assert (one != other).any()


# -- bounds ----------------------------------------------------------------------------------------

RAMP = np.array([-127.0, 0.0, 1.0, 127.0] * 2)
"""With blocks of 4, int8 has steps of 1, and the sum of two of them steps of 2."""


def test_a_mesh_rounds_each_contribution_and_the_sum() -> None:
    found = bound_of([RAMP, RAMP], Variant("mesh", "int8", 1, 4), "mesh", 0.0)
    assert found.typical == pytest.approx((0.25 + 0.25 + 1.0) ** 0.5 * STEP_SLACK)
    assert found.worst == pytest.approx((0.5 + 0.5 + 1.0) * STEP_SLACK)


def test_a_ring_rounds_each_sum() -> None:
    three = [RAMP, RAMP, RAMP]
    found = bound_of(three, Variant("ring", "int8", 1, 4), "ring", 0.0)
    assert found.typical == pytest.approx((0.25 + 1.0 + 2.25) ** 0.5 * STEP_SLACK)


def test_rounding_stochastically_costs_twice_the_worst() -> None:
    nearest = bound_of([RAMP], Variant("mesh", "int8", 1, 4), "mesh", 0.0)
    drawn = bound_of([RAMP], Variant("mesh", "int8", 1, 4, True), "mesh", 0.0)
    assert drawn.typical == nearest.typical
    assert drawn.worst == 2 * nearest.worst


@pytest.mark.parametrize(
    ("wire", "half_steps"),
    [
        ("uint8", [254 / 255 / 2] * 4),
        ("int4", [254 / 15 / 2] * 4),
        ("uint16", [254 / 65535 / 2] * 4),
        ("float16", [127 / 2048, 0.0, 1 / 2048, 127 / 2048]),
        ("bfloat16", [127 / 256, 0.0, 1 / 256, 127 / 256]),
        # Steps of 1/127 times code times |code|: 1 lies between 11² and 12² of them.
        ("companded8", [1 + 1 / 508, 1 / 508, 127**-0.5 + 1 / 508, 1 + 1 / 508]),
    ],
)
def test_half_steps_of_each_format(wire: str, half_steps: list[float]) -> None:
    found = bound_of([RAMP, 0 * RAMP], Variant("mesh", wire, 1, 4), "mesh", 0.0)
    expected = float(np.sqrt(2 * np.mean(np.square(half_steps))))  # one contribution, and the sum
    assert found.typical == pytest.approx(expected, rel=0.016)  # the slack


def test_sums_are_rounded_to_the_tensors_dtype_too() -> None:
    epsilon = float(cast(Any, ml_dtypes).finfo(ml_dtypes.bfloat16).eps)
    found = bound_of([RAMP], Variant("mesh", "uint16", 1, 4), "mesh", epsilon)
    square = np.mean(np.square(RAMP)) * epsilon**2 + (127 / 65535 * STEP_SLACK) ** 2
    assert found.typical == pytest.approx((2 * square) ** 0.5)


# -- variants --------------------------------------------------------------------------------------


def test_variants_are_all_combinations() -> None:
    found = variants_of(
        ("ring", "mesh"), ("none", "int8"), (1, 16), (512,), block=64, stochastic=True
    )
    assert [str(variant) for variant in found] == [
        *("ring", "ring 16 tensors", "ring 512 in one"),
        *("ring int8", "ring int8 16 tensors", "ring int8 512 in one"),
        *("mesh", "mesh 16 tensors", "mesh 512 in one"),
        *("mesh int8", "mesh int8 16 tensors", "mesh int8 512 in one"),
    ]
    assert [each.joint for each in found[:3]] == [1, 1, 512]
    assert {(each.exact, each.block, each.stochastic) for each in found} == {
        (True, None, False),
        (False, 64, True),
    }
    options = found[3].options()
    assert options is not None
    assert (options.format, options.block, options.stochastic) == ("int8", 64, True)
    assert found[0].options() is None
    assert INT8.wire_block == 32


def test_split() -> None:
    tensor = np.arange(10)
    parts = split(tensor, 4)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]
    assert all(np.shares_memory(part, tensor) for part in parts)
