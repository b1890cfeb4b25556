"""The layout of a shared state: its tensors in order, cut into pieces.

Pieces are numbered through all tensors in order. No piece has bytes of two tensors. A tensor
without elements has none.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import PIECE_BYTES

_HEAD = struct.Struct("<IBQ?")
"""Of a packed entry: length of the name, dtype, count, may differ; the name follows."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a shared state.

    Attributes:
        name: the same on all members.
        dtype: of its elements.
        count: how many they are; 0 is fine.
        may_differ: members may hold different values.
    """

    name: str
    dtype: DataType
    count: int
    may_differ: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    def __str__(self) -> str:
        differs = ", allow_content_inequality" if self.may_differ else ""
        return f"{self.name!r} ({self.count} x {self.dtype.label}{differs})"


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a piece is.

    Attributes:
        number: among all pieces of the state.
        entry: index of its tensor.
        offset: of its first byte in the tensor.
        length: in bytes, at least 1.
    """

    number: int
    entry: int
    offset: int
    length: int


class StateLayout:
    """The tensors of a shared state and their pieces.

    Args:
        entries: in the order in which the program gives them.
        piece_bytes: size of all pieces but the last one of each tensor; all members must agree.
    """

    def __init__(self, entries: Iterable[Entry], piece_bytes: int = PIECE_BYTES) -> None:
        self.entries = tuple(entries)
        self.piece_bytes = piece_bytes
        counts = (-(-entry.nbytes // piece_bytes) for entry in self.entries)
        self._firsts = [0, *accumulate(counts)]

    @property
    def piece_count(self) -> int:
        """Of all tensors."""
        return self._firsts[-1]

    @cached_property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    def piece(self, number: int) -> Piece:
        """The piece of that number.

        Raises:
            IndexError: there is none.
        """
        if not 0 <= number < self.piece_count:
            raise IndexError(f"piece {number} of {self.piece_count}")
        index = bisect_right(self._firsts, number) - 1
        offset = (number - self._firsts[index]) * self.piece_bytes
        length = min(self.piece_bytes, self.entries[index].nbytes - offset)
        return Piece(number, index, offset, length)

    def bytes_of(self, numbers: Iterable[int]) -> int:
        """Of so many pieces together."""
        return sum(self.piece(number).length for number in numbers)

    def pieces(self, entry: int) -> range:
        """The numbers of the pieces of one tensor."""
        return range(self._firsts[entry], self._firsts[entry + 1])

    def pack(self) -> bytes:
        """All that there is to know of it, as bytes."""
        return b"".join(
            _HEAD.pack(len(name), entry.dtype, entry.count, entry.may_differ) + name
            for entry in self.entries
            for name in (entry.name.encode(),)
        )

    @staticmethod
    def unpack(packed: bytes | bytearray) -> StateLayout:
        """The layout that was packed.

        Raises:
            ValueError: none was.
        """
        entries: list[Entry] = []
        at = 0
        try:
            while at < len(packed):
                length, dtype, count, may_differ = _HEAD.unpack_from(packed, at)
                name = bytes(packed[at + _HEAD.size : at + _HEAD.size + length])
                if len(name) < length:
                    raise ValueError("it ends within a name")
                entries.append(Entry(name.decode(), DataType(dtype), count, may_differ))
                at += _HEAD.size + length
        except (struct.error, ValueError) as error:
            raise ValueError(f"not a packed layout: {error}") from None
        return StateLayout(entries)

    def numbers(self, *, may_differ: bool) -> Iterator[int]:
        """The numbers of all pieces whose tensors may differ, or of all others."""
        for index, entry in enumerate(self.entries):
            if entry.may_differ is may_differ:
                yield from self.pieces(index)
