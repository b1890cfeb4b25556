"""Broadcast as a pure schedule: a chain in ring order that starts at the root.

The root sends every segment to the next rank, which forwards each as soon as it is here; the rank
before the root forwards nothing, and the root receives nothing. The rank at distance d from the
root receives at step d - 1 and sends at step d. Each rank but the last sends the tensor once. With
S segments the chain takes S + N - 2 segment times: the more segments, the less the length of the
chain matters.

What travels is final from the start, so all members hold the root's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from pccl.collectives.layout import Layout, Segment
from pccl.collectives.schedule import Arrival


class BroadcastSchedule:
    """The chain as one rank sees it.

    Args:
        rank: own position in the ring.
        root: the rank whose values everybody gets.
        world_size: number of ranks, at least 2.
        layout: segments, however they are grouped into chunks.
    """

    def __init__(self, rank: int, root: int, world_size: int, layout: Layout) -> None:
        if world_size < 2 or not 0 <= rank < world_size or not 0 <= root < world_size:
            raise ValueError(f"no broadcast from rank {root} for rank {rank} of {world_size}")
        self.rank = rank
        self.layout = layout
        self.world_size = world_size
        self.step_count = world_size - 1
        self.root = root
        self.upstream = (rank - 1) % world_size
        self.downstream = (rank + 1) % world_size
        self._distance = (rank - root) % world_size
        self._segments = tuple(layout.segments())
        self._positions = {segment.offset: segment.position for segment in self._segments}
        receives, sends = self._distance > 0, self._distance < world_size - 1
        self.incoming_count = len(self._segments) if receives else 0
        self.outgoing_count = len(self._segments) if sends else 0
        self.first_gather_index = 0
        self._arrival = Arrival(reduce=False, finish=False, final=True, forward=sends)

    def initial_sends(self) -> tuple[Segment, ...]:
        """Everything, if this is the root."""
        return () if self._distance else self._segments

    def initial_finals(self) -> tuple[Segment, ...]:
        """Everything, if this is the root."""
        return () if self._distance else self._segments

    def outgoing_index(self, step: int, segment: Segment) -> int:
        """Number of a segment among all that this rank sends: its position."""
        return segment.position

    def outgoing(self) -> Iterator[tuple[int, Segment]]:
        """All (step, segment) that this rank sends, in the order of their index."""
        for segment in self._segments[: self.outgoing_count]:
            yield self._distance, segment

    def incoming(self, step: int, offset: int, length: int) -> tuple[int, Segment] | None:
        """Find what a frame claims to carry: (index among all incoming, segment).

        None if no such segment is expected at this step: the sender broke the protocol.
        """
        position = self._positions.get(offset)
        if not self._distance or step != self._distance - 1 or position is None:
            return None
        segment = self._segments[position]
        return (position, segment) if segment.length == length else None

    def arrival(self, step: int) -> Arrival:
        """What the arrival of any segment causes: it is final, and travels on."""
        return self._arrival

    def seen_by(self, rank: int) -> BroadcastSchedule:
        """The same chain as another rank sees it (modulo the world size)."""
        world_size = self.world_size
        return BroadcastSchedule(rank % world_size, self.root, world_size, self.layout)

    def irreplaceable_count(self, gap: int) -> int:
        """See ``Schedule``: everything if the root is gone, otherwise nothing."""
        return self.incoming_count if gap >= self._distance else 0
