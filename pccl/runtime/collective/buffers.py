"""Memory for segments that cannot be read straight into their place; used again and again.

At most one segment per lane is arriving, so a few buffers are enough; fresh memory for each would
cost a page fault for every page.
"""

from __future__ import annotations

KEPT_MAX = 8


class Buffers:
    """Buffers of one I/O thread."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, nbytes: int) -> memoryview:
        """A buffer of exactly so many bytes, with undefined content."""
        for number in range(len(self._free) - 1, -1, -1):
            if len(self._free[number]) >= nbytes:
                return memoryview(self._free.pop(number))[:nbytes]
        return memoryview(bytearray(nbytes))

    def give(self, buffer: memoryview) -> None:
        """Give back what nobody uses any more; one that never comes back is only garbage."""
        memory = buffer.obj
        assert isinstance(memory, bytearray)
        self._free.append(memory)
        if len(self._free) > KEPT_MAX:
            del self._free[min(range(len(self._free)), key=lambda n: len(self._free[n]))]
