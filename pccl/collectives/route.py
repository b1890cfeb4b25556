"""The segments that one rank sends to another in one collective, with their numbers.

Both sides derive the same route, so each number means the same segment on both. The receiver can
send a bitmap of the segments that have arrived, and the sender repeats only missing ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pccl.collectives.layout import Segment, SegmentLayout

Leg = tuple[int, tuple[Segment, ...]]
"""A step, and the segments that one rank sends at it: a whole chunk, or several."""


class Route:
    """The segments of some steps, in order.

    Args:
        layout: the tensor's layout; a leg holds the segments of one of its chunks, or all.
        legs: the legs in the order of their steps.
    """

    def __init__(self, layout: SegmentLayout, legs: Sequence[Leg]) -> None:
        self._numbers = layout.numbers
        self._legs: dict[int, tuple[int, tuple[Segment, ...]]] = {}
        first = 0
        for step, segments in legs:
            self._legs[step] = (first, segments)
            first += len(segments)
        self.count = first
        """How many segments the route has."""

    def __iter__(self) -> Iterator[tuple[int, Segment]]:
        """Iterate over all (step, segment), in the order of their numbers."""
        for step, (_, segments) in self._legs.items():
            for segment in segments:
                yield step, segment

    def first(self, step: int) -> int:
        """Return the number of the first segment of ``step``; past the last step, the count."""
        return self._legs[step][0] if step in self._legs else self.count

    def number(self, step: int, segment: Segment) -> int:
        """Return the number of a segment that belongs to ``step``."""
        return self._legs[step][0] + self._numbers[segment.offset]

    def find(self, step: int, offset: int, length: int) -> tuple[int, Segment] | None:
        """Find the segment that a frame claims to carry: (number, segment).

        Args:
            step: step of the schedule.
            offset: offset of the segment, in bytes from the start of the tensor.
            length: length on the wire, in bytes.

        Returns:
            None if the route has no such segment at this step: the sender broke the protocol.
        """
        leg = self._legs.get(step)
        within = self._numbers.get(offset)
        if leg is None or within is None or within >= len(leg[1]):
            return None
        segment = leg[1][within]
        if segment.offset != offset or segment.wire_length != length:
            return None
        return leg[0] + within, segment
