"""Combining contributions: the arithmetic of every dtype and operation, in place.

* Integer sums and products wrap. An integer average is the wrapped sum divided once by its owner,
  exactly, and truncated toward zero, as in PCCL.
* NaN and infinity propagate as NumPy's operations do; overflow of floats is a result, not a
  warning.
* Halves (float16, bfloat16) are combined in float32 and rounded once per hop; the owner of an
  average rounds only after the division.
* In a weighted average (:mod:`~pccl.collectives.weighting`) each contribution is multiplied by its
  factor, and rounded, before it is combined or sent. One of weight 0 is not combined.

One owner computes each value. So all peers hold the same bits, even where machines differ: in the
payload of a NaN, or in the sign of the minimum of 0.0 and -0.0.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.collectives.weighting import Weighting, scale
from pccl.protocol.data_type import DataType
from pccl.protocol.types import ReduceOp

Array = npt.NDArray[Any]

_HALVES = (DataType.FLOAT16, DataType.BFLOAT16)
_OPERATIONS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}


class Scratch:
    """Reusable working memory of one thread, as large as the largest request so far."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def array(self, count: int, dtype: npt.DTypeLike) -> Array:
        """Return ``count`` elements with undefined values, valid until the next call."""
        nbytes = count * np.dtype(dtype).itemsize
        if len(self._memory) < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(dtype)


class Reduction:
    """Combines the arriving values and the own contribution of one operation.

    Args:
        data_type: the type of all arrays.
        op: the operation.
        world_size: how many contributions there are.
        scratch: working memory; may be shared by all reductions of a thread.
        weighted: whether this is a weighted average. It must not combine; ``weigh`` returns the
            reduction that does.
    """

    def __init__(
        self,
        data_type: DataType,
        op: ReduceOp,
        world_size: int,
        scratch: Scratch,
        *,
        weighted: bool = False,
    ) -> None:
        self._operation = _OPERATIONS[op]
        self._data_type = data_type
        self._divisor: float | None = world_size if op is ReduceOp.AVG else None
        self._scratch = scratch
        self.lacks_weights = weighted
        """Whether the weights have yet to come."""
        self._factor = 1.0
        self.scales = False
        """Whether the own contribution is multiplied by a factor other than 1."""
        self._scaled: Scratch | None = None

    def weigh(self, weighting: Weighting) -> Reduction:
        """Return the same reduction with weights."""
        weighed = copy(self)
        weighed.lacks_weights = False
        weighed._factor, weighed._divisor = weighting.factor, weighting.divisor
        weighed.scales = weighting.factor != 1.0
        return weighed

    def contribution(self, own: Array) -> Array:
        """Return the own values times their factor, to be combined; valid until the next call."""
        self._scaled = self._scaled or Scratch()
        scaled = self._scaled.array(len(own), own.dtype)
        scale(own, self._factor, scaled)
        return scaled

    def sendable(self, own: Array) -> Array:
        """Return the own values times their factor, to be sent, in new memory."""
        scaled = np.empty_like(own)
        scale(own, self._factor, scaled)
        return scaled

    def finished(self, total: Array) -> Array:
        """Return the average of floats from the sum of all contributions, in new memory."""
        wide = np.dtype(np.float32) if self._data_type in _HALVES else total.dtype
        average = np.empty_like(total)
        with np.errstate(all="ignore"):
            divisor = wide.type(self._divisor)
            np.divide(total, divisor, out=average, dtype=wide, casting="same_kind")
        return average

    def combine(self, left: Array, right: Array, out: Array | None = None, *, finish: bool) -> None:
        """Set ``out`` to ``left`` op ``right``, in that order of operands.

        Args:
            left: shape (n,), at most a segment.
            right: shape (n,), same dtype.
            out: shape (n,), same dtype; may be ``left`` or ``right``. None: ``left``.
            finish: whether this is the last contribution: an average then divides.
        """
        out = left if out is None else out
        divisor = self._divisor if finish else None
        with np.errstate(all="ignore"):
            if divisor is not None and self._data_type in _HALVES:
                wide = self._scratch.array(len(left), np.float32)
                self._operation(left, right, out=wide, dtype=np.float32)
                np.divide(wide, np.float32(divisor), out=wide)
                np.copyto(out, wide, casting="same_kind")
                return
            if self._data_type is DataType.BFLOAT16:
                # The operations of ml_dtypes do the same, at half the speed.
                self._operation(left, right, out=out, dtype=np.float32, casting="same_kind")
            else:
                self._operation(left, right, out=out)
            if divisor is not None:
                self._divide(out, divisor)

    def _divide(self, values: Array, divisor: float) -> None:
        if np.issubdtype(values.dtype, np.integer):
            _divide_integers(values, int(divisor), self._scratch)
        else:
            np.divide(values, values.dtype.type(divisor), out=values)


def _divide_integers(values: Array, divisor: int, scratch: Scratch) -> None:
    """Divide exactly, and truncate toward zero, even if ``divisor`` does not fit the dtype."""
    info = np.iinfo(values.dtype)
    if divisor > info.max:  # all quotients are 0, except that -128 / 128 is -1 (and so on)
        np.negative(np.equal(values, -divisor).astype(values.dtype), out=values)
        return
    if info.min < 0:
        # NumPy rounds down, so negative values have to start divisor - 1 higher.
        lift = scratch.array(len(values), values.dtype)
        np.right_shift(values, info.bits - 1, out=lift)  # -1 where negative, otherwise 0
        np.bitwise_and(lift, values.dtype.type(divisor - 1), out=lift)
        np.add(values, lift, out=values)
    np.floor_divide(values, values.dtype.type(divisor), out=values)
