"""The L2 norm of a contribution, which its member declares to a guard."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.protocol.guards.contributions import NORM_MAX

Array = npt.NDArray[Any]

_PART = 1 << 13
"""How many values are converted at a time: too few for NumPy to start threads for their product."""


def l2_norm(arrays: Iterable[Array]) -> float | None:
    """Return the L2 norm of all values of several arrays of floats; None if one is not finite.

    It is exact to about 12 digits, and at most ``NORM_MAX``.
    """
    parts = [array[i : i + _PART] for array in arrays for i in range(0, len(array), _PART)]
    wide = np.empty(_PART)
    with np.errstate(all="ignore"):
        squares = sum(_squares(part, wide, 1.0) for part in parts)
        if isfinite(squares):
            return sqrt(squares)
        if not all(np.isfinite(part).all() for part in parts):
            return None
        largest = max(float(np.abs(part).max()) for part in parts)
        squares = sum(_squares(part, wide, largest) for part in parts)
    return min(largest * sqrt(squares), NORM_MAX)


def _squares(part: Array, wide: npt.NDArray[np.float64], unit: float) -> float:
    values = wide[: len(part)]
    values[:] = part
    if unit != 1.0:
        values /= unit
    return float(np.dot(values, values))
