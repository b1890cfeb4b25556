"""Exchanges as one pure schedule: each member gives blocks of its input to others.

All-gather, gather, scatter and all-to-all differ only in the lengths of the blocks. A block goes
straight from its giver to its taker, so each value travels once. Blocks for different members take
turns, the next rank first: otherwise all members would send to the same one first (Thakur,
Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005,
section 3.2, on all-to-all).

Both ends of a pair number its segments by their offset in the block, and know their own places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, repeat

from pccl.collectives.layout import Segment, SegmentLayout, segment_bytes_for
from pccl.collectives.route import Hop, Route
from pccl.protocol.operation import BlockLengths


class ExchangeSchedule:
    """An exchange as one rank sees it.

    Args:
        rank: own rank.
        blocks: the lengths of this rank's blocks.
        itemsize: bytes per element.
        segment_bytes: upper bound of a segment; None: chosen for each block.
        gives_to_all: whether the input is one block, which each rank gets; else blocks in a row.
    """

    def __init__(
        self,
        rank: int,
        blocks: BlockLengths,
        itemsize: int,
        segment_bytes: int | None,
        *,
        gives_to_all: bool,
    ) -> None:
        self.rank, self.world_size = rank, len(blocks.gives)
        if not 0 <= rank < self.world_size or len(blocks.takes) != self.world_size:
            raise ValueError(f"invalid exchange: {rank=} {blocks=}")
        self._itemsize, self._segment_bytes = itemsize, segment_bytes
        taken = self._cut(blocks.takes, accumulate((0, *blocks.takes)))
        starts = repeat(0) if gives_to_all else accumulate((0, *blocks.gives))
        given = self._cut(blocks.gives, starts)
        self.layout = SegmentLayout.of_chunks(taken)
        """The segments of the result, in one chunk for each giver."""
        self.kept = tuple(zip(given[rank], taken[rank], strict=True))
        """The own block: its segments in the input, and in the result."""
        others = [(rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self.incoming_from = {other: Route([(0, taken[other])]) for other in others if taken[other]}
        """By rank: the segments that this rank receives from that rank; the next rank first."""
        self.outgoing_to = {other: Route([(0, given[other])]) for other in others if given[other]}
        """By rank: the segments that this rank sends to that rank."""
        self.initial_sends = tuple(self._in_turn())
        """All (rank, hop) to send, in turn to each rank, the next rank first."""
        self.hop_count = sum(
            route.count for routes in (self.incoming_from, self.outgoing_to)
            for route in routes.values()
        )  # fmt: skip

    def _cut(self, lengths: Sequence[int], starts: Iterable[int]) -> list[tuple[Segment, ...]]:
        """Return the segments of blocks; offsets count from the start of a block."""
        found: list[tuple[Segment, ...]] = []
        position = 0
        for length, start in zip(lengths, starts, strict=False):
            nbytes = length * self._itemsize
            most = self._segment_bytes or segment_bytes_for(nbytes, 1)
            most -= most % self._itemsize
            cut: list[Segment] = []
            for offset in range(0, nbytes, most):
                size = min(most, nbytes - offset)
                at = start * self._itemsize + offset
                cut.append(Segment(position, offset, size, size, at))
                position += 1
            found.append(tuple(cut))
        return found

    def _in_turn(self) -> Iterator[tuple[int, Hop]]:
        longest = max((route.count for route in self.outgoing_to.values()), default=0)
        for number in range(longest):
            for rank, route in self.outgoing_to.items():
                if number < route.count:
                    yield rank, route.hops[number]
