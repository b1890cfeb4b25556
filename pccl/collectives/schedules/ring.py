"""Ring all-reduce as a pure schedule: reduce-scatter, then all-gather, pipelined by segment.

Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC
2009: 2(N-1) steps; each rank sends and receives 2(N-1)/N of the tensor.

At step k rank p sends chunk (p - k) mod N to rank p + 1. It receives chunk (p - k - 1) mod N from
rank p - 1. During the first N - 1 steps (reduce-scatter) each rank receives a partial result and
combines its own contribution with it. After step N - 2 rank p owns the finished chunk p + 1. During
the other N - 1 steps (all-gather) each rank receives final values and copies them. A rank sends at
step k + 1 exactly what it received at step k. So it does not wait for a whole chunk: it forwards
each segment as soon as it has arrived.

Chunk c is thus combined in ring order starting at rank c, whatever the timing, and all ranks copy
the owner's bytes. So results are bit-identical, and reproducible for the same ring.

Why the result buffer may hold a partial result: the gather overwrites the region of chunk c only
after the final value of c exists. By then the next rank has received this rank's partial result.
"""

from __future__ import annotations

from pccl.collectives.layout import Segment, SegmentLayout
from pccl.collectives.route import Route
from pccl.collectives.schedules.chain import Arrival


class RingSchedule:
    """The schedule of a ring as one rank sees it.

    Args:
        rank: own position in the ring.
        layout: chunks and segments; its world size is that of the ring, at least 2. An empty tensor
            has no segments, so the ring sends none.
    """

    def __init__(self, rank: int, layout: SegmentLayout) -> None:
        world_size = layout.world_size
        if world_size < 2 or not 0 <= rank < world_size:
            raise ValueError(f"invalid ring: {rank=} {world_size=}")
        self.rank = rank
        self.layout = layout
        self.world_size = world_size
        self.step_count = 2 * (world_size - 1)
        self.upstream = (rank - 1) % world_size
        self.downstream = (rank + 1) % world_size
        self.initial_sends = self._chunk(0)
        self.sends_finals = False
        self.arrivals = [self._arrival(step) for step in range(self.step_count)]
        self.incoming = Route((k, self._chunk(k + 1)) for k in range(self.step_count))
        self.outgoing = Route((k, self._chunk(k)) for k in range(self.step_count))
        self.hop_count = self.incoming.count + self.outgoing.count
        self.first_gather_index = self.incoming.count_before(world_size - 1)
        """How many incoming segments are partial results; all later ones belong to the gather."""

    def seen_by(self, rank: int) -> RingSchedule:
        """Return the same ring as another rank sees it (modulo the world size)."""
        return RingSchedule(rank % self.world_size, self.layout)

    def irreplaceable_count(self, gap: int) -> int:
        """Return how many segments only the ranks in the gap could send.

        These are all partial results, and the chunks that the ranks in the gap have finished. The
        gather begins with the chunk that the rank right before has finished, then that of the rank
        before it, and so on.
        """
        return self.incoming.count_before(self.world_size - 1 + gap)

    # -- the arithmetic of the ring ------------------------------------------------------------

    def _chunk(self, hop: int) -> tuple[Segment, ...]:
        """Return chunk (rank - ``hop``) mod N."""
        return self.layout.chunk((self.rank - hop) % self.world_size)

    def _arrival(self, step: int) -> Arrival:
        last_reduce = self.world_size - 2
        return Arrival(
            reduce=step <= last_reduce,
            finish=step == last_reduce,
            final=step >= last_reduce,
            forward=step + 1 < self.step_count,
        )
