"""``Memory``: separate arrays, addressed as one tensor.

A collective addresses ranges of bytes of one long tensor. For a list of arrays, the tensor is their
concatenation, which is never built: a range is a list of views. Segments do not depend on where one
array ends and the next one begins, so members may split the same tensor in different ways.

Handling many small parts one by one costs more than copying them. :meth:`Memory.is_shredded` finds
ranges of small parts, which travel through a separate buffer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from ctypes import addressof, c_char
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.transports.outgoing import Payload

Array = npt.NDArray[Any]

PART_BYTES_MIN = 32 << 10
"""A range whose parts are smaller on average is gathered and scattered. Each part costs a read, an
entry in a write and its own arithmetic, which for small parts costs more than a copy in cache."""


_one_byte = c_char.from_buffer
"""Finds the address of writable memory, four times as fast as the array's ``ctypes.data``."""


class Memory:
    """Arrays that a collective addresses as one tensor, in the given order.

    Args:
        parts: non-empty arrays of shape (n,) and of one dtype, at least one; or a single empty
            array.
        start: the byte of the tensor at which the first part begins; the memory has no others.
    """

    def __init__(self, parts: Sequence[Array], start: int = 0) -> None:
        self.parts = tuple(parts)
        self.dtype: np.dtype[Any] = self.parts[0].dtype
        self._itemsize = self.dtype.itemsize
        self._views: list[memoryview] = []
        self._starts: list[int] = []
        self.nbytes = 0
        self.addresses: list[int] = []
        """Address of the first byte of each part."""
        for part in self.parts:
            view = part.view(np.uint8).data
            is_quick = not view.readonly and view.nbytes
            address = addressof(_one_byte(view)) if is_quick else part.ctypes.data
            self.addresses.append(address)
            self._views.append(view)
            self._starts.append(start + self.nbytes)
            self.nbytes += view.nbytes
        self.size = self.nbytes // self._itemsize
        """Number of elements."""
        self.first = self._views[0]
        """Bytes of the first part."""
        self.start = start
        self.is_one = len(self.parts) == 1 and not start
        """Whether one part holds the whole tensor, so that every range is a slice of it."""

    def copy(self) -> Array:
        """Return all elements in a new array of shape (n,)."""
        return np.concatenate(self.parts)

    # -- ranges of bytes, none of them empty ---------------------------------------------------

    def views(self, first: int, last: int) -> list[memoryview]:
        """Return the bytes from ``first`` to before ``last``, one view per part."""
        if self.is_one:
            return [self.first[first:last]]
        starts = self._starts
        low, high = bisect_right(starts, first) - 1, bisect_left(starts, last)
        found = self._views[low:high]
        found[-1] = found[-1][: last - starts[high - 1]]
        found[0] = found[0][first - starts[low] :]
        return found

    def beginning(self, first: int, last: int) -> memoryview:
        """Return a view of the bytes of a range that lie in its first part."""
        if self.is_one:
            return self.first[first:last]
        index = bisect_right(self._starts, first) - 1
        start = self._starts[index]
        return self._views[index][first - start : last - start]

    def whole(self, first: int, last: int) -> Array | None:
        """Return the elements of a range as one array of shape (n,); None if in several parts."""
        views = self.views(first, last)
        return np.frombuffer(views[0], self.dtype) if len(views) == 1 else None

    def elements(self, first: int, last: int) -> Array:
        """Return the elements of a range, shape (n,); a copy if several parts hold them."""
        if self.is_one:
            return self.parts[0][first // self._itemsize : last // self._itemsize]
        return np.frombuffer(self.read(first, last), self.dtype)

    def arrays(self, first: int, last: int) -> list[Array]:
        """Return the elements of a range, one array per part."""
        if self.is_one:
            return [self.parts[0][first // self._itemsize : last // self._itemsize]]
        return [np.frombuffer(view, self.dtype) for view in self.views(first, last)]

    def is_shredded(self, first: int, last: int) -> bool:
        """Whether the range consists of many small parts."""
        if self.is_one:
            return False
        starts = self._starts
        count = bisect_left(starts, last) - bisect_right(starts, first) + 1
        return count > 1 and last - first < count * PART_BYTES_MIN

    def payload(self, first: int, last: int) -> Payload:
        """Return the bytes of a range to send: views, or a function that gathers small parts."""
        if self.is_one:
            return self.first[first:last]
        if self.is_shredded(first, last):
            return partial(self.read, first, last)
        views = self.views(first, last)
        return views[0] if len(views) == 1 else views

    def read(self, first: int, last: int) -> memoryview:
        """Return the bytes of a range in one piece; a copy if several parts hold them."""
        views = self.views(first, last)
        return views[0] if len(views) == 1 else memoryview(bytearray().join(views))

    def write(self, first: int, data: memoryview | bytes | Array) -> None:
        """Copy ``data`` into the memory, from byte ``first`` on."""
        source = data.view(np.uint8).data if isinstance(data, np.ndarray) else memoryview(data)
        at = 0
        for view in self.views(first, first + len(source)):
            end = at + len(view)
            view[:] = source[at:end]
            at = end


def cut(arrays: list[Array], like: Sequence[Array]) -> list[Array]:
    """Return ``arrays``, split into the lengths of ``like``.

    Args:
        arrays: one array with as many elements as ``like``, or arrays of the same lengths.
        like: at least one array.
    """
    if len(arrays) == len(like):
        return arrays
    (values,) = arrays
    ends = accumulate(map(len, like))
    return [values[end - len(part) : end] for part, end in zip(like, ends, strict=True)]


Range = tuple[int, int, bool, str]
"""Address of the first byte, address after the last byte, whether it is written, and a name."""


class LentRanges:
    """Address ranges in use, with a check of whether new ranges conflict with them.

    Ranges that are only read may overlap, so this is no set of disjoint intervals. The number of
    overlaps of a range is the number of ranges that begin before its end, minus those that end
    before its beginning.
    """

    def __init__(self) -> None:
        self._all: tuple[list[int], list[int]] = ([], [])
        """First addresses, and addresses after the last byte; both lists ascend."""
        self._written: tuple[list[int], list[int]] = ([], [])

    def __len__(self) -> int:
        return len(self._all[0])

    def add(self, ranges: Iterable[Range]) -> None:
        """Add ranges, which are in use from now on."""
        for start, stop, written, _ in ranges:
            for starts, stops in (self._all, self._written)[: 1 + written if start < stop else 0]:
                insort(starts, start)
                insort(stops, stop)

    def remove(self, ranges: Iterable[Range]) -> None:
        """Remove ranges that were added and are no longer in use."""
        for start, stop, written, _ in ranges:
            for starts, stops in (self._all, self._written)[: 1 + written if start < stop else 0]:
                del starts[bisect_left(starts, start)]
                del stops[bisect_left(stops, stop)]

    def clash(self, ranges: Iterable[Range]) -> bool:
        """Whether one of ``ranges`` overlaps a range in use, and either of the two is written."""
        for start, stop, written, _ in ranges:
            starts, stops = self._all if written else self._written
            if start < stop and bisect_left(starts, stop) > bisect_right(stops, start):
                return True
        return False


def clash(ranges: Iterable[Range]) -> tuple[str, str] | None:
    """Return the names of two overlapping ranges of which one is written; None if there are none.

    Ranges that are only read may overlap.
    """
    end = end_written = 0  # furthest end so far: of all ranges, and of written ones
    last = last_written = ""
    for start, stop, written, name in sorted(ranges):
        if start < (end if written else end_written) and start < stop:
            return (last if written else last_written), name
        if stop > end:
            end, last = stop, name
        if written and stop > end_written:
            end_written, last_written = stop, name
    return None
