"""A segment as blocks of values: extremes per block, and a number per block for each value."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Blocks:
    """How ``count`` values fall into blocks; the last one may be shorter.

    Args:
        count: values, at least 1.
        block: values per block.
    """

    def __init__(self, count: int, block: int) -> None:
        self.count = count
        self.block = block
        self.number = -(-count // block)

    def fold(self, operation: np.ufunc, values: Array) -> Array:
        """One number per block: ``operation`` over its values.

        Args:
            operation: ``np.maximum`` or ``np.minimum``.
            values: integers (those are folded twice as fast as floats), shape (count,).
        """
        starts = np.arange(0, self.count, self.block)
        folded: Array = operation.reduceat(values, starts)
        return folded

    def spread(self, numbers: Array, out: Array | None = None) -> Array:
        """The number of its block for every value.

        Args:
            numbers: shape (blocks,).
            out: where to, shape (count,). New memory of that size has no pages yet, and to get them
                takes several times as long as to write it.
        """
        if out is None:
            return np.repeat(numbers, self.block)[: self.count]
        whole = self.count // self.block
        out[: whole * self.block].reshape(whole, self.block)[:] = numbers[:whole, None]
        if whole < self.number:
            out[whole * self.block :] = numbers[whole]
        return out
