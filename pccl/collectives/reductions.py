"""Adding and finishing values. Works in place on cache-sized arrays, without hidden copies.

Integer sums wrap. An average is the sum divided once by its owner; integers are truncated toward
zero, as users of PCCL know it. NaN and infinity propagate as NumPy's operations do; overflow of
floats to infinity is a result, not a warning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.protocol.types import DataType, ReduceOp

Array = npt.NDArray[Any]

_NUMPY_DTYPES: dict[DataType, np.dtype[Any]] = {
    DataType.INT32: np.dtype(np.int32),
    DataType.INT64: np.dtype(np.int64),
    DataType.FLOAT: np.dtype(np.float32),
    DataType.DOUBLE: np.dtype(np.float64),
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _NUMPY_DTYPES.items()}


def numpy_dtype(data_type: DataType) -> np.dtype[Any]:
    """The NumPy dtype (native byte order) of ``data_type``."""
    return _NUMPY_DTYPES[data_type]


def data_type_of(dtype: np.dtype[Any]) -> DataType | None:
    """The data type for a NumPy dtype; None if collectives do not carry it."""
    return _DATA_TYPES.get(dtype)


def accumulate(arrived: Array, own: Array) -> None:
    """``arrived += own``, element by element, in that order of operands."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(arrived, own, out=arrived)


def finish(values: Array, op: ReduceOp, world_size: int) -> None:
    """Turn complete sums into what ``op`` promises, in place."""
    if op is ReduceOp.SUM:
        return
    divisor = values.dtype.type(world_size)
    if np.issubdtype(values.dtype, np.integer):
        # What remains after taking away the truncated remainder divides exactly.
        np.subtract(values, np.fmod(values, divisor), out=values)
        np.floor_divide(values, divisor, out=values)
    else:
        with np.errstate(all="ignore"):
            np.divide(values, divisor, out=values)
