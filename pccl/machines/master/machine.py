"""``MasterMachine``: closes rounds and decides operations for the peers of a run.

Pure: :meth:`MasterMachine.handle` takes one event and the time and returns effects in the order in
which they must happen. It knows connections only as numbers that the shell hands out.

Invariants:

* An operation starts when every member of its view has asked for the same thing, and its outcome
  (``Ballot``) is announced once, to every member that is left.
* Outcomes and round answers are kept until everyone concerned has acknowledged them. With a
  standby, one that another master could contradict is told after a majority has stored it.
* A member is removed for one of the causes in :class:`~pccl.protocol.types.RemovalCause` only.
* Membership changes reach a peer before anything that was decided because of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pccl.machines.history import InvariantViolation
from pccl.machines.master.ballots.ballot import Abort, Ballot, Commit, Decision, Expel, Start
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.master.ballots.kept import Kept, affordable
from pccl.machines.master.ballots.sync_ballot import SyncBallot
from pccl.machines.master.lockstep import AskBlocked, Finding, LockstepWatch, LongWait, Stuck, Wait
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.rounds import RoundMaster
from pccl.machines.master.status import RunState, report
from pccl.machines.master.succession.recovery import Recovered
from pccl.machines.repair import Tell
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import (
    OPERATIONS_OPEN_MAX,
    OWED_MAX,
    TAGS_PER_VIEW_MAX,
    WAITS_NAMED_MAX,
)
from pccl.protocol.operation import Phase, name_peers
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected, Offer
from pccl.protocol.status_report import StatusReport
from pccl.protocol.types import (
    SYNC_TAG,
    AbortCause,
    OperationId,
    PeerId,
    RemovalCause,
    RoundId,
    RoundKind,
)
from pccl.topology.ring_order import apart, arrange, broken_neighbours, lacking


class MasterMachine(RoundMaster):
    """Coordinates one run: its rounds and operations.

    Args: see ``Restartable``.
    """

    def _forget_run(self) -> None:
        """Know of no round and no operation."""
        super()._forget_run()
        self._ballots: dict[OperationId, Ballot] = {}
        self._expected: dict[int, Expected] = {}
        """Of each group's shared state; also of groups without members."""
        self._commits: Counter[int] = Counter()
        """Group -> collectives that it has committed here since its last synchronization."""
        self._opened: Counter[PeerId] = Counter()
        """How many of them were opened by each member."""
        self._next_n: dict[tuple[int, int, int], int] = {}
        """(group, open view, tag) -> number of the next operation that may be asked for."""
        self._outcomes: Kept[OperationId, msg.OperationEnded] = Kept()
        self._lockstep = LockstepWatch(self.timing)

    # -- a master before this one ----------------------------------------------------------------

    def _take_up(self, recovered: Recovered) -> None:
        self._forget_run()
        self._opened.update(dict.fromkeys(recovered.members, 0))
        self._sequence = recovered.sequence
        self._expected.update(recovered.expected)
        self._round_counts = dict(recovered.counts)
        told = {
            report.peer: {o.outcome.sequence for o in report.outcomes if o.told}
            | {a.answer.sequence for a in report.answers if a.told}
            for report in recovered.returned
        }
        sizes = Counter(peer.group for peer in self.membership.members())
        for operation, outcome in affordable(
            recovered.outcomes, told.values(), lambda outcome: sizes[outcome.operation.group]
        ):
            members = [peer.id for peer in self.membership.members(operation.group)]
            lacking = [peer for peer in members if outcome.sequence not in told.get(peer, ())]
            self._outcomes.keep(operation, outcome, lacking)
            if lacking:
                self._propose(outcome, recovered.states[operation], sends=False)
            if self.membership.ring(operation.group, operation.view) is not None:
                tag = (operation.group, operation.view, operation.tag)
                self._next_n[tag] = max(self._next_n.get(tag, 0), operation.n + 1)
        members = [peer.id for peer in self.membership.members()]
        for round_id, answer in affordable(
            recovered.answers, told.values(), lambda _: len(members)
        ):
            lacking = [peer for peer in members if answer.sequence not in told.get(peer, ())]
            self._answers.keep(round_id, answer, lacking)
            if lacking:
                self._propose(answer, sends=False)
        taken = {
            (report.peer, count.kind): count.n
            for report in recovered.returned
            for count in report.header.rounds
        }
        for kind, count in recovered.counts.items():
            last = RoundId(kind, count - 1)
            lacking = [peer for peer in members if taken.get((peer, kind), 0) < count]
            if lacking and last not in recovered.answers:  # nobody who came back can tell it
                version, sequence = self.membership.version, self._next_sequence()
                answer = msg.RoundClosed(last, version, pending=False, sequence=sequence)
                self._answers.keep(last, answer, lacking)

    def _settled(self) -> int:
        outcome, answer = self._outcomes.oldest(), self._answers.oldest()
        return min(
            self._sequence + 1 if outcome is None else outcome.sequence,
            self._sequence + 1 if answer is None else answer.sequence,
        )

    # -- what peers say ------------------------------------------------------------------------

    def _on_request(self, peer: RegisteredPeer, message: msg.Message) -> None:
        match message:
            case msg.Heartbeat():
                self._on_heartbeat(peer, message)
            case msg.BlockedReply(query, blocked):
                peer.blocked = blocked
                self._lockstep.answered(peer.id, query, blocked=blocked)
            case msg.RoundRequest(round_id):
                peer.blocked = False
                self._on_round_request(peer, round_id)
            case msg.OperationRequest():
                peer.blocked = False
                self._on_operation_request(peer, message)
            case msg.SyncRequest(operation, offer):
                peer.blocked = False
                self._on_sync_request(peer, operation, offer)
            case msg.StatesCompared(operation, difference):
                ballot = self._find_ballot(peer, operation, opens=False)
                if isinstance(ballot, SyncBallot):
                    self._decide(ballot, ballot.compared(peer.id, difference, self._now_ns))
            case msg.OperationDone(operation, digest):
                ballot = self._find_ballot(peer, operation, opens=False)
                if ballot is not None:
                    self._decide(ballot, ballot.done(peer.id, digest, self._now_ns))
            case msg.Withdraw(operation, reason):
                ballot = self._find_ballot(peer, operation, opens=True)
                if ballot is not None:
                    self._decide(ballot, ballot.withdraw(peer.id, reason))
            case msg.Holdings(operation, lost, complete):
                ballot = self._ballots.get(operation)
                if isinstance(ballot, CollectiveBallot):
                    self._decide(ballot, ballot.holdings(peer.id, lost, complete=complete))
            case msg.OutcomeQuery(operation):
                self._find_ballot(peer, operation, opens=False)
            case _:
                raise RemoteProtocolError(reason=f"unexpected {type(message).__name__}")

    def _owed_to(self, peer: RegisteredPeer) -> Iterator[msg.MasterMessage]:
        for ballot in self._ballots.values():
            yield from ballot.owed_to(peer.id)
        yield from self._outcomes.owed_to(peer.id)
        yield from self._answers.owed_to(peer.id)

    def _on_heartbeat(self, peer: RegisteredPeer, message: msg.Heartbeat) -> None:
        peer.blocked = message.blocked
        if message.term == self.term:
            peer.seen_version = max(peer.seen_version, message.roster_version)
            peer.stored_place = max(peer.stored_place, message.proposed)
        for progress in message.progress:
            ballot = self._ballots.get(progress.operation)
            if ballot is not None and peer.id in ballot.survivors:
                ballot.report(peer.id, progress, self._now_ns)
        for operation in message.operations:
            self._outcomes.acknowledge(operation, peer.id)
            if operation not in self._outcomes:
                self._majority.proposals.settle(operation)
        for round_id in message.rounds:
            self._answers.acknowledge(round_id, peer.id)
            if round_id not in self._answers:
                self._majority.proposals.settle(round_id)

    # -- operations ----------------------------------------------------------------------------

    def _on_operation_request(self, peer: RegisteredPeer, message: msg.OperationRequest) -> None:
        if message.operation.tag == SYNC_TAG:
            raise RemoteProtocolError(reason="a collective under the tag of shared state")
        ballot = self._find_ballot(peer, message.operation, opens=True)
        if isinstance(ballot, CollectiveBallot):
            if not message.eager:
                self._repeat_start(peer, ballot)
            asked = (peer.id, message.descriptor, self._now_ns, message.resumes)
            weight = message.weight
            self._decide(ballot, ballot.request(*asked, eager=message.eager, weight=weight))

    def _on_sync_request(self, peer: RegisteredPeer, operation: OperationId, offer: Offer) -> None:
        if operation.tag != SYNC_TAG:
            raise RemoteProtocolError(reason="shared state under the tag of a collective")
        ballot = self._find_ballot(peer, operation, opens=True)
        if isinstance(ballot, SyncBallot):
            self._decide(ballot, ballot.request(peer.id, offer, self._now_ns))

    def _find_ballot(
        self, peer: RegisteredPeer, operation: OperationId, *, opens: bool
    ) -> Ballot | None:
        """The ballot that a member's message is about; a new one if that message ``opens`` it.

        None if the operation has ended; ``peer`` is told how. A withdrawal too may be the first
        that is heard of an operation (its request got lost with a connection), and it must end for
        everybody: all members have to count the same numbers.

        Raises:
            RemoteProtocolError: ``peer`` has no part in it, or it is not the next of its tag.
        """
        if operation in self._outcomes:
            outcome = self._outcomes.owed(operation, peer.id)
            if outcome is None:
                raise RemoteProtocolError(reason=f"the outcome of {operation} was acknowledged")
            self._send(peer, outcome)
            return None
        if not peer.admitted or operation.term > self.term or operation.group != peer.group:
            raise RemoteProtocolError(reason=f"operation {operation} is not of this run")
        if operation.view > self.membership.newest_view(operation.group):
            raise RemoteProtocolError(reason=f"operation {operation} of a future view")
        known = self._ballots.get(operation)
        if known is not None and known.outlives_view and peer.id in known.survivors:
            return known  # its view is closed
        view = self.membership.view(operation.group, operation.view)
        if view is None:
            self._send(peer, self._ended_by_closed_view(operation))
            return None
        if peer.id not in view.ring:
            raise RemoteProtocolError(reason=f"not a member of view {operation.view}")
        if operation.term != view.term:
            raise RemoteProtocolError(reason=f"view {operation.view} is of term {view.term}")
        ballot = self._ballots.get(operation)
        if ballot is None:
            tag = (operation.group, operation.view, operation.tag)
            inherited = view.term < self.term
            next_n = self._next_n.get(tag)
            if next_n is None:  # the master before may have counted; its members go on from there
                next_n = operation.n if inherited else 0
            if not opens or operation.n != next_n:
                raise RemoteProtocolError(reason=f"operation {operation} is not the next one")
            if self._opened[peer.id] >= OPERATIONS_OPEN_MAX:
                raise RemoteProtocolError(reason="too many operations are open")
            self._opened[peer.id] += 1
            ballot = self._make_ballot(operation, view.ring, peer.id, inherited=inherited)
            self._ballots[operation] = ballot
        return ballot

    def _make_ballot(
        self, operation: OperationId, ring: tuple[PeerId, ...], opener: PeerId, *, inherited: bool
    ) -> Ballot:
        about = (operation, ring, opener, self._now_ns)
        if operation.tag != SYNC_TAG:
            return CollectiveBallot(*about, inherited=inherited)

        def expected() -> tuple[Expected, int]:
            group = operation.group
            return self._expected.get(group, NOTHING_EXPECTED), self._commits[group]

        return SyncBallot(*about, expected, self._elect, inherited=inherited)

    def _busy_views(self) -> set[tuple[int, int]]:
        return {(operation.group, operation.view) for operation in self._ballots}

    def _groups_with_many_numbers(self) -> set[int]:
        """The groups whose newest view has seen so many tags that a new one should begin."""
        if len(self._next_n) <= TAGS_PER_VIEW_MAX:
            return set()
        counts: Counter[tuple[int, int]] = Counter((group, view) for group, view, _ in self._next_n)
        newest = self.membership.newest_view
        return {
            group
            for (group, view), count in counts.items()
            if count > TAGS_PER_VIEW_MAX and view == newest(group)
        }

    def _forget_numbers(self) -> None:
        """Nothing is counted any more in views that are closed."""
        ring = self.membership.ring
        self._next_n = {tag: n for tag, n in self._next_n.items() if ring(tag[0], tag[1])}

    def _ended_by_closed_view(self, operation: OperationId) -> msg.OperationEnded:
        return msg.OperationEnded(
            operation,
            AbortCause.VIEW_CLOSED,
            "a member was lost before this call",
            (),
            self.membership.version,
        )

    def _decide(self, ballot: Ballot, decision: Decision | None) -> None:
        """Announce what a ballot has decided, if anything."""
        if decision is None:
            return
        concerned = [self.membership.peers[peer] for peer in ballot.survivors]
        if isinstance(decision, Start):
            how = (decision.resumed, decision.weights)
            started = msg.OperationStarted(ballot.operation, *how)
            for waiting in ballot.wait_for_start():
                self._send(self.membership.peers[waiting], started)
            return
        if isinstance(decision, Tell):
            for told in decision.peers:
                self._send(self.membership.peers[told], decision.message)
            return
        if isinstance(decision, Expel):
            expelled = [self.membership.peers[peer] for peer in decision.peers]
            self._remove_all(expelled, decision.cause, decision.reason)
            return
        operation = ballot.operation
        del self._ballots[operation]
        if ballot.opener in self.membership.peers:
            self._opened[ballot.opener] -= 1
        if self.membership.ring(operation.group, operation.view) is not None:
            self._next_n[operation.group, operation.view, operation.tag] = operation.n + 1
        committed = isinstance(decision, Commit)
        expected: Expected | None = None
        if committed and isinstance(ballot, SyncBallot):
            expected = ballot.expected_after(self.run)
            if expected is not None:
                self._expected[operation.group] = expected
                del self._commits[operation.group]
        elif committed:
            self._commits[operation.group] += 1
        ended = msg.OperationEnded(
            ballot.operation,
            None if isinstance(decision, Commit) else decision.cause,
            "" if isinstance(decision, Commit) else decision.told_reason,
            ballot.contributors if committed else (),
            self.membership.version,
            self._next_sequence(),
            decision.difference if isinstance(decision, Abort) else None,
        )
        self._outcomes.keep(ballot.operation, ended, [peer.id for peer in concerned])
        if concerned and not self._would_follow(ballot, decision):
            self._propose(ended, expected or NOTHING_EXPECTED)
        for peer in concerned:
            self._send(peer, ended)

    def _would_follow(self, ballot: Ballot, decision: Commit | Abort) -> bool:
        """Whether any master that a majority follows comes to this outcome by itself.

        What all members of a view have reported done stays done. In a view that is closed for a
        majority nothing is committed that was not proposed before.
        """
        if isinstance(decision, Abort):
            return self.membership.ring(ballot.operation.group, ballot.operation.view) is None
        is_whole = len(ballot.survivors) == len(ballot.members)
        return is_whole and isinstance(ballot, CollectiveBallot)

    def _tell_rosters(self, peers: list[RegisteredPeer]) -> None:
        """Before a view is closed for them, members hear what was committed in it."""
        for outcome in self._outcomes:
            operation = outcome.operation
            is_open = self.membership.ring(operation.group, operation.view) is not None
            if outcome.abort is None and not is_open and operation not in self._majority.proposals:
                self._propose(outcome)
        super()._tell_rosters(peers)

    def _repeat_start(self, peer: RegisteredPeer, ballot: CollectiveBallot) -> None:
        if ballot.phase is Phase.STARTED:
            self._send(peer, ballot.started())

    def _acknowledges(self, peer: RegisteredPeer) -> bool:
        owed = self._outcomes.count_owed_to(peer.id) + self._answers.count_owed_to(peer.id)
        return owed <= OWED_MAX

    # -- removal -------------------------------------------------------------------------------

    def _draw_conclusions(self, peers: Sequence[RegisteredPeer], why: str) -> None:
        self._forget_numbers()
        gone = [peer.id for peer in peers]
        for peer in gone:
            self._outcomes.forget(peer)
            self._answers.forget(peer)
            for requested in self._rounds.values():
                requested.pop(peer, None)
        for proposed in self._majority.proposals.after(0):
            self._settle_if_forgotten(proposed)
        for ballot in list(self._ballots.values()):
            lost = [peer for peer in ballot.survivors if peer in gone]
            if lost:
                self._decide(ballot, ballot.lose(lost, why, self._now_ns))
        for kind in RoundKind:
            if self.membership.members():
                self._close_round_if_complete(kind)
        for peer in gone:
            del self._opened[peer]

    def _settle_if_forgotten(self, proposed: msg.Proposed) -> None:
        outcome, answer = proposed.outcome, proposed.answer
        if outcome is not None and outcome.operation not in self._outcomes:
            self._majority.proposals.settle(outcome.operation)
        if answer is not None and answer.round not in self._answers:
            self._majority.proposals.settle(answer.round)

    # -- time ----------------------------------------------------------------------------------

    def awaited(self) -> set[PeerId]:
        """See ``Registrar``."""
        awaited: set[PeerId] = set()
        members = self.membership.members()
        updating = self._rounds[RoundKind.UPDATE_TOPOLOGY]
        for requested in self._rounds.values():
            if requested:
                awaited.update(peer.id for peer in members if peer.id not in requested)
        if self.membership.admissible():  # newcomers that lack nothing but that round
            awaited.update(peer.id for peer in members if peer.id not in updating)
        for ballot in self._ballots.values():
            if len(awaited) == len(members):
                break  # all of them are
            if ballot.has_company:
                still_ns = self._now_ns - self.timing.ns(self.timing.progress_s) // 4
                awaited.update(ballot.awaited(still_ns))
        return awaited

    def _shift_deadlines(self, gap_ns: int) -> None:
        super()._shift_deadlines(gap_ns)
        for ballot in self._ballots.values():
            ballot.shift(gap_ns, self._now_ns)

    def _judge_waits(self) -> None:
        for group in sorted({ballot.operation.group for ballot in self._ballots.values()}):
            self._mend_ring(group)
        for ballot in list(self._ballots.values()):
            if ballot.phase is Phase.REQUESTED and isinstance(ballot, CollectiveBallot):
                continue  # of many that wait for calls each would cost something at every tick
            if ballot.operation in self._ballots:
                self._decide(ballot, ballot.look(self.timing, self._now_ns))
            self._judge_progress(ballot)
            if isinstance(ballot, CollectiveBallot):
                for peer in ballot.take_untold():
                    self._repeat_start(self.membership.peers[peer], ballot)
        blocked = [peer.id for peer in self.membership.members() if peer.blocked]
        for finding in self._lockstep.look(self._waits(), blocked, self._now_ns):
            self._carry_out(finding)

    def _status(self) -> StatusReport:
        idle = self.recovering
        state = RunState(
            self.run,
            self.term,
            self._began_ns,
            Membership(self.term) if idle else self.membership,
            [] if idle else self._waits(),
            self._lockstep.since_ns,
            {} if idle else self._ballots,
            self._removed,
            self._waits_for(),
        )
        return report(state, self._now_ns)

    def _waits(self) -> list[Wait]:
        """Everything that was requested and isn't decided."""
        waits: list[Wait] = []
        members = [peer.id for peer in self.membership.members()]
        for kind, requested in self._rounds.items():
            if requested:
                round_id = RoundId(kind, self._round_counts[kind])
                missing = tuple(peer for peer in members if peer not in requested)
                waits.append(Wait(round_id, kind.call_name, tuple(requested), missing))
        return [*waits, *(ballot.wait() for ballot in self._ballots.values())]

    def _carry_out(self, finding: Finding) -> None:
        peers = self.membership.peers
        match finding:
            case LongWait(wait, waited_s, whom, others):
                subject = wait.subject
                if isinstance(subject, RoundId):
                    told: msg.MasterMessage = msg.RoundWaits(subject, waited_s, whom)
                else:
                    named = [one.subject for one in others[:WAITS_NAMED_MAX]]
                    alike = tuple(one for one in named if isinstance(one, OperationId))
                    told = msg.OperationWaits(subject, waited_s, whom, alike, len(others))
                for peer in wait.requested:
                    self._send(peers[peer], told)
            case AskBlocked(query, asked):
                for peer in asked:
                    self._send(peers[peer], msg.BlockedQuery(query))
            case Stuck(subjects, reason):
                for subject in subjects:
                    if isinstance(subject, RoundId):
                        members = self.membership.members()
                        self._answer_round(subject.kind, members, pending=False, lockstep=reason)
                    else:
                        ballot = self._ballots[subject]
                        self._decide(ballot, ballot.get_stuck(reason))

    def _mend_ring(self, group: int) -> None:
        """If an operation waits for members that cannot talk, go on in a view that needs it not.

        Its ring has others as neighbours, and with them known to be apart no mesh is chosen.
        Their lanes are redialled all the time; a pair that has no link for as long as a lost
        control connection may take to come back counts as one that cannot talk.
        """
        patience_ns = self.timing.ns(self.timing.resume_s)
        broken = self.membership.broken_links(group, self._now_ns - patience_ns)
        started = [
            ballot
            for ballot in self._ballots.values()
            if ballot.operation.group == group and ballot.phase is Phase.STARTED
        ]
        for ballot in started:
            pairs = ballot.separated(broken) if broken else []
            if pairs and ballot.is_forced and not ballot.follows_ring:
                # Another view would not help: nobody chooses what the caller has named.
                reason = f"{apart(pairs[0], broken)}; leave algorithm out, or name the ring"
                self._decide(ballot, ballot.cannot_talk(reason))
        started = [ballot for ballot in started if ballot.operation in self._ballots]
        pairs = [pair for ballot in started for pair in ballot.separated(broken)] if broken else []
        if not pairs:
            return
        why = apart(pairs[0], broken)
        order, left_out = arrange(self.membership.order(group), broken)
        if left_out:
            peers = [self.membership.peers[peer] for peer in left_out]
            reason = f"{lacking(left_out, broken)}, and no order of the ring avoids that"
            self._remove_all(peers, RemovalCause.LINK_BROKEN, reason)
        closed: list[int] = []
        across = any(
            ballot.separated(broken)
            for ballot in started
            if not ballot.follows_ring and ballot.operation in self._ballots
        )
        if across or broken_neighbours(self.membership.order(group), broken):
            closed = self.membership.reorder(group, order)
            self._tell_rosters(self.membership.members())
            self._forget_numbers()
        for operation, ballot in list(self._ballots.items()):
            still_stuck = ballot in started and ballot.separated(broken)
            if still_stuck or (operation.group == group and operation.view in closed):
                mended = (
                    "another view was opened" if across else "the ring was put in another order"
                )
                reason = f"{why}; {mended}"
                self._decide(ballot, ballot.close_view(reason))

    def _judge_progress(self, ballot: Ballot) -> None:
        if ballot.phase is not Phase.STARTED:
            return
        stalled_ns = self._now_ns - ballot.progress_ns
        if stalled_ns < self.timing.ns(self.timing.progress_s):
            return
        window_ns = max(stalled_ns // 2, 2 * self.timing.ns(self.timing.heartbeat_s))
        stall = ballot.stall(self._now_ns - window_ns)
        if stall is not None and ballot.operation in self._ballots:
            seconds = stalled_ns / 1e9
            reason = f"{ballot.operation} has stood still for {seconds:.1f} s, and {stall}"
            charged = self.membership.worse_linked(stall.upstream, stall.downstream)
            self._remove(charged, RemovalCause.NO_PROGRESS, reason)

    def check(self) -> None:
        """Assert what must always hold (tests and the simulator call this after every event).

        Raises:
            InvariantViolation: a rule of this machine is broken; carries its history.
        """
        members = {peer.id: peer for peer in self.membership.members()}
        for operation, ballot in self._ballots.items():
            ring = self.membership.ring(operation.group, operation.view)
            if ballot.phase.ended or operation in self._outcomes:
                raise InvariantViolation(f"{operation} is decided and undecided", self.history)
            strayed = any(peer not in members for peer in ballot.survivors)
            whole = not ballot.outlives_view and len(ballot.survivors) == len(ballot.members)
            if strayed or ring != (ballot.members if whole else None):
                raise InvariantViolation(f"{operation} is open in a closed view", self.history)
        for owed in (*self._outcomes.everybody_owed(), *self._answers.everybody_owed()):
            strangers = [peer for peer in owed if peer not in members]
            if strangers or not owed:
                raise InvariantViolation(
                    f"outcome kept for {name_peers(strangers) if strangers else 'nobody'}",
                    self.history,
                )
        for kind, requested in self._rounds.items():
            if requested and all(peer in requested for peer in members):
                raise InvariantViolation(f"round {kind.name} should be closed", self.history)
