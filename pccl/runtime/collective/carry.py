"""``Carry``: what an aborted reduce leaves to the next attempt of the same call.

The partial sums that lie in the result, and in place the saved parts of the input. The call has not
returned, so its memory is still ours; whoever gives up on another attempt calls :meth:`restore`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pccl.collectives.resume import layout_without, reusable_chunks
from pccl.collectives.ring import RingSchedule
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.collective.operand import Operand


@dataclass(slots=True, eq=False)
class Seeds:
    """How a resumed attempt begins, as one rank sees it."""

    schedule: RingSchedule
    usable: bytearray
    """By position: whether the partial sum that is here is one of the new ring."""


@dataclass(slots=True, eq=False)
class Carry:
    """What is left of an attempt.

    Args:
        operation: the attempt.
        ring: its members.
        schedule: its ring as this rank saw it.
        operand: the caller's buffers.
        saved: by position: whether the own contribution was moved to ``operand.saved``.
        partial: by position: whether a partial sum of the ranks from the chunk's first to this one
            is in the result.
        unit: of a weighted average: by which all weights were divided.
    """

    operation: OperationId
    ring: tuple[PeerId, ...]
    schedule: RingSchedule
    operand: Operand
    saved: bytearray
    partial: bytearray
    unit: float = 0.0

    def seeds(self, ring: tuple[PeerId, ...]) -> Seeds | None:
        """What of it counts in another ring; None if that is not this one with members lost.

        All members come to the same conclusion.
        """
        left = [rank for rank, peer in enumerate(self.ring) if peer in ring]
        if tuple(self.ring[rank] for rank in left) != ring or len(ring) < 2:
            return None
        layout, world_size = self.schedule.layout, len(self.ring)
        usable = bytearray(layout.segment_count)
        for chunk in reusable_chunks(self.schedule.rank, world_size, left):
            for segment in layout.chunk(chunk):
                usable[segment.position] = self.partial[segment.position]
        rank = left.index(self.schedule.rank)
        return Seeds(RingSchedule(rank, layout_without(layout, left)), usable)

    def restore(self) -> None:
        """Make the input what it was."""
        if self.operand.in_place:
            for segment in self.schedule.layout.segments():
                if self.saved[segment.position]:
                    self.operand.put_back(segment.offset, segment.offset + segment.length)
