"""An all-reduce of contributions that are far shorter than their sum, as a pure schedule: a gather.

Each rank sends its encoded contribution to every other rank, and adds up all contributions itself,
in rank order. A rank sends and receives N - 1 contributions, so the gather suits sparse formats: a
sum of sparse contributions is less sparse with each of them, and a ring or a mesh would send it.
With a contribution of 1/150 of the tensor, it sends fewer bytes than an exact ring up to 300 ranks,
and fewer than an int4 mesh up to 40.

All ranks add the same bytes in the same order, so results are bit-identical: IEEE 754 defines every
sum and quotient exactly, except which NaN it is, and ``GatherTransfer`` settles that.
"""

from __future__ import annotations

from pccl.collectives.layout import SegmentLayout
from pccl.collectives.route import Route


class GatherSchedule:
    """The gather as one rank sees it.

    Args:
        rank: own rank.
        world_size: number of ranks, at least 2.
        layout: the segments, in one chunk.
    """

    def __init__(self, rank: int, world_size: int, layout: SegmentLayout) -> None:
        if world_size < 2 or not 0 <= rank < world_size or layout.world_size != 1:
            raise ValueError(f"invalid gather: {rank=} {world_size=}")
        self.rank = rank
        self.world_size = world_size
        self.layout = layout
        self.route = Route([(0, layout.chunk(0))])
        """The segments that any rank sends to any other."""
        self.others = tuple((rank + distance) % world_size for distance in range(1, world_size))
        """The other ranks, the next one first."""
        self.hop_count = self.route.count
