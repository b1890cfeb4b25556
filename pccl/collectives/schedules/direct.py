"""Mesh and star as one pure schedule: contributions to owners, results from owners.

Each segment has an owner. At step 0 every rank sends its contribution to the owner. When all
contributions have arrived, the owner sends the result to every rank at step 1. In a reduce it sends
it to one rank only; in a reduce-scatter, to none.

* Mesh: rank r owns chunk r (direct reduce-scatter and all-gather; Thakur, Rabenseifner & Gropp,
  "Optimization of collective communication operations in MPICH", IJHPCA 2005, sections 4 and 5, and
  Li et al., "Communication efficient distributed machine learning with the parameter server", NIPS
  2014, with a server in every rank). Each rank sends and receives 2(N-1)/N of the tensor, as in the
  ring, over N-1 links at once. Contributions are added in the order of arrival.
* Star: one rank, the root, owns all segments. Every other rank sends and receives the tensor once,
  the root N-1 times. The star suits tensors whose time on the wire is less than the latency.
  Contributions are added in rank order, so the result is reproducible for the same ranks. The root
  stores contributions that arrive before their turn.

One owner computes each value, and all ranks copy its bytes, so results are bit-identical. With
quantization each contribution and each result is quantized once, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pccl.collectives.layout import Segment, SegmentLayout
from pccl.collectives.route import Route

CONTRIBUTE, PUBLISH = 0, 1
"""The steps: contributions to the owner, results from the owner."""


class DirectSchedule:
    """The mesh or the star as one rank sees it.

    Args:
        rank: own rank.
        world_size: number of ranks, at least 2.
        layout: the segments; a mesh needs ``world_size`` chunks, a star one.
        root: the rank that owns all segments (star); None: each rank owns its own chunk (mesh).
        receivers: the ranks that receive results of others; None: all.
    """

    step_count = 2

    def __init__(
        self,
        rank: int,
        world_size: int,
        layout: SegmentLayout,
        root: int | None = None,
        receivers: Collection[int] | None = None,
    ) -> None:
        if world_size < 2 or not 0 <= rank < world_size or not 0 <= (root or 0) < world_size:
            raise ValueError(f"invalid mesh or star: {rank=} {world_size=} {root=}")
        if layout.world_size != (world_size if root is None else 1):
            raise ValueError(f"a mesh needs {world_size} chunks, a star needs 1")
        self.rank = rank
        self.world_size = world_size
        self.layout = layout
        self.root = root
        self._receivers = receivers
        self.in_rank_order = root is not None
        """Whether contributions are combined in rank order, instead of the order of arrival."""
        self._everything = tuple(layout.segments())
        self.owned = self._owned_by(rank)
        """The segments whose results this rank computes."""
        others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._routes: dict[tuple[int, int], Route] = {}
        """By the owners of the segments at each step: all routes to or from a root are alike."""
        incoming = {other: self._route(other, rank) for other in others}
        outgoing = {other: self._route(rank, other) for other in others}
        self.incoming_from = {other: route for other, route in incoming.items() if route.count}
        """By rank: the segments that this rank receives from that rank; the next rank first."""
        self.outgoing_to = {other: route for other, route in outgoing.items() if route.count}
        """By rank: the segments that this rank sends to that rank."""
        self.hop_count = sum(route.count for route in self._routes.values())
        self.initial_sends = tuple(self._in_turn())
        """All (rank, segment) to send at step 0, in turn to each owner, the next rank first."""

    def _in_turn(self) -> Iterator[tuple[int, Segment]]:
        chunks = {other: self._owned_by(other) for other in self.outgoing_to}
        for number in range(max((len(chunk) for chunk in chunks.values()), default=0)):
            for other, chunk in chunks.items():
                if number < len(chunk):
                    yield other, chunk[number]

    def _owned_by(self, rank: int) -> Sequence[Segment]:
        if self.root is None:
            return self.layout.chunk(rank)
        return self._everything if rank == self.root else ()

    def _route(self, source: int, target: int) -> Route:
        is_told = self._receivers is None or target in self._receivers
        contributes, publishes = self._owned_by(target), self._owned_by(source) if is_told else ()
        alike = (len(contributes), len(publishes)) if self.root is not None else (source, target)
        route = self._routes.get(alike)
        if route is None:
            route = self._routes[alike] = Route([(CONTRIBUTE, contributes), (PUBLISH, publishes)])
        return route
