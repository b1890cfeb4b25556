"""The values of a benchmark: the formula by hand, exact sums, and what is wrong is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pccl.cli.bench.values import HALF_STEPS, PERIOD, Exact, Rounded, pattern, value_max

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES: list[np.dtype[Any]] = [
    *map(np.dtype, (np.int8, np.uint64, np.float16, np.float32, np.float64)),
    BFLOAT16,
]


def value_of(peer: int, element: int, round_number: int, largest: int) -> int:
    """The formula as the documentation has it, one element at a time."""
    place = (element + 7919 * peer + 39208 * round_number) % 65521
    return (place * place % 65521) % (largest + 1)


def filled(values: Exact, count: int, round_number: int, dtype: np.dtype[Any]) -> Any:
    tensor = np.zeros(count, dtype)
    values.input.fill(tensor, round_number)
    return tensor


@pytest.mark.parametrize(
    ("dtype", "peers", "largest"),
    [
        (np.dtype(np.int8), 2, 63),
        (np.dtype(np.int8), 64, 1),
        (np.dtype(np.uint8), 64, 3),
        (np.dtype(np.float16), 4, 512),
        (BFLOAT16, 2, 128),
        (BFLOAT16, 64, 4),
        (FLOAT32, 4, 4095),
        (np.dtype(np.float64), 64, 4095),
        (np.dtype(np.int64), 2, 4095),
    ],
)
def test_sums_are_exact(dtype: np.dtype[Any], peers: int, largest: int) -> None:
    assert value_max(dtype, peers) == largest
    worst = np.full(1, largest, dtype)
    total = np.zeros(1, dtype)
    for _ in range(peers):
        total += worst
    assert int(total[0]) == largest * peers


def test_pattern() -> None:
    assert pattern(4095)[[0, 1, 2, 100, 256]].tolist() == [0, 1, 4, 10000 % 4096, 15]
    assert len(pattern(4095)) == 65521  # 256 * 256 is 65521 + 15


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fill_follows_the_formula(dtype: np.dtype[Any]) -> None:
    values, largest = Exact(dtype, 2, 3), value_max(dtype, 3)
    tensor = filled(values, 300_001, 7, dtype)
    for element in (0, 1, 8191, 65520, 65521, 196562, 196563, 262144, 300_000):
        assert int(tensor[element]) == value_of(2, element, 7, largest), element


@pytest.mark.parametrize("count", [1, 5, PERIOD - 1, PERIOD, 3 * PERIOD, 3 * PERIOD + 1, 400_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_all_peers_is_right(dtype: np.dtype[Any], count: int) -> None:
    everybody = [Exact(dtype, peer, 3) for peer in range(3)]
    total = np.zeros(count, dtype)
    for values in reversed(everybody):  # in any order
        total += filled(values, count, 5, dtype)
    for values in everybody:
        assert values.check_sum(total, 5) == ""
        assert values.input.compare(filled(values, count, 5, dtype), 5) == ""


def sum_of(peers: list[int], round_number: int, count: int = 200_000, peer_count: int = 3) -> Any:
    parts = [
        filled(Exact(FLOAT32, peer, peer_count), count, round_number, FLOAT32) for peer in peers
    ]
    return np.sum(parts, axis=0, dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("a peer is missing", sum_of([0, 1], 4)),
        ("a peer counted twice", sum_of([0, 1, 1], 4)),
        ("left from the round before", sum_of([0, 1, 2], 3)),
        ("a segment too far", np.roll(sum_of([0, 1, 2], 4), 65536)),
        ("a chunk too far", np.roll(sum_of([0, 1, 2], 4), 200_000 // 3)),
        ("the input of one", filled(Exact(FLOAT32, 1, 3), 200_000, 4, FLOAT32)),
        ("zeros", np.zeros(200_000, np.float32)),
    ],
)
def test_what_is_wrong_is_seen(name: str, wrong: Any) -> None:
    assert Exact(FLOAT32, 0, 3).check_sum(wrong, 4) != ""


@pytest.mark.parametrize("element", [0, 65521, 196562, 196563, 199_999])
def test_one_wrong_element_is_named(element: int) -> None:
    tensor = sum_of([0, 1, 2], 2)
    right = sum(value_of(peer, element, 2, 4095) for peer in range(3))
    assert tensor[element] == right
    tensor[element] += 1
    wrong = Exact(FLOAT32, 1, 3).check_sum(tensor, 2)
    assert wrong == f"element {element} is {right + 1}.0, expected {right}.0"


# -- rounded sums ----------------------------------------------------------------------------------

COUNT = 100_000


def rounded(wire: str = "int8", peers: int = 2) -> tuple[Rounded, np.ndarray[Any, Any]]:
    """What peer 0 checks, and the exact sum of round 1, shape (COUNT,), float64."""
    everybody = [Rounded(FLOAT32, peer, peers, wire) for peer in range(peers)]
    tensors = [np.zeros(COUNT, np.float32) for _ in everybody]
    for values, tensor in zip(everybody, tensors, strict=True):
        values.input.fill(tensor, 1)
    return everybody[0], np.stack(tensors).sum(axis=0, dtype=np.float64)


def test_values_are_normal_and_independent() -> None:
    one, other = (np.zeros(PERIOD, np.float32) for _ in range(2))
    for peer, tensor in enumerate((one, other)):
        Rounded(FLOAT32, peer, 2, "int8").input.fill(tensor, 0)
    assert abs(one.mean()) < 0.02
    assert one.std() == pytest.approx(1.0, abs=0.02)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.02


def test_the_error_is_relative_to_the_exact_sum() -> None:
    values, exact = rounded()
    assert values.error == 0.0
    assert values.check_sum((exact * 1.005).astype(np.float32), 1, "mesh") == ""
    assert values.error == pytest.approx(0.005, rel=1e-3)


def test_a_missing_peer_is_no_rounding() -> None:
    values, _ = rounded()
    alone = np.zeros(COUNT, np.float32)
    values.input.fill(alone, 1)
    wrong = values.check_sum(alone, 1, "mesh")
    assert wrong.startswith("the relative error is 7.")  # half of the sum's variance is missing
    assert wrong.endswith(" with algorithm mesh")


def test_a_result_of_another_round_is_wrong() -> None:
    values, exact = rounded()
    assert values.check_sum(exact.astype(np.float32), 2, "mesh") != ""


def test_nan_is_wrong() -> None:
    values, exact = rounded()
    result = exact.astype(np.float32)
    result[77] = np.nan
    assert values.check_sum(result, 1, "mesh") != ""


def test_digests_tell_bits_apart() -> None:
    digests: list[int] = []
    for change in (0.0, 0.0, 1e-6):
        values, exact = rounded()
        result = exact.astype(np.float32)
        result[5] += change
        assert values.check_sum(result, 1, "mesh") == ""
        digests.append(values.digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(("carrier", "roundings"), [("mesh", 2.0), ("star", 2.0), ("ring", 2.5)])
def test_how_far_off_a_sum_of_four_may_be(carrier: str, roundings: float) -> None:
    limit = HALF_STEPS["int8"] * roundings**0.5
    for share, is_right in ((0.99, True), (1.01, False)):
        values, exact = rounded(peers=4)
        # An error of one size everywhere, up or down, is that share of the limit.
        off = np.where(np.arange(COUNT) % 2, 1, -1) * np.sqrt(np.mean(exact**2)) * limit * share
        assert (values.check_sum((exact + off).astype(np.float32), 1, carrier) == "") is is_right


def is_large(blocks: Any) -> Any:
    """The 64 largest of each block."""
    return np.abs(blocks) >= np.sort(np.abs(blocks), axis=1)[:, -64, None]


# Of a value by its block's largest and range; as docs/algorithms.md has the formats.
STEPS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "uint8": (96, lambda b: np.ptp(b, axis=1, keepdims=True) / 255 + 0 * b),
    "int4": (32, lambda b: np.ptp(b, axis=1, keepdims=True) / 15 + 0 * b),
    "int2": (64, lambda b: np.ptp(b, axis=1, keepdims=True) / 3 + 0 * b),
    "e3m0": (64, lambda b: 2 * np.maximum(np.abs(b) / 3, np.abs(b).max(1, keepdims=True) / 128)),
    "sparse": (3200, lambda b: np.where(is_large(b), 0, b) * 2**0.5),
    "int8": (32, lambda b: np.abs(b).max(axis=1, keepdims=True) / 127 + 0 * b),
    "uint16": (96, lambda b: np.ptp(b, axis=1, keepdims=True) / 65535 + 0 * b),
    "float16": (256, lambda b: np.abs(b) * 2.0**-10),
    "bfloat16": (256, lambda b: np.abs(b) * 2.0**-7),
    "companded8": (
        32,
        lambda b: 2 * np.sqrt(np.abs(b) * np.abs(b).max(axis=1, keepdims=True)) / 127,
    ),
}


@pytest.mark.parametrize("wire", HALF_STEPS)
def test_half_steps_of_each_format(wire: str) -> None:
    block, step = STEPS[wire]
    blocks = np.random.default_rng(5).standard_normal(((1 << 20) // block, block))
    steps: np.ndarray[Any, Any] = step(blocks)
    half = float(np.sqrt(np.mean(np.square(steps / 2))))
    assert 0.9 * HALF_STEPS[wire] < half < HALF_STEPS[wire]  # steps are rounded up on the wire
