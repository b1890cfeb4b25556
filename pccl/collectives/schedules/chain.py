"""The interface of a chain's schedule: which segments one rank receives and sends, and when.

In a chain (the ring and the broadcast) each rank receives only from the rank before it, and sends
only to the rank behind it. A segment may pass a rank several times, each time at another step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pccl.collectives.layout import Segment, SegmentLayout
from pccl.collectives.route import Route


@dataclass(frozen=True, slots=True)
class Arrival:
    """What this rank does when a segment arrives at a step, in this order."""

    reduce: bool
    """Combine the own contribution with the arrived values."""
    finish: bool
    """This rank owns the value: apply the last operation (the division of an average)."""
    final: bool
    """The value is now final: add it to the digest."""
    forward: bool
    """Send the segment to the next rank, as part of the next step."""


class ChainSchedule(Protocol):
    """One collective as one rank of a chain sees it."""

    @property
    def rank(self) -> int:
        """The rank whose view this is."""
        ...

    @property
    def layout(self) -> SegmentLayout:
        """Chunks and segments, the same for all ranks."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        ...

    @property
    def step_count(self) -> int:
        """How many steps there are; the first is 0."""
        ...

    @property
    def upstream(self) -> int:
        """The rank that sends to this one."""
        ...

    @property
    def downstream(self) -> int:
        """The rank that this one sends to."""
        ...

    @property
    def incoming(self) -> Route:
        """The segments that this rank receives."""
        ...

    @property
    def outgoing(self) -> Route:
        """The segments that this rank sends: the incoming route of the next rank."""
        ...

    @property
    def first_gather_index(self) -> int:
        """How many incoming segments are partial results; all later ones are final values."""
        ...

    @property
    def arrivals(self) -> Sequence[Arrival]:
        """By step: what this rank does when a segment arrives."""
        ...

    @property
    def sends_finals(self) -> bool:
        """Whether the own contribution is the result: the initial sends are final values."""
        ...

    @property
    def initial_sends(self) -> tuple[Segment, ...]:
        """The segments of the own contribution to send at step 0."""
        ...

    def seen_by(self, rank: int) -> ChainSchedule:
        """Return the same collective as another rank sees it (modulo the world size)."""
        ...

    def irreplaceable_count(self, gap: int) -> int:
        """Return how many incoming segments, counted from the first, cannot come from across a gap.

        Args:
            gap: how many of the ranks right before this one are lost, at least 1.

        The rank before the gap can send all final values that it holds, or will hold: these are the
        same from any rank. No rank can replace a partial result that a lost rank contributed to and
        that had not passed the gap.
        """
        ...
