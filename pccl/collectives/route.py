"""What one rank sends to another in one collective: segments, numbered.

Both sides derive the same route, so a number stands for the same segment at either end: the
receiver can say in a bitmap what it has, and the sender repeats only what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pccl.collectives.layout import Segment, SegmentLayout

Leg = tuple[int, tuple[Segment, ...]]
"""A step, and the segments that travel at it: a whole chunk, or several."""


class Route:
    """The segments of some steps, in order.

    Args:
        layout: whose segments they are; a leg holds those of one of its chunks, or all.
        legs: in the order of their steps.
    """

    def __init__(self, layout: SegmentLayout, legs: Sequence[Leg]) -> None:
        self._numbers = layout.numbers
        self._legs: dict[int, tuple[int, tuple[Segment, ...]]] = {}
        first = 0
        for step, segments in legs:
            self._legs[step] = (first, segments)
            first += len(segments)
        self.count = first
        """How many segments travel in all."""

    def __iter__(self) -> Iterator[tuple[int, Segment]]:
        """All (step, segment), in the order of their number."""
        for step, (_, segments) in self._legs.items():
            for segment in segments:
                yield step, segment

    def first(self, step: int) -> int:
        """Number of the first segment of ``step``; of a step behind the last: the count."""
        return self._legs[step][0] if step in self._legs else self.count

    def number(self, step: int, segment: Segment) -> int:
        """Number of a segment that travels at ``step``."""
        return self._legs[step][0] + self._numbers[segment.offset]

    def find(self, step: int, offset: int, length: int) -> tuple[int, Segment] | None:
        """Find what a frame claims to carry: (number, segment).

        Args:
            step: of the schedule.
            offset: of the segment, in bytes from the start of the tensor.
            length: bytes on the wire.

        Returns:
            None if no such segment travels at this step: the sender broke the protocol.
        """
        leg = self._legs.get(step)
        within = self._numbers.get(offset)
        if leg is None or within is None or within >= len(leg[1]):
            return None
        segment = leg[1][within]
        if segment.offset != offset or segment.wire_length != length:
            return None
        return leg[0] + within, segment
