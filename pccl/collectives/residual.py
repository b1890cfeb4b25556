"""The rounding error of one tensor, which error feedback carries from one operation to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.protocol.data_type import DataType

Array = npt.NDArray[Any]

_PART = 1 << 16
"""How many values ``commit`` checks at a time, so that its memory use does not grow."""


def residual_dtype(data_type: DataType) -> np.dtype[Any]:
    """Return the dtype of residuals: float64 for tensors of float64, float32 for all others."""
    return np.dtype(np.float64 if data_type is DataType.DOUBLE else np.float32)


class Residual:
    """One use of a tensor's residual; ``commit``, ``drop`` or ``forget`` ends it.

    Args:
        current: rounding errors of earlier operations, to be added to the contribution; read-only.
            None if there are none.
        staged: zeros, same dtype and shape; collects the rounding errors of this operation.
        on_end: receives the new residual: ``staged``, or None if the residual does not change.
    """

    def __init__(
        self, current: Array | None, staged: Array, on_end: Callable[[Array | None], None]
    ) -> None:
        self.current = current
        self.staged = staged
        self._on_end: Callable[[Array | None], None] | None = on_end

    def commit(self) -> None:
        """Make ``staged`` the new residual, because the operation was committed.

        A value that was NaN or infinite leaves no residual.
        """
        for first in range(0, len(self.staged), _PART):
            part = self.staged[first : first + _PART]
            part[~np.isfinite(part)] = 0
        self._end(self.staged)

    def drop(self) -> None:
        """Keep the residual as it was, because there is no result.

        Once the use has ended, this does nothing.
        """
        if self._on_end is not None:
            self._end(None)

    def forget(self) -> None:
        """Clear the residual, because this peer does not know whether the operation was committed.

        The result may contain the old residual, which must not be added twice.
        """
        self.staged[:] = 0
        if self._on_end is not None:
            self._end(self.staged)

    def _end(self, kept: Array | None) -> None:
        assert self._on_end is not None, "this use of the residual has ended"
        on_end, self._on_end = self._on_end, None
        on_end(kept)
