"""Which of the expected segments are missing, as a bitmap that travels.

After a lane was lost the receiver says so what is here, and the sender repeats only what is missing
of what it had given to that lane. One bit per expected segment, set if it is here, lowest bit of
the first byte first.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np


def to_bitmap(missing: Collection[int], size: int) -> bytes:
    """All of ``0 .. size - 1`` but those that are ``missing``, as ``ceil(size / 8)`` bytes."""
    here = np.ones(size, np.uint8)
    here[list(missing)] = 0
    return np.packbits(here, bitorder="little").tobytes()


def missing_in(bitmap: bytes | bytearray | memoryview, size: int) -> list[int]:
    """The numbers below ``size`` that ``bitmap`` lacks, ascending.

    Raises:
        ValueError: the bitmap has not exactly the length that ``size`` demands.
    """
    packed = np.frombuffer(bitmap, np.uint8)
    if len(packed) != (size + 7) // 8:
        raise ValueError(f"bitmap of {len(packed)} bytes for {size} segments")
    flags = np.unpackbits(packed, count=size, bitorder="little")
    return [int(index) for index in np.flatnonzero(flags == 0)]
