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
  ring, in N-1 streams that slow each other down a little.

Every time is fixed + per_byte * n, so the fastest algorithm changes at few sizes. The search looks
for these sizes among the powers of two.

Links without a measure get an assumed one (:data:`NEAR_BYTES_PER_S` and others). A speed that was
measured with little data is too low. So the model separates algorithms whose times differ much; if
they differ little, either is good.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pccl.protocol.types import (
    ALGORITHM_STEPS_MAX,
    NS_PER_S,
    STAR_BYTES_MAX,
    Algorithm,
    AlgorithmStep,
    AlgorithmTable,
    PeerId,
)
from pccl.topology.link_measures import LinkMatrix
from pccl.topology.ring_order import Pair

IMPLEMENTED = (Algorithm.RING, Algorithm.STAR, Algorithm.MESH)
"""Algorithms that a table may name. At equal times the first one is chosen: a ring can be
repaired."""

MESSAGE_S = 25e-6
"""Time to send or receive one message at one end: frame, placement and a turn of the loop."""

SEGMENT_BYTES = 512 << 10
"""Bytes of one message."""

STREAM_COST = 0.08
"""Each further stream through the same port slows all of them by this share of their time."""

GAIN_MIN = 0.9
"""Another algorithm must take less than this share of the ring's time. Measured speeds are no
more exact than that, and a ring can be repaired."""

UNKNOWN_RTT_S = 1e-3
"""Assumed round trip of a link without a measured one."""

NEAR_RTT_S = 2e-3
"""Links with a shorter round trip count as inside one building."""

NEAR_BYTES_PER_S = 1.25e9
FAR_BYTES_PER_S = 125e6
"""Assumed speed of a link without a measured one: 10 Gbit/s in one building, 1 Gbit/s beyond."""

MESH_MEMBERS_MAX = 64
"""Larger groups get no mesh: its many streams lose packets, and the master's work grows with the
square of the group's size."""

SIZES = tuple(1 << power for power in range(10, 33))
"""The sizes of tensors that the search tries, in bytes: 1 KiB to 4 GiB."""


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
    """

    measured: LinkMatrix

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

    def _rtt_s(self, one: PeerId, other: PeerId) -> float:
        ends = (self.measured.get((one, other)), self.measured.get((other, one)))
        known = [end.rtt_ns for end in ends if end is not None and end.rtt_ns]
        return min(known) / NS_PER_S if known else UNKNOWN_RTT_S


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
    port = _port([links.bytes_per_s(root, leaf) for leaf in leaves])
    messages = 2 * len(leaves) + 2  # those of the root, and one at each end of the longest way
    per_byte_s = 2 * port + 2 * len(leaves) * MESSAGE_S / SEGMENT_BYTES
    return Cost(inward + outward + messages * MESSAGE_S, per_byte_s)


def mesh_cost(ring: Sequence[PeerId], links: AssumedLinks) -> Cost:
    """The cost of a mesh: each member sends 1/N of its data to each other member, twice.

    Args:
        ring: the members, at least 2.
        links: measured and assumed links.
    """
    others = {peer: [other for other in ring if other != peer] for peer in ring}
    latency = max(links.latency_s(peer, other) for peer in ring for other in others[peer])
    port = max(_port([links.bytes_per_s(peer, other) for other in others[peer]]) for peer in ring)
    messages = 2 * (len(ring) - 1)
    per_byte_s = (port + messages * MESSAGE_S / SEGMENT_BYTES) / len(ring)
    return Cost(2 * (latency + messages * MESSAGE_S), 2 * per_byte_s)


def choose_algorithms(
    ring: Sequence[PeerId],
    measured: LinkMatrix,
    broken: Collection[Pair],
    implemented: Collection[Algorithm] = IMPLEMENTED,
) -> AlgorithmTable:
    """Return the fastest algorithm for each size of tensor.

    Args:
        ring: the members in order; the first one is the root of a star.
        measured: known latencies and speeds; may include other peers.
        broken: pairs without a link; algorithms that need one are not chosen. (The caller has
            already reordered a ring with such neighbours.)
        implemented: algorithms to choose from.
    """
    costs = {
        algorithm: cost
        for algorithm, cost in _costs(ring, AssumedLinks(measured), broken).items()
        if algorithm in implemented
    }
    if list(costs) in ([], [Algorithm.RING]):
        return AlgorithmTable()
    quickest = [(size, _quickest(costs, size)) for size in SIZES]
    steps = [
        AlgorithmStep(size, algorithm)
        for (size, algorithm), (_, following) in pairwise(quickest)
        if algorithm is not following
    ]
    # In a ring of two members, each value is rounded as often as in a mesh of two.
    has_mesh = Algorithm.MESH in costs and len(ring) > 2
    quantized = Algorithm.MESH if has_mesh else Algorithm.RING
    return AlgorithmTable(tuple(steps[:ALGORITHM_STEPS_MAX]), quickest[-1][1], quantized)


def _costs(
    ring: Sequence[PeerId], links: AssumedLinks, broken: Collection[Pair]
) -> dict[Algorithm, Cost]:
    """Return the costs of the algorithms whose links all exist."""
    if len(ring) < 2:
        return {}
    costs = {Algorithm.RING: ring_cost(ring, links)}
    if all(Pair((ring[0], leaf)) not in broken for leaf in ring[1:]):
        costs[Algorithm.STAR] = star_cost(ring, links)
    if len(ring) <= MESH_MEMBERS_MAX and not any(pair <= set(ring) for pair in broken):
        costs[Algorithm.MESH] = mesh_cost(ring, links)
    return costs


def _quickest(costs: dict[Algorithm, Cost], size: int) -> Algorithm:
    times = {
        algorithm: cost.time_s(size) * (GAIN_MIN if algorithm is Algorithm.RING else 1)
        for algorithm, cost in costs.items()
        if algorithm is not Algorithm.STAR or size <= STAR_BYTES_MAX
    }
    return min(times, key=lambda algorithm: times[algorithm])


def _port(speeds: list[float]) -> float:
    """Return the seconds in which a port sends one byte over each of its links.

    The links share the port, whose speed the fastest link shows. A slow link may take longer than
    all other links together.
    """
    streams = len(speeds)
    shared = streams / max(speeds) * (1 + STREAM_COST * (streams - 1))
    return max(shared, 1 / min(speeds))
