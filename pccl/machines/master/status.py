"""Makes the :class:`StatusReport` of a master from its state, and does not change the state.

This module cuts everything that grows with the run. So a report fits one control message,
and costs the master little.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice

from pccl.machines.master.ballots.ballot import Ballot
from pccl.machines.master.lockstep import Wait, calls_by_member
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.removal import Removal
from pccl.protocol.guards.texts import shortened
from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.limits import BYTES_PER_S_MAX
from pccl.protocol.operation import Phase
from pccl.protocol.status_report import (
    EndedStatus,
    GroupStatus,
    LinkSpeed,
    MemberStatus,
    NewcomerStatus,
    OperationStatus,
    RemovalStatus,
    RoundStatus,
    StatusReport,
)
from pccl.protocol.types import NS_PER_MS, OperationId, PeerId, RoundId
from pccl.telemetry.ended import EndedCall, EndedCalls
from pccl.telemetry.pace import NS_PER_US
from pccl.topology.link_measures import LinkMatrix

MEMBERS_SHOWN_MAX = 1024
FIGURES_SHOWN_MAX = 32  # members whose figures are told
NEWCOMERS_SHOWN_MAX = 256
GROUPS_SHOWN_MAX = 256
PLANS_SHOWN_MAX = 16  # groups whose plan is told
VIEWS_SHOWN_MAX = 8
OPERATIONS_SHOWN_MAX = 128
MISSING_SHOWN_MAX = 64
LINKS_SHOWN_MAX = 1024
REMOVALS_SHOWN_MAX = 32
TEXT_CHARACTERS_MAX = 120
"""The limit for a member's calls, an operation's call, and what a newcomer waits for."""
REASON_CHARACTERS_MAX = 400
"""These limits keep the largest report below ``CONTROL_MESSAGE_BYTES_MAX``, as a test shows."""

LINKS_SAMPLED = 4096
"""At most so many links are sorted to find a limit for the slowest ones."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The parts of a master's state from which a report is made.

    Attributes:
        run: the run's id.
        term: the master's term.
        began_ns: when the master started.
        membership: the peers of the run.
        waits: every round and operation that is not decided.
        waiting_since_ns: returns when a round or operation was first seen to wait; None: never.
        ballots: the undecided operations.
        ended: the rounds and operations that were decided last.
        removals: the latest removals by peer, the newest last.
        waits_for: what a master without a run waits for; empty if the master coordinates a run.
        dialable: returns whether others can dial a peer; None: no test has shown it.
    """

    run: bytes
    term: int
    began_ns: int
    membership: Membership
    waits: Sequence[Wait]
    waiting_since_ns: Callable[[RoundId | OperationId], int | None]
    ballots: Mapping[OperationId, Ballot]
    ended: EndedCalls
    removals: dict[PeerId, Removal]
    waits_for: str
    dialable: Callable[[PeerId], bool | None]


def status_report(state: RunState, now_ns: int) -> StatusReport:
    """Return a report about the run at ``now_ns``."""
    membership = state.membership
    members, newcomers = membership.members(), membership.pending()
    groups = _groups(membership, members)
    return StatusReport(
        run=state.run,
        term=state.term,
        uptime_ms=_ms(now_ns - state.began_ns),
        roster_version=membership.version,
        member_count=len(members),
        members=_members(membership, members, state.waits, now_ns),
        newcomer_count=len(newcomers),
        newcomers=_newcomers(membership, newcomers, now_ns),
        group_count=len(groups),
        groups=groups[:GROUPS_SHOWN_MAX],
        rounds=_rounds(state, now_ns),
        operation_count=len(state.ballots),
        operations=tuple(
            _operation(ballot, now_ns)
            for ballot in islice(state.ballots.values(), OPERATIONS_SHOWN_MAX)
        ),
        ended_count=state.ended.count,
        ended=tuple(_ended(call, now_ns) for call in reversed(state.ended.latest)),
        link_count=len(membership.measures),
        links=_links(membership, state.dialable),
        removal_count=len(state.removals),
        removals=tuple(
            _removal(removal, now_ns)
            for removal in islice(reversed(state.removals.values()), REMOVALS_SHOWN_MAX)
        ),
        waits_for=state.waits_for,
    )


def admission_waits_for(peer: RegisteredPeer, size: int) -> str:
    """Return what a linked newcomer waits for, if its admission would make ``size`` members."""
    if peer.prefetching:
        return "its download of the shared state"
    if size < peer.min_peers:
        more = f"start {peer.min_peers - size} more, unless the run is over"
        return f"{peer.min_peers} members; with this one there are {size} ({more})"
    return "the members' update_topology()"


def _members(
    membership: Membership, members: list[RegisteredPeer], waits: Sequence[Wait], now_ns: int
) -> tuple[MemberStatus, ...]:
    calls = calls_by_member(waits)
    ranks = {
        peer: rank
        for group in sorted({peer.group for peer in members})
        for rank, peer in enumerate(membership.order(group))
    }
    found: list[MemberStatus] = []
    for peer in members[:MEMBERS_SHOWN_MAX]:
        awaited_ms = None if peer.waited_for_ns is None else _ms(now_ns - peer.waited_for_ns)
        found.append(
            MemberStatus(
                peer.id,
                peer.member.name,
                peer.group,
                ranks[peer.id],
                peer.member.host,
                peer.member.port,
                peer.connection is not None,
                _ms(now_ns - peer.heard_ns),
                awaited_ms,
                shortened(calls.get(peer.id, ""), TEXT_CHARACTERS_MAX),
                shortened(peer.pace.last_call, TEXT_CHARACTERS_MAX),
                _ms(now_ns - peer.pace.called_ns) if peer.pace.called_ns else 0,
                peer.pace.step,
                peer.pace.step_us,
                peer.pace.loss,
                peer.pace.figures if len(found) < FIGURES_SHOWN_MAX else (),
                peer.token,
                fingerprint_of(peer.member.key),
                membership.uplink(peer.id),
            )
        )
    return tuple(found)


def _newcomers(
    membership: Membership, newcomers: list[RegisteredPeer], now_ns: int
) -> tuple[NewcomerStatus, ...]:
    unlinked = membership.unlinked() if newcomers else {}
    size = membership.size + len(newcomers)
    found: list[NewcomerStatus] = []
    for peer in newcomers[:NEWCOMERS_SHOWN_MAX]:
        missing = unlinked.get(peer.id)
        waits_for = admission_waits_for(peer, size)
        if missing is not None:
            waits_for = f"a link to peer {missing[0]}: {missing[1]}"
        found.append(
            NewcomerStatus(
                peer.id,
                peer.member.name,
                peer.group,
                peer.member.host,
                peer.member.port,
                peer.connection is not None,
                _ms(now_ns - peer.heard_ns),
                _ms(now_ns - peer.registered_ns),
                shortened(waits_for, TEXT_CHARACTERS_MAX),
                peer.token,
                fingerprint_of(peer.member.key),
            )
        )
    return tuple(found)


def _groups(membership: Membership, members: list[RegisteredPeer]) -> tuple[GroupStatus, ...]:
    sizes: dict[int, int] = {}
    for peer in members:
        sizes[peer.group] = sizes.get(peer.group, 0) + 1
    return tuple(
        GroupStatus(
            group,
            membership.newest_view(group),
            sizes[group],
            membership.roster(group).open_views[-VIEWS_SHOWN_MAX:],
            membership.roster(group).algorithms if number < PLANS_SHOWN_MAX else None,
        )
        for number, group in enumerate(sorted(sizes))
    )


def _rounds(state: RunState, now_ns: int) -> tuple[RoundStatus, ...]:
    found: list[RoundStatus] = []
    for wait in state.waits:
        if isinstance(wait.subject, RoundId):
            since_ns = state.waiting_since_ns(wait.subject)
            found.append(
                RoundStatus(
                    wait.subject,
                    0 if since_ns is None else _ms(now_ns - since_ns),
                    len(wait.requested),
                    wait.missing[:MISSING_SHOWN_MAX],
                    len(wait.missing),
                )
            )
    return tuple(found)


def _operation(ballot: Ballot, now_ns: int) -> OperationStatus:
    missing = ballot.waiting_for()
    moved = [ballot.received_bytes(peer) for peer in missing]
    return OperationStatus(
        operation=ballot.operation,
        what=shortened(ballot.what, TEXT_CHARACTERS_MAX),
        started=ballot.phase is Phase.STARTED,
        open_ms=_ms(now_ns - ballot.opened_ns),
        still_ms=_ms(now_ns - ballot.progress_ns),
        member_count=len(ballot.survivors),
        missing=tuple(missing[:MISSING_SHOWN_MAX]),
        missing_count=len(missing),
        least_bytes=min(moved, default=0),
        most_bytes=max(moved, default=0),
    )


def _ended(call: EndedCall, now_ns: int) -> EndedStatus:
    return EndedStatus(
        shortened(call.what, TEXT_CHARACTERS_MAX),
        call.group,
        _ms(now_ns - call.ended_ns),
        max(0, call.ended_ns - call.opened_ns) // NS_PER_US,
        call.last,
        max(0, call.last_ns - call.opened_ns) // NS_PER_US,
        call.tensor_bytes,
        call.cause,
    )


def _links(
    membership: Membership, dialable: Callable[[PeerId], bool | None]
) -> tuple[LinkSpeed, ...]:
    """Return all links, or if there are too many, the slowest ones."""
    measures, links = membership.measures, membership.links
    return tuple(
        LinkSpeed(
            peer,
            other,
            measures[peer, other].rtt_ns // NS_PER_US,
            measures[peer, other].bytes_per_s,
            links.relay(peer, other),
            links.path(peer, other),
            dialable(peer),
            dialable(other),
        )
        for peer, other in sorted(_slowest(measures, LINKS_SHOWN_MAX))
    )


def _slowest(measures: LinkMatrix, count: int) -> Collection[tuple[PeerId, PeerId]]:
    """Return the ``count`` slowest links, or all; a link of unknown speed counts as fast.

    There may be millions, and a sort of them takes a second. So a sample says which ones may be
    among the slowest: more than enough, or if the sample misleads, all.
    """
    if len(measures) <= count:
        return measures.keys()
    step = len(measures) // LINKS_SAMPLED + 1
    sample = sorted(
        each.bytes_per_s or BYTES_PER_S_MAX for each in islice(measures.values(), 0, None, step)
    )
    limit = sample[min(4 * count // step, len(sample) - 1)]
    slow = [pair for pair, each in measures.items() if 0 < each.bytes_per_s <= limit]
    if len(slow) < count and limit < BYTES_PER_S_MAX:
        slow = [pair for pair, each in measures.items() if each.bytes_per_s]
    unknown = (pair for pair, each in measures.items() if not each.bytes_per_s)
    slow += islice(unknown, max(0, count - len(slow)))
    return nsmallest(count, slow, lambda pair: measures[pair].bytes_per_s or BYTES_PER_S_MAX)


def _removal(removal: Removal, now_ns: int) -> RemovalStatus:
    return RemovalStatus(
        removal.peer,
        removal.name,
        removal.group,
        removal.cause,
        shortened(removal.reason, REASON_CHARACTERS_MAX),
        removal.ago_ms(now_ns),
    )


def _ms(duration_ns: int) -> int:
    return max(0, duration_ns) // NS_PER_MS
