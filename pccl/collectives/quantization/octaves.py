"""Powers of two below each block's largest magnitude, and zero: e3m0, a float of 4 bits.

A block is its largest magnitude (float32 or float64), then 4 bits per value: a sign, and a code
``c`` of 3 bits. Code 0 is zero; code ``c`` stands for ``2**(c - 7)`` of the largest magnitude. The
error of a value is at most a third of that value, or 2**-7 of the block's largest (stochastic
rounding: the whole value, or 2**-6). So most values of a heavy-tailed block keep their sign and
their order of magnitude. A constant block is exact. Streaming DiLoCo (arXiv:2501.18512, section
2.3) sends its pseudo-gradients so.

In a block with NaN or infinity, the sign bit of the largest magnitude is set, code 7 is an
infinity, code 0 with a sign is NaN, and the finite values use the codes up to 6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.collectives.quantization.codec import Codec, Written
from pccl.collectives.quantization.packing import pack, unpack
from pccl.collectives.reductions import Scratch
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Quantization

Array = npt.NDArray[Any]

_TOP = 7
_NEGATIVE = 8
_SHARES = [0.0, *(2.0 ** (code - _TOP) for code in range(1, _TOP + 1))]
"""By code: the share of the largest magnitude."""


class OctaveCodec(Codec):
    """Codec of e3m0."""

    def __init__(self, quantization: Quantization, data_type: DataType, scratch: Scratch) -> None:
        super().__init__(quantization, data_type, scratch)
        shares = np.array(_SHARES, self._work)
        self._shares = np.concatenate([shares, 0 - shares])

    def encoded_bytes(self, count: int) -> int:
        """Return the length of ``count`` encoded values, in bytes."""
        return -(-count // self.block) * self._work.itemsize + (count + 1) // 2

    def _parts(self, encoded: Array, count: int) -> tuple[Array, Array]:
        """Return the largest magnitudes as integers, and the codes, as views."""
        start = -(-count // self.block) * self._work.itemsize
        wire = self._steps.bits.newbyteorder("<")
        return encoded[:start].view(wire), encoded[start : self.encoded_bytes(count)]

    @property
    def _sign(self) -> Any:
        return self._steps.bits.type(1 << (8 * self._work.itemsize - 1))

    def _write(self, wide: Array, out: Array, noise: Array | None, rows: Array) -> Written:
        largest_out, codes_out = self._parts(out, len(wide))
        blocks = self._blocks(len(wide))
        grid, bits, infinity = rows[0], self._steps.bits, self._steps.infinity
        sizes = np.bitwise_and(wide.view(bits), ~self._sign, out=grid.view(bits))
        largest = blocks.fold(np.maximum, sizes)
        marked = largest >= bits.type(infinity)
        special = ~np.isfinite(wide) if marked.any() else None
        if special is not None:
            sizes[special] = 0
            largest = blocks.fold(np.maximum, sizes)
        largest_out[:] = np.where(marked, largest | self._sign, largest)
        scale = np.where(largest, largest, bits.type(1)).view(self._work)
        np.divide(grid, blocks.spread(scale, rows[3]), out=grid)
        if special is not None:
            grid[blocks.spread(marked)] /= 2
        codes = self._rounded(grid, noise)
        codes |= (np.signbit(wide) & (codes > 0)) * np.uint8(_NEGATIVE)
        if special is not None:
            odd = wide[special]
            infinite = np.where(odd > 0, _TOP, _TOP | _NEGATIVE)
            codes[special] = np.where(np.isnan(odd), _NEGATIVE, infinite)
        pack(codes, 4, codes_out)
        return Written(special, None)

    def _rounded(self, shares: Array, noise: Array | None) -> Array:
        """Return the codes of magnitudes, uint8.

        Args:
            shares: magnitudes as shares of that of the largest code, from 0 to 1.
            noise: see ``Codec.encode``.
        """
        # As an integer, a float is its exponent, and how far it is on the way to the next one.
        bits, digits = np.dtype(f"i{self._work.itemsize}"), int(np.finfo(self._work).nmant)
        none, least = self._shares[1] / 2, self._shares[1]
        if noise is None:
            raised = shares >= none
            codes = shares.view(bits) + bits.type(1 << (digits - 1))
        else:
            raised = shares / least + noise >= 1
            codes = np.multiply(noise, 1 << digits, dtype=self._work).astype(bits)
            codes += shares.view(bits)
        codes -= none.view(bits)
        codes >>= bits.type(digits)
        rounded: Array = np.maximum(codes, raised)
        return rounded.astype(np.uint8)  # below ``least`` it is 0 or 1

    def _read(self, encoded: Array, wide: Array, spare: Array) -> None:
        largest_in, packed = self._parts(encoded, len(wide))
        blocks = self._blocks(len(wide))
        codes = spare.view(np.uint8)[: len(wide)]
        unpack(packed, 4, codes)
        np.take(self._shares, codes, out=wide, mode="clip")
        raw = largest_in.astype(self._steps.bits)
        marked = (raw & self._sign) != 0
        wanted: Array = (raw & ~self._sign).view(self._work)
        largest: Array = np.where(wanted <= self._largest, wanted, self._largest)
        if not marked.any():
            np.multiply(wide, blocks.spread(largest, spare), out=wide)
            return
        inside = blocks.spread(marked)
        wide[inside] *= 2
        np.multiply(wide, blocks.spread(largest), out=wide)
        for code, value in ((_TOP, np.inf), (_TOP | _NEGATIVE, -np.inf), (_NEGATIVE, np.nan)):
            wide[inside & (codes == code)] = value
