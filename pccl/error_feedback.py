"""Error feedback: what quantization leaves out of one reduce is added to the next.

Each peer keeps, per tensor, the difference between what it wanted to send and what the others
decoded, and adds it the next time (Seide et al. 2014; Karimireddy et al., arXiv:1901.09847). The
single results are as coarse as before, but their running mean converges to the truth.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.checks import check_text
from pccl.collectives.residual import Residual, residual_dtype
from pccl.protocol.data_type import DataType

Array = npt.NDArray[Any]


class ErrorFeedback:
    """Residuals by the name of their tensor.

    One object for a whole training run: give it to every reduce whose error is to be made good, as
    ``QuantizationOptions(error_feedback=feedback, name="layer1")``. Residuals change only when a
    reduce commits; after an abort they are what they were, so a retry counts nothing twice. A call
    that is left when it was done here (``OutcomeUnknown``) forgets its own: what was owed may be in
    the result. After ``Evicted`` or ``MasterLost`` in a reduce nobody can say; ``forget`` is safe.
    Residuals are this peer's own: they need not be alike on all, and one that joins begins with
    none. Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._residuals: dict[str, Array] = {}
        self._open: set[str] = set()

    def __repr__(self) -> str:
        return f"ErrorFeedback({len(self._residuals)} residuals)"

    def begin(self, name: str, count: int, data_type: DataType) -> Residual:
        """Open the residual of a tensor for one reduce; a reduce does this itself.

        Args:
            name: of the tensor.
            count: its elements.
            data_type: what it holds.

        Raises:
            ValueError: another reduce uses it, or it was of another size or dtype.
        """
        dtype = residual_dtype(data_type)
        with self._lock:
            current = self._checked_use(name, count, dtype)
            staged = np.zeros(count, dtype)  # before the name is taken: it may fail
            self._open.add(name)

        def end(kept: Array | None) -> None:
            with self._lock:
                self._open.discard(name)
                if kept is not None:
                    self._residuals[name] = kept

        return Residual(current, staged, end)

    def check(self, name: str, count: int, data_type: DataType) -> None:
        """Check that ``begin`` would open the residual, before anything is sent.

        Raises:
            ValueError: as of ``begin``.
        """
        with self._lock:
            self._checked_use(name, count, residual_dtype(data_type))

    def _checked_use(self, name: str, count: int, dtype: np.dtype[Any]) -> Array | None:
        if name in self._open:
            raise ValueError(
                f"a reduce in flight uses the residual of {name!r}; wait for it, or give each "
                "tensor a name of its own"
            )
        current = self._residuals.get(name)
        if current is not None and (current.size != count or current.dtype != dtype):
            raise ValueError(
                f"the residual of {name!r} is {current.size} x {current.dtype}, but the "
                f"tensor's is {count} x {dtype}; call forget({name!r}) if the tensor has "
                "changed, or give it another name"
            )
        return current

    def forget(self, name: str) -> None:
        """Begin anew with a tensor; nothing happens if there is no residual of it.

        Raises:
            ValueError: a reduce uses it; wait for that.
        """
        with self._lock:
            self._check_closed([name] if name in self._open else [])
            self._residuals.pop(name, None)

    def state_dict(self) -> dict[str, Array]:
        """Copies of all residuals, for a checkpoint: float32 or float64, shape (n,), by name.

        A reduce in flight is in them once it has committed.
        """
        with self._lock:
            residuals = dict(self._residuals)  # a commit puts another array in the place of one
        return {name: residual.copy() for name, residual in residuals.items()}

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Take residuals from a checkpoint, in place of all that are here.

        Args:
            state: what ``state_dict`` gave; the arrays are copied.

        Raises:
            TypeError: no mapping, or a name is no string.
            ValueError: a reduce uses a residual (wait for it), or an array is no residual: not
                float32 or float64, not of one dimension, or with NaN or infinity in it.
        """
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"state must be what state_dict() gave, not {state!r}")
        loaded = {check_text("a name", name): _checked(name, v) for name, v in state.items()}
        with self._lock:
            self._check_closed(sorted(self._open))
            self._residuals = loaded

    def _check_closed(self, used: list[str]) -> None:
        if used:
            raise ValueError(f"a reduce in flight uses the residual of {used[0]!r}; wait for it")


def _checked(name: str, value: npt.ArrayLike) -> Array:
    array = np.array(value)
    known = array.dtype.char in "fd" and array.dtype.isnative
    if not known or array.ndim != 1:
        raise ValueError(
            f"the residual of {name!r} must be float32 or float64 of one dimension, "
            f"not {array.dtype} of shape {array.shape}"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"the residual of {name!r} holds NaN or infinity")
    return array
