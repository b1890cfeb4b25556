"""Error feedback adds the quantization error of one reduce to the next reduce.

For each tensor, a peer keeps the difference between its own values and the values that the other
peers decoded. It adds this residual in the next reduce (Seide et al. 2014; Karimireddy et
al., arXiv:1901.09847). Each result is as coarse as before, but the running mean becomes exact.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.checks import check_between, check_text, shown
from pccl.collectives.residual import Residual, residual_dtype
from pccl.protocol.data_type import DataType

Array = npt.NDArray[Any]


class ErrorFeedback:
    """Quantization residuals, by the name of their tensor.

    Use one object for the whole training, in the options of every reduce that needs it:
    ``QuantizationOptions(error_feedback=feedback, name="layer1")``. Residuals change only when a
    reduce commits, so a retry after an abort adds no error twice. A call that ends with
    ``OutcomeUnknown`` drops its residual, because the result may contain it. After ``Evicted`` or
    ``MasterLost`` in a reduce, call ``forget``, because its outcome is unknown. Each peer has its
    own residuals, and a newcomer has none. Any thread may call the methods.

    Args:
        decay: share of an error that the next reduce adds, from 0 to 1. With 1, the running mean
            becomes exact. A sparse format sends some values many reduces late, so less may be
            better: SparseLoCo (arXiv:2508.15706, section 3) has 0.95.

    Raises:
        TypeError, ValueError: ``decay`` is no number from 0 to 1.
    """

    def __init__(self, *, decay: float = 1.0) -> None:
        self.decay = check_between("decay", decay, 0.0, 1.0)
        self._lock = threading.Lock()
        self._residuals: dict[str, Array] = {}
        self._open: set[str] = set()

    def __repr__(self) -> str:
        return f"ErrorFeedback({len(self._residuals)} residuals)"

    def begin(self, name: str, count: int, data_type: DataType) -> Residual:
        """Open the residual of a tensor for one reduce. The library calls this.

        Args:
            name: name of the tensor.
            count: number of elements.
            data_type: dtype of the tensor.

        Raises:
            ValueError: another reduce uses the residual, or it has another size or dtype.
        """
        dtype = residual_dtype(data_type)
        with self._lock:
            current = self._checked_use(name, count, dtype)
            staged = np.zeros(count, dtype)  # may raise, so the residual is not open yet
            self._open.add(name)

        def end(kept: Array | None) -> None:
            with self._lock:
                self._open.discard(name)
                if kept is not None:
                    self._residuals[name] = kept

        return Residual(current, staged, end, self.decay)

    def check(self, name: str, count: int, data_type: DataType) -> None:
        """Check that ``begin`` can open the residual. The library calls this before it sends data.

        Raises:
            ValueError: as for ``begin``.
        """
        with self._lock:
            self._checked_use(name, count, residual_dtype(data_type))

    def _checked_use(self, name: str, count: int, dtype: np.dtype[Any]) -> Array | None:
        if name in self._open:
            raise ValueError(
                f"a reduce in flight uses the residual of {name!r}; wait for the reduce, or give "
                "each tensor its own name"
            )
        current = self._residuals.get(name)
        if current is not None and (current.size != count or current.dtype != dtype):
            raise ValueError(
                f"the residual of {name!r} is {current.size} x {current.dtype}, but the "
                f"tensor needs {count} x {dtype}; call forget({name!r}) if the tensor has "
                "changed, or give it another name"
            )
        return current

    def forget(self, name: str) -> None:
        """Drop the residual of a tensor, if there is one.

        Raises:
            ValueError: a reduce in flight uses the residual; wait for the reduce.
        """
        with self._lock:
            self._check_closed([name] if name in self._open else [])
            self._residuals.pop(name, None)

    def state_dict(self) -> dict[str, Array]:
        """Return copies of all residuals by name, for a checkpoint: shape (n,), floats.

        They include the error of a reduce only after its commit.
        """
        with self._lock:
            residuals = dict(self._residuals)  # a commit replaces an array, and never changes one
        return {name: residual.copy() for name, residual in residuals.items()}

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Replace all residuals by those of a checkpoint.

        Args:
            state: a result of ``state_dict``; the arrays are copied.

        Raises:
            TypeError: ``state`` is no mapping, or a name is no string.
            ValueError: a reduce in flight uses a residual (wait for the reduce). Or an array is not
                float32 or float64, not one-dimensional, or contains NaN or infinity.
        """
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"state must be a result of state_dict(), not {shown(state)}")
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
        raise ValueError(f"the residual of {name!r} holds NaN or infinity; use an older checkpoint")
    return array
