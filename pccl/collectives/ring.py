"""Ring all-reduce as a pure schedule: reduce-scatter, then all-gather, pipelined by segment.

Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC
2009: 2(N-1) steps; each rank sends and receives 2(N-1)/N of the tensor.

At step k rank p sends chunk (p - k) mod N to rank p + 1 and receives chunk (p - k - 1) mod N from
rank p - 1. During the first N - 1 steps (reduce-scatter) an arrival is a partial result with which
the rank combines its own contribution; after step N - 2 rank p owns the finished chunk p + 1.
During the other N - 1 steps (all-gather) an arrival is a final value that is taken as it is.
Whatever is received at step k is exactly what is sent at step k + 1, so nothing waits for a whole
chunk: each segment travels on as soon as it is here.

Chunk c is thus folded in ring order starting at rank c, whatever the timing, and everybody takes
the owner's bytes: results are bit-identical, and reproducible for the same ring.

Why a partial result may live in the result buffer: the region of chunk c is overwritten by the
gather only after its final value exists, which takes the neighbour's having received our partial
of c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pccl.collectives.layout import Layout, Segment
from pccl.collectives.schedule import Arrival


class RingSchedule:
    """The ring as one rank sees it.

    Args:
        rank: own position in the ring.
        layout: chunks and segments; its world size is the ring's, at least 2. Without elements
            nothing travels.
    """

    def __init__(self, rank: int, layout: Layout) -> None:
        world_size = layout.world_size
        if world_size < 2 or not 0 <= rank < world_size:
            raise ValueError(f"no ring for rank {rank} of {world_size}")
        self.rank = rank
        self.layout = layout
        self.world_size = world_size
        self.step_count = 2 * (world_size - 1)
        self.upstream = (rank - 1) % world_size
        self.downstream = (rank + 1) % world_size
        self._arrivals = [self._arrival(step) for step in range(self.step_count)]
        self._first_incoming = self._first_indices(self._incoming)
        self._first_outgoing = self._first_indices(self._outgoing)

    # -- what travels ------------------------------------------------------------------------

    @property
    def incoming_count(self) -> int:
        """How many segments this rank receives in all."""
        return self._first_incoming[-1]

    @property
    def outgoing_count(self) -> int:
        """How many segments this rank sends in all."""
        return self._first_outgoing[-1]

    def initial_sends(self) -> tuple[Segment, ...]:
        """The segments to send as step 0, from the own contribution."""
        return self._outgoing(0)

    def initial_finals(self) -> tuple[Segment, ...]:
        """None: to every result all ranks contribute."""
        return ()

    def outgoing_index(self, step: int, segment: Segment) -> int:
        """Number of a segment among all that this rank sends (the receiver's incoming index)."""
        number = self.layout.number(segment.offset)
        assert number is not None
        return self._first_outgoing[step] + number

    def outgoing(self) -> Iterator[tuple[int, Segment]]:
        """All (step, segment) that this rank sends, in the order of their index."""
        for step in range(self.step_count):
            for segment in self._outgoing(step):
                yield step, segment

    def incoming_segments(self) -> Iterator[tuple[int, Segment]]:
        """All (step, segment) that this rank receives, in the order of their index."""
        for step in range(self.step_count):
            for segment in self._incoming(step):
                yield step, segment

    def incoming(self, step: int, offset: int, length: int) -> tuple[int, Segment] | None:
        """Find what a frame claims to carry: (index among all incoming, segment).

        None if no such segment is expected at this step: the sender broke the protocol.
        """
        if step >= self.step_count:
            return None
        segments = self._incoming(step)
        number = self.layout.number(offset)
        if number is None or number >= len(segments):
            return None
        segment = segments[number]
        if segment.offset != offset or segment.length != length:
            return None
        return self._first_incoming[step] + number, segment

    def arrival(self, step: int) -> Arrival:
        """What the arrival of any segment at ``step`` causes."""
        return self._arrivals[step]

    @property
    def first_gather_index(self) -> int:
        """How many of the incoming segments are partial results: the others are the gather."""
        return self._first_incoming[self.world_size - 1]

    def seen_by(self, rank: int) -> RingSchedule:
        """The same ring as another rank sees it (modulo the world size)."""
        return RingSchedule(rank % self.world_size, self.layout)

    def irreplaceable_count(self, gap: int) -> int:
        """See ``Schedule``: all partial results, and what the ranks in the gap have finished.

        The gather begins with the chunk that the rank right before has finished, and goes on with
        those of the ranks before it.
        """
        return self._first_incoming[min(self.world_size - 1 + gap, self.step_count)]

    # -- the arithmetic of the ring ------------------------------------------------------------

    def _outgoing(self, step: int) -> tuple[Segment, ...]:
        return self.layout.chunk((self.rank - step) % self.world_size)

    def _incoming(self, step: int) -> tuple[Segment, ...]:
        return self.layout.chunk((self.rank - step - 1) % self.world_size)

    def _arrival(self, step: int) -> Arrival:
        last_reduce = self.world_size - 2
        return Arrival(
            reduce=step <= last_reduce,
            finish=step == last_reduce,
            final=step >= last_reduce,
            forward=step + 1 < self.step_count,
        )

    def _first_indices(self, segments_of: Callable[[int], tuple[Segment, ...]]) -> list[int]:
        firsts = [0]
        for step in range(self.step_count):
            firsts.append(firsts[-1] + len(segments_of(step)))
        return firsts
