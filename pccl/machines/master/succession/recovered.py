"""The run that follows from what returning peers report.

Of rosters the newest one counts, because every change was told before anything that was decided
because of it; who is not in the newest one of his group was removed. Outcomes and answers that
anybody has seen are adopted; so are those that were proposed to anybody (``proposals``). What was
decided and reached nobody who came back may be decided anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pccl.machines.master.membership import RecoveredGroup, View
from pccl.machines.master.succession.report import Report, age, expected_states, round_count
from pccl.protocol import messages as msg
from pccl.protocol.limits import ID_JUMP_MAX, PEERS_MAX, PENDING_MAX
from pccl.protocol.shared_state import Expected
from pccl.protocol.types import Member, OperationId, PeerId, Roster, RoundId, RoundKind


@dataclass(slots=True)
class Recovered:
    """The run as it is known.

    Attributes:
        term: the highest that anybody has followed.
        last_peer: the highest id that anybody knows.
        version: of the newest roster that anybody knows.
        groups: their views and rosters, by number.
        members: all members of the newest views, also those that did not come back.
        returned: reports of the members that came back, in order of id.
        newcomers: reports of those that were registered, but not admitted.
        strangers: reports of those that the run went on without.
        outcomes: what became of operations; whoever is concerned may not know it.
        answers: of rounds; likewise.
        counts: how many rounds of each kind were closed.
        sequence: the highest place of anything decided.
        expected: what is known of each group's shared state.
        states: what each of the outcomes makes of that.
    """

    term: int
    last_peer: PeerId
    version: int
    groups: dict[int, RecoveredGroup]
    members: dict[PeerId, tuple[int, Member]]
    returned: list[Report]
    newcomers: list[Report]
    strangers: list[Report]
    outcomes: dict[OperationId, msg.OperationEnded]
    answers: dict[RoundId, msg.RoundClosed]
    counts: dict[RoundKind, int]
    sequence: int
    expected: dict[int, Expected]
    states: dict[OperationId, Expected]
    left: set[PeerId]
    """Who came back and said goodbye."""

    @property
    def missing(self) -> list[PeerId]:
        """The members that did not come back, or not to stay."""
        present = {report.peer for report in self.returned}
        return [peer for peer in self.members if peer not in present]


@dataclass(frozen=True, slots=True)
class TakeUp:
    """The run as it was: the machine goes on with it.

    Attributes:
        recovered: what its members know.
        connections: on which anybody has reported.
        waiting: the newcomers that have waited for it, by connection.
    """

    recovered: Recovered
    connections: Sequence[int]
    waiting: Mapping[int, msg.Register]


def recovered_run(
    reports: list[Report],
    believed: list[Report],
    left: set[PeerId],
    *,
    version: int,
    ratified: int,
    promised: bool,
) -> Recovered:
    """The run, as complete reports tell of it.

    Args:
        reports: all of them, in order of id.
        believed: those that count, in order of id.
        left: who came back and said goodbye.
        version: of the newest roster that anybody knows.
        ratified: the newest roster of which anybody knows that a majority had it.
        promised: whether members that don't follow the master that asks count as missing.
    """
    groups = _groups(believed, ratified)
    members: dict[PeerId, tuple[int, Member]] = {}
    for number, group in groups.items():
        for member in group.rosters[max(group.rosters)].members:
            members[member.peer] = (number, member)
    told = [roster for report in believed for roster in report.rosters.values()]
    given = _ids_given_out(reports, told, members)
    newcomers = [r for r in reports if r.peer not in members and not r.rosters]
    newcomers = [r for r in newcomers if r.peer in given]
    newcomers = newcomers[: min(PENDING_MAX, PEERS_MAX - len(members))]
    returned = [r for r in reports if _is_member(r, members)]
    known = {report.peer for report in (*returned, *newcomers)}
    returned = [r for r in returned if r.promised or not promised]
    # Of others the last master may never have heard, and have decided without them.
    back = {report.peer for report in returned}
    heard = [r for r in believed if not promised or r.peer in back]
    finals = sorted((o for report in heard for o in report.outcomes), key=age)
    outcomes = {o.outcome.operation: o.outcome for o in finals}
    answers = {a.answer.round: a.answer for report in heard for a in report.answers}
    decided = [
        *(o.outcome.sequence for report in believed for o in report.outcomes),
        *(a.answer.sequence for report in believed for a in report.answers),
    ]
    return Recovered(
        term=max((report.header.term for report in believed), default=0),
        last_peer=max(given, default=PeerId(0)),
        version=version,
        groups=groups,
        members=dict(sorted(members.items())),
        returned=returned,
        newcomers=newcomers,
        strangers=[r for r in reports if r.peer not in known],
        outcomes=dict(sorted(outcomes.items(), key=lambda item: item[1].sequence)),
        answers=dict(sorted(answers.items(), key=lambda item: item[1].sequence)),
        counts={kind: round_count(kind, believed, told) for kind in RoundKind},
        sequence=max(decided, default=0),
        expected=expected_states(believed, finals),
        states={o.outcome.operation: o.expected for o in finals},
        left=left,
    )


def _groups(reports: list[Report], ratified: int) -> dict[int, RecoveredGroup]:
    """Of each group what is known; the newest first, and none that does not fit beside it.

    No master makes a peer a member of two groups, or has more than so many members.
    """
    known: dict[int, RecoveredGroup] = {}
    told = [roster for report in reports for roster in report.rosters.values()]
    for roster in sorted(told, key=lambda roster: roster.version):
        known.setdefault(roster.group, RecoveredGroup({}, {})).rosters[roster.version] = roster
    groups: dict[int, RecoveredGroup] = {}
    taken: set[PeerId] = set()
    for number, group in _newest_first(known, ratified):
        newest = group.rosters[max(group.rosters)]
        ring = set(newest.ring)
        if len(taken) + len(ring) > PEERS_MAX or not ring.isdisjoint(taken):
            continue
        taken |= ring
        groups[number] = group
        for roster in group.rosters.values():
            # Whoever loses a member closes its views: what is open has members of now.
            is_open = roster.view in newest.open_views and roster.view <= newest.view
            if is_open and ring.issuperset(roster.ring):
                group.views[roster.view] = View(roster.ring, roster.term, roster.algorithms)
    return dict(sorted(groups.items()))


def _newest_first(
    known: dict[int, RecoveredGroup], ratified: int
) -> list[tuple[int, RecoveredGroup]]:
    """The groups that returning peers know, by number, without those that are gone.

    Every change is told to all groups. So where the rosters of all groups are known of one version,
    a group of which only older ones are known had lost all its members by then. Versions above
    ``ratified`` say nothing of that: they had no consequences, and the members of the groups before
    are still needed for consent.
    """
    told: dict[int, list[Roster]] = {}
    for group in known.values():
        for version, roster in group.rosters.items():
            told.setdefault(version, []).append(roster)
    whole = [v for v, rosters in told.items() if len(rosters) >= rosters[0].peer_groups]
    since = max((version for version in whole if version <= ratified), default=0)
    order = sorted(known.items(), key=lambda item: -max(item[1].rosters))
    return [(number, group) for number, group in order if max(group.rosters) >= since]


def _ids_given_out(
    reports: list[Report], told: list[Roster], members: Iterable[PeerId]
) -> set[PeerId]:
    """The ids that anybody knows of and that a master can have given out.

    Each master begins a jump above those that it was told of. What is further away is invented, and
    must not drive all later ids to where no number is left.
    """
    ids = {report.peer for report in reports}
    ids.update(peer for roster in told for peer in roster.ring)
    highest = max(members, default=None)
    if highest is None:
        return ids
    return {peer for peer in ids if peer <= highest + 2 * ID_JUMP_MAX}


def _is_member(report: Report, members: dict[PeerId, tuple[int, Member]]) -> bool:
    """Whether this is the process that the others know as a member: by its group and its port."""
    known, said = members.get(report.peer), report.header.registration
    return known is not None and (known[0], known[1].port) == (said.group, said.port)
