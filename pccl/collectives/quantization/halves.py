"""float16 and bfloat16, scaled by a power of two per block.

A block is an int16 ``k``, then a half per value: ``value * 2**k``. ``k`` brings the block's largest
magnitude into [2**14, 2**15); it is at most 127, for float64 at most 1023. So no float32 or float64
overflows, and small values survive that a plain cast would lose to underflow.
The error of a value is at most 2**-11 of that value (bfloat16: 2**-8), or 2**-39 of the block's
largest; twice the former when rounding stochastically. NaN and infinity are those of the half.

A constant block has ``k`` = -2**15, and the number itself in place of its first halves
(``constants``): it is exact.

Values below 2**-29 of the block's largest are always rounded to nearest.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pccl.collectives.quantization import constants
from pccl.collectives.quantization.codec import Codec, Written
from pccl.collectives.reductions import Scratch
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Quantization, WireFormat

Array = npt.NDArray[Any]

_EXPONENT_BYTES = 2
_TARGET = 15
_CONSTANT = -(1 << 15)
"""Value of ``k`` that marks a constant block."""


class HalfCodec(Codec):
    """Codec of float16 and bfloat16, for values of 32 or 64 bits."""

    def __init__(self, quantization: Quantization, data_type: DataType, scratch: Scratch) -> None:
        super().__init__(quantization, data_type, scratch)
        half: type[Any] = np.float16
        kept = 10
        if self._format is WireFormat.BFLOAT16:
            half, kept = ml_dtypes.bfloat16, 7
        self._half = np.dtype(half)
        self._infinity = int(np.array(np.inf, half).view(np.uint16))
        self._dropped = np.finfo(self._work).nmant - kept
        """How many bits of the significand a half cannot hold."""

    def encoded_bytes(self, count: int) -> int:
        """Return the length of ``count`` encoded values, in bytes."""
        if not count:
            return 0
        exponents_bytes = -(-count // self.block) * _EXPONENT_BYTES
        return exponents_bytes + constants.padded(count, self.block, 2, self._work)

    def _parts(self, encoded: Array, count: int) -> tuple[Array, Array]:
        """Return the exponents, and the halves as integers, as views."""
        start = -(-count // self.block) * _EXPONENT_BYTES
        return (
            encoded[:start].view("<i2"),
            encoded[start : self.encoded_bytes(count)].view("<u2"),
        )

    def _write(self, wide: Array, out: Array, noise: Array | None, rows: Array) -> Written:
        count = len(wide)
        exponents_out, padded = self._parts(out, count)
        padded[count:] = 0
        blocks = self._blocks(count)
        grid = rows[0]
        bits = self._steps.bits.type
        sizes = grid.view(bits)
        np.bitwise_and(wide.view(bits), bits((1 << (8 * self._work.itemsize - 1)) - 1), out=sizes)
        largest = blocks.fold(np.maximum, sizes)
        special: Array | None = None
        if (largest >= bits(self._steps.infinity)).any():
            special = ~np.isfinite(wide)
            sizes[special] = 0
            largest = blocks.fold(np.maximum, sizes)
        _, exponents = np.frexp(largest.view(self._work))
        scales = np.minimum(_TARGET - exponents, np.finfo(self._work).maxexp - 1)
        exponents_out[:] = scales
        np.multiply(wide, blocks.spread(np.ldexp(self._work.type(1), scales)), out=grid)
        if noise is not None:
            raised = grid.view(bits)
            span = self._work.type(1 << self._dropped)
            np.add(raised, (noise * span).astype(bits), out=raised)
            np.bitwise_and(raised, ~bits((1 << self._dropped) - 1), out=raised)
        narrow = rows[1].view(self._half)[: len(wide)]
        np.copyto(narrow, grid, casting="same_kind")
        if special is not None:
            narrow[special] = wide[special]
            narrow[np.isnan(wide)] = np.nan
        np.copyto(padded[:count], narrow.view(np.uint16))
        same = constants.constant_blocks(blocks, wide)
        if len(same):
            exponents_out[same] = _CONSTANT
            numbers = wide[same * self.block]
            constants.write_constants(padded.view(np.uint8), same, numbers, 2 * self.block)
        return Written(special, None)

    def _read(self, encoded: Array, wide: Array, spare: Array) -> None:
        count = len(wide)
        exponents, padded = self._parts(encoded, count)
        blocks = self._blocks(count)
        native = spare.view(np.uint16)[:count]
        np.copyto(native, padded[:count])
        np.copyto(wide, native.view(self._half))
        scales = -exponents.astype(np.int32)
        np.multiply(wide, blocks.spread(np.ldexp(self._work.type(1), scales)), out=wide)
        if (scales + _TARGET >= np.finfo(self._work).maxexp).any():
            # The largest value may have been rounded up to infinity.
            over = np.isinf(wide) & ((native & np.uint16(0x7FFF)) != self._infinity)
            np.copyto(wide, np.copysign(self._largest, wide), where=over)
        same = np.flatnonzero(exponents == _CONSTANT)
        self._read_constants(blocks, same, padded.view(np.uint8), wide)
