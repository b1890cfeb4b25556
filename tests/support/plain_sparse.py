"""The sparse format in plain Python, from its description: value by value, bit by bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

KEPT = 64


def distinct(count: int, seed: int) -> npt.NDArray[Any]:
    """Whole numbers of all signs, no two of the same magnitude, float32."""
    rng = np.random.default_rng(seed)
    sizes = 1 + rng.choice(1 << 20, count, replace=False)
    return np.asarray(sizes * rng.choice([-1, 1], count), np.float32)


def parts(count: int, block: int) -> Iterator[tuple[int, int, int]]:
    """The first value, the length and the kept values of each block."""
    for first in range(0, count, block):
        length = min(block, count - first)
        yield first, length, math.ceil(min(KEPT, block) * length / block)


def shape(length: int, kept: int) -> tuple[int, int]:
    """Low bits of an index, and length of the unary code of all high parts."""
    shift = int(math.log2(length // kept))
    return shift, kept + ((length - 1) >> shift)


def nbytes(count: int, block: int, itemsize: int) -> int:
    total = 0
    for _, length, kept in parts(count, block):
        shift, high_bits = shape(length, kept)
        total += 2 * itemsize + math.ceil((high_bits + kept * (shift + 2)) / 8)
    return total


def sent(values: Sequence[float], block: int) -> list[float]:
    """What all members get of float32 values whose magnitudes all differ."""
    result = [0.0] * len(values)
    for first, length, kept in parts(len(values), block):
        places = sorted(range(first, first + length), key=lambda i: -abs(values[i]))[:kept]
        sizes = sorted(abs(values[i]) for i in places)
        mean = math.fsum(sizes) / kept
        large = [size for size in sizes if size > mean]
        small = [size for size in sizes if size <= mean]
        for place in places:
            group = large if abs(values[place]) > mean else small
            size = single(math.fsum(group) / len(group))
            result[place] = math.copysign(size, values[place])
    return result


def decoded(data: bytes, count: int, block: int) -> list[float]:
    """The values of any bytes, for float32."""
    blocks = list(parts(count, block))
    whole = [one for one in blocks if one[1] == block]
    result = [0.0] * count
    at = 0
    for group in (whole, blocks[len(whole) :]):
        means = struct.unpack_from(f"<{2 * len(group)}f", data, at)
        at += 8 * len(group)
        for number, (first, length, kept) in enumerate(group):
            shift, high_bits = shape(length, kept)
            row_bytes = math.ceil((high_bits + kept * (shift + 2)) / 8)
            bits = "".join(f"{byte:08b}" for byte in data[at : at + row_bytes])
            at += row_bytes
            sizes = [abs(size) for size in means[2 * number : 2 * number + 2]]
            ones = [place for place in range(high_bits) if bits[place] == "1"]
            zeros = [place for place in range(high_bits) if bits[place] == "0"]
            for i, place in enumerate((ones + zeros)[:kept]):
                low = bits[high_bits + i * shift : high_bits + (i + 1) * shift][::-1]
                index = max(place - i, 0) << shift | int(low or "0", 2)
                signs = high_bits + kept * shift
                size = sizes[int(bits[signs + kept + i])]
                size = math.nan if math.isinf(size) else size
                is_negative = bits[signs + i] == "1"
                result[first + min(index, length - 1)] = -size if is_negative else size
    return result


def single(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded
