"""Blocks of one repeated number, in formats whose metadata has no room for that number.

int8, companded8 and the halves have 2 or 4 bytes of metadata per block, which cannot hold a float.
A constant block has a metadata word that no other block has. The number itself stands in place of
its first codes, in the work dtype and little-endian. So a constant is exact, however many peers add
to it. The last block of a segment has at least as many bytes of codes as the number needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.collectives.quantization.blocks import Blocks

Array = npt.NDArray[Any]


def padded(count: int, block: int, code_bytes: int, work: np.dtype[Any]) -> int:
    """Return how many bytes of codes a segment has.

    Args:
        count: number of values, at least 1.
        block: values per block, at least 8.
        code_bytes: bytes per value.
        work: dtype of the number.
    """
    last = (count - 1) % block + 1
    return (count - last) * code_bytes + max(last * code_bytes, work.itemsize)


def constant_blocks(blocks: Blocks, values: Array) -> Array:
    """Return the indices of the blocks whose values are all one finite number other than 0.

    A block of zeros needs no special treatment: every format represents it exactly.
    """
    block, whole = blocks.block, blocks.count // blocks.block
    heads = values[: whole * block : block]
    # Few blocks begin and end with the same value, unless they are constant.
    likely = np.flatnonzero((heads == values[block - 1 :: block]) & (heads != 0))
    if len(likely):
        rows = values[: whole * block].reshape(whole, block)[likely]
        likely = likely[(rows == rows[:, :1]).all(axis=1)]
    rest = values[whole * block :]
    if len(rest) and rest[0] != 0 and (rest == rest[0]).all():
        likely = np.append(likely, whole)
    found: Array = likely[np.isfinite(values[likely * block])]
    return found


def write_constants(codes: Array, which: Array, numbers: Array, stride: int) -> None:
    """Write numbers in place of the first codes of their blocks.

    Args:
        codes: all codes, as bytes.
        which: indices of the blocks, ascending.
        numbers: one per block, in the work dtype.
        stride: bytes of codes per block.
    """
    wire = numbers.astype(numbers.dtype.newbyteorder("<")).view(np.uint8)
    codes[_places(which, stride, numbers.dtype)] = wire.reshape(-1, numbers.itemsize)


def read_constants(codes: Array, which: Array, stride: int, work: np.dtype[Any]) -> Array:
    """Read the numbers that ``write_constants`` has written; any bytes are valid."""
    wire = codes[_places(which, stride, work)].reshape(-1)
    return wire.view(work.newbyteorder("<")).astype(work)


def fill(blocks: Blocks, which: Array, numbers: Array, out: Array) -> None:
    """Set all values of the blocks ``which`` to the number of their block."""
    block, whole = blocks.block, blocks.count // blocks.block
    if len(which) and which[-1] == whole:
        out[whole * block :] = numbers[-1]
        which, numbers = which[:-1], numbers[:-1]
    out[: whole * block].reshape(whole, block)[which] = numbers[:, None]


def _places(which: Array, stride: int, work: np.dtype[Any]) -> Array:
    places: Array = (which * stride)[:, None] + np.arange(work.itemsize)
    return places
