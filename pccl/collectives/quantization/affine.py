"""Even steps from each block's minimum to its maximum: uint8, uint16, int4 and int2.

A block is its minimum (float32 or float64), its step (16 or 32 bits; ``steps``), then a code per
value: ``minimum + code * step``. The error is at most half a step (stochastic rounding: a step),
plus the rounding of the sum. A constant block is exact. PCCL's MIN_MAX is this format with one
block per chunk, truncating. Blocks are as in 8-bit optimizers (Dettmers et al., arXiv:2110.02861).

In a marked block the three highest codes are inf, -inf and NaN; the finite values use the others.
int2 has no room for infinities: there, the highest code is NaN, and they become NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.collectives.quantization.blocks import Blocks
from pccl.collectives.quantization.codec import Codec, Written
from pccl.collectives.quantization.packing import pack, unpack
from pccl.collectives.reductions import Scratch
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Quantization, WireFormat

Array = npt.NDArray[Any]

_SPECIALS = (np.inf, -np.inf, np.nan)


class AffineCodec(Codec):
    """Codec of uint8, uint16, int4 and int2; several values of the latter two share a byte."""

    def __init__(self, quantization: Quantization, data_type: DataType, scratch: Scratch) -> None:
        super().__init__(quantization, data_type, scratch)
        self._bits = self._format.bits
        self._is_packed = self._bits < 8
        self._specials = _SPECIALS[-1:] if self._format is WireFormat.INT2 else _SPECIALS
        self._codes = np.dtype("<u2" if self._format is WireFormat.UINT16 else np.uint8)
        self._top = (1 << self._bits) - 1
        self._lows = self._work.newbyteorder("<")

    def encoded_bytes(self, count: int) -> int:
        """Return the length of ``count`` encoded values, in bytes."""
        metadata = self._lows.itemsize + self._steps.wire.itemsize
        return -(-count // self.block) * metadata + -(-count * self._bits // 8)

    def _parts(self, encoded: Array, count: int) -> tuple[Array, Array, Array]:
        """Return the minima, the steps and the codes, as views."""
        number = -(-count // self.block)
        first = number * self._lows.itemsize
        second = first + number * self._steps.wire.itemsize
        return (
            encoded[:first].view(self._lows),
            encoded[first:second].view(self._steps.wire),
            encoded[second : self.encoded_bytes(count)].view(self._codes),
        )

    def _write(self, wide: Array, out: Array, noise: Array | None, rows: Array) -> Written:
        lows_out, steps_out, codes_out = self._parts(out, len(wide))
        blocks = self._blocks(len(wide))
        grid, finite = rows[0], rows[1]
        lows, highs = self._extremes(blocks, wide, rows)
        marked: Array | None = None
        special: Array | None = None
        levels: Array | int = self._top
        values = wide
        if not (np.isfinite(lows).all() and np.isfinite(highs).all()):
            marked = ~(np.isfinite(lows) & np.isfinite(highs))
            special = ~np.isfinite(wide)
            lows, highs = self._finite_extremes(blocks, wide, special, rows)
            np.copyto(finite, wide)
            np.copyto(finite, blocks.spread(lows), where=special)
            values = finite
            levels = np.where(marked, self._top - len(self._specials), self._top).astype(self._work)
        reach = highs - lows
        huge: Array | None = None
        wanted = reach / levels
        if not np.isfinite(reach).all():
            huge = ~np.isfinite(reach)  # the difference overflows
            wanted = np.where(huge, (highs / 2 - lows / 2) / levels * 2, wanted)
        packed = self._steps.pack(wanted, reach, levels, marked)
        lows_out[:] = lows
        steps_out[:] = packed
        steps, _ = self._steps.unpack(packed)
        steps[steps == 0] = 1
        plain = special is None and huge is None and bool(self._fits(lows, steps).all())
        if huge is not None:
            scale = self._halves(huge)
            lows, steps = lows * scale, steps * scale
            values = np.multiply(values, blocks.spread(scale), out=finite)
        np.subtract(values, blocks.spread(lows, rows[3]), out=grid)
        np.divide(grid, blocks.spread(steps, rows[3]), out=grid)
        if noise is None:
            np.rint(grid, out=grid)
        else:
            np.add(grid, noise, out=grid)
            np.floor(grid, out=grid)
            ends = levels if isinstance(levels, int) else blocks.spread(levels)
            np.minimum(grid, ends, out=grid)  # the sum may have been rounded up

        self._put(grid, wide, special, codes_out, finite)
        if not plain:
            return Written(special, None)
        np.multiply(grid, rows[3], out=grid)  # the steps
        np.add(grid, blocks.spread(lows, rows[3]), out=grid)
        return Written(special, grid)

    def _put(
        self, grid: Array, wide: Array, special: Array | None, codes_out: Array, spare: Array
    ) -> None:
        """Write the codes of a segment."""
        codes = spare.view(np.uint8)[: len(grid)] if self._is_packed else codes_out
        np.copyto(codes, grid, casting="unsafe")
        if special is not None:
            odd = wide[special]
            infinite = np.where(odd > 0, self._top - 2, self._top - 1)
            is_nan = np.isnan(odd) if len(self._specials) > 1 else True
            codes[special] = np.where(is_nan, self._top, infinite)
        if self._is_packed:
            pack(codes, self._bits, codes_out)

    def _fits(self, lows: Array, steps: Array) -> Array:
        """Return for each block whether the dtype can hold the largest value of its codes."""
        fits: Array = lows + steps * self._work.type(self._top) <= self._largest
        return fits

    def _extremes(self, blocks: Blocks, values: Array, rows: Array) -> tuple[Array, Array]:
        """Return the minimum and maximum of each block; not finite if any of its values is not."""
        # As integers in the order of the floats; a NaN lies beyond the infinity of its sign.
        signed = np.dtype(f"i{self._work.itemsize}")
        magnitude = signed.type(np.iinfo(signed).max)
        ordered = rows[0].view(signed)
        bits = values.view(signed)
        np.right_shift(bits, 8 * signed.itemsize - 1, out=ordered)
        np.bitwise_and(ordered, magnitude, out=ordered)
        np.bitwise_xor(ordered, bits, out=ordered)
        lows = blocks.fold(np.minimum, ordered)
        highs = blocks.fold(np.maximum, ordered)
        for found in (lows, highs):
            np.bitwise_xor(found, (found >> (8 * signed.itemsize - 1)) & magnitude, out=found)
        return lows.view(self._work), highs.view(self._work)

    def _halves(self, where: Array) -> Array:
        """Return a factor per block: 1/2 where the values of the block would overflow."""
        factors = np.ones(len(where), self._work)
        factors[where] = 0.5
        return factors

    def _finite_extremes(
        self, blocks: Blocks, values: Array, special: Array, rows: Array
    ) -> tuple[Array, Array]:
        """Return the extremes of the finite values of each block; 0 if a block has none."""
        spare = rows[1]
        np.copyto(spare, values)
        np.copyto(spare, self._work.type(np.inf), where=special)
        lows, _ = self._extremes(blocks, spare, rows)
        np.copyto(spare, self._work.type(-np.inf), where=special)
        _, highs = self._extremes(blocks, spare, rows)
        empty = lows > highs
        lows[empty] = highs[empty] = 0
        return lows, highs

    def _read(self, encoded: Array, wide: Array, spare: Array) -> None:
        lows_in, steps_in, codes = self._parts(encoded, len(wide))
        blocks = self._blocks(len(wide))
        if self._is_packed:
            packed, codes = codes, spare.view(np.uint8)[: len(wide)]
            unpack(packed, self._bits, codes)
        lows = lows_in.astype(self._work)
        steps, marked = self._steps.unpack(steps_in)
        np.copyto(wide, codes)
        if not self._fits(lows, steps).all():
            over = ~self._fits(lows, steps)
            # Half the value does not overflow before it is clipped.
            scale = self._halves(over)
            np.multiply(wide, blocks.spread(steps * scale), out=wide)
            np.add(wide, blocks.spread(lows * scale), out=wide)
            np.divide(wide, blocks.spread(scale), out=wide)
            np.clip(wide, -self._largest, self._largest, out=wide)
        else:
            spread = spare if marked is None else np.empty_like(wide)  # spare may hold the codes
            np.multiply(wide, blocks.spread(steps, spread), out=wide)
            np.add(wide, blocks.spread(lows, spread), out=wide)
        if marked is not None:
            inside = blocks.spread(marked)
            for code, value in enumerate(self._specials, self._top + 1 - len(self._specials)):
                wide[inside & (codes == code)] = value
