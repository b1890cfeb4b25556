"""Which pieces are missing, free and rare: sets that are searched and joined by the thousand.

A *slot* is a piece's place in the order in which one member asks for pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

_SHIFT = 10
_BLOCK = 1 << _SHIFT
_MASK = _BLOCK - 1
_BITS = tuple(1 << bit for bit in range(_BLOCK))


def ones(bits: int) -> Iterator[int]:
    """The places of the ones, ascending."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


class SlotSet:
    """A set of numbers below ``count``, ascending: bits in blocks of 1024, and a summary of those.

    One block of two sets is joined at once; up to a million numbers the summary is no longer than
    a block, so to find the first one takes a few operations on small integers.

    Attributes:
        blocks: the bits.
        summary: bit *i* tells whether block *i* has any.
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
        """Put it in."""
        block = slot >> _SHIFT
        self.blocks[block] |= _BITS[slot & _MASK]
        self.summary |= 1 << block

    def discard(self, slot: int) -> None:
        """Take it out, if it is in."""
        block = slot >> _SHIFT
        bits = self.blocks[block]
        bit = _BITS[slot & _MASK]
        if bits & bit:
            bits ^= bit
            self.blocks[block] = bits
            if not bits:
                self.summary ^= 1 << block

    def put(self, block: int, bits: int) -> None:
        """Replace a block."""
        self.blocks[block] = bits
        if bits:
            self.summary |= 1 << block
        elif self.summary >> block & 1:
            self.summary ^= 1 << block

    def first(self) -> int | None:
        """The smallest one."""
        summary = self.summary
        if not summary:
            return None
        block = (summary & -summary).bit_length() - 1
        bits = self.blocks[block]
        return (block << _SHIFT) + (bits & -bits).bit_length() - 1

    def first_shared(self, other: SlotSet, alive: SlotSet) -> int | None:
        """The smallest one that is in ``other``, too.

        What of ``other`` is not in ``alive`` either is forgotten on the way, so that no block is
        looked at again for nothing.
        """
        for block in ones(self.summary & other.summary):
            bits = self.blocks[block] & other.blocks[block]
            if bits:
                return first_of(block, bits)
            other.put(block, other.blocks[block] & alive.blocks[block])
        return None


def block_of(slot: int) -> int:
    """Where the bit of a number is."""
    return slot >> _SHIFT


def first_of(block: int, bits: int) -> int:
    """The smallest number in a block with these bits, at least one."""
    return (block << _SHIFT) + (bits & -bits).bit_length() - 1


def union(sets: Iterable[SlotSet | None], block: int) -> int:
    """What any of them has in a block; None: everything."""
    bits = 0
    for each in sets:
        bits |= -1 if each is None else each.blocks[block]
    return bits


class Board:
    """What is left to do.

    Attributes:
        sizes: bytes of each slot.
        wanted: what is missing.
        free: what of it nobody is on.
        rare: what of that no other member that fetches has.
        missing: how many are missing.
        free_bytes: of those that are free.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        count = len(sizes)
        self.sizes = sizes
        self.wanted = SlotSet(count, full=True)
        self.free = SlotSet(count, full=True)
        self.rare = SlotSet(count, full=True)
        self._common = SlotSet(count)
        """Bits of slots that are not wanted mean nothing."""
        self.missing = count
        self.free_bytes = sum(sizes)

    def release(self, slot: int) -> None:
        """Nobody is on it any more."""
        if slot not in self.free:
            self.free.add(slot)
            self.free_bytes += self.sizes[slot]
            if slot not in self._common:
                self.rare.add(slot)

    def occupy(self, slot: int) -> None:
        """Somebody is on it."""
        if slot in self.free:
            self.free.discard(slot)
            self.free_bytes -= self.sizes[slot]
            self.rare.discard(slot)

    def done(self, slot: int) -> None:
        """It is missing no longer."""
        self.occupy(slot)
        self.wanted.discard(slot)
        self.missing -= 1

    def spread(self, slot: int) -> None:
        """Another one that fetches has it now."""
        self._common.add(slot)
        self.rare.discard(slot)

    def weigh(self, blocks: Iterable[int], held: Sequence[SlotSet | None]) -> None:
        """Look again in these blocks what others that fetch have.

        Args:
            blocks: numbers of blocks.
            held: what each of the others has.
        """
        for block in blocks:
            common = union(held, block)
            self._common.put(block, common)
            self.rare.put(block, self.free.blocks[block] & ~common)
