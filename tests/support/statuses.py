"""A status of a run in trouble, for all tools that show one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pccl.inquiry import (
    EndedStatus,
    GroupStatus,
    LinkPath,
    LinkSpeed,
    MasterStatus,
    MemberStatus,
    NewcomerStatus,
    OperationStatus,
    RemovalCause,
    RemovalStatus,
    RoundStatus,
)
from pccl.protocol.limits import TERM_GAP
from pccl.protocol.types import AbortCause, AlgorithmTable, OperationId, PeerId, RoundId, RoundKind

REDUCE = "tag 7 (AVG of 1048576 x float32)"


def member(peer: int, name: str, **changes: Any) -> MemberStatus:
    """A member that works, with some values of its own."""
    values: dict[str, Any] = {
        "peer": PeerId(peer),
        "name": name,
        "group": 0,
        "rank": peer - 1,
        "host": f"10.0.0.{peer}",
        "port": 48200 + peer,
        "connected": True,
        "silent_ms": 100 * peer,
        "awaited_ms": None,
        "calls": "",
        "last_call": REDUCE,
        "last_call_ms": 250,
        "step": 1200,
        "step_us": 400_000,
        "loss": 2.5,
    }
    return MemberStatus(**values | changes)


def ended(**changes: Any) -> EndedStatus:
    """A call that has a result, with some values of its own."""
    values: dict[str, Any] = {
        "what": REDUCE,
        "group": 0,
        "ago_ms": 400,
        "took_us": 42_000,
        "last": PeerId(2),
        "late_us": 31_000,
        "tensor_bytes": 4 << 20,
        "cause": None,
    }
    return EndedStatus(**values | changes)


MEMBERS = (
    member(1, "alice", calls=REDUCE),
    member(2, "bob", rank=2, step=1196, step_us=520_000, awaited_ms=3200, last_call_ms=3600),
    member(3, "carol", rank=1, calls=REDUCE, step=1199),
    member(
        4, "dave", connected=False, silent_ms=6100, awaited_ms=6000, step=0, step_us=0, loss=None
    ),
)

SPEEDS = {(1, 2): 98_100_000, (2, 1): 12_400_000, (1, 3): 1_130_000_000, (3, 1): 1_090_000_000}


def link(peer: int, other: int, bytes_per_s: int) -> LinkSpeed:
    """A direct link; that of alice and bob leads through carol, because nobody can dial them."""
    known = LinkSpeed(PeerId(peer), PeerId(other), 900 * peer, bytes_per_s, None, LinkPath.DIRECT)
    if {peer, other} != {1, 2}:
        return known
    path = LinkPath.RELAYED
    return replace(known, relay=PeerId(3), path=path, peer_dialable=False, other_dialable=False)


SAMPLE = MasterStatus(
    run=bytes(range(16)),
    term=2,
    uptime_ms=725_000,
    roster_version=9,
    member_count=4,
    members=MEMBERS,
    newcomer_count=1,
    newcomers=(
        NewcomerStatus(
            PeerId(12), "erin", 0, "10.0.0.12", 48212, True, 80, 1400,
            "the members' update_topology()",
        ),
    ),
    group_count=1,
    groups=(GroupStatus(0, 5, 4, (5,), AlgorithmTable()),),
    rounds=(
        RoundStatus(
            RoundId(RoundKind.UPDATE_TOPOLOGY, 3), 3200, 2, (PeerId(2), PeerId(4)), 2
        ),
    ),
    operation_count=1,
    operations=(
        OperationStatus(
            OperationId(0, 5, 7, 42, 2), REDUCE, False, 3300, 3200, 4, (PeerId(2), PeerId(4)), 2,
            0, 0,
        ),
    ),
    ended_count=1281,
    ended=(
        ended(),
        ended(ago_ms=1300, last=PeerId(3), late_us=2_000, took_us=18_000),
        ended(ago_ms=2100, cause=AbortCause.MEMBER_LOST, took_us=250_000),
        ended(ago_ms=2500, what="update_topology", group=None, tensor_bytes=0),
    ),
    link_count=4,
    links=tuple(link(*pair, speed) for pair, speed in sorted(SPEEDS.items())),
    removal_count=1,
    removals=(
        RemovalStatus(
            PeerId(9), "ivan", 0, RemovalCause.SILENT, "silent for 10.0 s", 65_000
        ),
    ),
    waits_for="",
)  # fmt: skip


def with_long_ids(status: MasterStatus) -> MasterStatus:
    """The same run, whose peers have joined after a restart of the master."""
    gap = TERM_GAP + 7_000_000
    return replace(
        status,
        members=tuple(replace(one, peer=PeerId(one.peer + gap)) for one in status.members),
        newcomers=tuple(
            replace(one, peer=PeerId(one.peer + gap), waits_for=f"a link to peer {gap + 1}: none")
            for one in status.newcomers
        ),
        rounds=tuple(replace(one, missing=(PeerId(gap + 2),)) for one in status.rounds),
        operations=tuple(replace(one, missing=(PeerId(gap + 2),)) for one in status.operations),
        ended=tuple(replace(one, last=PeerId(one.last + gap)) for one in status.ended),
        links=tuple(
            replace(
                one,
                peer=PeerId(one.peer + gap),
                other=PeerId(one.other + gap),
                relay=one.relay and PeerId(one.relay + gap),
            )
            for one in status.links
        ),
        removals=tuple(replace(one, peer=PeerId(one.peer + gap)) for one in status.removals),
    )
