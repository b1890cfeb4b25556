"""What returning peers report to a restarted master, and the run that follows from it.

A master's state is soft: everything that it has told anybody is known to somebody. Of rosters the
newest one counts, because every change was told before anything that was decided because of it; who
is not in the newest one of his group was removed. Outcomes and answers that anybody has seen are
adopted. What was decided and reached nobody who came back may be decided anew.

Pure state: :class:`~pccl.protocol.restart.Restartable` collects and carries out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import REPORT_MESSAGES_MAX, REPORTED_MAX, TERM_MAX, Timing
from pccl.protocol.majority import Basis
from pccl.protocol.membership import RecoveredGroup, RecoveredMembership, View
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected
from pccl.protocol.types import Member, OperationId, PeerId, Roster, RoundId, RoundKind


@dataclass(slots=True)
class Report:
    """What one peer says on its return."""

    header: msg.Return
    host: str
    """Where it comes from."""
    connection: int | None
    rosters: dict[int, Roster] = field(default_factory=dict[int, Roster])
    outcomes: list[msg.OperationEnded] = field(default_factory=list[msg.OperationEnded])
    answers: list[msg.RoundClosed] = field(default_factory=list[msg.RoundClosed])
    requests: list[msg.Message] = field(default_factory=list[msg.Message])
    """What it wants from the master, in order: it is dealt with when the run is rebuilt."""
    complete: bool = False
    tellers: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Version of a roster -> id of the master that told it."""
    promised: bool = False
    """Whether it follows the master that asks, and has done so since this report."""

    @property
    def peer(self) -> PeerId:
        """Who says it."""
        return self.header.peer

    @property
    def newest(self) -> Roster | None:
        """The newest roster that it knows; None for one who was never admitted."""
        return self.rosters[max(self.rosters)] if self.rosters else None

    def take(self, message: msg.Message) -> None:
        """Add the next message of the report, or of what comes after it.

        Raises:
            RemoteProtocolError: it does not belong there, or it is too much.
        """
        match message:
            case msg.KnownRoster(roster, teller) if not self.complete:
                if roster.group != self.header.registration.group or self.peer not in roster.ring:
                    raise RemoteProtocolError(reason="a roster of others")
                if not _roster_is_possible(roster):
                    raise RemoteProtocolError(reason="a roster that no master makes")
                self.rosters[roster.version] = roster
                self.tellers[roster.version] = teller
            case msg.KnownOutcome(outcome) if not self.complete:
                _check_sequence(outcome.sequence)
                self.outcomes.append(outcome)
            case msg.KnownAnswer(answer) if not self.complete:
                _check_sequence(answer.sequence)
                _check_sequence(answer.round.n)
                self.answers.append(answer)
            case msg.Reported():
                self.complete = True
            case _:
                self.requests.append(message)
        if len(self.requests) + len(self.outcomes) + len(self.answers) > REPORT_MESSAGES_MAX:
            raise RemoteProtocolError(reason="a report without end")


@dataclass(slots=True)
class Recovered:
    """The run as it is known.

    Attributes:
        term: the highest that anybody has followed.
        last_peer: the highest id that anybody knows.
        membership: groups, views and rosters.
        members: all members of the newest views, also those that did not come back.
        returned: reports of the members that came back, in order of id.
        newcomers: reports of those that were registered, but not admitted.
        strangers: reports of those that the run went on without.
        outcomes: what became of operations; whoever is concerned may not know it.
        answers: of rounds; likewise.
        counts: how many rounds of each kind were closed.
        sequence: the highest place of anything decided.
        expected: what is known of each group's shared state.
    """

    term: int
    last_peer: PeerId
    membership: RecoveredMembership
    members: dict[PeerId, tuple[int, Member]]
    returned: list[Report]
    newcomers: list[Report]
    strangers: list[Report]
    outcomes: dict[OperationId, msg.OperationEnded]
    answers: dict[RoundId, msg.RoundClosed]
    counts: dict[RoundKind, int]
    sequence: int
    expected: dict[int, Expected]
    left: set[PeerId]
    """Who came back and said goodbye."""

    @property
    def missing(self) -> list[PeerId]:
        """The members that did not come back, or not to stay."""
        present = {report.peer for report in self.returned}
        return [peer for peer in self.members if peer not in present]


class Recovery:
    """Collects reports for a while.

    Args:
        timing: ``recovery_s`` is how long it waits for everybody.
        run: the run's id; None: whichever the first one to return belongs to.
        incumbent: id of the master that asks.
        now_ns: the present.
    """

    def __init__(self, timing: Timing, run: bytes | None, incumbent: bytes, now_ns: int) -> None:
        self.run = self._given_run = run
        self._patience_ns = timing.ns(timing.recovery_s)
        self._incumbent = incumbent
        self._since_ns = now_ns
        self._reports: dict[PeerId, Report] = {}
        self._by_connection: dict[int, Report] = {}
        self._left: set[PeerId] = set()

    def begins(self, connection: int, host: str, header: msg.Return, now_ns: int) -> None:
        """A peer returns; its report follows.

        Raises:
            RemoteProtocolError: somebody else returned under its id.
        """
        if self.run is None:
            self.run = header.run
        if not self._reports:  # the others get as long from now on
            self._since_ns = now_ns
        known = self._reports.get(header.peer)
        if known is not None and known.header.token != header.token:
            raise RemoteProtocolError(reason=f"another process has returned as peer {header.peer}")
        if known is not None and known.connection is not None:
            self._by_connection.pop(known.connection, None)
        report = Report(header, host, connection)
        self._reports[header.peer] = self._by_connection[connection] = report

    def superseded(self, peer: PeerId) -> int | None:
        """The connection on which ``peer`` has returned before, if that is still open."""
        known = self._reports.get(peer)
        return known.connection if known is not None else None

    def report_on(self, connection: int) -> Report | None:
        """The report that comes on a connection."""
        return self._by_connection.get(connection)

    def closed(self, connection: int) -> None:
        """A connection is gone; a report that is not complete is worth nothing."""
        report = self._by_connection.pop(connection, None)
        if report is not None:
            report.connection = None
            if not report.complete:
                del self._reports[report.peer]
                if not self._reports:  # whoever it was, others may come from another run
                    self.run = self._given_run

    def leave(self, connection: int) -> None:
        """A peer that had returned leaves for good."""
        report = self._by_connection.pop(connection)
        del self._reports[report.peer]
        self._left.add(report.peer)

    def shift(self, gap_ns: int, now_ns: int) -> None:
        """This process slept: everybody has so much more time."""
        self._since_ns = min(self._since_ns + gap_ns, now_ns)

    def is_over(self, now_ns: int) -> bool:
        """Whether all members are back, or there was time enough."""
        return self._is_complete() or self.is_late(now_ns)

    def is_late(self, now_ns: int) -> bool:
        """Whether there was time enough for everybody to come."""
        return now_ns - self._since_ns >= self._patience_ns

    def begin_anew(self, now_ns: int) -> list[int]:
        """Too few have come: wait once more, from nothing. Returns the connections to close."""
        connections = list(self._by_connection)
        self._reports.clear()
        self._by_connection.clear()
        self.run = self._given_run
        self._since_ns = now_ns
        return connections

    def complete_reports(self) -> list[Report]:
        """Those of whoever is connected and has said everything, in order of id."""
        reports = (report for _, report in sorted(self._reports.items()))
        return [r for r in reports if r.complete and r.connection is not None]

    def bases(self) -> list[Basis]:
        """The memberships that have to consent to a successor, as far as anybody knows.

        The last one to which a majority is known to have consented, and all that were told since.
        """
        known: dict[int, list[tuple[Roster, bytes]]] = {}
        ratified = 0
        for report in self._reports.values():
            if report.complete:
                ratified = max(ratified, report.header.ratified)
                for version, roster in report.rosters.items():
                    known.setdefault(version, []).append((roster, report.tellers[version]))
        floor = max((version for version in known if version <= ratified), default=0)
        return [
            Basis(
                frozenset(peer for roster, _ in told for peer in roster.ring),
                told[0][0].global_world_size,
                is_ours=any(teller == self._incumbent for _, teller in told),
            ).without(self._left)
            for version, told in sorted(known.items())
            if version >= floor
        ]

    def has_promises(self) -> bool:
        """Whether enough of the members follow the master that asks."""
        return self._is_enough([r.peer for r in self.complete_reports() if r.promised])

    def all_promised(self) -> bool:
        """Whether nobody is left to wait for."""
        return all(report.promised for report in self.complete_reports())

    def _is_enough(self, peers: list[PeerId]) -> bool:
        bases = self.bases()
        return bool(bases) and all(basis.consents(peers) for basis in bases)

    @property
    def world_size(self) -> int:
        """How many members the run had, as far as anybody knows."""
        newest = self._newest()
        return newest.global_world_size if newest is not None else 0

    def has_majority(self) -> bool:
        """Whether no other master can have as many of the last members as this one."""
        return self._is_enough([report.peer for report in self.complete_reports()])

    def result(self, *, promised: bool = False) -> Recovered:
        """The run, as the complete reports tell of it.

        With ``promised``, members that don't follow the master that asks count as missing.
        """
        reports = [r for _, r in sorted(self._reports.items()) if r.complete]
        groups = self._groups(reports)
        members: dict[PeerId, tuple[int, Member]] = {}
        for number, group in groups.items():
            for member in group.rosters[max(group.rosters)].members:
                members[member.peer] = (number, member)
        rosters = [roster for report in reports for roster in report.rosters.values()]
        outcomes = {o.operation: o for report in reports for o in report.outcomes}
        answers = {a.round: a for report in reports for a in report.answers}
        decided = [
            *(o.sequence for o in outcomes.values()),
            *(a.sequence for a in answers.values()),
        ]
        newest = self._newest()
        version = newest.version if newest is not None else 0
        return Recovered(
            term=max((report.header.term for report in reports), default=0),
            last_peer=max(
                (*(r.peer for r in reports), *(peer for roster in rosters for peer in roster.ring)),
                default=PeerId(0),
            ),
            membership=RecoveredMembership(version, groups),
            members=dict(sorted(members.items())),
            returned=[
                r for r in reports if _is_member(r, members) and (r.promised or not promised)
            ],
            newcomers=[r for r in reports if r.peer not in members and not r.rosters],
            strangers=[
                r
                for r in reports
                if (r.peer not in members and r.rosters)
                or (r.peer in members and not _is_member(r, members))
            ],
            outcomes=dict(sorted(outcomes.items(), key=lambda item: item[1].sequence)),
            answers=dict(sorted(answers.items(), key=lambda item: item[1].sequence)),
            counts={kind: _count(kind, reports, rosters) for kind in RoundKind},
            sequence=max(decided, default=0),
            expected=_expected(reports),
            left=set(self._left),
        )

    def _newest(self) -> Roster | None:
        known = [r.newest for r in self._reports.values() if r.complete and r.newest is not None]
        return max(known, key=lambda roster: roster.version, default=None)

    def _groups(self, reports: list[Report]) -> dict[int, RecoveredGroup]:
        groups: dict[int, RecoveredGroup] = {}
        for roster in _in_order(reports):
            groups.setdefault(roster.group, RecoveredGroup({}, {})).rosters[roster.version] = roster
        for group in groups.values():
            newest = group.rosters[max(group.rosters)]
            for roster in group.rosters.values():
                if roster.view in newest.open_views:
                    group.views[roster.view] = View(roster.ring, roster.term, roster.algorithms)
        return groups

    def _is_complete(self) -> bool:
        if len(self._reports) + len(self._left) < self.world_size:
            return False
        recovered = self.result()
        return (
            self.world_size > 0
            and len(recovered.members) == self.world_size
            and self._left.issuperset(recovered.missing)
        )


def _is_member(report: Report, members: dict[PeerId, tuple[int, Member]]) -> bool:
    """Whether this is the process that the others know as a member: by its group and its port."""
    known, said = members.get(report.peer), report.header.registration
    return known is not None and (known[0], known[1].port) == (said.group, said.port)


def is_credible(header: msg.Return) -> bool:
    """Whether a peer of some run may say so."""
    numbers = (header.peer, header.roster_version, header.ratified, *(c.n for c in header.rounds))
    synced = header.expected.lineage
    if synced is not None:
        operation = synced.operation
        if operation.group != header.registration.group or operation.term > header.term:
            return False
        numbers += (operation.view, operation.n)
    return header.peer > 0 and header.term < TERM_MAX and max(numbers) < REPORTED_MAX


def _roster_is_possible(roster: Roster) -> bool:
    numbers = (roster.version, roster.view, *roster.ring, *roster.open_views)
    return (
        roster.version > 0
        and roster.view in roster.open_views
        and roster.algorithms.is_sound
        and len(set(roster.ring)) == len(roster.ring) <= roster.global_world_size
        and roster.term < TERM_MAX
        and max(numbers) < REPORTED_MAX
    )


def _check_sequence(number: int) -> None:
    if number >= REPORTED_MAX:
        raise RemoteProtocolError(reason="a number that no master gives out")


def _expected(reports: list[Report]) -> dict[int, Expected]:
    """By group: after the last synchronization that anybody knows to be committed."""
    known: dict[int, Expected] = {}
    for report in reports:
        group, expected = report.header.registration.group, report.header.expected
        before = known.get(group, NOTHING_EXPECTED)
        if _place(expected) > _place(before):
            known[group] = expected
    return known


def _place(expected: Expected) -> tuple[int, int, int]:
    """Later synchronizations of a group have the larger one."""
    if expected.lineage is None:
        return (0, 0, 0)
    operation = expected.lineage.operation
    return (operation.term, operation.view, operation.n + 1)


def _in_order(reports: list[Report]) -> Iterator[Roster]:
    rosters = [roster for report in reports for roster in report.rosters.values()]
    yield from sorted(rosters, key=lambda roster: roster.version)


def _count(kind: RoundKind, reports: list[Report], rosters: list[Roster]) -> int:
    """Rosters come before answers, so an admission may be known of whose round is not."""
    counts = [c.n for report in reports for c in report.header.rounds if c.kind is kind]
    answers = [a.round.n + 1 for report in reports for a in report.answers if a.round.kind is kind]
    updates = [r.updates for r in rosters if kind is RoundKind.UPDATE_TOPOLOGY]
    return max((*counts, *answers, *updates), default=0)
