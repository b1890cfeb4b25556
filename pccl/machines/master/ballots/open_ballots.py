"""The undecided operations: which peer may request which, and how each one ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pccl.machines.history import History, InvariantViolation
from pccl.machines.master.ballots.arrivals import ArrivalHistory, Arrivals
from pccl.machines.master.ballots.ballot import Abort, Ballot, Commit, Decision, Expel, Start
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.master.ballots.finals import Finals
from pccl.machines.master.ballots.norms import NormHistory
from pccl.machines.master.ballots.sync_ballot import SyncBallot
from pccl.machines.master.connections import Outbox
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.succession.origin import Incarnation
from pccl.machines.master.succession.ratification import Ratification
from pccl.machines.master.succession.recovered import Recovered
from pccl.machines.repair import Tell
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import OPERATIONS_OPEN_MAX, TAGS_PER_VIEW_MAX
from pccl.protocol.operation import Eager, Phase, Subset, name_peers
from pccl.protocol.shared_state import NOTHING_EXPECTED, Elected, Expected
from pccl.protocol.types import (
    SYNC_TAG,
    AbortCause,
    OperationId,
    PeerId,
)
from pccl.protocol.vocabulary.tags import is_of_subset
from pccl.telemetry.ended import EndedCall

_SUPERSEDED = "the other members went on in a newer view"


class OpenBallots:
    """The ballots over all undecided operations."""

    def __init__(
        self,
        incarnation: Incarnation,
        membership: Membership,
        finals: Finals,
        ratification: Ratification,
        outbox: Outbox,
    ) -> None:
        self._incarnation = incarnation
        self._membership = membership
        self._finals = finals
        self._ratification = ratification
        self._outbox = outbox
        self.open: dict[OperationId, Ballot] = {}
        self.expected: dict[int, Expected] = {}
        """Group -> its expected shared state; also of groups without members."""
        self._commits: Counter[int] = Counter()
        """Group -> collectives committed by this master since the group's last synchronization."""
        self._norms = NormHistory()
        self.arrivals = ArrivalHistory()
        self._opened: Counter[PeerId] = Counter()
        """Member -> how many undecided operations it has opened."""
        self.next_n: dict[tuple[int, int, int], int] = {}
        """(group, open view, tag) -> number of the next operation that a member may request."""

    def take_up(self, recovered: Recovered, ended: Iterable[OperationId]) -> None:
        """Continue a recovered run without open operations; numbers continue after ``ended``."""
        self.open = {}
        self.expected = dict(recovered.expected)
        self._commits = Counter()
        self._opened = Counter(dict.fromkeys(recovered.members, 0))
        self.next_n = {}
        for operation in ended:
            if self._is_in_open_view(operation):
                tag = (operation.group, operation.view, operation.tag)
                self.next_n[tag] = max(self.next_n.get(tag, 0), operation.n + 1)

    # -- what members say ----------------------------------------------------------------------

    def take(self, peer: RegisteredPeer, message: msg.Message) -> Expel | None:
        """Handle a member's message about an operation; return a removal that follows from it.

        Raises:
            RemoteProtocolError: ``peer`` may not send this message.
        """
        now_ns = self._outbox.now_ns
        decision: Decision | None = None
        match message:
            case msg.OperationRequest(
                operation, descriptor, eager, weight, norm, participants, blocks, among
            ):
                peer.blocked = peer.left_out = False
                peer.pace.called(message, now_ns)
                if operation.tag == SYNC_TAG:
                    raise RemoteProtocolError(reason=f"tag {SYNC_TAG} is for shared state only")
                ballot = self._find(peer, operation, opens=True, among=among)
                if isinstance(ballot, CollectiveBallot):
                    if eager is not Eager.SEGMENTS:
                        self.repeat_start(peer, ballot)
                    decision = ballot.request(
                        peer.id,
                        descriptor,
                        now_ns,
                        eager=eager,
                        weight=weight,
                        norm=norm,
                        participants=participants,
                        blocks=blocks,
                    )
            case msg.OperationDone(operation, digest):
                ballot = self._find(peer, operation, opens=False)
                if ballot is not None:
                    decision = ballot.done(peer.id, digest, now_ns)
            case msg.SyncRequest(operation, offer, quorum):
                peer.blocked = peer.left_out = False
                peer.pace.called(message, now_ns)
                if operation.tag != SYNC_TAG:
                    raise RemoteProtocolError(reason=f"tag {operation.tag} is not for shared state")
                ballot = self._find(peer, operation, opens=True)
                if isinstance(ballot, SyncBallot):
                    decision = ballot.request(peer.id, offer, now_ns, quorum)
            case msg.StatesCompared(operation, difference):
                ballot = self._find(peer, operation, opens=False)
                if isinstance(ballot, SyncBallot):
                    decision = ballot.compared(peer.id, difference, now_ns)
            case msg.Withdraw(operation, reason, among):
                ballot = self._find(peer, operation, opens=True, among=among)
                if ballot is not None:
                    decision = ballot.withdraw(peer.id, reason)
            case msg.Holdings(operation, lost, complete):
                ballot = self.open.get(operation)
                if isinstance(ballot, CollectiveBallot):
                    decision = ballot.holdings(peer.id, lost, complete=complete)
            case msg.OutcomeQuery(operation):
                ballot = self._find(peer, operation, opens=False)
            case _:
                raise RemoteProtocolError(reason=f"{type(message).__name__} is unexpected")
        if ballot is None:
            return None
        expel = None if decision is None else self.decide(ballot, decision)
        return expel or self._go_on_if_due(ballot)

    def note_progress(self, peer: PeerId, reports: Iterable[msg.Progress]) -> None:
        """Record the progress that a member reports."""
        for progress in reports:
            ballot = self.open.get(progress.operation)
            if ballot is not None and peer in ballot.survivors:
                ballot.report(peer, progress, self._outbox.now_ns)

    def repeat_start(self, peer: RegisteredPeer, ballot: CollectiveBallot) -> None:
        """Send a member the start of an operation, which it may have missed."""
        if ballot.phase is Phase.STARTED:
            self._ratification.tell([peer], ballot.started())

    def owed_to(self, peer: PeerId) -> Iterator[msg.MasterMessage]:
        """Yield what a member may have missed while its connection was lost."""
        for ballot in self.open.values():
            yield from ballot.owed_to(peer)

    # -- which operation -----------------------------------------------------------------------

    def _find(
        self,
        peer: RegisteredPeer,
        operation: OperationId,
        *,
        opens: bool,
        among: Subset | None = None,
    ) -> Ballot | None:
        """Return the ballot of an operation; make a new one if the member's message ``opens`` it.

        If the operation continues without ``peer``, return None. If it has ended, send the outcome
        too. A withdrawal also opens a ballot, because the request may be lost with a connection.
        Then the operation ends for all members, since they have to count the same numbers.

        Raises:
            RemoteProtocolError: ``peer`` has no part in the operation, or its number is wrong, or
                ``among`` names other members than an earlier message.
        """
        if opens and not _fits(operation.tag, among):
            raise RemoteProtocolError(reason=f"{operation} does not name its members")
        known = self.open.get(operation)
        if opens and known is not None and known.among != among:
            raise RemoteProtocolError(reason=f"{operation} is of tag {known.among}, not {among}")
        if known is not None and peer.id in known.survivors:
            return known
        if known is not None and peer.id in known.left_out:
            return None  # it gets the outcome
        if operation in self._finals.outcomes:
            outcome = self._finals.outcomes.owed(operation, peer.id)
            if outcome is None:
                raise RemoteProtocolError(reason=f"no outcome of {operation} is kept for the peer")
            self._ratification.tell([peer], outcome)
            return None
        term, membership = self._incarnation.term, self._membership
        if not peer.admitted or operation.term > term or operation.group != peer.group:
            raise RemoteProtocolError(reason=f"the peer cannot take part in {operation}")
        view = membership.view(operation.group, operation.view)
        if view is None:
            if operation.view > membership.newest_view(operation.group):
                raise RemoteProtocolError(reason=f"{operation} is of a future view")
            self._ratification.tell([peer], self._ended_by_closed_view(operation))
            return None
        ring = view.ring if among is None else among.peers
        if peer.id not in ring or not set(ring) <= set(view.ring):
            raise RemoteProtocolError(reason=f"the peer has no part in {operation}")
        if operation.term != view.term:
            raise RemoteProtocolError(reason=f"{operation} is not of the term of its view")
        tag = (operation.group, operation.view, operation.tag)
        inherited = view.term < term
        next_n = self.next_n.get(tag)
        if next_n is None:  # if an earlier master opened the view, its members count on
            next_n = operation.n if inherited else 0
        if not opens or operation.n != next_n:
            raise RemoteProtocolError(reason=f"this message cannot open {operation}")
        if self._opened[peer.id] >= OPERATIONS_OPEN_MAX:
            raise RemoteProtocolError(reason=f"over {OPERATIONS_OPEN_MAX} operations are open")
        self._opened[peer.id] += 1
        ballot = self._make(operation, ring, peer.id, among, inherited=inherited)
        self.open[operation] = ballot
        if among is not None and self._is_superseded(operation):
            self.decide(ballot, ballot.close_view(_SUPERSEDED))
            return None
        return ballot

    def _make(
        self,
        operation: OperationId,
        ring: tuple[PeerId, ...],
        opener: PeerId,
        among: Subset | None,
        *,
        inherited: bool,
    ) -> Ballot:
        now_ns = self._outbox.now_ns
        if operation.tag != SYNC_TAG:
            return CollectiveBallot(
                operation, ring, opener, now_ns, self._norms, among, inherited=inherited
            )

        def expected() -> tuple[Expected, int]:
            group = operation.group
            return self.expected.get(group, NOTHING_EXPECTED), self._commits[group]

        return SyncBallot(operation, ring, opener, now_ns, expected, inherited=inherited)

    def _ended_by_closed_view(self, operation: OperationId) -> msg.OperationEnded:
        return msg.OperationEnded(
            operation,
            AbortCause.VIEW_CLOSED,
            "the master closed the view before this call",
            (),
            self._membership.version,
        )

    def _is_superseded(self, operation: OperationId) -> bool:
        """Whether this master has opened a newer view.

        A member that a quorum left out may not know that view yet. If it began an operation of a
        subset in the older view, the other member would wait for it in the newer one.
        """
        group, newest = operation.group, self._membership.newest_view(operation.group)
        opened = self._membership.view(group, newest)
        is_ours = opened is not None and opened.term == self._incarnation.term
        return is_ours and operation.view < newest

    def _is_in_open_view(self, operation: OperationId) -> bool:
        return self._membership.view(operation.group, operation.view) is not None

    # -- without all members -------------------------------------------------------------------

    def go_on(self) -> Iterator[Expel]:
        """At a tick: continue operations without late members, if the grace is over."""
        for ballot in list(self.open.values()):
            expel = self._go_on_if_due(ballot)
            if expel is not None:
                yield expel

    def _go_on_if_due(self, ballot: Ballot) -> Expel | None:
        """Continue an operation without late members, if the grace is over.

        A member that was left out, and has made no call since, gets no further grace.
        """
        if ballot.quorum is None:
            return None
        goes_on_ns = ballot.goes_on_ns(self._arrivals_at(ballot))
        if goes_on_ns is None:
            return None
        peers = self._membership.peers
        is_awaited = any(not peers[peer].left_out for peer in ballot.waiting_for())
        if is_awaited and goes_on_ns > self._outbox.now_ns:
            return None
        expel = self.decide(ballot, ballot.go_on())
        for peer in ballot.left_out:
            peers[peer].left_out = True
        return expel

    def _arrivals_at(self, ballot: Ballot) -> Arrivals:
        return self.arrivals.at((ballot.operation.group, ballot.operation.tag))

    # -- decisions -----------------------------------------------------------------------------

    def decide(self, ballot: Ballot, decision: Decision | None) -> Expel | None:
        """Carry out a ballot's decision, if there is one; return a removal to the caller."""
        peers = self._membership.peers
        match decision:
            case Start(weights, flagged):
                if waiting := ballot.wait_for_start():
                    started = msg.OperationStarted(ballot.operation, weights, flagged)
                    self._ratification.tell([peers[peer] for peer in waiting], started)
            case Tell(whom, message):
                self._ratification.tell([peers[peer] for peer in whom], message)
            case Expel():
                return decision
            case Commit() | Abort():
                self._end(ballot, decision)
            case None:
                pass
        return None

    def _end(self, ballot: Ballot, decision: Commit | Abort) -> None:
        operation = ballot.operation
        del self.open[operation]
        if ballot.quorum is not None:
            for lag_ns in ballot.lags_ns:
                self._arrivals_at(ballot).note(lag_ns)
        if ballot.opener in self._membership.peers:
            self._opened[ballot.opener] -= 1
        if self._membership.view(operation.group, operation.view) is not None:
            self.next_n[operation.group, operation.view, operation.tag] = operation.n + 1
        committed = isinstance(decision, Commit)
        expected: Expected | None = None
        weights: tuple[float, ...] = ()
        elected: Elected | None = None
        digest = b""
        if committed and isinstance(ballot, CollectiveBallot) and ballot.left_out:
            digest = ballot.kept_digest
            weights = ballot.weights if digest else ()
        elif committed and isinstance(ballot, SyncBallot):
            elected = ballot.elected_without_all
        if committed and isinstance(ballot, CollectiveBallot):
            self._commits[operation.group] += 1
            if norms := ballot.trusted_norms:
                self._norms.note(operation, ballot.count, norms)
        elif committed and isinstance(ballot, SyncBallot):
            expected = ballot.expected_after(self._incarnation.run)
            if expected is not None:
                self.expected[operation.group] = expected
                del self._commits[operation.group]
        ended = msg.OperationEnded(
            operation,
            None if isinstance(decision, Commit) else decision.cause,
            "" if isinstance(decision, Commit) else decision.told_reason,
            ballot.contributors if committed else (),
            self._membership.version,
            self._finals.next_sequence(),
            decision.difference if isinstance(decision, Abort) else None,
            weights,
            elected,
            digest,
        )
        call = EndedCall(
            ballot.what,
            operation.group,
            ballot.opened_ns,
            ballot.latest,
            ballot.latest_ns,
            self._outbox.now_ns,
            ballot.tensor_bytes,
            ended.abort,
        )
        self._finals.ended.note(call)
        follows = self._would_follow(ballot, decision)
        self._finals.end(ended, ballot.concerned, expected or NOTHING_EXPECTED, follows=follows)

    def _would_follow(self, ballot: Ballot, decision: Commit | Abort) -> bool:
        """Whether every master that a majority follows reaches this outcome by itself.

        The done reports of all members of a view are final. In a view that is closed for a
        majority, a master commits nothing that was not proposed before.
        """
        if isinstance(decision, Abort):
            return not self._is_in_open_view(ballot.operation)
        is_whole = len(ballot.survivors) == len(ballot.members)
        return is_whole and isinstance(ballot, CollectiveBallot)

    def lose(self, gone: Sequence[PeerId], why: str) -> None:
        """Decide about operations of removed members, after the new roster was sent to the rest."""
        for ballot in list(self.open.values()):
            lost = [peer for peer in ballot.concerned if peer in gone]
            if lost:
                expel = self.decide(ballot, ballot.lose(lost, why, self._outbox.now_ns))
                assert expel is None, "a ballot removes members after a loss"
            elif ballot.ends_with_view and self._is_in_closed_view(ballot):
                reason = f"the run lost {name_peers(list(gone))}: {why}"
                self.decide(ballot, ballot.close_view(reason))

    def _is_in_closed_view(self, ballot: Ballot) -> bool:
        return self._membership.ring(ballot.operation.group, ballot.operation.view) is None

    def forget(self, gone: Iterable[PeerId]) -> None:
        """Forget removed members, after all decisions that follow from their loss."""
        for peer in gone:
            del self._opened[peer]

    def shift(self, gap_ns: int) -> None:
        """Shift the times of progress by ``gap_ns``, because this process slept that long."""
        for ballot in self.open.values():
            ballot.shift(gap_ns, self._outbox.now_ns)

    # -- views ---------------------------------------------------------------------------------

    def busy_views(self) -> set[tuple[int, int]]:
        """Return the views with undecided operations: (group, number)."""
        return {(operation.group, operation.view) for operation in self.open}

    def groups_with_many_numbers(self) -> set[int]:
        """Return the groups whose newest view has used too many tags, and needs a successor."""
        if len(self.next_n) <= TAGS_PER_VIEW_MAX:
            return set()
        counts: Counter[tuple[int, int]] = Counter((group, view) for group, view, _ in self.next_n)
        newest = self._membership.newest_view
        return {
            group
            for (group, view), count in counts.items()
            if count > TAGS_PER_VIEW_MAX and view == newest(group)
        }

    def supersede(self, group: int) -> None:
        """End calls that wait in older views of a group: a round has left their callers out.

        The outcome shows the newest view to the callers.
        """
        newest = self._membership.newest_view(group)
        for operation, ballot in list(self.open.items()):
            is_old = operation.group == group and operation.view < newest
            if is_old and ballot.phase is Phase.REQUESTED:
                self.decide(ballot, ballot.close_view(_SUPERSEDED))

    def forget_numbers(self) -> None:
        """Forget the operation numbers of closed views."""
        ring = self._membership.ring
        self.next_n = {tag: n for tag, n in self.next_n.items() if ring(tag[0], tag[1])}

    def check(self, history: History) -> None:
        """Assert that every open operation is undecided, and can still be decided.

        Raises:
            InvariantViolation: an open operation is decided, or contradicts its view.
        """
        members = {peer.id for peer in self._membership.members()}
        for operation, ballot in self.open.items():
            ring = self._membership.ring(operation.group, operation.view)
            if ballot.phase.ended or operation in self._finals.outcomes:
                raise InvariantViolation(f"{operation} is decided, but still open", history)
            strayed = any(peer not in members for peer in ballot.concerned)
            whole = not ballot.outlives_view and len(ballot.concerned) == len(ballot.members)
            if ring is not None and ballot.among is not None:
                ring = tuple(peer for peer in ballot.members if peer in ring)
            if strayed or ring != (ballot.members if whole else None):
                raise InvariantViolation(f"the members of {operation} contradict its view", history)


def _fits(tag: int, among: Subset | None) -> bool:
    """Whether an operation of ``tag`` can be one of these members; None: all of its view."""
    if among is None:
        return not is_of_subset(tag)
    return among.operation_tag == tag and len(set(among.peers)) == len(among.peers) >= 2
