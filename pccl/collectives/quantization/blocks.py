"""A segment as blocks of values: extremes per block, and a number per block for each value."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Blocks:
    """The division of ``count`` values into blocks; the last block may be shorter.

    Args:
        count: number of values, at least 1.
        block: values per block.
    """

    def __init__(self, count: int, block: int) -> None:
        self.count = count
        self.block = block
        self.number = -(-count // block)

    def fold(self, operation: np.ufunc, values: Array) -> Array:
        """Return ``operation`` over the values of each block.

        Args:
            operation: ``np.maximum`` or ``np.minimum``.
            values: integers (twice as fast to fold as floats), shape (count,).
        """
        starts = np.arange(0, self.count, self.block)
        folded: Array = operation.reduceat(values, starts)
        return folded

    def spread(self, numbers: Array, out: Array | None = None) -> Array:
        """Return for each value the number of its block.

        Args:
            numbers: one per block, shape (blocks,).
            out: memory for the result, shape (count,). New memory of that size has no pages yet:
                allocating them takes several times as long as writing the result.
        """
        if out is None:
            return np.repeat(numbers, self.block)[: self.count]
        whole = self.count // self.block
        out[: whole * self.block].reshape(whole, self.block)[:] = numbers[:whole, None]
        if whole < self.number:
            out[whole * self.block :] = numbers[whole]
        return out
