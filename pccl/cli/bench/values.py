"""The values that a benchmark reduces, and checks of the results.

Each value depends on peer, element and round. So the checks find a missing peer, a segment in a
wrong place, and values of the previous round. Without quantization, values are small whole numbers
whose sum is exact in every dtype and order. They follow a formula with a prime period::

    value(peer, element, round) = pattern[(element + 7919 peer + 39208 round) mod 65521]
    pattern[j] = (j² mod 65521) mod (value_max + 1)

The sum over all peers has the same period, and the next round has the same sums, shifted. A fill or
check copies or compares one tile at a time, which fits into a cache. This module does not depend
on how the library reduces.

With quantization, values are random, normal, and independent for each peer. The exact sum is the
float64 sum of the values as the dtype holds them. The error is relative in L2. Each rounding is off
by at most half a step. The mean square error is at most the sum of squared half steps of all
roundings. A mesh or star rounds the N contributions and the sum; a ring rounds each partial sum.
Relative to the sum, that is sqrt(2), or in a ring sqrt((N+1)/2), times the half step of one value.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import xxhash

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

PERIOD = 65_521
"""The largest prime below 2**16, so that no chunk or segment is a multiple of the period."""

PEER_STRIDE = 7_919
ROUND_STRIDE = 39_208

VALUE_MAX = 4_095

TILE_PERIODS = 4
"""Periods in a tile: large enough for few calls per tensor, small enough for the cache."""

SEED = 20_240

HALF_STEPS = {
    **{"uint8": 0.0101, "int8": 0.0097, "companded8": 0.0111, "int4": 0.143},
    **{"float16": 0.00049, "bfloat16": 0.0040, "uint16": 0.000040},
    **{"e3m0": 0.334, "int2": 0.794},
    "sparse": 0.66,  # it rounds each contribution only, so that is 1 / sqrt(2) of what is lost
}
"""Half steps of normal values in blocks of the default size, as root mean squares; see the formats
in ``docs/algorithms.md``."""

FEW = 8.0
"""Factor on the error limit for tensors shorter than a period."""


def value_max(dtype: np.dtype[Any], peer_count: int) -> int:
    """Return the largest value up to ``VALUE_MAX`` with an exact sum; at least 1 for 127 peers."""
    is_integer = np.issubdtype(dtype, np.integer)
    exact = np.iinfo(dtype).max if is_integer else 2 ** (_finfo(dtype).nmant + 1)
    return min(VALUE_MAX, int(exact) // peer_count)


def pattern(largest: int) -> Array:
    """Return one period of values from 0 to ``largest``, int64, shape (PERIOD,)."""
    places = np.arange(PERIOD, dtype=np.int64)
    return places * places % PERIOD % (largest + 1)


class Pattern:
    """Periodic values, which begin at a different place in each round.

    Args:
        period: one period, shape (PERIOD,), in the dtype of the tensors.
    """

    def __init__(self, period: Array) -> None:
        self._tile = np.tile(period, TILE_PERIODS)

    def fill(self, tensor: Array, round_number: int) -> None:
        """Write the values of a round into a tensor, shape (n,)."""
        for begin, part in self.parts(len(tensor), round_number):
            tensor[begin : begin + len(part)] = part

    def compare(self, tensor: Array, round_number: int) -> str:
        """Describe the first element whose bits differ from those of ``fill``; empty if none."""
        for begin, part in self.parts(len(tensor), round_number):
            found = tensor[begin : begin + len(part)]
            if not np.array_equal(_bits(found), _bits(part)):
                at = int(np.argmax(_bits(found) != _bits(part)))
                return f"element {begin + at} is {found[at]!s}, expected {part[at]!s}"
        return ""

    def parts(self, count: int, round_number: int) -> list[tuple[int, Array]]:
        """Return the beginning and the right values of each part of a tensor."""
        start = ROUND_STRIDE * round_number % PERIOD
        span = (TILE_PERIODS - 1) * PERIOD
        whole = self._tile[start : start + span]
        return [(begin, whole[: count - begin]) for begin in range(0, count, span)]


class Exact:
    """The inputs of one peer without quantization. The sum must be right bit for bit."""

    error = 0.0
    digest = 0

    def __init__(self, dtype: np.dtype[Any], peer: int, peer_count: int) -> None:
        one = pattern(value_max(dtype, peer_count))
        places = np.arange(PERIOD)
        total = sum(one[(places + PEER_STRIDE * other) % PERIOD] for other in range(peer_count))
        self.input = Pattern(one[(places + PEER_STRIDE * peer) % PERIOD].astype(dtype))
        self._sum = Pattern(np.asarray(total).astype(dtype))

    def check_sum(self, tensor: Array, round_number: int, carrier: str = "") -> str:
        """Describe the first wrong value of a result; empty if all are right."""
        return self._sum.compare(tensor, round_number)


class Rounded:
    """The inputs of one peer with quantization. The sum may have a bounded error.

    Attributes:
        error: relative L2 error of the worst result so far.
        digest: digest of the bits of all results so far.
    """

    def __init__(self, dtype: np.dtype[Any], peer: int, peer_count: int, wire: str) -> None:
        generators = [np.random.default_rng([SEED, other]) for other in range(peer_count)]
        held = [each.standard_normal(PERIOD).astype(dtype) for each in generators]
        self.input = Pattern(held[peer])
        total: Array = np.stack(held).sum(axis=0, dtype=np.float64)
        self._exact = Pattern(total)
        self._peer_count = peer_count
        self._half_step = math.hypot(HALF_STEPS[wire], float(_finfo(dtype).eps))
        self._work = np.zeros(PERIOD)
        self.error = 0.0
        self.digest = 0

    def check_sum(self, tensor: Array, round_number: int, carrier: str) -> str:
        """Describe an error above the limit of format and algorithm; empty: within the limit."""
        bits = tensor.view(np.uint8).data
        self.digest = xxhash.xxh3_64_intdigest(bits, seed=self.digest)
        squares = exact_squares = 0.0
        for begin, part in self._exact.parts(len(tensor), round_number):
            for at in range(0, len(part), PERIOD):
                exact = part[at : at + PERIOD]
                off = self._work[: len(exact)]
                off[:] = tensor[begin + at : begin + at + len(exact)]
                np.subtract(off, exact, out=off)
                squares += float(np.dot(off, off))
                exact_squares += float(np.dot(exact, exact))
        error = math.sqrt(squares / exact_squares)
        self.error = max(self.error, error)
        limit = self._half_step * math.sqrt((self._peer_count + 1) / 2 if carrier == "ring" else 2)
        limit *= 1.0 if len(tensor) >= PERIOD else FEW
        if error <= limit:  # False if any value is NaN
            return ""
        return (
            f"the relative error is {error:.2e}, but the format causes at most {limit:.2e} "
            f"with algorithm {carrier}"
        )


def _finfo(dtype: np.dtype[Any]) -> Any:
    finfo: Any = ml_dtypes.finfo  # typed in part only
    return finfo(dtype)


def _bits(array: Array) -> Array:
    """Return the same memory as unsigned integers."""
    return array.view(np.dtype(f"u{array.itemsize}"))
