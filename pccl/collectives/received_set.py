"""Which of the expected segments are here: each counts exactly once, and the set can travel.

After a lane was lost the receiver sends this set as a bitmap, and the sender repeats only what is
missing. One bit per expected segment, lowest bit of the first byte first.
"""

from __future__ import annotations

import numpy as np


class ReceivedSet:
    """A set of the numbers ``0 .. size - 1``."""

    def __init__(self, size: int) -> None:
        self._flags = bytearray(size)
        self.missing = size

    def __contains__(self, index: int) -> bool:
        return self._flags[index] == 1

    def __len__(self) -> int:
        return len(self._flags) - self.missing

    def add(self, index: int) -> bool:
        """Add ``index``; return False if it was there already (a second copy)."""
        if self._flags[index]:
            return False
        self._flags[index] = 1
        self.missing -= 1
        return True

    def to_bitmap(self) -> bytes:
        """The set as ``ceil(size / 8)`` bytes."""
        return np.packbits(np.frombuffer(self._flags, np.uint8), bitorder="little").tobytes()

    @staticmethod
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
