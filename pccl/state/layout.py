"""The layout of a shared state: its tensors in order, cut into pieces.

Pieces are numbered through all tensors in order. No piece has bytes of two tensors. A tensor
without elements has no pieces.
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
"""Head of a packed entry: length of the name, dtype, count, may differ. The name follows it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a shared state.

    Attributes:
        name: name of the tensor, the same on all members.
        dtype: type of its elements.
        count: number of its elements, 0 or more.
        may_differ: whether members may hold different values.
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
    """The place of one piece in the state.

    Attributes:
        number: its number among all pieces of the state.
        entry: index of its tensor.
        offset: offset of its first byte in the tensor.
        length: length in bytes, at least 1.
    """

    number: int
    entry: int
    offset: int
    length: int


class StateLayout:
    """The tensors of a shared state and their pieces.

    Args:
        entries: the tensors, in the order of the program.
        piece_bytes: bytes of each piece, except the last of a tensor; all members must agree.
    """

    def __init__(self, entries: Iterable[Entry], piece_bytes: int = PIECE_BYTES) -> None:
        self.entries = tuple(entries)
        self.piece_bytes = piece_bytes
        counts = (-(-entry.nbytes // piece_bytes) for entry in self.entries)
        self._firsts = [0, *accumulate(counts)]

    @property
    def piece_count(self) -> int:
        """Number of pieces of all tensors."""
        return self._firsts[-1]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    def piece(self, number: int) -> Piece:
        """Return the place of a piece.

        Raises:
            IndexError: the state has no piece of this number.
        """
        if not 0 <= number < self.piece_count:
            raise IndexError(f"the state has {self.piece_count} pieces, but no piece {number}")
        index = bisect_right(self._firsts, number) - 1
        offset = (number - self._firsts[index]) * self.piece_bytes
        length = min(self.piece_bytes, self.entries[index].nbytes - offset)
        return Piece(number, index, offset, length)

    def bytes_of(self, numbers: Iterable[int]) -> int:
        """Return the total size of these pieces in bytes."""
        return sum(self.piece(number).length for number in numbers)

    def pieces(self, entry: int) -> range:
        """Return the numbers of the pieces of one tensor."""
        return range(self._firsts[entry], self._firsts[entry + 1])

    def pack(self) -> bytes:
        """Encode the entries; ``piece_bytes`` is not included."""
        return b"".join(
            _HEAD.pack(len(name), entry.dtype, entry.count, entry.may_differ) + name
            for entry in self.entries
            for name in (entry.name.encode(),)
        )

    @staticmethod
    def unpack(packed: bytes | bytearray) -> StateLayout:
        """Decode a layout of pieces of ``PIECE_BYTES``.

        Raises:
            ValueError: ``packed`` is malformed.
        """
        entries: list[Entry] = []
        at = 0
        try:
            while at < len(packed):
                length, dtype, count, may_differ = _HEAD.unpack_from(packed, at)
                name = bytes(packed[at + _HEAD.size : at + _HEAD.size + length])
                if len(name) < length:
                    raise ValueError("the name of a tensor is truncated")
                entries.append(Entry(name.decode(), DataType(dtype), count, may_differ))
                at += _HEAD.size + length
        except (struct.error, ValueError) as error:
            raise ValueError(f"malformed layout: {error}") from None
        return StateLayout(entries)

    def numbers(self, *, may_differ: bool) -> Iterator[int]:
        """Yield the numbers of all pieces whose tensors may differ, or of all that must not."""
        for index, entry in enumerate(self.entries):
            if entry.may_differ is may_differ:
                yield from self.pieces(index)
