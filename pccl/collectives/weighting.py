"""Weighted averages: what becomes of contributions that count unequally.

Each contribution is multiplied by its weight, and their sum is divided by the sum of the weights.
All weights of an operation are first divided by a unit: the power of two that brings the largest
of them into (1/2, 1], which is exact, so it changes no result; or, if all that are not 0 are equal,
that weight, so that the result is bit for bit the plain average. No partial sum is larger than that
of a plain average would be, whatever the weights count.

A contribution of weight 0 is taken for zeros, also where it is infinite or NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp, fsum, ldexp
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Weighting:
    """How one rank's contribution counts among all.

    Attributes:
        factor: of the own contribution, from 0 to 1.
        divisor: of the sum of all: the sum of all factors; 1 if all are 0.
        world_size: how many contributions there are.
    """

    factor: float
    divisor: float
    world_size: int

    @property
    def mean_factor(self) -> float:
        """The factor of a contribution of average weight."""
        return self.divisor / self.world_size


def weigh(weights: tuple[float, ...], rank: int) -> Weighting:
    """How the contribution of ``rank`` counts.

    Args:
        weights: of all contributions, in ring order; finite, not negative.
        rank: whose factor it is.
    """
    unit = _unit_of(weights)
    factors = [weight / unit for weight in weights]
    return Weighting(factors[rank], fsum(factors) or 1.0, len(weights))


def _unit_of(weights: tuple[float, ...]) -> float:
    least, largest = min((w for w in weights if w), default=1.0), max(weights) or 1.0
    mantissa, exponent = frexp(largest)
    return largest if least == largest else ldexp(1.0, exponent - (mantissa == 0.5))


def total_weight(weights: tuple[float, ...]) -> float | None:
    """The sum of all weights, rounded once; None: there are none."""
    return fsum(weights) if weights else None


def scale(values: Array, factor: float, out: Array) -> None:
    """``out`` becomes ``values`` times ``factor``, rounded once; zeros if ``factor`` is 0.

    Args:
        values: floats, shape (n,).
        factor: of float32 precision for halves, otherwise of theirs.
        out: shape (n,), same dtype; may be ``values``.
    """
    wide = np.dtype(np.float32) if values.dtype.itemsize == 2 else values.dtype
    multiplier = wide.type(factor)
    if not multiplier:
        out.fill(0)
        return
    with np.errstate(all="ignore"):
        np.multiply(values, multiplier, out=out, dtype=wide, casting="same_kind")
