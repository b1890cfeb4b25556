"""The values of a benchmark: the formula by hand, exact sums, and what is wrong is seen."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pccl.cli.bench.peers.values import PERIOD, Values, pattern, value_max

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


def filled(values: Values, count: int, round_number: int, dtype: np.dtype[Any]) -> Any:
    tensor = np.zeros(count, dtype)
    values.fill(tensor, round_number)
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
    values, largest = Values(dtype, 2, 3), value_max(dtype, 3)
    tensor = filled(values, 300_001, 7, dtype)
    for element in (0, 1, 8191, 65520, 65521, 196562, 196563, 262144, 300_000):
        assert int(tensor[element]) == value_of(2, element, 7, largest), element


@pytest.mark.parametrize("count", [1, 5, PERIOD - 1, PERIOD, 3 * PERIOD, 3 * PERIOD + 1, 400_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_all_peers_is_right(dtype: np.dtype[Any], count: int) -> None:
    everybody = [Values(dtype, peer, 3) for peer in range(3)]
    total = np.zeros(count, dtype)
    for values in reversed(everybody):  # in any order
        total += filled(values, count, 5, dtype)
    for values in everybody:
        assert values.check_sum(total, 5) is None
        assert values.check_input(filled(values, count, 5, dtype), 5) is None


def sum_of(peers: list[int], round_number: int, count: int = 200_000, peer_count: int = 3) -> Any:
    parts = [
        filled(Values(FLOAT32, peer, peer_count), count, round_number, FLOAT32) for peer in peers
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
        ("the input of one", filled(Values(FLOAT32, 1, 3), 200_000, 4, FLOAT32)),
        ("zeros", np.zeros(200_000, np.float32)),
    ],
)
def test_what_is_wrong_is_seen(name: str, wrong: Any) -> None:
    assert Values(FLOAT32, 0, 3).check_sum(wrong, 4) is not None


@pytest.mark.parametrize("element", [0, 65521, 196562, 196563, 199_999])
def test_one_wrong_element_is_named(element: int) -> None:
    tensor = sum_of([0, 1, 2], 2)
    right = sum(value_of(peer, element, 2, 4095) for peer in range(3))
    assert tensor[element] == right
    tensor[element] += 1
    wrong = Values(FLOAT32, 1, 3).check_sum(tensor, 2)
    assert wrong is not None
    assert str(wrong) == f"element {element} is {right + 1}.0, expected {right}.0"
