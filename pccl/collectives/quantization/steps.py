"""The step of a block in the upper half of a float's bits: 16 for float32, 32 for float64.

With so few bits the product of a step and any code is exact. A step is rounded up, so that the
codes still reach the end of the range. The upper half of a float32 is a bfloat16. If it would be
denormal, the step is a power of two instead, 2**-149 at least, so blocks of denormals keep their
values. A step needs no sign, so the sign bit marks blocks that hold NaN or infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepFormat:
    """The encoding of steps for one work dtype."""

    work: np.dtype[Any]
    """Dtype of the arithmetic: float32 or float64."""
    bits: np.dtype[Any]
    """Dtype of unsigned integers of the same size."""
    wire: np.dtype[Any]
    """Dtype of unsigned integers of half the size, little-endian."""
    shift: int
    mantissa: int
    """Mask of the significand's bits in the upper half."""
    exponent: int
    """Mask of the exponent's bits in the upper half."""
    least: int
    """2**least is the smallest positive number of the work dtype."""

    @property
    def infinity(self) -> int:
        """The bits of infinity; without the sign, all larger values are NaN."""
        return self.exponent << self.shift

    def pack(self, wanted: Array, reach: Array, levels: Array | int, marked: Array | None) -> Array:
        """Encode steps, rounded up, but not to infinity.

        Args:
            wanted: ``reach / levels`` in the work dtype, shape (blocks,), finite, not negative.
            reach: the range of values that ``levels`` steps have to cover.
            levels: one per block, or one number for all.
            marked: bool, shape (blocks,): blocks that hold NaN or infinity; None: there are none.
        """
        ones = self.bits.type((1 << self.shift) - 1)
        upper: Array = (wanted.view(self.bits) + ones) >> self.bits.type(self.shift)
        np.minimum(upper, self.bits.type(self.exponent - 1), out=upper)
        if upper.min() <= self.mantissa:
            tiny = (upper <= self.bits.type(self.mantissa)) & (reach > 0)
            fraction, exponent = np.frexp(reach)
            part, more = np.frexp(fraction.astype(np.float64) / levels)
            power = exponent + more - (part == 0.5)
            power = np.maximum(power, self.least) - self.least + 1
            upper = np.where(tiny, power.astype(self.bits), upper)
        if marked is not None:
            upper |= marked.astype(self.bits) << self.bits.type(self.shift - 1)
        packed: Array = upper.astype(self.wire)
        return packed

    def unpack(self, packed: Array) -> tuple[Array, Array | None]:
        """Return the steps, and the mask of the marked blocks (None: there are none).

        Args:
            packed: wire dtype, shape (blocks,); any values are accepted.
        """
        upper = packed.astype(self.bits)
        if packed.min() > self.mantissa and packed.max() < self.exponent:  # the usual case
            return (upper << self.bits.type(self.shift)).view(self.work), None
        marked = (upper >> self.bits.type(self.shift - 1)) != 0
        small = upper & self.bits.type(self.mantissa)
        tiny = ((upper & self.bits.type(self.exponent)) == 0) & (small != 0)
        upper &= self.bits.type(self.exponent | self.mantissa)
        steps: Array = (upper << self.bits.type(self.shift)).view(self.work)
        if tiny.any():
            powers = np.ldexp(self.work.type(1), small.astype(np.int32) - 1 + self.least)
            steps = np.where(tiny, powers.astype(self.work), steps)
        return steps, marked if marked.any() else None


SINGLE = StepFormat(
    np.dtype(np.float32), np.dtype(np.uint32), np.dtype("<u2"), 16, 0x7F, 0x7F80, -149
)
DOUBLE = StepFormat(
    np.dtype(np.float64), np.dtype(np.uint64), np.dtype("<u4"), 32, 0xFFFFF, 0x7FF00000, -1074
)
