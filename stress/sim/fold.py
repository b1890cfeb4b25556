"""Expected results of a reduce, computed from the definition, without the library's arithmetic.

``fold`` works element by element, in the order in which partial results travel. It starts the chunk
of rank c with the value of rank c, then combines the values of c + 1, c + 2, ... (modulo the world
size). Integers are exact Python numbers, cut to the width of their dtype after each hop. 16-bit
floats are combined in float32 and rounded after each hop; an average rounds its last hop after the
division.

A weighted average first multiplies each value by its weight, as a fraction of a unit. It divides
the sum of the products by the sum of the fractions. The unit is the smallest power of two that is
no less than any weight. If all weights except zeros are equal, the unit is that weight. A value of
weight 0 is skipped; if all are, the result is zeros.

All NaNs count as equal: sign and payload depend on the machine. MIN and MAX may give either of two
zeros of different sign. The checkers compare members, which must hold the same bits anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pccl.protocol.types import Algorithm, ReduceOp, WireFormat

Array = npt.NDArray[Any]

_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

_STEPS = {WireFormat.INT4: 2.05 / 15, WireFormat.E3M0: 0.51, WireFormat.INT2: 2.05 / 3}
"""Largest step of each format of less than 8 bits, relative to a block's largest value."""

_OF_INTEGERS: dict[ReduceOp, Callable[[int, int], int]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PROD: operator.mul,
    ReduceOp.MAX: max,
    ReduceOp.MIN: min,
}
_OF_FLOATS: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PROD: operator.mul,
    ReduceOp.MAX: lambda a, b: np.where(np.isnan(a) | (a > b), a, b),
    ReduceOp.MIN: lambda a, b: np.where(np.isnan(a) | (a < b), a, b),
}


def unit_of(weights: list[float]) -> float:
    """Return the unit; each weight counts as a fraction of the unit."""
    kinds = set(weights) - {0.0}
    if len(kinds) == 1:
        return kinds.pop()
    unit = 1.0
    while unit < max(weights):
        unit *= 2
    while any(weights) and unit / 2 >= max(weights):
        unit /= 2
    return unit


def weighed(contributions: list[Array], weights: list[float]) -> tuple[list[Array | None], float]:
    """Return the summands of a weighted average (None: skipped), and the divisor of their sum."""
    if not any(weights):
        return [np.zeros_like(own) for own in contributions], 1.0
    fractions = [weight / unit_of(weights) for weight in weights]
    scaled: list[Array | None] = []
    for own, weight, share in zip(contributions, weights, fractions, strict=True):
        if not weight:
            scaled.append(None)
            continue
        wide = np.dtype(np.float32) if own.dtype in _HALVES else own.dtype
        fraction = np.array(share).astype(wide)
        with np.errstate(all="ignore"):
            product = own.astype(wide) * fraction if fraction else np.zeros(len(own), wide)
            scaled.append(product.astype(own.dtype))
    return scaled, float(sum(map(Fraction, fractions)))


def fold(
    contributions: Sequence[Array | None],
    op: ReduceOp,
    firsts: list[int] | None = None,
    divisor: float | None = None,
) -> Array:
    """Return the result that a ring of these contributions must have.

    Args:
        contributions: values of all ranks, in ring order; None: this rank is skipped.
        op: how values are combined.
        firsts: rank that begins each chunk; None: one chunk per rank.
        divisor: divisor of an average; None: number of contributions.
    """
    like = next(part for part in contributions if part is not None)
    world_size, count = len(contributions), len(like)
    firsts = list(range(world_size)) if firsts is None else firsts
    base, longer = divmod(count, len(firsts))
    result = np.empty_like(like)
    are_integers = np.issubdtype(result.dtype, np.integer)
    start = 0
    for chunk, first in enumerate(firsts):
        end = start + base + (1 if chunk < longer else 0)
        ranks = [(first + hop) % world_size for hop in range(world_size)]
        parts = [None if (own := contributions[r]) is None else own[start:end] for r in ranks]
        if are_integers:
            result[start:end] = _fold_integers([part for part in parts if part is not None], op)
        else:
            result[start:end] = _fold_floats(parts, op, divisor or world_size)
        start = end
    return result


def implausible(
    result: Array, contributions: list[Array], op: ReduceOp, divisor: float | None = None
) -> list[int]:
    """Return the indices at which ``result`` is no fold of the contributions in any order.

    Integers, MIN and MAX are the same in every order. For other results each rounding is bounded
    (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, sections 3.1 and 4.2). Where a
    value may overflow or is not finite, the check only finds a missing NaN.
    """
    if np.issubdtype(result.dtype, np.integer) or op in (ReduceOp.MIN, ReduceOp.MAX):
        return differences(result, fold(contributions, op), op)
    finfo: Any = ml_dtypes.finfo
    info = finfo(result.dtype)
    count = len(contributions)
    with np.errstate(all="ignore"):
        wide = np.array([part.astype(np.longdouble) for part in contributions])
        if op is ReduceOp.PROD:
            exact = np.prod(wide, axis=0)
            size = np.prod(np.maximum(np.abs(wide), 1), axis=0)
            small = np.prod(np.minimum(np.abs(wide), 1), axis=0)
            safe = (size < float(info.max)) & (small > float(info.tiny))
            slack = np.abs(exact)
        else:
            share = (divisor or count) if op is ReduceOp.AVG else 1
            exact = np.sum(wide, axis=0) / share
            size = np.sum(np.abs(wide), axis=0)
            safe = np.maximum(size, size / share) < float(info.max)
            slack = size / share
        slack = slack * 2 * count * float(info.eps) + float(info.tiny)
        wrong = safe & ~(np.abs(result.astype(np.longdouble) - exact) <= slack)
        lost = np.isnan(wide).any(axis=0) & ~np.isnan(result.astype(np.longdouble))
    return [int(index) for index in np.flatnonzero(wrong | lost)]


def inaccurate(
    result: Array,
    contributions: list[Array],
    op: ReduceOp,
    algorithm: Algorithm,
    wire: WireFormat,
    divisor: float | None = None,
) -> list[int]:
    """Return the indices at which a quantized result is further off than its roundings allow.

    With 8 bits or more, a step is at most 4/127 of a block's largest value; see ``_STEPS`` for
    fewer bits. A rounding is off by one step at most. A mesh or star rounds inputs and result, a
    ring its partial results.
    """
    wide = np.array([part.astype(np.float64) for part in contributions])
    count = len(contributions)
    largest = float(np.abs(wide).max())
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        exact, sums = wide.sum(axis=0), count
    else:
        exact, sums = (wide.max if op is ReduceOp.MAX else wide.min)(axis=0), 1
    hops = count * sums if algorithm is Algorithm.RING else count + sums
    slack = hops * largest * _STEPS.get(wire, 4.1 / 127)
    share = (divisor or count) if op is ReduceOp.AVG else 1
    off = np.abs(result.astype(np.float64) * share - exact)
    return [int(index) for index in np.flatnonzero(~(off <= slack))]


def inaccurate_sparse(
    result: Array, contributions: list[Array], op: ReduceOp, divisor: float | None = None
) -> list[int]:
    """Return the indices at which a sum of sparse contributions cannot be right.

    Of each contribution, a value is 0, or has its sign and at most the largest magnitude.
    """
    wide = np.array([part.astype(np.float64) for part in contributions])
    reach = np.sign(wide) * np.abs(wide).max(axis=1, keepdims=True)
    share = (divisor or len(contributions)) if op is ReduceOp.AVG else 1
    found = result.astype(np.float64) * share
    rounding = 2.0**-8 if result.dtype.itemsize == 2 else 1e-6  # of each sum and quotient
    slack = np.abs(reach).sum(axis=0) * rounding * (len(wide) + 2)
    lowest, highest = np.minimum(reach, 0).sum(axis=0), np.maximum(reach, 0).sum(axis=0)
    is_right = (lowest - slack <= found) & (found <= highest + slack)
    return [int(index) for index in np.flatnonzero(~is_right)]


def differences(result: Array, expected: Array, op: ReduceOp) -> list[int]:
    """Return the indices at which ``result`` is not ``expected``, which :func:`fold` returned."""
    equal = _bits(result) == _bits(expected)
    if not np.issubdtype(result.dtype, np.integer):
        with np.errstate(invalid="ignore"):  # a signalling NaN
            a, b = result.astype(np.float64), expected.astype(np.float64)
        equal |= np.isnan(a) & np.isnan(b)
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            equal |= (a == 0) & (b == 0)
    return [int(index) for index in np.flatnonzero(~equal)]


def _bits(values: Array) -> Array:
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def _fold_integers(parts: list[Array], op: ReduceOp) -> Array:
    dtype = parts[0].dtype
    combine = _OF_INTEGERS[op]
    low, span = int(np.iinfo(dtype).min), 1 << (8 * dtype.itemsize)
    totals: list[int] = parts[0].tolist()
    for part in parts[1:]:
        values: list[int] = part.tolist()
        exact = [combine(a, b) for a, b in zip(totals, values, strict=True)]
        totals = [(value - low) % span + low for value in exact]
    if op is ReduceOp.AVG:
        totals = [_divide_toward_zero(value, len(parts)) for value in totals]
    return np.array(totals, dtype)


def _divide_toward_zero(value: int, divisor: int) -> int:
    quotient = abs(value) // divisor
    return quotient if value >= 0 else -quotient


def _fold_floats(parts: list[Array | None], op: ReduceOp, divisor: float) -> Array:
    dtype = next(part.dtype for part in parts if part is not None)
    wide = np.dtype(np.float32) if dtype in _HALVES else dtype
    total: Array | None = None
    with np.errstate(all="ignore"):
        for number, part in enumerate(parts, 1):
            exact = total if part is None else part
            if exact is None:
                continue
            exact = exact.astype(wide)
            if total is not None and part is not None:
                exact = _OF_FLOATS[op](total.astype(wide), exact)
            if op is ReduceOp.AVG and number == len(parts):
                exact = exact / wide.type(divisor)
            total = exact.astype(dtype)
    assert total is not None
    return total
