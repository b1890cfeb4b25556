"""Reusable memory, because new memory costs one page fault per page.

* ``Buffers``: for segments that cannot be read straight into their place. At most one segment per
  lane arrives at a time, so a few buffers are enough.
* ``Backups``: for the input of collectives that work in place.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

KEPT_MAX = 8
KEPT_BYTES_MAX = 8 << 20
"""Number and size of the buffers that a pool keeps."""


class Buffers:
    """A pool of buffers for one I/O thread."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        """Unused buffers; the last one was given back last."""
        self._free_bytes = 0

    def take(self, nbytes: int) -> memoryview:
        """Return a buffer of exactly ``nbytes`` bytes, with undefined content."""
        for number in range(len(self._free) - 1, -1, -1):
            if len(self._free[number]) >= nbytes:
                self._free_bytes -= len(self._free[number])
                return memoryview(self._free.pop(number))[:nbytes]
        return memoryview(bytearray(nbytes))

    def give(self, buffer: memoryview) -> None:
        """Put an unused buffer into the pool. A buffer that never comes back is only garbage."""
        memory = buffer.obj
        assert isinstance(memory, bytearray)
        self._free.append(memory)
        self._free_bytes += len(memory)
        while len(self._free) > KEPT_MAX or self._free_bytes > KEPT_BYTES_MAX:
            self._free_bytes -= len(self._free.pop(0))


BACKUP_BYTES_MIN = 128 << 10
"""Smaller backups are not kept: the allocator keeps their memory itself."""

BACKUPS_BYTES_MAX = 256 << 20
"""Memory that backups keep between calls."""


class Backups:
    """Arrays for the inputs of calls in place. Any thread may take one; nobody gives them back.

    A kept block is free while nothing else refers to it. Arrays and views on a block refer to it,
    so no memory is used twice at the same time.

    Args:
        bytes_max: memory to keep.
    """

    def __init__(self, bytes_max: int = BACKUPS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._blocks: dict[int, npt.NDArray[np.uint8]] = {}
        """The kept blocks by number, the oldest first."""
        self._last = 0
        block = np.empty(1, np.uint8)
        self._references_if_free = self._references(block)

    def take(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array of ``count`` elements with undefined values."""
        nbytes = count * dtype.itemsize
        if not BACKUP_BYTES_MIN <= nbytes <= self._bytes_max:
            return np.empty(count, dtype)
        for number in list(self._blocks):
            block = self._blocks.pop(number, None)  # now no other thread can take it
            if block is None:
                continue
            is_free = self._references(block) == self._references_if_free
            array = block[:nbytes].view(dtype) if is_free and len(block) >= nbytes else None
            self._blocks[number] = block
            if array is not None:
                return array
        self._last += 1
        block = self._blocks[self._last] = np.empty(nbytes, np.uint8)
        while sum(map(len, self._blocks.copy().values())) > self._bytes_max:
            self._blocks.pop(next(iter(self._blocks.copy())), None)  # in use or not
        return block.view(dtype)

    def _references(self, block: npt.NDArray[np.uint8]) -> int:
        return sys.getrefcount(block)
