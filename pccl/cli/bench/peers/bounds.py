"""How far a quantized sum may be from the exact one: the formats' bounds, for given values. Pure.

Each rounding of a value to its format is off by at most half a step (``docs/algorithms.md``); when
rounding stochastically by a whole one, but by no more than half a one in the root mean square. How
large steps are follows from the values of each block. Roundings of independent values do not add up
in one direction, so the mean square of an error is at most the sum of the squares of half a step
over all roundings on the way: in a mesh or a star each contribution and the sum, in a ring each sum
that is passed on. That holds for many values; of a few the worst of all cases counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pccl.cli.bench.variants import Variant

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

STEP_SLACK = 1 + 2**-6
"""Steps are rounded up to the few bits that they have on the wire."""

AFFINE_LEVELS = {"uint8": 255, "int4": 15, "uint16": 65535}
HALF_PRECISION = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The error of a value by its magnitude."""


class Bound(NamedTuple):
    """Of the error of a sum, absolute.

    Attributes:
        typical: of its root mean square, over many values.
        worst: of any value.
    """

    typical: float
    worst: float


def bound_of(
    contributions: Sequence[Floats], variant: Variant, carrier: str, epsilon: float
) -> Bound:
    """Bound the error of a sum.

    Args:
        contributions: of each peer, shape (n,).
        variant: its wire format, block and rounding; quantized.
        carrier: the algorithm that is used, not ``auto``.
        epsilon: of the tensor's own dtype, to which sums are rounded.
    """
    sums = list(itertools.accumulate(contributions))
    rounded = sums if carrier == "ring" else [*contributions, sums[-1]]
    squares = worst = 0.0
    for values in rounded:
        halves = _half_steps(values, variant.quantize, variant.wire_block)
        own = epsilon * np.abs(values)
        squares += float(np.mean(np.square(halves))) + float(np.mean(np.square(own)))
        largest = _half_steps(values, variant.quantize, len(values))
        worst += float(largest.max()) * (2 if variant.stochastic else 1) + float(own.max())
    return Bound(math.sqrt(squares), worst)


def _half_steps(values: Floats, wire: str, block: int) -> Floats:
    """The most that each value is off by when rounded to the nearest, shape (m,), m about n."""
    block = min(block, len(values))
    blocks = values[: len(values) // block * block].reshape(-1, block)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    if wire in HALF_PRECISION:
        halves = np.abs(blocks) * HALF_PRECISION[wire]
    elif wire == "companded8":
        step = largest / 127**2 * STEP_SLACK
        halves = np.sqrt(np.abs(blocks) * step) + step / 4
    elif wire == "int8":
        halves = np.broadcast_to(largest / 127 / 2 * STEP_SLACK, blocks.shape)
    else:
        reach = blocks.max(axis=1, keepdims=True) - blocks.min(axis=1, keepdims=True)
        halves = np.broadcast_to(reach / AFFINE_LEVELS[wire] / 2 * STEP_SLACK, blocks.shape)
    return halves.reshape(-1)
