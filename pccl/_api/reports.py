"""The reports of a peer to its program: the members of its group, and its status."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from pccl.machines.peer.events import CallEvent
from pccl.machines.peer.operations import OpenOperation
from pccl.machines.peer.words import call_name
from pccl.protocol.types import NS_PER_S, Roster
from pccl.runtime.collective.transfers.transfer import Transfer
from pccl.runtime.engine import PeerEngine
from pccl.telemetry.events import CallEnded
from pccl.telemetry.names import with_name
from pccl.telemetry.stream import EventStream
from pccl.telemetry.words import line_of
from pccl.transports.link import Lane

HAPPENED_MAX = 16
"""Events in a status."""


class Attribute(enum.IntEnum):
    """The attributes that :meth:`pccl.Communicator.get_attribute` returns."""

    GLOBAL_WORLD_SIZE = 1
    LOCAL_WORLD_SIZE = 2
    NUM_DISTINCT_PEER_GROUPS = 3
    LARGEST_PEER_GROUP_WORLD_SIZE = 4


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One member of this peer's group.

    Attributes:
        peer_id: its id, unique in the run; peers that joined later have larger ids.
        name: its name, for people; not necessarily unique.
        rank: its place in the ring, from 0.
        host: host at which other peers reach it.
        port: port at which other peers reach it.
    """

    peer_id: int
    rank: int
    host: str
    port: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """One connection to another peer.

    Attributes:
        number: number of the lane within its link, from 0.
        local: this end, ``HOST:PORT``.
        remote: the other end, as this host sees it.
        congestion: congestion control of this end, by its name in the kernel; empty if unknown.
        sent_bytes: all bytes sent since the greeting of the connection.
        received_bytes: all bytes received since the greeting of the connection.
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
        peer_id: id of the other peer.
        lanes: its lanes by number.
    """

    peer_id: int
    lanes: tuple[LaneStatus, ...]


@dataclass(frozen=True, slots=True)
class MasterContact:
    """The master as this peer knows it.

    Attributes:
        address: address of the master.
        connected: whether this peer has a connection to it.
        silent_s: seconds since its last message.
    """

    address: str
    connected: bool
    silent_s: float


@dataclass(frozen=True, slots=True)
class CallStatus:
    """One open call of this peer's program: a running call, or a handle without an outcome.

    Attributes:
        call: its name.
        tag: tag of a collective; None for a joint call of the run.
        open_s: seconds since the call was made.
        waits_for: members or event it waits for, as the master reports; empty without a report.
    """

    call: str
    tag: int | None
    open_s: float
    waits_for: str


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """One collective of this peer that has no outcome yet.

    Attributes:
        tag: its tag.
        what: description of the tensor or call.
        algorithm: how the values travel, as in ``ReduceInfo``.
        phase: ``requested``, ``started``, or ``done`` on this peer but not yet on all members.
        received_segments: segments received so far.
        segments: segments that this peer receives in total.
        received_bytes: payload bytes received so far.
        sent_bytes: payload bytes sent, or queued for sending.
    """

    tag: int
    what: str
    algorithm: str
    phase: str
    received_segments: int
    segments: int
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Happened:
    """One event of this peer: a loss, a failure, a broken connection.

    Attributes:
        ago_s: seconds since the event.
        text: description.
    """

    ago_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Status:
    """This peer's own view of the run at the moment.

    Unlike ``members()``, it includes every message that has arrived, even if no joint call of this
    peer has returned since.

    Attributes:
        peer_id: id of this peer.
        links: links to the other peers, by id. Links that carry segments get all their lanes when
            the first collective begins; other links have one lane.
        standing: ``member``; ``lost``: no longer a member, and the next call raises the reason;
            ``joining`` and ``pending``: while it joins again.
        term: number of the master's incarnation.
        view: number of the newest view of this peer's group.
        members: members of this peer's group in that view, in ring order.
        master: the master as this peer knows it.
        calls: open calls, the oldest first.
        transfers: collectives without an outcome, the oldest first.
        happened: recent events, the newest first.
    """

    peer_id: int
    links: tuple[LinkStatus, ...]
    standing: str
    term: int
    view: int
    members: tuple[MemberInfo, ...]
    master: MasterContact
    calls: tuple[CallStatus, ...]
    transfers: tuple[TransferStatus, ...]
    happened: tuple[Happened, ...]

    def __repr__(self) -> str:
        master, own = self.master, self.peer_id
        name = next((member.name for member in self.members if member.peer_id == own), "")
        contact = f"silent for {master.silent_s:.1f} s" if master.connected else "not connected"
        return (
            f"<Status: peer {with_name(own, name)}, {self.standing}, members: {len(self.members)}, "
            f"links: {len(self.links)}, open calls: {len(self.calls)}, "
            f"master {master.address} ({contact})>"
        )


def status_of(engine: PeerEngine) -> Status:
    """Return the status of a peer that is or was a member. I/O thread."""
    machine, now_ns = engine.machine, engine.now_ns()
    newest, contact = machine.newest, machine.contact
    return Status(
        peer_id=machine.peer,
        links=tuple(
            LinkStatus(link.peer, tuple(_lane_status(lane) for lane in link.lanes))
            for link in sorted(engine.links.all(), key=lambda link: link.peer)
        ),
        standing=machine.standing.value,
        term=machine.term,
        view=newest.view if newest is not None else 0,
        members=members_of(newest) if newest is not None else (),
        master=MasterContact(
            str(engine.master), contact.connected, _seconds(now_ns - contact.heard_ns)
        ),
        calls=tuple(
            _call_status(call.event, machine.waits_for(number), now_ns - (call.began_ns or now_ns))
            for number, call in engine.calls.open.items()
        ),
        transfers=tuple(
            _transfer_status(operation, engine.data_plane.transfers[operation.id])
            for operation in machine.open_operations
            if operation.id in engine.data_plane.transfers
        ),
        happened=tuple(_happened(engine.events, now_ns)),
    )


def _happened(stream: EventStream, now_ns: int) -> Iterator[Happened]:
    """Yield the latest events that people should know, the newest first."""
    lines = (
        (stamped.at_ns, *line_of(stamped.event))
        for stamped in reversed(stream.kept)
        if not isinstance(stamped.event, CallEnded) or stamped.event.reason
    )
    for at_ns, _, text in islice(lines, HAPPENED_MAX):
        yield Happened(_seconds(now_ns - at_ns), text)


def _call_status(event: CallEvent | None, waits_for: str, open_ns: int) -> CallStatus:
    name, tag = call_name(event) if event is not None else ("", None)
    return CallStatus(name, tag, _seconds(open_ns), waits_for)


def _transfer_status(operation: OpenOperation, transfer: Transfer) -> TransferStatus:
    progress = transfer.progress
    return TransferStatus(
        tag=operation.id.tag if operation.among is None else operation.among.tag,
        what=str(operation.descriptor),
        algorithm=operation.descriptor.carrier.label,
        phase=operation.phase.value,
        received_segments=progress.received,
        segments=progress.received + transfer.lacking,
        received_bytes=progress.received_bytes,
        sent_bytes=transfer.tx_bytes,
    )


def _seconds(duration_ns: int) -> float:
    return max(0, duration_ns) / NS_PER_S


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


def members_of(roster: Roster) -> tuple[MemberInfo, ...]:
    """Return the members of a group as the user sees them."""
    return tuple(
        MemberInfo(member.peer, rank, member.host, member.port, member.name)
        for rank, member in enumerate(roster.members)
    )
