"""The plan of a view: the fastest algorithm for each size of tensor, and the shares of a mesh.

The planner compares predicted times (``cost_model``) for tensors of many sizes. Measures fluctuate,
so a plan stays until another one is better by ``GAIN_MIN`` for some size; a plan with shares, until
another one is better by ``NOISE_GAIN_MIN``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations

from pccl.protocol.link_messages import LinkMeasure
from pccl.protocol.types import (
    ALGORITHM_STEPS_MAX,
    STAR_BYTES_MAX,
    Algorithm,
    AlgorithmStep,
    AlgorithmTable,
    PeerId,
)
from pccl.protocol.vocabulary.mesh_plan import EQUAL_MESH, MESH_MEMBERS_MAX, MeshPlan
from pccl.topology.cost_model import (
    AssumedLinks,
    Cost,
    mesh_cost,
    mesh_s_per_byte,
    speeds_of,
    usable_costs,
)
from pccl.topology.ring_order import Pair

GAIN_MIN = 0.9
"""Another algorithm must take less than this share of the ring's time, shares of a mesh less than
this share of the time with equal ones, and another plan less than this share of the present one's.
Measured speeds are no more exact than that, and a ring can be repaired."""

NOISE_GAIN_MIN = 0.8
"""The same for a present plan with shares: as long as no speed changes by more than a tenth, the
plan takes at most 1.1 / 0.9 = 1.22 times as long as the best one."""

PLANNED_MEMBERS_MIN = 3
"""With two members, any shares load the one link alike, and there is at most one site."""

SIZES = tuple(1 << power for power in range(10, 33))
"""The sizes of tensors that the search tries, in bytes: 1 KiB to 4 GiB."""


def plan_view(
    ring: Sequence[PeerId],
    links: AssumedLinks,
    broken: Collection[Pair],
    present: AlgorithmTable | None = None,
) -> AlgorithmTable:
    """Return the fastest algorithm for each size of tensor, and the shares and sites of a mesh.

    Args:
        ring: the members in order; the first one is the root of a star.
        links: known latencies and speeds; may include other peers.
        broken: pairs without a link; algorithms that need one are not chosen. (The caller has
            already reordered a ring with such neighbours.)
        present: the plan of the same ring in use. It is returned if no other plan is much better.
    """
    mesh = _best_mesh(ring, links)
    costs = usable_costs(ring, links, broken, mesh)
    if present is not None:
        kept = usable_costs(ring, links, broken, present.mesh)
        if kept and all(_is_good(present, kept, costs, size) for size in SIZES):
            return present
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
    return AlgorithmTable(
        tuple(steps[:ALGORITHM_STEPS_MAX]),
        quickest[-1][1],
        Algorithm.MESH if has_mesh else Algorithm.RING,
        mesh if has_mesh else EQUAL_MESH,
    )


def _best_mesh(ring: Sequence[PeerId], links: AssumedLinks) -> MeshPlan:
    """Return the shares and sites of the fastest mesh. Sites that change little are used.

    They need fewer bytes between the sites, which share a line that no measure shows.
    """
    if not PLANNED_MEMBERS_MIN <= len(ring) <= MESH_MEMBERS_MAX:
        return EQUAL_MESH
    flat = MeshPlan(_useful_shares(ring, links))
    sites = near_sites(ring, links)
    if not sites:
        return flat
    nested = MeshPlan(_useful_shares(ring, links, sites), sites)
    times = [mesh_cost(ring, links, plan).per_byte_s for plan in (nested, flat)]
    return nested if GAIN_MIN * times[0] <= times[1] else flat


def near_sites(ring: Sequence[PeerId], links: AssumedLinks) -> tuple[int, ...]:
    """Return the site of each member: members of one site are all near each other.

    Empty if all members are near each other, or none is.
    """
    sites: list[list[PeerId]] = []
    found: list[int] = []
    for peer in ring:
        near = (all(links.are_near(peer, other) for other in site) for site in sites)
        number = next((number for number, fits in enumerate(near) if fits), len(sites))
        if number == len(sites):
            sites.append([])
        sites[number].append(peer)
        found.append(number)
    return tuple(found) if 1 < len(sites) < len(ring) else ()


def _useful_shares(
    ring: Sequence[PeerId], links: AssumedLinks, sites: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return the shares with which a mesh is much faster than with equal ones; empty: none.

    Every pair must have been measured, or shares would follow assumptions. Only a newcomer has no
    speeds yet: its links count as slow as the slowest known one, until a mesh has measured them.
    A pair on one machine never has one, and is fast.
    """
    found = ((ends, links.measured.get(ends)) for ends in permutations(ring, 2))
    speeds = {ends: each for ends, each in found if each is not None and each.bytes_per_s}
    pairs = list(combinations(ring, 2))
    known = {pair for pair in pairs if pair in speeds or pair[::-1] in speeds}
    if not known:
        return ()
    known |= {pair for pair in pairs if links.are_near(*pair)}
    old = {peer for pair in known for peer in pair}
    if 2 * len(old) <= len(ring) or len(known) < len(old) * (len(old) - 1) / 2:
        return ()
    slowest = LinkMeasure(0, min(each.bytes_per_s for each in speeds.values()))
    assumed = {pair: slowest for pair in pairs if pair not in known}
    from pccl.topology.shares import best_shares  # numpy, which no other part of a master needs

    pair_speeds, ports = speeds_of(ring, replace(links, measured={**links.measured, **assumed}))
    shares = best_shares(pair_speeds, ports, sites)
    equal = mesh_s_per_byte([1] * len(ring), pair_speeds, ports, sites)
    is_better = mesh_s_per_byte(shares, pair_speeds, ports, sites) < GAIN_MIN * equal
    return shares if is_better else ()


def _is_good(
    present: AlgorithmTable,
    kept: dict[Algorithm, Cost],
    costs: dict[Algorithm, Cost],
    size: int,
) -> bool:
    """Whether the present plan is about as fast as the best one for tensors of this size."""
    chosen = {
        (present.algorithm_for(size), _quickest(costs, size)),
        (present.quantized, _for_quantized(costs)),
    }
    gain_min = NOISE_GAIN_MIN if present.mesh.shares else GAIN_MIN
    return all(
        now in kept and kept[now].time_s(size) * gain_min <= costs[best].time_s(size)
        for now, best in chosen
    )


def _for_quantized(costs: dict[Algorithm, Cost]) -> Algorithm:
    """Return the algorithm of large quantized tensors: a mesh rounds less often than a ring."""
    return Algorithm.MESH if Algorithm.MESH in costs else Algorithm.RING


def _quickest(costs: dict[Algorithm, Cost], size: int) -> Algorithm:
    """Return the fastest algorithm. At equal times it is the first one: a ring can be repaired."""
    times = {
        algorithm: cost.time_s(size) * (GAIN_MIN if algorithm is Algorithm.RING else 1)
        for algorithm, cost in costs.items()
        if algorithm is not Algorithm.STAR or size <= STAR_BYTES_MAX
    }
    return min(times, key=lambda algorithm: times[algorithm])
