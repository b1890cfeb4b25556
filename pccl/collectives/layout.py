"""How a tensor splits: into one chunk per rank, and each chunk into segments.

The first ``count mod world_size`` chunks are one element longer, as in PCCL. With fewer elements
than ranks the later chunks are empty. The chunks of a mesh may also follow the shares of its
members. A segment has at most ``segment_bytes`` bytes, and never
splits an element. All members compute the same layout from the same descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate

SEGMENT_BYTES_MIN = 128 << 10
SEGMENT_BYTES_MAX = 896 << 10
"""Large enough to keep the work per segment small in Python and in the kernel. Small enough that a
segment stays in the cache while it is received, added, hashed and forwarded."""

NEAR_SEGMENT_BYTES_MAX = 4 << 20
"""The same for members that pull segments. A pull costs little more than its one copy, but a larger
one would block the I/O thread for too long."""

_SEGMENTS_PER_CHUNK = 4
"""Several, so that a ring's steps overlap: a rank forwards a segment while it receives the next."""
_PAGE_BYTES = 4096

_SHARE_SEGMENTS, _SHARE_SEGMENT_BYTES_MIN = 8, 16 << 10
"""The same for chunks by shares. A member with a slow link owns a small chunk. It publishes a
segment after the contribution that comes over that link. So the link carries its last segment when
all other work is done, and small chunks need small segments, too."""


def segment_bytes_for(tensor_bytes: int, world_size: int, *, near: bool = False) -> int:
    """Return the segment size for a tensor: a fixed part of a chunk, in whole pages, bounded.

    If all members share the memory of one machine (``near``), a segment is a whole chunk, or an
    equal part of a chunk above ``NEAR_SEGMENT_BYTES_MAX``.
    """
    parts = _SEGMENTS_PER_CHUNK
    if near:
        parts = max(1, -(-tensor_bytes // (world_size * NEAR_SEGMENT_BYTES_MAX)))
    nbytes = -(-tensor_bytes // (world_size * parts * _PAGE_BYTES)) * _PAGE_BYTES
    largest = NEAR_SEGMENT_BYTES_MAX if near else SEGMENT_BYTES_MAX
    return min(largest, max(SEGMENT_BYTES_MIN, nbytes))


def _share_segment_bytes(chunk_bytes: int) -> int:
    pages = -(-chunk_bytes // (_SHARE_SEGMENTS * _PAGE_BYTES))
    return max(_SHARE_SEGMENT_BYTES_MIN, pages * _PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous part of a tensor; ``position`` is its index among all segments of the tensor."""

    position: int
    offset: int
    """In bytes from the start of the tensor; in an exchange, from the start of a block."""
    length: int
    """In bytes."""
    wire_length: int
    """Length on the wire, in bytes: the same unless the values are quantized."""
    start: int = -1
    """The first byte in memory; -1: ``offset``."""
    span: tuple[int, int] = field(init=False, compare=False, repr=False)
    """(first byte, byte behind the last one) in memory."""
    wire_span: tuple[int, int] = field(init=False, compare=False, repr=False)
    """The same for ``wire_length`` bytes."""

    def __post_init__(self) -> None:
        start = self.start if self.start >= 0 else self.offset
        object.__setattr__(self, "span", (start, start + self.length))
        object.__setattr__(self, "wire_span", (start, start + self.wire_length))

    @property
    def is_coded(self) -> bool:
        """Whether the segment is encoded on the wire."""
        return self.wire_length != self.length


def _equal_ends(count: int, world_size: int) -> list[int]:
    """Return the end of each chunk, in elements, if the first ones are one element longer."""
    base, longer = divmod(count, world_size)
    return [rank * base + min(rank, longer) for rank in range(1, world_size + 1)]


def _ends(count: int, shares: Sequence[int]) -> list[int]:
    """Return the end of each chunk, in elements, for chunks in proportion to ``shares``."""
    whole = sum(shares)
    return [count * owned // whole for owned in accumulate(shares)]


class SegmentLayout:
    """The chunks and segments of one tensor.

    Args:
        count: number of elements; an empty tensor has no segments.
        itemsize: bytes per element.
        world_size: number of ranks, at least 1.
        segment_bytes: upper bound of a segment; rounded down to whole elements.
        wire_bytes: number of elements -> bytes on the wire; None: values are not encoded. A segment
            that encoding would not shorten is not encoded either.
        shares: by rank, the length of its chunk in units of their sum; empty: all are equal.
    """

    def __init__(
        self,
        count: int,
        itemsize: int,
        world_size: int,
        segment_bytes: int,
        wire_bytes: Callable[[int], int] | None = None,
        shares: Sequence[int] = (),
    ) -> None:
        wrong_shares = bool(shares) and len(shares) != world_size
        if count < 0 or itemsize < 1 or world_size < 1 or segment_bytes < itemsize or wrong_shares:
            raise ValueError(f"invalid layout: {count=} {itemsize=} {world_size=} {segment_bytes=}")
        self.nbytes = count * itemsize
        self.world_size = world_size
        ends = _ends(count, shares) if shares else _equal_ends(count, world_size)
        self._chunks: list[tuple[Segment, ...]] = []
        position = offset = 0
        for last in ends:
            end = last * itemsize
            segments: list[Segment] = []
            wanted = _share_segment_bytes(end - offset) if shares else segment_bytes
            step = min(segment_bytes, wanted) // itemsize * itemsize
            while offset < end:
                length = min(step, end - offset)
                wire = length
                if wire_bytes is not None:
                    wire = min(length, wire_bytes(length // itemsize))
                segments.append(Segment(position, offset, length, wire))
                position += 1
                offset += length
            self._chunks.append(tuple(segments))
        self.segment_count = position

    @staticmethod
    def of_chunks(chunks: Sequence[tuple[Segment, ...]]) -> SegmentLayout:
        """Return a layout of these segments, whose positions are consecutive."""
        made = SegmentLayout(0, 1, 1, 1)
        made._chunks = list(chunks)
        made.world_size, made.segment_count = len(chunks), sum(map(len, chunks))
        made.nbytes = sum(segment.length for segment in made.segments())
        return made

    def in_one_chunk(self) -> SegmentLayout:
        """Return the same segments as a single chunk, for a chain that sends them all in order."""
        other = copy(self)
        other.world_size = 1
        other._chunks = [tuple(self.segments())]
        return other

    def chunk(self, index: int) -> tuple[Segment, ...]:
        """Return the segments of chunk ``index`` in order (empty for an empty chunk)."""
        return self._chunks[index]

    def segments(self) -> Iterator[Segment]:
        """Yield all segments in order of position."""
        for chunk in self._chunks:
            yield from chunk
