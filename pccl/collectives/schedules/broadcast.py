"""Broadcast as a pure schedule: a chain in ring order that starts at the root.

The root sends every segment to the next rank, and each rank forwards a segment as soon as it has
arrived. The rank before the root forwards nothing, and the root receives nothing. The rank at
distance d from the root receives at step d - 1 and sends at step d. Each rank but the last sends
the tensor once. With S segments and N ranks the chain takes S + N - 2 segment times. So with more
segments, the length of the chain matters less.

All values are final from the start, so all members hold the root's bytes.
"""

from __future__ import annotations

from pccl.collectives.layout import SegmentLayout
from pccl.collectives.route import Route
from pccl.collectives.schedules.chain import Arrival


class BroadcastSchedule:
    """The schedule of a broadcast as one rank sees it.

    Args:
        rank: own position in the ring.
        root: the rank whose values all ranks receive.
        world_size: number of ranks, at least 2.
        layout: the segments, in any chunks.
    """

    def __init__(self, rank: int, root: int, world_size: int, layout: SegmentLayout) -> None:
        if world_size < 2 or not 0 <= rank < world_size or not 0 <= root < world_size:
            raise ValueError(f"invalid broadcast: {rank=} {root=} {world_size=}")
        self.rank = rank
        self.layout = layout.in_one_chunk()
        self.world_size = world_size
        self.step_count = world_size - 1
        self.root = root
        self.upstream = (rank - 1) % world_size
        self.downstream = (rank + 1) % world_size
        self._distance = (rank - root) % world_size
        self._segments = self.layout.chunk(0)
        sends = self._distance < world_size - 1
        came = [(self._distance - 1, self._segments)] if self._distance else []
        goes = [(self._distance, self._segments)] if sends else []
        self.incoming = Route(came)
        self.outgoing = Route(goes)
        self.hop_count = self.incoming.count + self.outgoing.count
        self.first_gather_index = 0
        self.initial_sends = () if self._distance else self._segments
        self.sends_finals = not self._distance
        arrival = Arrival(reduce=False, finish=False, final=True, forward=sends)
        self.arrivals = [arrival] * self.step_count

    def seen_by(self, rank: int) -> BroadcastSchedule:
        """Return the same chain as another rank sees it (modulo the world size)."""
        world_size = self.world_size
        return BroadcastSchedule(rank % world_size, self.root, world_size, self.layout)

    def irreplaceable_count(self, gap: int) -> int:
        """Return the number of all incoming segments if the root is in the gap, otherwise 0."""
        return self.incoming.count if gap >= self._distance else 0
