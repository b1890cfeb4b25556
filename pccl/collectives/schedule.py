"""What a chain tells the runtime: who sends what when, as one rank sees it.

In a chain everything comes from the rank before and goes to the rank behind: the ring and the
broadcast. The steps tell apart the times that one segment passes one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pccl.collectives.layout import Segment, SegmentLayout
from pccl.collectives.route import Route


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the arrival of a segment at a step causes, in this order."""

    reduce: bool
    """Combine the own contribution with what has arrived."""
    finish: bool
    """This rank owns the value: apply what the operation does last (the division of an average)."""
    final: bool
    """The value is now final: take its digest."""
    forward: bool
    """Send it on to the next rank, as part of the next step."""


class ChainSchedule(Protocol):
    """One collective as one rank of a chain sees it."""

    @property
    def rank(self) -> int:
        """The rank that sees it so."""
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
        """The rank that segments come from."""
        ...

    @property
    def downstream(self) -> int:
        """The rank that segments go to."""
        ...

    @property
    def incoming(self) -> Route:
        """What this rank receives."""
        ...

    @property
    def outgoing(self) -> Route:
        """What this rank sends: the incoming route of the next one."""
        ...

    @property
    def first_gather_index(self) -> int:
        """How many of the incoming segments are partial results; the others are final values."""
        ...

    @property
    def arrivals(self) -> Sequence[Arrival]:
        """By step: what the arrival of any segment causes."""
        ...

    @property
    def sends_finals(self) -> bool:
        """Whether the own contribution is the result: nothing arrives for what is sent at first."""
        ...

    @property
    def initial_sends(self) -> tuple[Segment, ...]:
        """The segments to send as step 0, from the own contribution."""
        ...

    def seen_by(self, rank: int) -> ChainSchedule:
        """The same collective as another rank sees it (modulo the world size)."""
        ...

    def irreplaceable_count(self, gap: int) -> int:
        """How many of the incoming segments, the first ones, cannot come from across a gap.

        Args:
            gap: how many of the ranks right before this one are gone, at least 1.

        What the rank before the gap can send instead are final values that it holds, or will: a
        final value is the same wherever it comes from. What a rank that is gone has contributed to,
        and nobody behind it has got, nobody can send.
        """
        ...
