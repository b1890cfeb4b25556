"""The random numbers of stochastic rounding, which any member can draw again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.protocol.types import OperationId

Noise = Callable[[int], npt.NDArray[Any]]
"""Draws the given number of float32 from [0, 1)."""


def noise_source(operation: OperationId, rank: int, position: int) -> Noise:
    """Return the noise for one segment that one rank encodes.

    Philox (Salmon et al. 2011) is a function of a key and a counter, so no hashing is needed:
    different operations, ranks and positions draw from different parts of it. NumPy guarantees
    the raw stream of a bit generator (NEP 19), but not the methods that make floats of it. So
    each draw is 16 bits of the raw stream, in the middle of its interval.

    Args:
        operation: the collective.
        rank: the rank that encodes, below 2**16.
        position: position of the segment in the tensor, below 2**48.
    """
    counter = [0, operation.view, operation.term << 32 | operation.group, rank << 48 | position]
    generator = np.random.Philox(
        key=np.array([operation.tag, operation.n], np.uint64),
        counter=np.array(counter, np.uint64),
    )

    def draw(count: int) -> npt.NDArray[Any]:
        raw = np.asarray(generator.random_raw(-(-count // 4)), "<u8").view("<u2")[:count]
        return (raw + np.float32(0.5)) * np.float32(2**-16)

    return draw
