"""What quantization left out of one tensor, on its way from one operation into the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.protocol.data_type import DataType

Array = npt.NDArray[Any]

_PART = 1 << 16
"""Values that are looked at together: no memory that grows with the tensor."""


def residual_dtype(data_type: DataType) -> np.dtype[Any]:
    """Of residuals of tensors of ``data_type``: float64 for float64, float32 for the others."""
    return np.dtype(np.float64 if data_type is DataType.DOUBLE else np.float32)


class Residual:
    """One use of a tensor's residual; ``commit`` or ``drop`` ends it.

    Args:
        current: what earlier operations left out; None: nothing. To be added to the contribution,
            and not to be changed.
        staged: same dtype and shape, zeros: takes what this operation leaves out.
        on_end: told the residual from now on: ``staged`` of a commit, or None if it stays.
    """

    def __init__(
        self, current: Array | None, staged: Array, on_end: Callable[[Array | None], None]
    ) -> None:
        self.current = current
        self.staged = staged
        self._on_end: Callable[[Array | None], None] | None = on_end

    def commit(self) -> None:
        """The result counts: from now on the residual is what was staged.

        Where a value was NaN or infinite nothing is left to make good.
        """
        for first in range(0, len(self.staged), _PART):
            part = self.staged[first : first + _PART]
            part[~np.isfinite(part)] = 0
        self._end(self.staged)

    def drop(self) -> None:
        """There is no result: the residual stays, and nothing is counted twice.

        After the end it changes nothing.
        """
        if self._on_end is not None:
            self._end(None)

    def forget(self) -> None:
        """Whether the result counts is not known here: nothing is owed any more.

        What was owed may be in the result, and must not be added twice.
        """
        self.staged[:] = 0
        if self._on_end is not None:
            self._end(self.staged)

    def _end(self, kept: Array | None) -> None:
        assert self._on_end is not None, "this use of the residual has ended"
        on_end, self._on_end = self._on_end, None
        on_end(kept)
