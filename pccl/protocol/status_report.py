"""The answer of a master to ``pccl status``: one ``StatusReport``.

It describes one instant. Durations are whole milliseconds up to that instant. Lists are bounded
(``status`` has the bounds); each list that may be cut has a count with its full length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pccl.protocol.guards.bounds import AtMost
from pccl.protocol.link_messages import LinkPath
from pccl.protocol.types import (
    AbortCause,
    AlgorithmTable,
    Loss,
    OperationId,
    PeerId,
    PeerName,
    RemovalCause,
    RoundId,
)

FIGURES_MAX, FIGURE_NAME_BYTES_MAX = 8, 64


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that a program reports for the page, such as a gradient norm."""

    name: Annotated[str, AtMost(FIGURE_NAME_BYTES_MAX)]
    value: Loss


Figures = Annotated[tuple[Figure, ...], AtMost(FIGURES_MAX)]


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member of the run.

    Attributes:
        peer: id of the member.
        name: its name.
        group: its peer group.
        rank: its index in the ring of its group's newest view.
        host: host at which other peers reach it.
        port: port at which other peers reach it.
        connected: whether it has a control connection.
        silent_ms: time since its last message.
        awaited_ms: time for which other peers have waited for it; None: no peer waits.
        calls: names of the calls that it is in; empty: the master knows of none.
        last_call: its latest call, in words; empty: none.
        last_call_ms: time since that call.
        step: step of its program, as it reports; 0: unknown.
        step_us: time of one step of its program in microseconds; 0: unknown.
        loss: loss of its program, as it reports; None: unknown.
        figures: other numbers that its program reports; of the first 32 members only.
        token: number of the token with which it joined; 0: a plain secret, or none.
        fingerprint: hash of its key, 16 bytes.
        uplink_bytes_per_s: the most that it has sent lately over all its links; 0: unknown.
    """

    peer: PeerId
    name: PeerName
    group: int
    rank: int
    host: str
    port: int
    connected: bool
    silent_ms: int
    awaited_ms: int | None
    calls: str
    last_call: str
    last_call_ms: int
    step: int
    step_us: int
    loss: Loss | None = None
    figures: Figures = ()
    token: int = 0
    fingerprint: bytes = b""
    uplink_bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class NewcomerStatus:
    """One peer that is registered, but no member yet.

    Attributes:
        peer: id of the newcomer.
        name: its name.
        group: its peer group.
        host: host at which other peers reach it.
        port: port at which other peers reach it.
        connected: whether it has a control connection.
        silent_ms: time since its last message.
        waiting_ms: time since its registration.
        waits_for: why it is not admitted yet.
        token: number of the token with which it registered; 0: a plain secret, or none.
        fingerprint: hash of its key, 16 bytes.
    """

    peer: PeerId
    name: PeerName
    group: int
    host: str
    port: int
    connected: bool
    silent_ms: int
    waiting_ms: int
    waits_for: str
    token: int = 0
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """One peer group.

    Attributes:
        group: number of the group.
        view: number of its newest view.
        members: number of its members.
        open_views: views in which the master may still decide operations, the oldest first.
        plan: the algorithms and shares of its newest view; None: the report has no room for it.
    """

    group: int
    view: int
    members: int
    open_views: tuple[int, ...]
    plan: AlgorithmTable | None


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """One joint call of the whole run that not all members have made yet.

    Attributes:
        round: id of the round.
        waiting_ms: time since the first member made the call, accurate to one tick.
        requested_count: number of members that have made it.
        missing: members that have not made it.
        missing_count: number of these members; ``missing`` may name fewer.
    """

    round: RoundId
    waiting_ms: int
    requested_count: int
    missing: tuple[PeerId, ...]
    missing_count: int


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """One collective without an outcome.

    Attributes:
        operation: id of the operation.
        what: description of the operation for its callers.
        started: whether all members have requested it. Until then it waits for their calls, and
            after that for their results.
        open_ms: time since the first request.
        still_ms: time since its last progress: a request, a result, or data at any member.
        member_count: number of members of its view that are not lost.
        missing: members whose call (or, once started, result) it waits for.
        missing_count: number of these members; ``missing`` may name fewer.
        least_bytes: smallest number of bytes that a missing member has received.
        most_bytes: largest number of bytes that a missing member has received.
    """

    operation: OperationId
    what: str
    started: bool
    open_ms: int
    still_ms: int
    member_count: int
    missing: tuple[PeerId, ...]
    missing_count: int
    least_bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction of a link, as the peer that sends on it has measured it.

    Attributes:
        peer: id of the peer that measured.
        other: id of the peer at the other end.
        rtt_us: shortest round trip in microseconds; 0: unknown.
        bytes_per_s: rate at which ``peer`` could send; 0: unknown.
        relay: what forwards the data of the link, because neither peer can dial the other: a peer,
            or 0, the master. None: the link is direct.
        path: how the two peers are connected; None: they are not.
        peer_dialable: whether others can dial ``peer``, as tests of its address say; None: no test
            has ended.
        other_dialable: whether others can dial ``other``.
    """

    peer: PeerId
    other: PeerId
    rtt_us: int
    bytes_per_s: int
    relay: PeerId | None = None
    path: LinkPath | None = None
    peer_dialable: bool | None = None
    other_dialable: bool | None = None


@dataclass(frozen=True, slots=True)
class EndedStatus:
    """One joint call of the run, or one collective of a group, that has its outcome.

    Attributes:
        what: the call, as its callers know it.
        group: the peer group; None: all groups.
        ago_ms: time since the outcome.
        took_us: time from the first member's request to the outcome, in microseconds.
        last: the member whose request came last.
        late_us: time from the first request to the last one, in microseconds.
        tensor_bytes: size of the tensor of each member; 0 for a call without one.
        cause: why it ended without a result; None: it has one.
    """

    what: str
    group: int | None
    ago_ms: int
    took_us: int
    last: PeerId
    late_us: int
    tensor_bytes: int
    cause: AbortCause | None


@dataclass(frozen=True, slots=True)
class RemovalStatus:
    """One peer that is no longer in the run.

    Attributes:
        peer: id of the peer.
        name: its name.
        group: its peer group.
        cause: kind of the removal.
        reason: reason in words, with the evidence.
        ago_ms: time since the removal.
    """

    peer: PeerId
    name: PeerName
    group: int
    cause: RemovalCause
    reason: str
    ago_ms: int


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The run of a master at one instant.

    Attributes:
        run: id of the run, 16 bytes.
        term: number of the master's incarnation.
        uptime_ms: time since this incarnation began.
        roster_version: number that grows with every change of the membership.
        member_count: number of members; ``members`` may list fewer.
        members: members in the order of their ids.
        newcomer_count: number of waiting newcomers; ``newcomers`` may list fewer.
        newcomers: newcomers in the order of their ids.
        group_count: number of groups with members.
        groups: groups with members, by number.
        rounds: open rounds.
        operation_count: number of collectives without an outcome.
        operations: collectives without an outcome, in the order of their first requests.
        ended_count: number of calls that have ended in this incarnation.
        ended: the calls that ended last, the newest first.
        link_count: number of measured directions of links; ``links`` may list fewer.
        links: measured directions of links in the order of the peers' ids; the slowest if cut.
        removal_count: number of removals that the master remembers.
        removals: last removals, the newest first.
        waits_for: why the master coordinates no run (it is a standby, or was restarted), in words;
            empty for a master that coordinates a run.
    """

    run: bytes
    term: int
    uptime_ms: int
    roster_version: int
    member_count: int
    members: tuple[MemberStatus, ...]
    newcomer_count: int
    newcomers: tuple[NewcomerStatus, ...]
    group_count: int
    groups: tuple[GroupStatus, ...]
    rounds: tuple[RoundStatus, ...]
    operation_count: int
    operations: tuple[OperationStatus, ...]
    ended_count: int
    ended: tuple[EndedStatus, ...]
    link_count: int
    links: tuple[LinkSpeed, ...]
    removal_count: int
    removals: tuple[RemovalStatus, ...]
    waits_for: str

    def __repr__(self) -> str:
        open_calls = len(self.rounds) + self.operation_count
        return (
            f"<MasterStatus: term {self.term}, members: {self.member_count}, "
            f"newcomers: {self.newcomer_count}, open calls: {open_calls}, "
            f"removals: {self.removal_count}{self.waits_for and f', waits for {self.waits_for}'}>"
        )
