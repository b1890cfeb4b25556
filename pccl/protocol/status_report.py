"""What a master says of its run to whoever asks: one ``StatusReport``.

All of it is of one instant. Durations are whole milliseconds up to that instant. Lists are bounded
(``status`` has the bounds), and each that may be cut says how many it had.
"""

from __future__ import annotations

from dataclasses import dataclass

from pccl.protocol.types import OperationId, PeerId, RemovalCause, RoundId


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member of the run.

    Attributes:
        peer: its id.
        group: its peer group.
        rank: its place in the ring of its group's newest view.
        host: where the others reach it.
        port: likewise.
        connected: whether it has a control connection.
        silent_ms: since it was last heard.
        awaited_ms: since somebody, a newcomer too, waits for what it should do; None: nobody does.
        calls: what it is in, as its callers know it; empty: nothing that the master knows of.
    """

    peer: PeerId
    group: int
    rank: int
    host: str
    port: int
    connected: bool
    silent_ms: int
    awaited_ms: int | None
    calls: str


@dataclass(frozen=True, slots=True)
class NewcomerStatus:
    """One peer that is registered and no member yet.

    Attributes:
        peer: its id.
        group: its peer group.
        host: where the others reach it.
        port: likewise.
        connected: whether it has a control connection.
        silent_ms: since it was last heard.
        waiting_ms: since it was registered.
        waits_for: what its admission waits for.
    """

    peer: PeerId
    group: int
    host: str
    port: int
    connected: bool
    silent_ms: int
    waiting_ms: int
    waits_for: str


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """One peer group.

    Attributes:
        group: its number.
        view: number of its newest view.
        members: how many members it has.
        open_views: the views in which operations may still be decided, the oldest first.
    """

    group: int
    view: int
    members: int
    open_views: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """One joint call of the whole run that not all members have made yet.

    Attributes:
        round: which.
        waiting_ms: since the first member has made it, to a tick.
        requested_count: how many have made it.
        missing: who has not.
        missing_count: how many have not; ``missing`` may name fewer.
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
        operation: which.
        what: how its callers know it.
        started: whether all members have asked for it; until then it waits for their calls, and
            after that for their results.
        open_ms: since the first member has asked for it.
        still_ms: since it last came forward: a request, a result, or data at any member.
        member_count: members of its view that are not lost.
        missing: whose call (or, once started, result) it waits for.
        missing_count: how many these are; ``missing`` may name fewer.
        least_bytes: received so far by the one of the missing who has least.
        most_bytes: likewise, who has most.
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
class RemovalStatus:
    """One peer that is no longer in the run.

    Attributes:
        peer: its id.
        group: its peer group.
        cause: why, in a word.
        reason: why, with the evidence.
        ago_ms: since when.
    """

    peer: PeerId
    group: int
    cause: RemovalCause
    reason: str
    ago_ms: int


@dataclass(frozen=True, slots=True)
class StatusReport:
    """A run as its master sees it.

    Attributes:
        run: the run's id, 16 bytes.
        term: number of the master's incarnation.
        uptime_ms: since this incarnation began.
        roster_version: grows with every change of the membership.
        member_count: how many members there are; ``members`` may show fewer.
        members: in order of their ids.
        newcomer_count: how many newcomers wait.
        newcomers: in order of their ids.
        group_count: how many groups have members.
        groups: those that have members, by number.
        rounds: that are open.
        operation_count: how many collectives have no outcome.
        operations: in the order in which they were first asked for.
        removal_count: how many removals the master remembers.
        removals: the last ones, the newest first.
        waits_for: why it coordinates nothing (a standby, one that has been restarted), in words;
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
    removal_count: int
    removals: tuple[RemovalStatus, ...]
    waits_for: str
