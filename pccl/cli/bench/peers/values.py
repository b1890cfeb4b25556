"""The values that a benchmark reduces, and whether the results are right.

Every value depends on the peer, the element and the round, so that a missing peer, a segment in a
wrong place and what is left of the round before are all seen. Values are small whole numbers whose
sum is exact in every dtype, in any order. Both follow one formula with a prime period::

    value(peer, element, round) = pattern[(element + 7919 peer + 39208 round) mod 65521]
    pattern[j] = (j² mod 65521) mod (value_max + 1)

so the sum over all peers has that period too, and each round's is the last one's, shifted. Filling
a tensor and checking one are copies and comparisons of a tile that fits into a cache, bit for bit,
without temporary memory. Nothing here knows how the library reduces.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

PERIOD = 65_521
"""The largest prime below 2**16: chunks and segments are no multiples of it."""

PEER_STRIDE = 7_919
ROUND_STRIDE = 39_208

VALUE_MAX = 4_095

TILE_PERIODS = 4
"""Copies of the period in a tile: calls per tensor are few, and a tile stays in the cache."""


def value_max(dtype: np.dtype[Any], peer_count: int) -> int:
    """The largest value whose sum over all peers is exact.

    Args:
        dtype: of the tensor.
        peer_count: how many are added.

    Returns:
        At least 1 for up to 127 peers.
    """
    if np.issubdtype(dtype, np.integer):
        exact = int(np.iinfo(dtype).max)
    else:
        finfo: Any = ml_dtypes.finfo  # typed in part only
        exact = 2 ** (int(finfo(dtype).nmant) + 1)
    return min(VALUE_MAX, exact // peer_count)


def pattern(largest: int) -> Array:
    """One period of one peer's values, int64, shape (PERIOD,)."""
    places = np.arange(PERIOD, dtype=np.int64)
    return places * places % PERIOD % (largest + 1)


class WrongValue(NamedTuple):
    """The first element that is not what it should be."""

    element: int
    found: str
    expected: str

    def __str__(self) -> str:
        return f"element {self.element} is {self.found}, expected {self.expected}"


class Pattern:
    """Values with a period, from which each round takes another beginning.

    Args:
        period: shape (PERIOD,), of the tensors' dtype.
    """

    def __init__(self, period: Array) -> None:
        self._tile = np.tile(period, TILE_PERIODS)

    def fill(self, tensor: Array, round_number: int) -> None:
        """Write the values of a round into a tensor, shape (n,)."""
        for begin, part in self.parts(len(tensor), round_number):
            tensor[begin : begin + len(part)] = part

    def compare(self, tensor: Array, round_number: int) -> WrongValue | None:
        """Where a tensor differs in a bit from what ``fill`` writes."""
        for begin, part in self.parts(len(tensor), round_number):
            found = tensor[begin : begin + len(part)]
            if not np.array_equal(_bits(found), _bits(part)):
                at = int(np.argmax(_bits(found) != _bits(part)))
                return WrongValue(begin + at, str(found[at]), str(part[at]))
        return None

    def parts(self, count: int, round_number: int) -> list[tuple[int, Array]]:
        """Where each part of a tensor begins, and what belongs there."""
        start = ROUND_STRIDE * round_number % PERIOD
        span = (TILE_PERIODS - 1) * PERIOD
        whole = self._tile[start : start + span]
        return [(begin, whole[: count - begin]) for begin in range(0, count, span)]


class Values:
    """What one peer puts in, and what must come out.

    Args:
        dtype: of the tensors.
        peer: whose values, counted from 0.
        peer_count: how many peers' values are added.
    """

    def __init__(self, dtype: np.dtype[Any], peer: int, peer_count: int) -> None:
        one = pattern(value_max(dtype, peer_count))
        places = np.arange(PERIOD)
        total = sum(one[(places + PEER_STRIDE * other) % PERIOD] for other in range(peer_count))
        self._input = Pattern(one[(places + PEER_STRIDE * peer) % PERIOD].astype(dtype))
        self._sum = Pattern(np.asarray(total).astype(dtype))

    def fill(self, tensor: Array, round_number: int) -> None:
        """Write this peer's values of a round into a tensor, shape (n,)."""
        self._input.fill(tensor, round_number)

    def check_input(self, tensor: Array, round_number: int) -> WrongValue | None:
        """Where a tensor is not what ``fill`` has written."""
        return self._input.compare(tensor, round_number)

    def check_sum(self, tensor: Array, round_number: int) -> WrongValue | None:
        """Where a tensor is not the sum of all peers' values of a round."""
        return self._sum.compare(tensor, round_number)


def _bits(array: Array) -> Array:
    """The same memory as unsigned integers."""
    return array.view(np.dtype(f"u{array.itemsize}"))
