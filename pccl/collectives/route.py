"""The segments that one rank sends to another in one collective, with their numbers.

Both sides derive the same route, so each number means the same segment on both. The receiver can
send a bitmap of the segments that have arrived, and the sender repeats only missing ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pccl.collectives.layout import Segment


@dataclass(frozen=True, slots=True)
class Hop:
    """One segment on its way from one rank to the other at one step."""

    number: int
    """Number of the hop in its route, from 0."""
    step: int
    segment: Segment


NO_HOPS: dict[int, Hop] = {}
"""The leg of a step at which a route has no segments."""


class Route:
    """The hops of some steps, in order.

    Args:
        legs: by step, in ascending order: the segments that the rank sends at the step.
    """

    def __init__(self, legs: Iterable[tuple[int, Iterable[Segment]]]) -> None:
        hops: list[Hop] = []
        self.legs: dict[int, dict[int, Hop]] = {}
        """Step -> offset of a segment -> its hop."""
        for step, segments in legs:
            leg = self.legs[step] = {}
            for segment in segments:
                hop = leg[segment.offset] = Hop(len(hops), step, segment)
                hops.append(hop)
        self.hops = tuple(hops)
        self.count = len(hops)
        """How many hops the route has."""

    def count_before(self, step: int) -> int:
        """Return the number of hops before ``step``; for a step past the last one, of all hops."""
        return sum(len(leg) for earlier, leg in self.legs.items() if earlier < step)

    def find(self, step: int, offset: int, length: int) -> Hop | None:
        """Find the hop that a frame claims to be.

        Args:
            step: step of the schedule.
            offset: offset of the segment, in bytes from the start of the tensor.
            length: length on the wire, in bytes.

        Returns:
            None if the route has no such segment at this step: the sender broke the protocol.
        """
        hop = self.legs.get(step, NO_HOPS).get(offset)
        return hop if hop is not None and hop.segment.wire_length == length else None
