"""The run that follows from the reports of returning peers.

The newest roster of a group counts, because masters send a change before decisions that follow from
it. A peer that is not in this roster was removed. The master adopts outcomes and answers that any
member has received, and proposals that any member has stored (``proposals``). It may decide again
what no returning member knows.
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
    """The run as the reports describe it.

    Attributes:
        term: the highest term that a reporting peer has followed.
        last_peer: the highest id in the reports that a master can have given out.
        version: version of the newest roster that a report names.
        groups: by number: the views and rosters of the group.
        members: all members of the newest views, missing members included.
        returned: reports of the members that returned, in order of id.
        newcomers: reports of peers that were registered, but not admitted.
        strangers: reports of peers that were removed from the run.
        outcomes: outcomes of operations, which some members may lack.
        answers: answers to rounds, which some members may lack.
        counts: how many rounds of each kind were closed.
        sequence: the highest place of a decision.
        expected: the expected shared state of each group.
        states: by operation: the expected shared state after its outcome.
        entries: keys of the store, as members last wrote or read them.
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
    entries: list[msg.KnownEntry]
    left: set[PeerId]
    """The peers that returned and then said goodbye."""

    @property
    def missing(self) -> list[PeerId]:
        """The members that did not return, or said goodbye since."""
        present = {report.peer for report in self.returned}
        return [peer for peer in self.members if peer not in present]


@dataclass(frozen=True, slots=True)
class TakeUp:
    """A recovered run, with which the machine continues.

    Attributes:
        recovered: the run as the reports describe it.
        connections: the connections on which peers have returned.
        waiting: by connection: newcomers that waited until the run was rebuilt.
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
    """Return the run that complete reports describe.

    Args:
        reports: all complete reports, in order of id.
        believed: the reports that count, in order of id.
        left: the peers that returned and then said goodbye.
        version: version of the newest roster that a report names.
        ratified: version of the newest roster that a majority is known to have acknowledged.
        promised: whether members that do not follow this master count as missing.
    """
    groups = _groups(believed, ratified)
    members: dict[PeerId, tuple[int, Member]] = {}
    for number, group in groups.items():
        for member in group.rosters[max(group.rosters)].members:
            members[member.peer] = (number, member)
    told = [roster for report in believed for roster in report.rosters.values()]
    given = _ids_given_out(reports, told, members)
    returned = [r for r in reports if _is_member(r, members)]
    newcomers = [r for r in reports if r.peer not in members and not r.rosters]
    newcomers = [r for r in newcomers if r.peer in given]
    taken = {report.key for report in returned}  # a key has one peer
    newcomers = list({r.key: r for r in newcomers if r.key not in taken}.values())
    newcomers = newcomers[: min(PENDING_MAX, PEERS_MAX - len(members))]
    known = {report.peer for report in (*returned, *newcomers)}
    returned = [r for r in returned if r.promised or not promised]
    # The last master may have removed other members, and decided without them.
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
        entries=[entry for report in heard for entry in report.entries],
        left=left,
    )


def _groups(reports: list[Report], ratified: int) -> dict[int, RecoveredGroup]:
    """Return the known groups, without groups that contradict a newer one.

    No master makes a peer a member of two groups, or has more than ``PEERS_MAX`` members.
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
            # The loss of a member closes its views, so an open view has present members only.
            is_open = roster.view in newest.open_views and roster.view <= newest.view
            if is_open and ring.issuperset(roster.ring):
                group.views[roster.view] = View(roster.ring, roster.term, roster.algorithms)
    return dict(sorted(groups.items()))


def _newest_first(
    known: dict[int, RecoveredGroup], ratified: int
) -> list[tuple[int, RecoveredGroup]]:
    """Return (number, group), the newest first, without groups that have lost all members.

    Masters send every change to all groups. If the reports contain the rosters of all groups for
    one version, a group with only older rosters had lost all its members by then. Versions above
    ``ratified`` prove nothing: no decision has followed from them, and the members of an older
    group are still needed for consent.
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
    """Return the reported ids that a master can have given out.

    Each master begins a jump above the ids that it knows. A higher id is invented; it must not
    raise all later ids until no number is left.
    """
    ids = {report.peer for report in reports}
    ids.update(peer for roster in told for peer in roster.ring)
    highest = max(members, default=None)
    if highest is None:
        return ids
    return {peer for peer in ids if peer <= highest + 2 * ID_JUMP_MAX}


def _is_member(report: Report, members: dict[PeerId, tuple[int, Member]]) -> bool:
    """Whether a report is from a member: rosters name the peer, with the same key."""
    known, said = members.get(report.peer), report.header.registration
    if known is None:
        return False
    group, member = known
    return (group, member.port, member.key) == (said.group, said.port, report.key)
