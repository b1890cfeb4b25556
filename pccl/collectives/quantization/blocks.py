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
        self._even = count // block * block

    def fold(self, operation: np.ufunc, values: Array, spare: Array) -> Array:
        """One number per block: ``operation`` over its values.

        Args:
            operation: ``np.maximum`` or ``np.minimum``.
            values: integers (those are folded several times as fast as floats), shape (count,).
            spare: working memory, same dtype and shape.
        """
        found = np.empty(self.number, values.dtype)
        whole, width = values[: self._even], self.block
        while width % 2 == 0 and len(whole):
            half = spare[: len(whole) // 2]
            operation(whole[0::2], whole[1::2], out=half)
            whole, spare, width = half, spare[len(half) :], width // 2
        if width > 1 and len(whole):
            starts = np.arange(0, len(whole), width)
            operation.reduceat(whole, starts, out=found[: len(starts)])
        else:
            found[: len(whole)] = whole
        if self._even < self.count:
            found[-1] = operation.reduce(values[self._even :])
        return found

    def spread(self, numbers: Array) -> Array:
        """The number of its block for every value."""
        return np.repeat(numbers, self.block)[: self.count]
