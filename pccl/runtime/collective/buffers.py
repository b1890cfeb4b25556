"""Reusable memory for segments that cannot be read straight into their place.

At most one segment per lane arrives at a time, so a few buffers are enough. New memory for each
segment would cost one page fault per page.
"""

from __future__ import annotations

KEPT_MAX = 8


class Buffers:
    """A pool of buffers for one I/O thread."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, nbytes: int) -> memoryview:
        """Return a buffer of exactly ``nbytes`` bytes, with undefined content."""
        for number in range(len(self._free) - 1, -1, -1):
            if len(self._free[number]) >= nbytes:
                return memoryview(self._free.pop(number))[:nbytes]
        return memoryview(bytearray(nbytes))

    def give(self, buffer: memoryview) -> None:
        """Put an unused buffer into the pool. A buffer that never comes back is only garbage."""
        memory = buffer.obj
        assert isinstance(memory, bytearray)
        self._free.append(memory)
        if len(self._free) > KEPT_MAX:
            del self._free[min(range(len(self._free)), key=lambda n: len(self._free[n]))]
