"""The plan of a group, explained: links, algorithms, shares, and predicted beside measured times.

The master plans each view (``pccl.topology.planner``). ``pccl plan`` shows the plan, and what a new
plan would be by the present measures. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

from pccl.observe.summary import US_PER_S
from pccl.protocol.limits import BYTES_PER_S_MAX, RTT_NS_MAX
from pccl.protocol.link_messages import LinkMeasure
from pccl.protocol.status_report import EndedStatus, StatusReport
from pccl.protocol.types import Algorithm, AlgorithmTable, PeerId
from pccl.protocol.vocabulary.mesh_plan import EQUAL_MESH, SHARE_UNITS
from pccl.telemetry.names import name_flaw
from pccl.topology.cost_model import AssumedLinks, usable_costs
from pccl.topology.planner import plan_view
from pccl.topology.ring_order import Pair

NS_PER_US = 1000

MEMBERS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """What a plan depends on.

    Attributes:
        group: number of the group.
        ring: its members in ring order.
        names: their names; a peer without one is missing.
        links: what they have measured.
        plan: the plan in use.
        broken: pairs without a link.
        ended: its calls that ended last.
        is_complete: whether the master has sent all measures.
    """

    group: int
    ring: tuple[PeerId, ...]
    names: Mapping[PeerId, str]
    links: AssumedLinks
    plan: AlgorithmTable
    broken: frozenset[Pair] = frozenset()
    ended: tuple[EndedStatus, ...] = ()
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long an all-reduce of one size takes.

    Attributes:
        tensor_bytes: size of the tensor of each member.
        times_s: algorithm -> predicted time, of those that the links allow. A mesh has the shares
            of the plan.
        equal_mesh_s: predicted time of a mesh in which all own the same; None: no mesh.
        chosen: the algorithm of ``"auto"``.
        measured_s: median of the last calls of this size; None: there were none.
        measured_count: number of these calls.
    """

    tensor_bytes: int
    times_s: Mapping[Algorithm, float]
    equal_mesh_s: float | None
    chosen: Algorithm
    measured_s: float | None
    measured_count: int


def of_status(status: StatusReport, group: int) -> PlannedGroup | None:
    """Return what the plan of a group depends on; None: the status lacks it."""
    members = sorted((one for one in status.members if one.group == group), key=lambda m: m.rank)
    found = next((one for one in status.groups if one.group == group), None)
    if found is None or found.plan is None or not members:
        return None
    ring = tuple(member.peer for member in members)
    are_all = len(ring) == found.members  # a status shows the first members of a large run
    return PlannedGroup(
        group,
        ring,
        {member.peer: member.name for member in members if member.name},
        AssumedLinks(
            {
                (link.peer, link.other): LinkMeasure(link.rtt_us * NS_PER_US, link.bytes_per_s)
                for link in status.links
            },
            {member.peer: member.uplink_bytes_per_s for member in members},
        ),
        found.plan if are_all else replace(found.plan, mesh=EQUAL_MESH),
        frozenset(Pair((one.peer, one.other)) for one in status.links if one.path is None),
        tuple(one for one in status.ended if one.group == group),
        are_all and len(status.links) == status.link_count,
    )


def of_json(data: Any, group: int) -> PlannedGroup:
    """Return what the plan of a group depends on, from the JSON of a status or a part of it.

    Args:
        data: ``{"members": [{"peer": 1, "name": "a", "group": 0, "rank": 0}, ...], "links":
            [{"peer": 1, "other": 2, "rtt_us": 900, "bytes_per_s": 5000000}, ...]}``. Names, groups
            (0), ranks (in order) and ``uplink_bytes_per_s`` of members may be missing.
        group: number of the group.

    Raises:
        ValueError: the data has another form; the message says where.
    """
    members = [
        (_number(one, "rank", f"member {index}", index), one)
        for index, one in enumerate(_objects(data, "members"))
        if _number(one, "group", f"member {index}", 0) == group
    ]
    ranked = [one for _, one in sorted(members, key=lambda member: member[0])]
    ring = tuple(PeerId(_number(one, "peer", "a member")) for one in ranked)
    if len(set(ring)) != len(ring) or not 2 <= len(ring) <= MEMBERS_MAX:
        raise ValueError(f"group {group} must have at least 2 members, each of them once")
    links: dict[tuple[PeerId, PeerId], LinkMeasure] = {}
    for index, link in enumerate(_objects(data, "links")):
        where = f"link {index}"
        ends = PeerId(_number(link, "peer", where)), PeerId(_number(link, "other", where))
        rtt_ns = _number(link, "rtt_us", where, 0) * NS_PER_US
        speed = _number(link, "bytes_per_s", where, 0)
        links[ends] = LinkMeasure(min(rtt_ns, RTT_NS_MAX), min(speed, BYTES_PER_S_MAX))
    names = {peer: str(one.get("name", "")) for peer, one in zip(ring, ranked, strict=True)}
    named = {peer: name for peer, name in names.items() if name}
    for peer, name in named.items():
        if flaw := name_flaw(name):
            raise ValueError(f"the name of peer {peer}: {flaw}")
    uplinks = {
        peer: min(_number(one, "uplink_bytes_per_s", f"peer {peer}", 0), BYTES_PER_S_MAX)
        for peer, one in zip(ring, ranked, strict=True)
    }
    known = AssumedLinks(links, uplinks)
    return PlannedGroup(group, ring, named, known, plan_view(ring, known, ()))


def _objects(data: Any, key: str) -> list[Mapping[str, Any]]:
    found: Any = cast("dict[str, Any]", data).get(key) if isinstance(data, dict) else None
    if not isinstance(found, list):
        raise ValueError(f'there must be a list "{key}"')
    objects = cast("list[Mapping[str, Any]]", found)
    for index, one in enumerate(objects):
        if not isinstance(one, dict):
            raise ValueError(f"{key}[{index}] must be an object")
    return objects


def _number(one: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = one.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f'"{key}" of {where} must be a whole number, at least 0')
    return value


def renewed(known: PlannedGroup) -> AlgorithmTable:
    """Return the plan that ``optimize_topology`` would give the group now."""
    return plan_view(known.ring, known.links, known.broken, known.plan)


def shares(known: PlannedGroup, plan: AlgorithmTable) -> dict[PeerId, float]:
    """Return the part of a tensor that each member owns in a mesh."""
    owned = plan.mesh.shares or (SHARE_UNITS / len(known.ring),) * len(known.ring)
    return {peer: share / SHARE_UNITS for peer, share in zip(known.ring, owned, strict=True)}


def sites(known: PlannedGroup, plan: AlgorithmTable) -> list[list[PeerId]]:
    """Return the members of each site of several members, which first add up among themselves."""
    found: dict[int, list[PeerId]] = {}
    for peer, site in zip(known.ring, plan.mesh.sites, strict=False):
        found.setdefault(site, []).append(peer)
    return [members for members in found.values() if len(members) > 1]


def predictions(
    known: PlannedGroup, plan: AlgorithmTable, sizes: Iterable[int]
) -> Sequence[Prediction]:
    """Return the times of all-reduces under a plan, the predicted ones beside the measured."""
    costs = usable_costs(known.ring, known.links, known.broken, plan.mesh)
    mesh = usable_costs(known.ring, known.links, known.broken).get(Algorithm.MESH)
    found: list[Prediction] = []
    for size in sizes:
        took = [
            (call.took_us - call.late_us) / US_PER_S
            for call in known.ended
            if call.tensor_bytes == size and call.cause is None
        ]
        found.append(
            Prediction(
                size,
                {algorithm: cost.time_s(size) for algorithm, cost in costs.items()},
                mesh.time_s(size) if mesh is not None else None,
                plan.algorithm_for(size),
                median(took) if took else None,
                len(took),
            )
        )
    return found
