"""How a tensor splits: into one chunk per rank, and each chunk into segments.

The first ``count mod world_size`` chunks are one element longer (as users of PCCL know it); with
fewer elements than ranks the later chunks are empty. A segment is at most ``segment_bytes`` long
and never splits an element. All members compute the same layout from the same descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field

SEGMENT_BYTES_MIN = 64 << 10
SEGMENT_BYTES_MAX = 896 << 10
"""Large enough to make per-segment work in Python and in the kernel small, small enough to stay in
cache between being received, added, hashed and sent on."""

_SEGMENTS_PER_CHUNK = 4
"""So that a ring's steps overlap: a segment travels on while the next one arrives."""
_PAGE_BYTES = 4096


def segment_bytes_for(tensor_bytes: int, world_size: int) -> int:
    """Choose a segment size: a fixed part of a chunk, in whole pages."""
    pages = -(-tensor_bytes // (world_size * _SEGMENTS_PER_CHUNK * _PAGE_BYTES))
    return min(SEGMENT_BYTES_MAX, max(SEGMENT_BYTES_MIN, pages * _PAGE_BYTES))


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous part of the tensor: ``position`` in the whole tensor's list of segments."""

    position: int
    offset: int
    """In bytes from the start of the tensor."""
    length: int
    """In bytes."""
    wire_length: int
    """In bytes, as it travels: the same, unless values are quantized."""
    span: tuple[int, int] = field(init=False, compare=False, repr=False)
    """Where it is, in bytes: the first one, and the one behind it."""
    wire_span: tuple[int, int] = field(init=False, compare=False, repr=False)
    """The same of the bytes that travel."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "span", (self.offset, self.offset + self.length))
        object.__setattr__(self, "wire_span", (self.offset, self.offset + self.wire_length))

    @property
    def is_coded(self) -> bool:
        """Whether its values are encoded while it travels."""
        return self.wire_length != self.length


class SegmentLayout:
    """The chunks and segments of one tensor.

    Args:
        count: number of elements; of none there are no segments.
        itemsize: bytes per element.
        world_size: number of ranks, at least 1.
        segment_bytes: upper bound of a segment; rounded down to whole elements.
        wire_bytes: how many bytes so many elements are on the wire; None: what they are here, and
            so are segments too short to become shorter.
    """

    def __init__(
        self,
        count: int,
        itemsize: int,
        world_size: int,
        segment_bytes: int,
        wire_bytes: Callable[[int], int] | None = None,
    ) -> None:
        if count < 0 or itemsize < 1 or world_size < 1 or segment_bytes < itemsize:
            raise ValueError(f"no layout for {count=} {itemsize=} {world_size=} {segment_bytes=}")
        self.nbytes = count * itemsize
        self.world_size = world_size
        step = segment_bytes // itemsize * itemsize
        base, longer = divmod(count, world_size)
        self._chunks: list[tuple[Segment, ...]] = []
        position = offset = 0
        for chunk in range(world_size):
            end = offset + (base + (chunk < longer)) * itemsize
            segments: list[Segment] = []
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
        self.numbers = self._number()
        """Offset of each segment -> which one of its chunk it is."""

    def in_one_chunk(self) -> SegmentLayout:
        """The same segments as a single chunk, for a chain that sends all of them in order."""
        other = copy(self)
        other.world_size = 1
        other._chunks = [tuple(self.segments())]
        other.numbers = other._number()
        return other

    def _number(self) -> dict[int, int]:
        return {s.offset: number for chunk in self._chunks for number, s in enumerate(chunk)}

    def chunk(self, index: int) -> tuple[Segment, ...]:
        """The segments of chunk ``index`` in order (empty for an empty chunk)."""
        return self._chunks[index]

    def segments(self) -> Iterator[Segment]:
        """All segments in order of position."""
        for chunk in self._chunks:
            yield from chunk
