"""How long an all-reduce takes, and which algorithm is therefore the fastest for each size.

The model is the usual one of latency and bandwidth: a message of n bytes takes a + b n from end to
end (Hockney 1994). It also occupies its sender and its receiver for a while, which is the o of LogP
(Culler et al. 1993). For collectives see Thakur, Rabenseifner & Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005. For N members with n bytes each:

* **Ring.** It takes 2(N-1) steps, nearly twice around the ring. Each step moves n/N over
  every link of the ring at once, so the slowest link sets the pace.
* **Star.** Each member sends n to the root and receives n. The root's port carries (N-1) n each
  way, and the root processes its messages one after the other.
* **Mesh.** Each member sends n/N to each other member, twice. Each port carries as much as in a
  ring, in N-1 streams that slow each other down a little. Members may own other shares than n/N
  (``shares``), and the members of a site may first add up among themselves (``direct``).

Every time is fixed + per_byte * n, so the fastest algorithm changes at few sizes.

Links without a measure get an assumed one (:data:`NEAR_BYTES_PER_S` and others). A speed that was
measured with little data is too low. So the model separates algorithms whose times differ much; if
they differ little, either is good.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from math import inf

from pccl.protocol.types import NS_PER_S, Algorithm, PeerId
from pccl.protocol.vocabulary.mesh_plan import EQUAL_MESH, MESH_MEMBERS_MAX, MeshPlan
from pccl.topology.link_measures import LinkMatrix
from pccl.topology.ring_order import Pair

MESSAGE_S = 25e-6
"""Time to send or receive one message at one end: frame, placement and a turn of the loop."""

SEGMENT_BYTES = 512 << 10
"""Bytes of one message."""

STREAM_COST = 0.08
"""Each further stream through the same port slows all of them by this share of their time."""

UNKNOWN_RTT_S = 1e-3
"""Assumed round trip of a link without a measured one."""

NEAR_RTT_S = 2e-3
"""Links with a shorter round trip count as inside one building."""

NEAR_BYTES_PER_S = 1.25e9
FAR_BYTES_PER_S = 125e6
"""Assumed speed of a link without a measured one: 10 Gbit/s in one building, 1 Gbit/s beyond."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of an all-reduce as a function of its tensor's size.

    Attributes:
        fixed_s: time for an empty tensor.
        per_byte_s: additional time for each byte.
    """

    fixed_s: float
    per_byte_s: float

    def time_s(self, tensor_bytes: int) -> float:
        """Return the time for a tensor of ``tensor_bytes``."""
        return self.fixed_s + self.per_byte_s * tensor_bytes


@dataclass(frozen=True, slots=True)
class AssumedLinks:
    """The measured links, and assumptions about all other links.

    Attributes:
        measured: (the peer that measured, the peer at the other end) -> its measure.
        uplinks: peer -> what it has sent over all its links at once, in bytes per second.
    """

    measured: LinkMatrix
    uplinks: Mapping[PeerId, int] = field(default_factory=dict[PeerId, int])

    def latency_s(self, source: PeerId, target: PeerId) -> float:
        """Return the one-way latency."""
        return self._rtt_s(source, target) / 2

    def bytes_per_s(self, source: PeerId, target: PeerId) -> float:
        """Return the speed measured to ``target``, else the reverse speed, else an assumed one."""
        for ends in ((source, target), (target, source)):
            known = self.measured.get(ends)
            if known is not None and known.bytes_per_s:
                return known.bytes_per_s
        is_near = self._rtt_s(source, target) < NEAR_RTT_S
        return NEAR_BYTES_PER_S if is_near else FAR_BYTES_PER_S

    def port_bytes_per_s(self, peer: PeerId, fastest: float, streams: int) -> float:
        """Return what ``peer`` can send over ``streams`` links at once.

        Without a measure they share the speed of the ``fastest`` link, and slow each other down.
        """
        assumed = fastest / (1 + STREAM_COST * (streams - 1))
        return max(assumed, self.uplinks.get(peer, 0))

    def are_near(self, one: PeerId, other: PeerId) -> bool:
        """Whether the measured round trip is so short that both are inside one building."""
        known = self._measured_rtt_s(one, other)
        return known is not None and known < NEAR_RTT_S

    def _rtt_s(self, one: PeerId, other: PeerId) -> float:
        known = self._measured_rtt_s(one, other)
        return UNKNOWN_RTT_S if known is None else known

    def _measured_rtt_s(self, one: PeerId, other: PeerId) -> float | None:
        ends = (self.measured.get((one, other)), self.measured.get((other, one)))
        known = [end.rtt_ns for end in ends if end is not None and end.rtt_ns]
        return min(known) / NS_PER_S if known else None


def ring_cost(ring: Sequence[PeerId], links: AssumedLinks) -> Cost:
    """The cost of a ring: 2(N-1) steps, each over all links between neighbours at once.

    Args:
        ring: the members in order, at least 2.
        links: measured and assumed links.
    """
    size = len(ring)
    hops = [(peer, ring[(rank + 1) % size]) for rank, peer in enumerate(ring)]
    latencies = [links.latency_s(*hop) for hop in hops]
    # The slowest chunk skips the two adjacent hops with the lowest latency.
    spared = min(latencies[rank - 1] + latencies[rank] for rank in range(size))
    steps = 2 * (size - 1)
    slowest = min(links.bytes_per_s(*hop) for hop in hops)
    fixed_s = 2 * sum(latencies) - spared + 2 * steps * MESSAGE_S
    return Cost(fixed_s, steps / size * (1 / slowest + 2 * MESSAGE_S / SEGMENT_BYTES))


def star_cost(ring: Sequence[PeerId], links: AssumedLinks) -> Cost:
    """The cost of a star: each member sends all its data to the root, and receives the result.

    Args:
        ring: the members, the root first, at least 2.
        links: measured and assumed links.
    """
    root, leaves = ring[0], ring[1:]
    inward = max(links.latency_s(leaf, root) for leaf in leaves)
    outward = max(links.latency_s(root, leaf) for leaf in leaves)
    speeds = [links.bytes_per_s(root, leaf) for leaf in leaves]
    port = links.port_bytes_per_s(root, max(speeds), len(leaves))
    messages = 2 * len(leaves) + 2  # those of the root, and one at each end of the longest way
    per_byte_s = (
        2 * max(len(leaves) / port, 1 / min(speeds)) + 2 * len(leaves) * MESSAGE_S / SEGMENT_BYTES
    )
    return Cost(inward + outward + messages * MESSAGE_S, per_byte_s)


def mesh_cost(ring: Sequence[PeerId], links: AssumedLinks, plan: MeshPlan = EQUAL_MESH) -> Cost:
    """The cost of a mesh: each member sends each owner its part, and its own part to each member.

    With sites, one member of each site does so for its site.

    Args:
        ring: the members, at least 2.
        links: measured and assumed links.
        plan: shares and sites of the members.
    """
    size, sites = len(ring), plan.sites or range(len(ring))
    across = inside = 0.0
    for one, other in permutations(range(size), 2):
        latency = links.latency_s(ring[one], ring[other])
        if sites[one] == sites[other]:
            inside = max(inside, latency)
        else:
            across = max(across, latency)
    slowest = mesh_s_per_byte(plan.shares or [1] * size, *speeds_of(ring, links), plan.sites)
    members = Counter(sites).values()
    messages = 2 * (len(members) + max(members) - 2)
    per_byte_s = slowest + 2 * messages * MESSAGE_S / SEGMENT_BYTES / size
    return Cost(2 * (across + inside + messages * MESSAGE_S), per_byte_s)


def speeds_of(ring: Sequence[PeerId], links: AssumedLinks) -> tuple[list[list[float]], list[float]]:
    """Return the speeds of all links by the ranks of their ends, and of each member's port.

    A port carries all links of its member at once. Links inside a building do not show what it
    carries, unless there are no others. The diagonal of the links is infinite.
    """
    speeds = [
        [inf if peer == other else links.bytes_per_s(peer, other) for other in ring]
        for peer in ring
    ]
    ports: list[float] = []
    for peer, row in zip(ring, speeds, strict=True):
        known = [
            (links.are_near(peer, other), speed) for other, speed in zip(ring, row, strict=True)
        ]
        finite = [one for one in known if one[1] < inf]
        across = [speed for near, speed in finite if not near]
        fastest = max(across or [speed for _, speed in finite])
        ports.append(links.port_bytes_per_s(peer, fastest, len(ring) - 1))
    return speeds, ports


def mesh_s_per_byte(
    shares: Sequence[float],
    speeds: Sequence[Sequence[float]],
    ports: Sequence[float],
    sites: Sequence[int] = (),
) -> float:
    """Return the seconds that a mesh takes for each byte of a large tensor.

    Contributions and results travel at the same time. So the link from rank i to rank j carries j's
    part of i's contribution and i's part of the result. A port carries that of all its links.

    At a site of k ranks, each of them also collects a k-th of what others own. Inside the site this
    counts like an own part. The link to a rank elsewhere carries a k-th of that rank's part. Ports
    lead out of the site.

    Args:
        shares: by rank, how much of the tensor the member owns, in any unit.
        speeds: by the ranks of the ends, in bytes per second.
        ports: by rank, in bytes per second.
        sites: by rank, the site of the member; empty: each member is its own site.
    """
    whole, size = sum(shares), len(shares)
    sites = sites or range(size)
    members, owned = Counter(sites), defaultdict[int, float](float)
    for site, share in zip(sites, shares, strict=True):
        owned[site] += share
    slowest = 0.0
    for one, other in combinations(range(size), 2):
        if sites[one] == sites[other]:
            collected = (whole - owned[sites[one]]) / members[sites[one]]
            load = shares[one] + shares[other] + 2 * collected
        else:
            load = shares[one] / members[sites[other]] + shares[other] / members[sites[one]]
        slowest = max(slowest, load / min(speeds[one][other], speeds[other][one]))
    for share, site, port in zip(shares, sites, ports, strict=True):
        collected = (whole - owned[site]) / members[site]
        slowest = max(slowest, (collected + (len(members) - 1) * share) / port)
    return slowest / whole


def usable_costs(
    ring: Sequence[PeerId],
    links: AssumedLinks,
    broken: Collection[Pair],
    plan: MeshPlan = EQUAL_MESH,
) -> dict[Algorithm, Cost]:
    """Return the costs of the algorithms whose links all exist.

    Args:
        ring: the members in order; the first one is the root of a star.
        links: measured and assumed links.
        broken: pairs without a link. (The caller has already reordered a ring with such
            neighbours.)
        plan: shares and sites of the members in a mesh.
    """
    if len(ring) < 2:
        return {}
    costs = {Algorithm.RING: ring_cost(ring, links)}
    if all(Pair((ring[0], leaf)) not in broken for leaf in ring[1:]):
        costs[Algorithm.STAR] = star_cost(ring, links)
    if len(ring) <= MESH_MEMBERS_MAX and not any(pair <= set(ring) for pair in broken):
        costs[Algorithm.MESH] = mesh_cost(ring, links, plan)
    return costs
