"""Mesh and star as one pure schedule: contributions to owners, results from owners.

Each segment has an owner. Every rank sends its contribution to the owner. When all contributions
have arrived, the owner sends the result to every rank. In a reduce it sends it to one rank only; in
a reduce-scatter, to none.

* Mesh: rank r owns chunk r (direct reduce-scatter and all-gather; Thakur, Rabenseifner & Gropp,
  "Optimization of collective communication operations in MPICH", IJHPCA 2005, sections 4 and 5, and
  Li et al., "Communication efficient distributed machine learning with the parameter server", NIPS
  2014, with a server in every rank). Each rank sends and receives 2(N-1)/N of the tensor, as in the
  ring, over N-1 links at once. Contributions are added in the order of arrival.
* Mesh of sites, in two levels: at each other site than the owner's, one rank collects. It adds up
  the contributions of its site, sends the sum to the owner, and passes the result on to its site.
  So a segment crosses between two sites once each way, however many ranks they have. The ranks of a
  site take turns, segment by segment, so all links between two sites carry data at once.
* Star: one rank, the root, owns all segments. Every other rank sends and receives the tensor once,
  the root N-1 times. The star suits tensors whose time on the wire is less than the latency.
  Contributions are added in rank order, so the result is reproducible for the same ranks. The root
  stores contributions that arrive before their turn.

One owner computes each value, and all ranks copy its bytes, so results are bit-identical. With
quantization each contribution, each sum of a site and each result is quantized once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from math import lcm

from pccl.collectives.layout import Segment, SegmentLayout
from pccl.collectives.route import Route

CONTRIBUTE, COLLECT, PUBLISH = 0, 1, 2
"""The steps: own contributions, sums of a site, and results."""


class DirectSchedule:
    """The mesh or the star as one rank sees it.

    Args:
        rank: own rank.
        world_size: number of ranks, at least 2.
        layout: the segments; a mesh needs ``world_size`` chunks, a star one.
        root: the rank that owns all segments (star); None: each rank owns its own chunk (mesh).
        receivers: the ranks that receive results of others; None: all.
        sites: by rank, the site of a mesh to which it belongs; empty: each rank is its own site.
            With sites all ranks receive results.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        layout: SegmentLayout,
        root: int | None = None,
        receivers: Collection[int] | None = None,
        sites: Sequence[int] = (),
    ) -> None:
        if world_size < 2 or not 0 <= rank < world_size or not 0 <= (root or 0) < world_size:
            raise ValueError(f"invalid mesh or star: {rank=} {world_size=} {root=}")
        if layout.world_size != (world_size if root is None else 1):
            raise ValueError(f"a mesh needs {world_size} chunks, a star needs 1")
        if sites and (len(sites) != world_size or root is not None or receivers is not None):
            raise ValueError(f"{len(sites)} sites do not fit a mesh of {world_size} ranks")
        self.rank = rank
        self.world_size = world_size
        self.layout = layout
        self.in_rank_order = root is not None
        """Whether contributions are combined in rank order, instead of the order of arrival."""
        self._sites = _Sites(sites or range(world_size))
        self._told = range(world_size) if receivers is None else receivers
        self.owned: list[Segment] = []
        """The segments whose results this rank computes."""
        self.sources: dict[int, tuple[int, ...]] = {}
        """Position of a segment -> the ranks that send their contributions to it, or the sums of
        their sites, to this rank."""
        self._owners: list[int] = []
        """By the position of a segment."""
        incoming: _Legs = defaultdict(lambda: ([], [], []))
        outgoing: _Legs = defaultdict(lambda: ([], [], []))
        for chunk in range(layout.world_size):
            owner = chunk if root is None else root
            if owner == rank:
                self.owned += layout.chunk(chunk)
            for segment in layout.chunk(chunk):
                self._owners.append(owner)
                self._place(segment, owner, incoming, outgoing)
        self._routes: dict[tuple[tuple[int, ...], ...], Route] = {}
        """By the positions of the segments at each step: all routes to or from a root are alike."""
        others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self.incoming_from = {one: self._route(incoming[one]) for one in others if one in incoming}
        """By rank: the segments that this rank receives from that rank; the next rank first."""
        self.outgoing_to = {one: self._route(outgoing[one]) for one in others if one in outgoing}
        """By rank: the segments that this rank sends to that rank."""
        self.hop_count = sum(route.count for route in self._routes.values())
        self.initial_sends = tuple(self._in_turn())
        """All (rank, segment) to send at step 0, in turn to each rank, the next one first."""

    def stands_for(self, rank: int) -> frozenset[int]:
        """Return the ranks whose contributions are in what ``rank`` sends to the own rank."""
        return self._sites.stands_for(rank, self.rank)

    def collects(self, segment: Segment) -> bool:
        """Whether this rank adds up a segment for its site, and passes the result on."""
        return segment.position in self.sources and self._owners[segment.position] != self.rank

    def _place(self, segment: Segment, owner: int, incoming: _Legs, outgoing: _Legs) -> None:
        """Add a segment to the routes of this rank, and to its sources."""
        sites, position, own = self._sites, segment.position, self.rank
        sources = sites.sources(own, owner, position)
        if sources:
            self.sources[position] = sources
        if own != owner:
            target = sites.target(own, owner, position)
            outgoing[target][COLLECT if sources else CONTRIBUTE].append(segment)
            if own in self._told:
                incoming[target][PUBLISH].append(segment)
        for source in sources:
            is_sum = sites.collects(source, owner, position)
            incoming[source][COLLECT if is_sum else CONTRIBUTE].append(segment)
            if source in self._told:
                outgoing[source][PUBLISH].append(segment)

    def _in_turn(self) -> Iterator[tuple[int, Segment]]:
        chunks = {
            other: [hop.segment for hop in route.legs[CONTRIBUTE].values()]
            for other, route in self.outgoing_to.items()
        }
        for number in range(max((len(chunk) for chunk in chunks.values()), default=0)):
            for other, chunk in chunks.items():
                if number < len(chunk):
                    yield other, chunk[number]

    def _route(self, legs: tuple[list[Segment], ...]) -> Route:
        alike = tuple(tuple(segment.position for segment in leg) for leg in legs)
        route = self._routes.get(alike)
        if route is None:
            route = self._routes[alike] = Route(enumerate(legs))
        return route


class _Sites:
    """Who sends a segment to whom, by the sites of all ranks."""

    def __init__(self, sites: Sequence[int]) -> None:
        self._site_of = sites
        self._members: dict[int, list[int]] = {}
        for rank, site in enumerate(sites):
            self._members.setdefault(site, []).append(rank)
        self._period = lcm(*map(len, self._members.values()))
        """The same ranks collect again so many segments later."""
        self._found: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def collects(self, rank: int, owner: int, position: int) -> bool:
        """Whether ``rank`` adds up this segment for a site of several ranks, not the owner's."""
        site = self._members[self._site_of[rank]]
        is_elsewhere = self._site_of[rank] != self._site_of[owner]
        return is_elsewhere and len(site) > 1 and site[position % len(site)] == rank

    def target(self, rank: int, owner: int, position: int) -> int:
        """Return the rank to which ``rank`` sends this segment: the owner, or who collects."""
        site = self._members[self._site_of[rank]]
        if self._site_of[rank] == self._site_of[owner]:
            return owner
        collector = site[position % len(site)]
        return owner if collector == rank else collector

    def sources(self, rank: int, owner: int, position: int) -> tuple[int, ...]:
        """Return the ranks that send this segment to ``rank``."""
        if rank != owner and not self.collects(rank, owner, position):
            return ()
        key = rank, owner, position % self._period
        found = self._found.get(key)
        if found is None:
            others = [
                site[position % len(site)]
                for number, site in self._members.items()
                if rank == owner and number != self._site_of[rank]
            ]
            own_site = self._members[self._site_of[rank]]
            found = self._found[key] = (*(one for one in own_site if one != rank), *others)
        return found

    def stands_for(self, source: int, target: int) -> frozenset[int]:
        """Return the ranks whose contributions are in what ``source`` sends to ``target``."""
        if self._site_of[source] == self._site_of[target]:
            return frozenset((source,))
        return frozenset(self._members[self._site_of[source]])


_Legs = defaultdict[int, tuple[list[Segment], list[Segment], list[Segment]]]
"""Rank -> the segments of its route, by step."""
