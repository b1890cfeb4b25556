"""Weighted averages: the factor of each contribution, and the divisor of their sum.

Each contribution is multiplied by its weight, and their sum is divided by the sum of the weights.
All weights of an operation are first divided by a unit. If all weights other than 0 are equal, the
unit is that weight, so the result is bit for bit the plain average. Otherwise the unit is the power
of two that brings the largest weight into (1/2, 1]; this division is exact, so it changes no
result. Every factor is at most 1, so no contribution grows, whatever the weights are.

A contribution of weight 0 is never read: the sum skips it, and so do error feedback and its
residual. If all weights are 0, the result is zeros.
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
    """The factor of one rank's contribution, and the divisor of the sum.

    Attributes:
        factor: multiplies the own contribution; from 0 to 1.
        divisor: divides the sum of all contributions: the sum of all factors; 1 if all are 0.
        world_size: how many contributions there are.
        muted: the ranks whose contributions have weight 0.
    """

    factor: float
    divisor: float
    world_size: int
    muted: frozenset[int]

    @property
    def mean_factor(self) -> float:
        """The factor of a contribution with the average weight."""
        return self.divisor / self.world_size


def weigh(weights: tuple[float, ...], rank: int) -> Weighting:
    """Return the weighting of the contribution of ``rank``.

    Args:
        weights: one per contribution, in ring order; finite, not negative.
        rank: the rank that contributes.
    """
    unit = _unit_of(weights)
    factors = [weight / unit for weight in weights]
    muted = frozenset(rank for rank, weight in enumerate(weights) if not weight)
    return Weighting(factors[rank], fsum(factors) or 1.0, len(weights), muted)


def _unit_of(weights: tuple[float, ...]) -> float:
    least, largest = min((w for w in weights if w), default=1.0), max(weights) or 1.0
    mantissa, exponent = frexp(largest)
    return largest if least == largest else ldexp(1.0, exponent - (mantissa == 0.5))


def total_weight(weights: tuple[float, ...]) -> float | None:
    """Return the sum of all weights, rounded once; None if there are none."""
    return fsum(weights) if weights else None


def scale(values: Array, factor: float, out: Array) -> None:
    """Set ``out`` to ``values`` times ``factor``, rounded once; to zeros if ``factor`` is 0.

    Args:
        values: floats, shape (n,).
        factor: rounded to float32 for halves, otherwise to the dtype of ``values``.
        out: shape (n,), same dtype; may be ``values``.
    """
    wide = np.dtype(np.float32) if values.dtype.itemsize == 2 else values.dtype
    multiplier = wide.type(factor)
    if not multiplier:
        out.fill(0)
        return
    with np.errstate(all="ignore"):
        np.multiply(values, multiplier, out=out, dtype=wide, casting="same_kind")
