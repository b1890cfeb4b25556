"""The element types of tensors, and their names in NumPy and torch."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class DataType(enum.IntEnum):
    """Element types, numbered as in PCCL."""

    UINT8 = 0
    INT8 = 1
    INT16 = 2
    UINT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT = 10
    DOUBLE = 11

    @cached_property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return _ITEM_BYTES[self]

    @property
    def label(self) -> str:
        """The name in NumPy and torch, for messages."""
        return {DataType.FLOAT: "float32", DataType.DOUBLE: "float64"}.get(self, self.name.lower())

    def to_numpy_dtype(self) -> np.dtype[Any]:
        """Return the NumPy dtype in native byte order; BFLOAT16 is ``ml_dtypes.bfloat16``."""
        return numpy_dtypes()[self]

    @classmethod
    def from_numpy_dtype(cls, dtype: npt.DTypeLike) -> DataType:
        """Return the data type of a NumPy dtype, or of anything that ``np.dtype`` accepts.

        Raises:
            ValueError: collectives and shared state do not support this dtype.
        """
        import numpy as np

        wanted = np.dtype(dtype)
        for data_type, known in numpy_dtypes().items():
            if known == wanted:
                return data_type
        raise ValueError(f"no DataType for NumPy's {wanted}; use one of {_names(numpy_dtypes())}")

    def to_torch_dtype(self) -> torch.dtype:
        """Return the torch dtype.

        Raises:
            ValueError: the installed torch has no such dtype (torch 2.3 added unsigned ones).
        """
        dtype = _torch_dtypes().get(self)
        if dtype is None:
            raise ValueError(f"the installed torch has no dtype for {self.name}; update torch")
        return dtype

    @classmethod
    def from_torch_dtype(cls, dtype: torch.dtype) -> DataType:
        """Return the data type of a torch dtype.

        Raises:
            ValueError: collectives and shared state do not support this dtype.
        """
        for data_type, known in _torch_dtypes().items():
            if known == dtype:
                return data_type
        raise ValueError(f"no DataType for {dtype}; use one of {_names(_torch_dtypes())}")


_ITEM_BYTES = {
    DataType.UINT8: 1,
    DataType.INT8: 1,
    DataType.INT16: 2,
    DataType.UINT16: 2,
    DataType.UINT32: 4,
    DataType.INT32: 4,
    DataType.UINT64: 8,
    DataType.INT64: 8,
    DataType.FLOAT16: 2,
    DataType.BFLOAT16: 2,
    DataType.FLOAT: 4,
    DataType.DOUBLE: 8,
}


@cache
def numpy_dtypes() -> dict[DataType, np.dtype[Any]]:
    """Return the NumPy dtype of every data type. The first call imports NumPy."""
    import ml_dtypes
    import numpy as np

    return {
        DataType.UINT8: np.dtype(np.uint8),
        DataType.INT8: np.dtype(np.int8),
        DataType.INT16: np.dtype(np.int16),
        DataType.UINT16: np.dtype(np.uint16),
        DataType.UINT32: np.dtype(np.uint32),
        DataType.INT32: np.dtype(np.int32),
        DataType.UINT64: np.dtype(np.uint64),
        DataType.INT64: np.dtype(np.int64),
        DataType.FLOAT16: np.dtype(np.float16),
        DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
        DataType.FLOAT: np.dtype(np.float32),
        DataType.DOUBLE: np.dtype(np.float64),
    }


@cache
def _torch_dtypes() -> dict[DataType, torch.dtype]:
    import torch

    names = {DataType.FLOAT: "float32", DataType.DOUBLE: "float64"}
    found = {kind: getattr(torch, names.get(kind, kind.name.lower()), None) for kind in DataType}
    return {kind: dtype for kind, dtype in found.items() if dtype is not None}


def _names(known: Iterable[DataType]) -> str:
    return ", ".join(data_type.name for data_type in known)
