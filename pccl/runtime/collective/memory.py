"""``Memory``: arrays that lie anywhere, as if they were one.

A collective speaks of ranges of bytes of one long tensor. Of a single array that is what they are;
of a list they are ranges of its concatenation, which exists nowhere: a range is a list of views.
Nothing here knows of segments, and segments know nothing of where one array ends and the next one
begins: what the members split in different ways is still the same tensor.

Many small parts cost more one by one than what is in them, so such ranges are told apart
(:meth:`Memory.is_shredded`): they travel through a buffer of their own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from ctypes import addressof, c_char
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.transports.outgoing import Payload

Array = npt.NDArray[Any]

PART_BYTES_MIN = 32 << 10
"""Smaller parts, on the average of a range, are gathered and scattered: a part costs a read, a
place in a write and arithmetic of its own, which for so little is more than copies in cache are."""


_one_byte = c_char.from_buffer
"""Four times as fast as the array's own ``ctypes.data``, where memory can be written."""


class Memory:
    """Consecutive parts.

    Args:
        parts: arrays of shape (n,) and of one dtype, none of them empty, at least one; or one that
            is empty.
    """

    def __init__(self, parts: Sequence[Array]) -> None:
        self.parts = tuple(parts)
        self.dtype: np.dtype[Any] = self.parts[0].dtype
        self._itemsize = self.dtype.itemsize
        self._views = [part.view(np.uint8).data for part in self.parts]
        ends = list(accumulate(map(len, self._views)))
        self._starts = [0, *ends[:-1]]
        self.nbytes = ends[-1]
        self._first = self._views[0]
        self.is_one = len(self.parts) == 1
        """Whether every range is in one piece."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.nbytes // self._itemsize

    @cached_property
    def addresses(self) -> list[int]:
        """Of the first byte of each part."""
        return [
            addressof(_one_byte(view)) if not view.readonly and view.nbytes else part.ctypes.data
            for view, part in zip(self._views, self.parts, strict=True)
        ]

    def copy(self) -> Array:
        """All elements, in an array of their own, shape (n,)."""
        return np.concatenate(self.parts)

    # -- ranges: of bytes, none of them empty --------------------------------------------------

    def views(self, first: int, last: int) -> list[memoryview]:
        """The bytes from ``first`` to before ``last``, part by part."""
        if self.is_one:
            return [self._first[first:last]]
        starts = self._starts
        low, high = bisect_right(starts, first) - 1, bisect_left(starts, last)
        found = self._views[low:high]
        found[-1] = found[-1][: last - starts[high - 1]]
        found[0] = found[0][first - starts[low] :]
        return found

    def beginning(self, first: int, last: int) -> memoryview:
        """Of the same bytes those that are in the first part."""
        if self.is_one:
            return self._first[first:last]
        index = bisect_right(self._starts, first) - 1
        start = self._starts[index]
        return self._views[index][first - start : last - start]

    def whole(self, first: int, last: int) -> Array | None:
        """The elements there as one array of shape (n,); None if several parts have them."""
        views = self.views(first, last)
        return np.frombuffer(views[0], self.dtype) if len(views) == 1 else None

    def elements(self, first: int, last: int) -> Array:
        """The elements there; a copy if several parts have them."""
        if self.is_one:
            return self.parts[0][first // self._itemsize : last // self._itemsize]
        return np.frombuffer(self.read(first, last), self.dtype)

    def arrays(self, first: int, last: int) -> list[Array]:
        """The elements there, part by part."""
        if self.is_one:
            return [self.parts[0][first // self._itemsize : last // self._itemsize]]
        return [np.frombuffer(view, self.dtype) for view in self.views(first, last)]

    def is_shredded(self, first: int, last: int) -> bool:
        """Whether the range is made of many small parts."""
        if self.is_one:
            return False
        starts = self._starts
        count = bisect_left(starts, last) - bisect_right(starts, first) + 1
        return count > 1 and last - first < count * PART_BYTES_MIN

    def payload(self, first: int, last: int) -> Payload:
        """The same bytes, to be sent: views, unless they are gathered when it is their turn."""
        if self.is_one:
            return self._first[first:last]
        if self.is_shredded(first, last):
            return partial(self.read, first, last)
        views = self.views(first, last)
        return views[0] if len(views) == 1 else views

    def read(self, first: int, last: int) -> memoryview:
        """The same bytes in one piece; a copy if several parts have them."""
        views = self.views(first, last)
        return views[0] if len(views) == 1 else memoryview(bytearray().join(views))

    def write(self, first: int, data: memoryview | bytes | Array) -> None:
        """Put bytes there."""
        source = data.view(np.uint8).data if isinstance(data, np.ndarray) else memoryview(data)
        at = 0
        for view in self.views(first, first + len(source)):
            end = at + len(view)
            view[:] = source[at:end]
            at = end


def cut(arrays: list[Array], like: Sequence[Array]) -> list[Array]:
    """The parts of ``arrays`` that belong to those of ``like``, which has as many elements.

    Args:
        arrays: one, or as many as ``like``, and as long.
        like: at least one.
    """
    if len(arrays) == len(like):
        return arrays
    (values,) = arrays
    ends = accumulate(map(len, like))
    return [values[end - len(part) : end] for part, end in zip(like, ends, strict=True)]


Range = tuple[int, int, bool, str]
"""Addresses of the first byte and of the byte behind it, whether it is written, and its name."""


def ranges_of(memory: Memory, name: str, *, written: bool) -> list[Range]:
    """Where the parts of ``memory`` are."""
    return [
        (start, start + part.nbytes, written, name)
        for start, part in zip(memory.addresses, memory.parts, strict=True)
    ]


class LentRanges:
    """Ranges that are in use, of which new ones are asked whether they may be used besides.

    What is only read may overlap, so ranges are no set of intervals that follow each other. A range
    overlaps as many of them as begin before its end, less those that end before its beginning.
    """

    def __init__(self) -> None:
        self._all: tuple[list[int], list[int]] = ([], [])
        """First bytes, and the bytes behind; each ascending."""
        self._written: tuple[list[int], list[int]] = ([], [])

    def __len__(self) -> int:
        return len(self._all[0])

    def add(self, ranges: Iterable[Range]) -> None:
        """These are in use from now on."""
        for start, stop, written, _ in ranges:
            for starts, stops in (self._all, self._written)[: 1 + written if start < stop else 0]:
                insort(starts, start)
                insort(stops, stop)

    def remove(self, ranges: Iterable[Range]) -> None:
        """These, which were added, are no longer in use."""
        for start, stop, written, _ in ranges:
            for starts, stops in (self._all, self._written)[: 1 + written if start < stop else 0]:
                del starts[bisect_left(starts, start)]
                del stops[bisect_left(stops, stop)]

    def clash(self, ranges: Iterable[Range]) -> bool:
        """Whether one of the two would write what the other one uses."""
        for start, stop, written, _ in ranges:
            starts, stops = self._all if written else self._written
            if start < stop and bisect_left(starts, stop) > bisect_right(stops, start):
                return True
        return False


def clash(ranges: Iterable[Range]) -> tuple[str, str] | None:
    """The names of two ranges of which one would write what the other one uses, if there are two.

    What is only read may overlap.
    """
    end = end_written = 0  # of what reaches furthest: of all, of what is written
    last = last_written = ""
    for start, stop, written, name in sorted(ranges):
        if start < (end if written else end_written) and start < stop:
            return (last if written else last_written), name
        if stop > end:
            end, last = stop, name
        if written and stop > end_written:
            end_written, last_written = stop, name
    return None
