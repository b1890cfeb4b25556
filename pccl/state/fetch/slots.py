"""The sets of missing, free and rare pieces, which are fast to search and to combine.

A *slot* is a piece's place in the order in which one member asks for pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

_SHIFT = 10
_BLOCK = 1 << _SHIFT
_MASK = _BLOCK - 1
_BITS = tuple(1 << bit for bit in range(_BLOCK))


def ones(bits: int) -> Iterator[int]:
    """Yield the positions of the one bits, ascending."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


class SlotSet:
    """A set of numbers below ``count``: bits in blocks of 1024, and a summary of the blocks.

    One operation combines a block of two sets. Up to a million numbers, the summary is no longer
    than a block. So finding the first number takes a few operations on small integers.

    Attributes:
        blocks: the bits.
        summary: bit *i* is 1 if block *i* is not empty.
    """

    __slots__ = ("blocks", "summary")

    def __init__(self, count: int, *, full: bool = False) -> None:
        whole, rest = divmod(count, _BLOCK)
        self.blocks = [(1 << _BLOCK) - 1] * whole + ([(1 << rest) - 1] if rest else [])
        self.summary = (1 << len(self.blocks)) - 1
        if not full:
            self.blocks = [0] * len(self.blocks)
            self.summary = 0

    def __contains__(self, slot: int) -> bool:
        return self.blocks[slot >> _SHIFT] & _BITS[slot & _MASK] != 0

    def add(self, slot: int) -> None:
        """Add ``slot`` to the set."""
        block = slot >> _SHIFT
        self.blocks[block] |= _BITS[slot & _MASK]
        self.summary |= 1 << block

    def discard(self, slot: int) -> None:
        """Remove ``slot`` from the set, if it is there."""
        block = slot >> _SHIFT
        bits = self.blocks[block]
        bit = _BITS[slot & _MASK]
        if bits & bit:
            bits ^= bit
            self.blocks[block] = bits
            if not bits:
                self.summary ^= 1 << block

    def put(self, block: int, bits: int) -> None:
        """Replace the bits of a block."""
        self.blocks[block] = bits
        if bits:
            self.summary |= 1 << block
        elif self.summary >> block & 1:
            self.summary ^= 1 << block

    def first(self) -> int | None:
        """Return the smallest number; None: the set is empty."""
        summary = self.summary
        if not summary:
            return None
        block = (summary & -summary).bit_length() - 1
        bits = self.blocks[block]
        return (block << _SHIFT) + (bits & -bits).bit_length() - 1

    def first_shared(self, other: SlotSet, alive: SlotSet) -> int | None:
        """Return the smallest number that is also in ``other``; None: there is none.

        In blocks without a common number, it removes from ``other`` the numbers that are not in
        ``alive``. So later calls may skip such blocks.
        """
        for block in ones(self.summary & other.summary):
            bits = self.blocks[block] & other.blocks[block]
            if bits:
                return first_of(block, bits)
            other.put(block, other.blocks[block] & alive.blocks[block])
        return None


def block_of(slot: int) -> int:
    """Return the block that holds the bit of a number."""
    return slot >> _SHIFT


def first_of(block: int, bits: int) -> int:
    """Return the smallest number in a block with these bits, of which at least one is 1."""
    return (block << _SHIFT) + (bits & -bits).bit_length() - 1


def union(sets: Iterable[SlotSet | None], block: int) -> int:
    """Return the bits of a block that any of the sets has. None stands for a set of all numbers."""
    bits = 0
    for each in sets:
        bits |= -1 if each is None else each.blocks[block]
    return bits


class Board:
    """The missing pieces, and which of them to request next.

    Attributes:
        sizes: bytes of each slot.
        wanted: slots that are missing.
        free: wanted slots that no source is expected to send.
        rare: free slots that no other fetcher has.
        missing: number of wanted slots.
        free_bytes: bytes of the free slots.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        count = len(sizes)
        self.sizes = sizes
        self.wanted = SlotSet(count, full=True)
        self.free = SlotSet(count, full=True)
        self.rare = SlotSet(count, full=True)
        self._common = SlotSet(count)
        """Slots that other fetchers have; bits of slots that are not wanted are undefined."""
        self.missing = count
        self.free_bytes = sum(sizes)

    def release(self, slot: int) -> None:
        """Make ``slot`` free, because no source is expected to send it."""
        if slot not in self.free:
            self.free.add(slot)
            self.free_bytes += self.sizes[slot]
            if slot not in self._common:
                self.rare.add(slot)

    def occupy(self, slot: int) -> None:
        """Remove ``slot`` from the free slots, because a source is expected to send it."""
        if slot in self.free:
            self.free.discard(slot)
            self.free_bytes -= self.sizes[slot]
            self.rare.discard(slot)

    def done(self, slot: int) -> None:
        """Record that the piece of ``slot`` has arrived."""
        self.occupy(slot)
        self.wanted.discard(slot)
        self.missing -= 1

    def spread(self, slot: int) -> None:
        """Record that another fetcher has ``slot``, so that it is no longer rare."""
        self._common.add(slot)
        self.rare.discard(slot)

    def weigh(self, blocks: Iterable[int], held: Sequence[SlotSet | None]) -> None:
        """Compute again which slots of these blocks are rare.

        Args:
            blocks: numbers of blocks.
            held: slots of each other fetcher; None: all.
        """
        for block in blocks:
            common = union(held, block)
            self._common.put(block, common)
            self.rare.put(block, self.free.blocks[block] & ~common)
