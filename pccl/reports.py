"""What calls tell their callers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pccl.protocol.types import PeerId, Roster
from pccl.runtime.requests import ReduceReport
from pccl.transports.lane import Lane
from pccl.transports.link import Link


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


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """One connection to another peer.

    Attributes:
        number: of the lane within its link, from 0.
        local: this end, ``HOST:PORT``.
        remote: the other end, as this host sees it.
        congestion: what paces the bytes sent here, as the kernel calls it; empty if unknown.
        sent_bytes: all bytes sent since the connection was greeted.
        received_bytes: likewise received.
    """

    number: int
    local: str
    remote: str
    congestion: str
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The link to one other peer: up while it has a lane.

    Attributes:
        peer_id: of the other peer.
        lanes: by number.
    """

    peer_id: int
    lanes: tuple[LaneStatus, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """What this peer knows of itself at the moment.

    Attributes:
        peer_id: the own id.
        links: to the other peers, by id. Those that segments go over get all their lanes when the
            first collective begins; the others have one.
    """

    peer_id: int
    links: tuple[LinkStatus, ...]


def status_of(peer: PeerId, links: Iterable[Link]) -> Status:
    """The user's view of a peer."""
    return Status(
        peer,
        tuple(
            LinkStatus(link.peer, tuple(_lane_status(lane) for lane in link.lanes))
            for link in sorted(links, key=lambda link: link.peer)
        ),
    )


def _lane_status(lane: Lane) -> LaneStatus:
    at = lane.connection
    return LaneStatus(
        lane.number,
        str(at.local),
        str(at.remote),
        at.congestion,
        lane.sent_bytes,
        lane.received_bytes,
    )


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
