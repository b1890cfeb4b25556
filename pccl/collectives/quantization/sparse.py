"""The largest values of each block, with 2 bits each; all others are zero.

Of a block of ``n`` values, 64 are kept (of a shorter last block as large a part), those of the
largest magnitude. A kept value is a sign and one of two magnitudes: the mean of those above the
mean, or of those not above. So the default block of 3200 values, 2 % kept, takes 85 bytes instead
of 12,800. With error feedback the other values are not lost: they are kept for later rounds, as in
SparseLoCo (arXiv:2508.15706, section 3), which also has 2 bits and chunks. Zeros stay zeros: in
place of a kept one, the block's largest value is sent again.

An encoded segment is the two magnitudes of each block (float32 or float64), then a row of bits for
each block: the indices of the kept values in ascending order as an Elias-Fano code (their high
parts in unary, then ``shift`` low bits each; about 8 bits for an index below 3200), then a bit for
each sign, and one for each magnitude.

In a block with NaN or infinity, the larger magnitude is infinite, and stands for NaN. It is that of
all values that are NaN or infinite, up to 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.collectives.quantization.codec import Codec, Written
from pccl.protocol.types import BLOCK_MAX

Array = npt.NDArray[Any]

KEPT = 64
"""Values of a whole block that are kept."""

_INDEX_BITS = (BLOCK_MAX - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some equally long blocks of a segment, one after the other."""

    first: int
    """Position of the first value."""
    count: int
    length: int
    """Values per block."""
    kept: int
    """Kept values per block."""
    sizes: np.dtype[Any]
    """Dtype of the magnitudes."""

    @property
    def values(self) -> slice:
        """The positions of the values in the segment."""
        return slice(self.first, self.first + self.count * self.length)

    @property
    def shift(self) -> int:
        """Low bits of an index that are stored as they are."""
        return (self.length // self.kept).bit_length() - 1

    @property
    def high_bits(self) -> int:
        """Bits of the unary code of the high parts: a one for each index, a zero for each step."""
        return self.kept + ((self.length - 1) >> self.shift)

    @property
    def row_bytes(self) -> int:
        """Bytes of the bits of a block."""
        return (self.high_bits + self.kept * (self.shift + 2) + 7) // 8

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.count * (2 * self.sizes.itemsize + self.row_bytes)

    def _split(self, encoded: Array) -> tuple[Array, Array]:
        """Return the magnitudes, shape (count, 2), and the bits, (count, row_bytes), as views."""
        end = self.count * 2 * self.sizes.itemsize
        sizes = encoded[:end].view(self.sizes.newbyteorder("<")).reshape(self.count, 2)
        return sizes, encoded[end:].reshape(self.count, self.row_bytes)

    def _largest(self, sizes: Array) -> Array:
        """Return the indices of the largest magnitudes of each block; NaN is larger than infinity.

        As integers, floats above 0 have the same order. With the index in the low bits no two of
        them are equal; partitioning a block of zeros would take ten times as long. Of a float64,
        this drops 16 of 52 bits.
        """
        bits = sizes.view(np.dtype(f"i{sizes.itemsize}")).astype(np.int64)
        keys = bits >> _INDEX_BITS if sizes.itemsize == 8 else bits
        keys = keys << _INDEX_BITS | np.arange(self.length)
        first = self.length - self.kept
        found: Array = np.partition(keys, first, axis=1)[:, first:] & ((1 << _INDEX_BITS) - 1)
        return found

    def _sizes_of(self, blocks: Array, where: Array) -> Array:
        """Return the magnitudes at these places of each block, float64; NaN counts as infinity."""
        sizes: Array = np.abs(np.take_along_axis(blocks, where, axis=1)).astype(np.float64)
        sizes[np.isnan(sizes)] = np.inf
        return sizes

    def write(self, values: Array, out: Array) -> None:
        """Encode ``values``, floats, shape (count * length,), into ``out``, uint8, (nbytes,)."""
        blocks = values.reshape(self.count, self.length)
        where = self._largest(np.abs(blocks))
        sizes = self._sizes_of(blocks, where)
        is_zero = sizes == 0
        mean = sizes.sum(axis=1) / np.maximum(np.sum(~is_zero, axis=1), 1)
        limit = np.minimum(mean, np.finfo(self.sizes).max)[:, None]
        is_large = sizes > limit
        means, rows = self._split(out)
        for column, group in enumerate((~(is_large | is_zero), is_large)):
            alone = np.where(group, sizes, 0)
            mean = alone.sum(axis=1) / np.maximum(group.sum(axis=1), 1)
            least = np.where(group, sizes, np.inf).min(axis=1)
            means[:, column] = np.clip(mean, least, alone.max(axis=1))  # a constant is exact
        largest = np.take_along_axis(where, sizes.argmax(axis=1, keepdims=True), axis=1)
        where = np.sort(np.where(is_zero, largest, where), axis=1)
        is_large = self._sizes_of(blocks, where) > limit
        is_negative = np.signbit(np.take_along_axis(blocks, where, axis=1))
        high = np.zeros((self.count, self.high_bits), np.uint8)
        np.put_along_axis(high, (where >> self.shift) + np.arange(self.kept), 1, axis=1)
        low = where[:, :, None] >> np.arange(self.shift) & 1
        low = low.reshape(self.count, -1).astype(np.uint8)
        bits = [high, low, is_negative, is_large]
        rows[:] = np.packbits(np.concatenate(bits, axis=1), axis=1)

    def read(self, encoded: Array, values: Array, largest: Any) -> None:
        """Decode any bytes, uint8, shape (nbytes,), into ``values``; none exceeds ``largest``."""
        means, rows = self._split(encoded)
        sizes = np.abs(means.astype(self.sizes))
        sizes[np.isinf(sizes)] = np.nan
        np.minimum(sizes, largest, out=sizes)
        bits = np.unpackbits(rows, axis=1, count=self.high_bits + self.kept * (self.shift + 2))
        ends = np.cumsum([self.high_bits, self.kept * self.shift, self.kept])
        high, low, is_negative, is_large = np.split(bits, ends, axis=1)
        # The first ``kept`` ones; of wrong bytes with fewer ones, also zeros.
        ones = np.argsort(1 - high, axis=1, kind="stable")[:, : self.kept]
        index = np.maximum(ones - np.arange(self.kept), 0) << self.shift
        if self.shift:
            parts = low.reshape(self.count, self.kept, self.shift)
            index |= parts @ (1 << np.arange(self.shift))
        np.minimum(index, self.length - 1, out=index)
        kept = np.take_along_axis(sizes, is_large.astype(np.intp), axis=1)
        np.negative(kept, out=kept, where=is_negative.astype(bool))
        values.fill(0)
        np.put_along_axis(values.reshape(self.count, self.length), index, kept, axis=1)


class SparseCodec(Codec):
    """Codec of sparse. It rounds nothing at random."""

    def encoded_bytes(self, count: int) -> int:
        """Return the length of ``count`` encoded values, in bytes."""
        return sum(rows.nbytes for rows in self._parts(count))

    def _parts(self, count: int) -> Iterator[_Rows]:
        """Yield the whole blocks, and the shorter last one."""
        whole, rest = divmod(count, self.block)
        if whole:
            yield _Rows(0, whole, self.block, min(KEPT, self.block), self._work)
        if rest:
            kept = -(-rest * min(KEPT, self.block) // self.block)
            yield _Rows(whole * self.block, 1, rest, kept, self._work)

    def _write(self, wide: Array, out: Array, noise: Array | None, rows: Array) -> Written:
        begin = 0
        for part in self._parts(len(wide)):
            part.write(wide[part.values], out[begin : begin + part.nbytes])
            begin += part.nbytes
        special = ~np.isfinite(wide)
        return Written(special if special.any() else None, None)

    def _read(self, encoded: Array, wide: Array, spare: Array) -> None:
        begin = 0
        for part in self._parts(len(wide)):
            part.read(encoded[begin : begin + part.nbytes], wide[part.values], self._largest)
            begin += part.nbytes
