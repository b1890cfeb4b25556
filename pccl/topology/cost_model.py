"""How long an all-reduce takes, and which algorithm is therefore the quickest for which size.

The model is the usual one of latency and bandwidth: a message of n bytes takes a + b n from end to
end, and whoever sends or receives it is busy with it for a while (Hockney 1994; for collectives
Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH",
2005; the time that the ends are busy is the o of LogP, Culler et al. 1993). Of N members with n
bytes each:

* **Ring.** 2(N-1) steps one after the other, around the ring nearly twice; each moves n/N over
  every link of the ring at once, so that the slowest one sets the pace.
* **Star.** Everybody sends n to the root and gets n back; the root's port carries (N-1) n each way,
  and its messages are dealt with one after the other.
* **Mesh.** Twice everybody sends n/N to everybody else. Through each port goes what goes through it
  in a ring, as N-1 streams that get in each other's way a little.

Every time is fixed + per_byte * n, so there are few sizes from which on another one is the
quickest. They are looked for among the powers of two.

What nobody has measured is assumed (:data:`NEAR_BYTES_PER_S` and the others), and what was measured
while there was too little to send is less than what there is. So the model tells algorithms apart
that differ much; where they don't, either will do.
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
"""What a table may name. Of two that take equally long, the first one: a ring can be repaired."""

MESSAGE_S = 25e-6
"""To send or to receive one message, at one end: frame, placement and a turn of the loop."""

SEGMENT_BYTES = 512 << 10
"""So many bytes are one message."""

STREAM_COST = 0.08
"""By so much of its time each further stream through the same port slows down all of them."""

GAIN_MIN = 0.9
"""Another algorithm than the ring has to take less than so much of its time: measured speeds are
not more certain than that, and a ring can be repaired."""

UNKNOWN_RTT_S = 1e-3
"""Of a link whose round trip nobody has measured."""

NEAR_RTT_S = 2e-3
"""Links with a shorter round trip are inside one building."""

NEAR_BYTES_PER_S = 1.25e9
FAR_BYTES_PER_S = 125e6
"""Of a link whose speed nobody has measured: 10 Gbit/s inside one building, 1 Gbit/s beyond."""

MESH_MEMBERS_MAX = 64
"""Of larger groups a mesh is not thought of: so many streams at once end in lost packets, and the
master would look at the square of their number."""

SIZES = tuple(1 << power for power in range(10, 33))
"""The tensors that are tried, in bytes: 1 KiB to 4 GiB."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of an all-reduce by the size of its tensor.

    Attributes:
        fixed_s: of one without a byte.
        per_byte_s: more for each byte.
    """

    fixed_s: float
    per_byte_s: float

    def time_s(self, tensor_bytes: int) -> float:
        """The time that a tensor takes."""
        return self.fixed_s + self.per_byte_s * tensor_bytes


@dataclass(frozen=True, slots=True)
class AssumedLinks:
    """What is known of the links, with what is assumed of the others.

    Attributes:
        measured: who has measured, and the other end -> what.
    """

    measured: LinkMatrix

    def latency_s(self, source: PeerId, target: PeerId) -> float:
        """One way."""
        return self._rtt_s(source, target) / 2

    def bytes_per_s(self, source: PeerId, target: PeerId) -> float:
        """What ``source`` can send to ``target``; else what comes the other way."""
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
        links: of all neighbours.
    """
    size = len(ring)
    hops = [(peer, ring[(rank + 1) % size]) for rank, peer in enumerate(ring)]
    latencies = [links.latency_s(*hop) for hop in hops]
    # What is on its way longest is spared the two neighbouring hops that take the least.
    spared = min(latencies[rank - 1] + latencies[rank] for rank in range(size))
    steps = 2 * (size - 1)
    slowest = min(links.bytes_per_s(*hop) for hop in hops)
    fixed_s = 2 * sum(latencies) - spared + 2 * steps * MESSAGE_S
    return Cost(fixed_s, steps / size * (1 / slowest + 2 * MESSAGE_S / SEGMENT_BYTES))


def star_cost(ring: Sequence[PeerId], links: AssumedLinks) -> Cost:
    """The cost of a star: everything goes to the first member and back.

    Args:
        ring: the members, the root first, at least 2.
        links: of the root.
    """
    root, leaves = ring[0], ring[1:]
    inward = max(links.latency_s(leaf, root) for leaf in leaves)
    outward = max(links.latency_s(root, leaf) for leaf in leaves)
    port = _port([links.bytes_per_s(root, leaf) for leaf in leaves])
    messages = 2 * len(leaves) + 2  # the root's, and one at each end of the longest way
    per_byte_s = 2 * port + 2 * len(leaves) * MESSAGE_S / SEGMENT_BYTES
    return Cost(inward + outward + messages * MESSAGE_S, per_byte_s)


def mesh_cost(ring: Sequence[PeerId], links: AssumedLinks) -> Cost:
    """The cost of a mesh: twice everybody sends his share of N to everybody.

    Args:
        ring: the members, at least 2.
        links: of all pairs.
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
    """The quickest algorithm for each size of tensor.

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
    # In a ring of two each value is rounded as often as in a mesh of two.
    has_mesh = Algorithm.MESH in costs and len(ring) > 2
    quantized = Algorithm.MESH if has_mesh else Algorithm.RING
    return AlgorithmTable(tuple(steps[:ALGORITHM_STEPS_MAX]), quickest[-1][1], quantized)


def _costs(
    ring: Sequence[PeerId], links: AssumedLinks, broken: Collection[Pair]
) -> dict[Algorithm, Cost]:
    """Of what is possible."""
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
    """Seconds in which a port sends one byte to each of those that it has links to.

    Its links share it. How fast it is shows in the fastest of them; a slow one may take longer than
    all others together.
    """
    streams = len(speeds)
    shared = streams / max(speeds) * (1 + STREAM_COST * (streams - 1))
    return max(shared, 1 / min(speeds))
