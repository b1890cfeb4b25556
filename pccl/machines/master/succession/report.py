"""The report of one returning peer to a master that is rebuilding the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pccl.machines.master.connections import Caller
from pccl.machines.master.credible import check_answer, check_entry, check_known_outcome
from pccl.machines.master.succession.footprint import footprint
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import REQUEST_BYTES_MIN
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected
from pccl.protocol.types import PeerId, Roster, RoundKind

_LINK_BYTES = 160
"""Memory for the state of one link."""


@dataclass(slots=True)
class SharedRoster:
    """A roster that is in memory once, though ``holders`` reports contain it."""

    roster: Roster
    nbytes: int
    holders: int = 0


@dataclass(slots=True)
class Report:
    """The report of one returning peer."""

    header: msg.Return
    caller: Caller
    connection: int | None
    rosters: dict[int, Roster] = field(default_factory=dict[int, Roster])
    outcomes: list[msg.KnownOutcome] = field(default_factory=list[msg.KnownOutcome])
    answers: list[msg.KnownAnswer] = field(default_factory=list[msg.KnownAnswer])
    entries: list[msg.KnownEntry] = field(default_factory=list[msg.KnownEntry])
    links: dict[PeerId, msg.LinkReport] = field(default_factory=dict[PeerId, msg.LinkReport])
    """Other peer -> the last report about the link to it."""
    requests: list[msg.Message] = field(default_factory=list[msg.Message])
    """The peer's requests in order, which the master handles when the run is rebuilt."""
    complete: bool = False
    tellers: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Version of a roster -> id of the master that sent it."""
    promised: bool = False
    """Whether the peer has followed this master since this report."""
    nbytes: int = 0
    """About how much memory the report takes, rosters included."""
    own_nbytes: int = 0
    """About how much memory the report takes without rosters, which several reports may share."""
    shares: list[SharedRoster] = field(default_factory=list[SharedRoster])
    """The rosters in the report, each shared with all reports that contain it."""

    @property
    def peer(self) -> PeerId:
        """The peer that reports."""
        return self.header.peer

    @property
    def key(self) -> bytes:
        """The public key that the peer has proven."""
        return self.caller.key

    @property
    def newest(self) -> Roster | None:
        """The newest roster that the peer knows; None if it was never admitted."""
        return self.rosters[max(self.rosters)] if self.rosters else None

    @property
    def freed_nbytes(self) -> int:
        """Memory that becomes free if this report is dropped."""
        return self.own_nbytes + sum(one.nbytes for one in self.shares if one.holders == 1)

    def take(self, message: msg.Message) -> None:
        """Add the next message of the report, or a later request; ``Recovery`` adds rosters.

        Raises:
            RemoteProtocolError: the message does not belong in a report.
        """
        nbytes = footprint(message)
        match message:
            case msg.KnownOutcome() if not self.complete:
                check_known_outcome(message, self.header)
                nbytes = max(nbytes, REQUEST_BYTES_MIN)
                self.outcomes.append(message)
            case msg.KnownAnswer(answer) if not self.complete:
                check_answer(answer)
                nbytes = max(nbytes, REQUEST_BYTES_MIN)
                self.answers.append(message)
            case msg.KnownEntry() if not self.complete:
                check_entry(message, self.header)
                nbytes = max(nbytes, REQUEST_BYTES_MIN)
                self.entries.append(message)
            case msg.LinkReport(other, _, reason):
                nbytes = _LINK_BYTES + len(reason) if other not in self.links else len(reason)
                self.links[other] = message
            case msg.Reported() if not self.complete:
                self.complete = True
            case _ if isinstance(message, _REQUESTS):
                nbytes = max(nbytes, REQUEST_BYTES_MIN)
                self.requests.append(message)
            case _:
                what = type(message).__name__
                raise RemoteProtocolError(reason=f"{what} does not belong in a report")
        self.nbytes += nbytes
        self.own_nbytes += nbytes


_REQUESTS = (
    msg.Heartbeat,
    msg.RoundRequest,
    msg.OperationRequest,
    msg.SyncRequest,
    msg.StatesCompared,
    msg.OperationDone,
    msg.Withdraw,
    msg.OutcomeQuery,
    msg.StoreRequest,
    msg.BlockedReply,
    msg.Holdings,
    msg.LinksMeasured,
    msg.Prefetched,
)


def age(known: msg.KnownOutcome) -> tuple[int, tuple[int, int, int]]:
    """Return a sort key by which outcomes of later masters, then of later states, come last."""
    return known.outcome.roster_version, known.expected.place


def expected_states(
    reports: list[Report], finals: Iterable[msg.KnownOutcome]
) -> dict[int, Expected]:
    """Return each group's expected shared state after its last known synchronization."""
    known: dict[int, Expected] = {}
    said = [(report.header.registration.group, report.header.expected) for report in reports]
    for group, expected in [*said, *((o.outcome.operation.group, o.expected) for o in finals)]:
        before = known.get(group, NOTHING_EXPECTED)
        if expected.place > before.place:
            known[group] = expected
    return known


def round_count(kind: RoundKind, reports: list[Report], rosters: list[Roster]) -> int:
    """Return how many rounds of a kind are closed; a roster may arrive before the answer."""
    counts = [c.n for report in reports for c in report.header.rounds if c.kind is kind]
    known = [a.answer.round for report in reports for a in report.answers]
    answers = [answered.n + 1 for answered in known if answered.kind is kind]
    updates = [r.updates for r in rosters if kind is RoundKind.UPDATE_TOPOLOGY]
    return max((*counts, *answers, *updates), default=0)
