"""The base class of all wire formats: encodes a segment, decodes it, and measures the error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pccl.collectives.quantization import constants
from pccl.collectives.quantization.blocks import Blocks
from pccl.collectives.quantization.noise import Noise
from pccl.collectives.quantization.steps import DOUBLE, SINGLE
from pccl.collectives.reductions import Scratch
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Quantization

Array = npt.NDArray[Any]

_ROWS = 5
"""Number of working arrays, each as long as the segment."""
_SQUARES = 1024
"""How many squares are summed in the work dtype; these sums are then added in float64."""


class EncodeError(NamedTuple):
    """The error that encoding caused in the finite values.

    The relative L2 error is ``sqrt(error_squares / value_squares)``. Sums of segments can be added.
    """

    error_squares: float
    value_squares: float


class Written(NamedTuple):
    """What an encoder knows after it has encoded a segment."""

    special: Array | None
    """Mask of the values that are NaN or infinite; None: there are none."""
    decoded: Array | None
    """The values that all members will decode, except the sign of zero; None: not decoded yet.
    They may use the memory of the first row, but not of the second."""


class Codec(ABC):
    """One wire format for values of one dtype. float16 and bfloat16 are processed as float32.

    An encoded segment is the metadata of all its blocks, then the codes of all its values. Its
    length depends only on the count. Finite values stay finite: a value that would round beyond the
    dtype's largest number becomes that number. NaN, inf and -inf are decoded as themselves.

    Args:
        quantization: the format and its block.
        data_type: FLOAT16, BFLOAT16, FLOAT or DOUBLE.
        scratch: working memory; no argument of a method may lie in it.
    """

    def __init__(self, quantization: Quantization, data_type: DataType, scratch: Scratch) -> None:
        self.block = quantization.block
        self._format = quantization.format
        self._dtype = data_type.to_numpy_dtype()
        self._steps = DOUBLE if data_type is DataType.DOUBLE else SINGLE
        self._work = self._steps.work
        finfo: Any = ml_dtypes.finfo  # typed in part only
        self._largest = self._work.type(finfo(self._dtype).max)
        self._scratch = scratch

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Return the length of ``count`` encoded values, in bytes."""

    @abstractmethod
    def _write(self, wide: Array, out: Array, noise: Array | None, rows: Array) -> Written:
        """Encode ``wide`` (work dtype), which is not changed."""

    @abstractmethod
    def _read(self, encoded: Array, wide: Array, spare: Array) -> None:
        """Decode into ``wide`` (work dtype), only to values that the own dtype can hold."""

    def encode(
        self,
        values: Array,
        out: Array,
        noise: Noise | None = None,
        decoded: Array | None = None,
    ) -> EncodeError:
        """Encode ``values`` into ``out``; return the error.

        Args:
            values: own dtype, shape (n,).
            out: uint8, shape (encoded_bytes(n),).
            noise: draws n float32 from [0, 1), to round each value up or down with the right mean
                (unless it saturates); None: round to nearest.
            decoded: own dtype, shape (n,): receives what all members decode; may be ``values``.
        """
        count = len(values)
        if not count:
            return EncodeError(0.0, 0.0)
        with np.errstate(all="ignore"):
            rows = self._rows(count)
            wide = values
            if values.dtype != self._work:
                wide = rows[0]
                np.copyto(wide, values)
            drawn = None if noise is None else noise(count)
            written = self._write(wide, out, drawn, rows[1:])
            return self._measured(wide, out, written, decoded, rows[1:])

    def decode(self, encoded: Array, out: Array) -> None:
        """Decode ``encoded`` into ``out``. Any bytes are decoded to some values.

        Args:
            encoded: uint8, shape (encoded_bytes(n),).
            out: own dtype, shape (n,).
        """
        count = len(out)
        if not count:
            return
        with np.errstate(all="ignore"):
            rows = self._rows(count)
            if out.dtype == self._work:
                self._read(encoded, out, rows[0])
            else:
                self._read(encoded, rows[0], rows[1])
                np.copyto(out, rows[0], casting="same_kind")

    def _rows(self, count: int) -> Array:
        padded = -(-count // 16) * 16  # each row begins where vector instructions are fast
        return self._scratch.array(_ROWS * padded, self._work).reshape(_ROWS, padded)[:, :count]

    def _blocks(self, count: int) -> Blocks:
        return Blocks(count, self.block)

    def _read_constants(self, blocks: Blocks, which: Array, codes: Array, wide: Array) -> None:
        """Decode the blocks that hold a number in place of codes.

        Args:
            blocks: the blocks of the segment.
            which: indices of the blocks to decode.
            codes: all codes, as bytes.
            wide: receives the values.
        """
        if len(which):
            stride = self.block * (self._format.bits // 8)
            numbers = constants.read_constants(codes, which, stride, self._work)
            np.clip(numbers, -self._largest, self._largest, out=numbers, where=np.isfinite(numbers))
            constants.fill(blocks, which, numbers, wide)

    def _measured(
        self, wide: Array, out: Array, written: Written, decoded: Array | None, rows: Array
    ) -> EncodeError:
        got, spare = rows[0], rows[1]
        if written.decoded is None:
            self._read(out, got, spare)
        elif decoded is None:
            got = written.decoded
        else:
            np.add(written.decoded, 0, out=got)  # codes have no negative zero
        if self._dtype != self._work:
            narrow = spare.view(self._dtype)[: len(got)]
            np.copyto(narrow, got, casting="same_kind")
            np.copyto(got, narrow)
        np.subtract(got, wide, out=spare)
        if written.special is None:
            found = EncodeError(_square_sum(spare), _square_sum(wide))
        else:
            spare[written.special] = 0
            finite = np.where(written.special, self._work.type(0), wide)
            found = EncodeError(_square_sum(spare), _square_sum(finite))
        if decoded is not None:
            np.copyto(decoded, got, casting="same_kind")
        return found


def _square_sum(values: Array) -> float:
    """Return the sum of squares, even if float32 cannot hold a square."""
    even = len(values) // _SQUARES * _SQUARES
    rows = values[:even].reshape(-1, _SQUARES)
    # One product of matrices per row is twice as fast as einsum.
    total = float(np.matmul(rows[:, None, :], rows[:, :, None]).sum(dtype=np.float64))
    total += float(np.dot(values[even:], values[even:]))
    if 1e-20 < total < np.inf:
        return total
    largest = float(np.abs(values).max())
    if largest == 0 or not np.isfinite(largest):
        return largest
    scaled = values.astype(np.float64) / largest
    return float(np.square(scaled).sum() * np.float64(largest) ** 2)
