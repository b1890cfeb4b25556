"""The element types of tensors with their names in NumPy and torch, and the formats on the wire."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pccl.protocol.guards.bounds import Below

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


BLOCK_MIN = 8
BLOCK_MAX = 1 << 16
"""Limits on the values per block of a wire format. Shorter blocks would be mostly metadata. In
longer blocks, a single step fits few of the values."""


class WireFormat(enum.IntEnum):
    """The encoding of values on the wire; ``pccl.collectives.quantization`` describes each."""

    NONE = 0
    """Unchanged values."""
    UINT8 = 1
    """256 even steps from each block's minimum to its maximum."""
    INT8 = 2
    """255 even steps, zero among them, up to each block's largest magnitude."""
    COMPANDED8 = 3
    """INT8 of the square root: fine steps near zero, for heavy tails."""
    INT4 = 4
    """UINT8 with 16 steps, two values in a byte."""
    FLOAT16 = 5
    """Half precision, with a power of two per block, so that no value overflows."""
    BFLOAT16 = 6
    """FLOAT16 with 8 bits of precision instead of 11."""
    UINT16 = 7
    """UINT8 with 65536 steps."""
    E3M0 = 8
    """A sign, and 7 powers of two up to each block's largest magnitude, or zero: 4 bits."""
    INT2 = 9
    """UINT8 with 4 steps, four values in a byte: for error feedback."""
    SPARSE = 10
    """The 64 largest values of each block, with two magnitudes: for error feedback, in a gather."""

    @property
    def label(self) -> str:
        """The name for callers and for messages."""
        return self.name.lower()

    @property
    def bits(self) -> int:
        """Bits per value, without the metadata of blocks; 0 for NONE."""
        return _WIRE[self][0]

    @property
    def default_block(self) -> int:
        """Values per block if the caller sets no number; 0 for NONE."""
        return _WIRE[self][1]


_WIRE = {
    WireFormat.NONE: (0, 0),
    WireFormat.UINT8: (8, 96),
    WireFormat.INT8: (8, 32),
    WireFormat.COMPANDED8: (8, 32),
    WireFormat.INT4: (4, 32),
    WireFormat.FLOAT16: (16, 256),
    WireFormat.BFLOAT16: (16, 256),
    WireFormat.UINT16: (16, 96),
    WireFormat.E3M0: (4, 64),
    WireFormat.INT2: (2, 64),
    WireFormat.SPARSE: (1, 3200),
}
"""Bits per value, and default block. With 8 bits, blocks are so long that a value takes at most
about 1.07 bytes with its metadata; the figures are in docs/benchmarks.md."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of an operation. All members must agree about it."""

    format: WireFormat = WireFormat.NONE
    block: Annotated[int, Below(BLOCK_MAX + 1)] = 0
    """Values that share a step; 0 if values are sent unchanged."""
    stochastic: bool = False
    """Whether to round at random, so that the mean is kept, instead of to the nearest step."""

    @property
    def active(self) -> bool:
        """Whether the values are quantized."""
        return self.format is not WireFormat.NONE

    @property
    def is_gathered(self) -> bool:
        """Whether each member gets all contributions, instead of a result that one computes."""
        return self.format is WireFormat.SPARSE

    def __str__(self) -> str:
        rounded = ", stochastic" if self.stochastic else ""
        return f"{self.format.label} in blocks of {self.block}{rounded}"


UNQUANTIZED = Quantization()
