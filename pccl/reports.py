"""What calls tell their callers."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.protocol.types import Roster
from pccl.runtime.requests import ReduceReport


@dataclass(frozen=True, slots=True)
class ReduceInfo:
    """What a reduce or a broadcast did.

    Attributes:
        local_world_size: members of the own group whose values are in the result.
        tx_bytes: payload bytes this peer sent.
        rx_bytes: payload bytes this peer received.
        contributors: ids of the members whose values are in the result, in ring order. Of several
            tensors: of the one that was reduced last.
        view: number of the view that the operation belonged to.
        attempts: how many operations it took; more than one after losses.
    """

    local_world_size: int
    tx_bytes: int
    rx_bytes: int
    contributors: tuple[int, ...] = ()
    view: int = 0
    attempts: int = 0


NO_INFO = ReduceInfo(0, 0, 0)
"""Of a reduce that failed."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One member of the own group.

    Attributes:
        peer_id: its id; unique in the run, and larger for those who joined later.
        rank: its place in the ring, from 0.
        host: where the others reach it.
        port: likewise.
    """

    peer_id: int
    rank: int
    host: str
    port: int


def info_of(report: ReduceReport) -> ReduceInfo:
    """The user's view of a report."""
    return ReduceInfo(
        local_world_size=len(report.contributors),
        tx_bytes=report.tx_bytes,
        rx_bytes=report.rx_bytes,
        contributors=report.contributors,
        view=report.operation.view,
        attempts=report.attempts,
    )


def members_of(roster: Roster) -> tuple[MemberInfo, ...]:
    """The user's view of a group."""
    return tuple(
        MemberInfo(member.peer, rank, member.host, member.port)
        for rank, member in enumerate(roster.members)
    )
