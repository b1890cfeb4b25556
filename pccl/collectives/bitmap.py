"""A bitmap of the expected segments that have arrived, as sent after a lost lane.

From it the sender learns which segments of the lost lane to repeat. There is one bit per expected
segment, set if the segment has arrived. The lowest bit of the first byte comes first.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np


def to_bitmap(missing: Collection[int], size: int) -> bytes:
    """Return ``ceil(size / 8)`` bytes with one bit per number below ``size``, unset if missing."""
    here = np.ones(size, np.uint8)
    here[list(missing)] = 0
    return np.packbits(here, bitorder="little").tobytes()


def missing_in(bitmap: bytes | bytearray | memoryview, size: int) -> list[int]:
    """Return the numbers below ``size`` that ``bitmap`` lacks, ascending.

    Raises:
        ValueError: the bitmap does not have the length that ``size`` requires.
    """
    packed = np.frombuffer(bitmap, np.uint8)
    if len(packed) != (size + 7) // 8:
        raise ValueError(f"a bitmap of {len(packed)} bytes does not fit {size} segments")
    flags = np.unpackbits(packed, count=size, bitorder="little")
    return [int(index) for index in np.flatnonzero(flags == 0)]
