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
        decay: share of the new errors that stays in the residual.
    """

    def __init__(
        self,
        current: Array | None,
        staged: Array,
        on_end: Callable[[Array | None], None],
        decay: float = 1.0,
    ) -> None:
        self.current = current
        self.staged = staged
        self._decay = decay
        self._kept: dict[int, slice] = {}
        """First value of a part that adds none of ``current`` to the operation -> the part."""
        self._on_end: Callable[[Array | None], None] | None = on_end

    def keep(self, where: slice) -> None:
        """Record that the operation reads nothing of ``current`` there, so it stays owed."""
        self._kept[where.start] = where
        self.staged[where] = 0

    def commit(self) -> None:
        """Make ``staged`` the new residual, because the operation was committed.

        A value that was NaN or infinite leaves no residual. Only new errors decay, not a residual
        that the operation has not read: no part of it was sent.
        """
        for first in range(0, len(self.staged), _PART):
            part = self.staged[first : first + _PART]
            part[~np.isfinite(part)] = 0
            if self._decay != 1.0:
                part *= self._decay
        if self.current is not None:
            for where in self._kept.values():
                self.staged[where] += self.current[where]
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
