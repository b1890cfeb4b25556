"""Steps about zero, up to each block's largest magnitude: int8, and companded8.

A block is its step (16 or 32 bits; ``steps``), then a signed code per value. Zero stays zero. A
constant block has step 0, and its exact number in place of its first codes (``constants``).

* int8: ``code * step``; the error is at most half a step (stochastic rounding: a whole step).
* companded8: ``code * |code| * step``, so smaller values have finer steps. The error is at most
  ``sqrt(|x| * step) + step / 4`` (stochastic rounding: twice the root and a step). This suits heavy
  tails: one large value costs the small values of its block little accuracy. The square root lies
  between linear steps and the logarithmic steps of mu-law (ITU-T G.711).

In a marked block the code -128 is NaN, 127 and -127 are the infinities, and the finite values use
the other codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.collectives.quantization import constants
from pccl.collectives.quantization.codec import Codec, Written
from pccl.collectives.reductions import Scratch
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Quantization, WireFormat

Array = npt.NDArray[Any]

_TOP = 127
_NAN = -128


class Scale(ABC):
    """The relation between codes and numbers of steps."""

    power: int
    """The code 127 stands for ``127 ** power`` steps."""

    @abstractmethod
    def round(
        self, values: Array, steps: Array, ends: Array | int, noise: Array | None, rows: Array
    ) -> None:
        """Write the codes of ``values`` to ``rows[0]``; ``values`` may lie in ``rows[1]``."""

    @abstractmethod
    def expand(self, wide: Array, spare: Array) -> None:
        """Replace the codes in ``wide`` by the numbers of steps that they stand for."""


class EvenScale(Scale):
    """A code stands for as many steps as its value."""

    power = 1

    def round(
        self, values: Array, steps: Array, ends: Array | int, noise: Array | None, rows: Array
    ) -> None:
        """Write the number of steps of each value, rounded; stochastically if there is noise."""
        grid = rows[0]
        np.divide(values, steps, out=grid)
        if noise is None:
            np.rint(grid, out=grid)
        else:
            np.add(grid, noise, out=grid)
            np.floor(grid, out=grid)
            np.minimum(grid, ends, out=grid)  # the sum may have been rounded up

    def expand(self, wide: Array, spare: Array) -> None:
        """Do nothing, because a code is its number of steps."""


class SquareScale(Scale):
    """A code stands for as many steps as its square."""

    power = 2

    def round(
        self, values: Array, steps: Array, ends: Array | int, noise: Array | None, rows: Array
    ) -> None:
        """Write the rounded square root of each number of steps, with the sign of the value."""
        work = values.dtype
        bits = np.uint32 if work.itemsize == 4 else np.uint64
        sign = bits(1 << (8 * work.itemsize - 1))
        grid, spare = rows[0], rows[2]
        np.divide(values, steps, out=grid)
        signs = np.bitwise_and(values.view(bits), sign, out=rows[1].view(bits))
        np.abs(grid, out=grid)
        if noise is None:
            np.sqrt(grid, out=grid)
            np.rint(grid, out=grid)
        else:
            below = np.sqrt(grid, out=spare)
            np.floor(below, out=below)
            # The fraction of the way to the next square, which is 2 * below + 1 further.
            np.subtract(grid, np.square(below), out=grid)
            np.divide(grid, 2 * below + work.type(1), out=grid)
            np.add(grid, noise, out=grid)
            np.floor(grid, out=grid)
            np.clip(grid, 0, 1, out=grid)
            np.add(grid, below, out=grid)
            np.minimum(grid, ends, out=grid)
        np.bitwise_or(grid.view(bits), signs, out=grid.view(bits))

    def expand(self, wide: Array, spare: Array) -> None:
        """Replace each code by its square, with the sign of the code."""
        np.abs(wide, out=spare)
        np.multiply(wide, spare, out=wide)


_SCALES: dict[WireFormat, Scale] = {
    WireFormat.INT8: EvenScale(),
    WireFormat.COMPANDED8: SquareScale(),
}


class SymmetricCodec(Codec):
    """Codec of int8 and companded8, which differ in their scale.

    Args: see ``Codec``.
    """

    def __init__(self, quantization: Quantization, data_type: DataType, scratch: Scratch) -> None:
        super().__init__(quantization, data_type, scratch)
        self._scale = _SCALES[quantization.format]

    def encoded_bytes(self, count: int) -> int:
        """Return the length of ``count`` encoded values, in bytes."""
        if not count:
            return 0
        steps_bytes = -(-count // self.block) * self._steps.wire.itemsize
        return steps_bytes + constants.padded(count, self.block, 1, self._work)

    def _parts(self, encoded: Array, count: int) -> tuple[Array, Array]:
        """Return the steps and the codes, as views."""
        start = -(-count // self.block) * self._steps.wire.itemsize
        return (
            encoded[:start].view(self._steps.wire),
            encoded[start : self.encoded_bytes(count)].view(np.int8),
        )

    def _write(self, wide: Array, out: Array, noise: Array | None, rows: Array) -> Written:
        count = len(wide)
        steps_out, padded = self._parts(out, count)
        codes = padded[:count]
        padded[count:] = 0
        blocks = self._blocks(count)
        grid, finite = rows[0], rows[1]
        bits = self._steps.bits.type
        magnitude = bits((1 << (8 * self._work.itemsize - 1)) - 1)
        sizes = grid.view(bits)
        np.bitwise_and(wide.view(bits), magnitude, out=sizes)
        largest = blocks.fold(np.maximum, sizes)
        marked: Array | None = None
        special: Array | None = None
        levels: Array | int = _TOP**self._scale.power
        ends: Array | int = _TOP
        values = wide
        if largest.max() >= bits(self._steps.infinity):
            marked = odd_blocks = largest >= bits(self._steps.infinity)
            special = ~np.isfinite(wide)
            np.copyto(finite, wide)
            finite[special] = 0
            values = finite
            np.bitwise_and(values.view(bits), magnitude, out=sizes)
            largest = blocks.fold(np.maximum, sizes)
            last = np.where(odd_blocks, _TOP - 1, _TOP).astype(self._work)
            levels, ends = last**self._scale.power, blocks.spread(last)
        reach = largest.view(self._work)
        packed = self._steps.pack(reach / levels, reach, levels, marked)
        steps_out[:] = packed
        steps, _ = self._steps.unpack(packed)
        largest_step = steps.max()
        steps[steps == 0] = 1
        spread = blocks.spread(steps, rows[3])
        self._scale.round(values, spread, ends, noise, rows)
        np.copyto(codes, grid, casting="unsafe")
        if special is not None:
            odd = wide[special]
            codes[special] = np.where(np.isnan(odd), _NAN, np.where(odd > 0, _TOP, -_TOP))
        same = constants.constant_blocks(blocks, wide)
        numbers = wide[same * self.block]
        if len(same):
            steps_out[same] = 0
            constants.write_constants(padded.view(np.uint8), same, numbers, self.block)
        if special is not None or not self._fits(largest_step):
            return Written(special, None)
        self._scale.expand(grid, rows[1])
        np.multiply(grid, spread, out=grid)
        if len(same):
            constants.fill(blocks, same, numbers, grid)
        return Written(special, grid)

    def _fits(self, step: np.floating[Any]) -> bool:
        """Whether the dtype can hold the largest value that a code of this step may have."""
        return bool(step * self._work.type(_TOP**self._scale.power) <= self._largest)

    def _read(self, encoded: Array, wide: Array, spare: Array) -> None:
        count = len(wide)
        steps_in, padded = self._parts(encoded, count)
        codes = padded[:count]
        blocks = self._blocks(count)
        steps, marked = self._steps.unpack(steps_in)
        np.copyto(wide, codes)
        self._scale.expand(wide, spare)
        np.multiply(wide, blocks.spread(steps, spare), out=wide)
        if not self._fits(steps.max()):
            np.clip(wide, -self._largest, self._largest, out=wide)
        self._read_constants(blocks, np.flatnonzero(steps_in == 0), padded.view(np.uint8), wide)
        if marked is not None:
            inside = blocks.spread(marked)
            for code, value in ((_TOP, np.inf), (-_TOP, -np.inf), (_NAN, np.nan)):
                wide[inside & (codes == code)] = value
