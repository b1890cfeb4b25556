"""``PeerMachine``: turns a caller's joint calls into requests, and decisions into results.

Pure: :meth:`PeerMachine.handle` takes one event and the time and returns effects in the order in
which they must happen. The data plane is the shell's: the machine tells it which buffers to post,
when to begin and how an operation has ended, and hears when the own result is complete.

Invariants:

* What a caller sees of the membership (``seen``) changes only when one of his joint calls returns,
  and to the roster that the answer names: the same for all callers at the same call.
* Buffers are posted before the operation is requested, and released before its call returns.
* Every operation that was posted ends exactly once, and every call returns exactly once.
* Every call that was open when this peer lost its place, and each one that is made before a caller
  was told, ends with the same error.
* The outcome of a detached operation, with the membership it names, is seen when it is claimed.
* Everything unanswered is repeated after a reconnect; a second answer changes nothing.
"""

from __future__ import annotations

from pccl.machines.history import InvariantViolation
from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.calls import JointCall, OneTimeError
from pccl.machines.peer.eager import EagerBudget
from pccl.machines.peer.left_sync import LeftSync
from pccl.machines.peer.membership import Standing
from pccl.machines.peer.operations import MISSED_CAUSES, OpenOperation, OpenOperations
from pccl.machines.peer.round_caller import RoundCaller
from pccl.machines.reachability import AddressTried
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import OPERATIONS_OPEN_MAX, Timing
from pccl.protocol.operation import Phase
from pccl.protocol.shared_state import Elected, Lineage, expected_after
from pccl.protocol.types import (
    SYNC_TAG,
    AbortCause,
    Collective,
    Descriptor,
    OperationId,
    Roster,
    RoundKind,
)

__all__ = ["PeerMachine", "Standing"]


class PeerMachine(RoundCaller):
    """One incarnation of one process in a run.

    Args:
        timing: deadlines.
        now_ns: the present.
        eager: which operations go ahead; None: none does.
        former_loss: how the incarnation before this one ended; None: there was none.
        left_sync: what that incarnation knew of its last synchronization.
    """

    def __init__(
        self,
        timing: Timing,
        now_ns: int,
        eager: EagerBudget | None = None,
        former_loss: errors.PCCLError | None = None,
        left_sync: LeftSync | None = None,
    ) -> None:
        super().__init__(timing, now_ns, former_loss)
        self._eager = eager or EagerBudget()
        self.left_sync = left_sync or LeftSync()
        self.left_sync.forget_repeat()
        self._operations = OpenOperations(self.history)

    def phase_of(self, operation: OperationId) -> Phase | None:
        """Where an operation is in its life; None once it has ended or if it never was."""
        known = self._operations.get(operation)
        return known.phase if known else None

    @property
    def open_operations(self) -> tuple[OpenOperation, ...]:
        """Everything that was posted here and has no outcome, in the order of the calls."""
        return tuple(self._operations)

    def waits_for(self, call: int) -> str:
        """Whom or what a call waits for, as far as the master has said."""
        operation = self._operations.of_call(call)
        if operation is not None:
            return operation.waits_for
        if self._join is not None and self._join.call == call:
            return self._join.waits_for
        return next((round_.waits_for for round_ in self._rounds if round_.call == call), "")

    def may_come(self, operation: OperationId) -> bool:
        """Whether an operation that is not posted here may still be posted."""
        newest = self.newest
        return (
            newest is not None
            and self._operations.get(operation) is None
            and operation.term <= self.own.term
            and operation.group == self.own.group
            and operation.view in newest.open_views
            and operation.n >= self._operations.next_n(operation.view, operation.tag)
        )

    @property
    def needs_resync(self) -> bool:
        """Whether the others have committed something that this peer's caller had left."""
        return self._refusals.resync is not None

    def _take(self, event: ev.PeerEvent) -> None:
        self._dispatch(event)
        self._effects += self._out.take()

    def _dispatch(self, event: ev.PeerEvent) -> None:
        match event:
            case ev.JoinCall():
                self._on_join_call(event)
            case ev.RoundCall():
                self._on_round_call(event)
            case ev.ReduceCall():
                self._on_reduce_call(event)
            case ev.SyncCall():
                self._on_sync_call(event)
            case ev.Claim(call):
                self._on_claim(call)
            case ev.Forget(call):
                self._on_forget(call)
            case ev.LeaveCall():
                self._on_leave_call(event)
            case ev.CallersAsked(query, blocked):
                self._out.send(msg.BlockedReply(query, self._is_blocked(blocked)))
            case ev.Close():
                self._on_close()
            case ev.ControlOpened(run, term):
                self._on_control_opened(run, term)
            case ev.ControlMessage(message):
                self._contact.heard(self._now_ns)
                self._on_message(message)
            case ev.ControlClosed(reason):
                self._on_control_closed(reason)
            case ev.LinkChanged(peer, reason):
                self._links.changed(peer, reason)
            case ev.LinksMeasured() | AddressTried():
                self._links.measured(event)
            case ev.ReduceDone(operation, digest):
                self._on_reduce_done(operation, digest)
            case ev.SyncStarved(operation, reason):
                self._on_starved(operation, reason)
            case ev.StatesCompared(operation, difference):
                self._out.send(msg.StatesCompared(operation, difference))
            case ev.Prefetched():
                self._on_prefetched()
            case ev.HoldingsKnown(operation, lost, complete):
                self._out.send(msg.Holdings(operation, lost, complete))
            case ev.LeftCommitted(operation):
                self._on_left_committed(operation)
            case ev.LeftFailed(error):
                self._refusals.left_unnoticed(error)
            case ev.LeftAnswered(kind):
                self._on_left_answered(kind)
            case ev.LeftAdmitted():
                self._on_left_admitted()
            case ev.Tick(progress, blocked, busy_ns):
                self._on_tick(progress, self._is_blocked(blocked), busy_ns)

    # -- calls ---------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return self._membership.has_unclaimed or self._operations.have_callers

    def _on_reduce_call(self, event: ev.ReduceCall) -> None:
        if not self._may_call(event):
            return
        if not self._has_caught_up(event):
            return
        self._admission_unused = False
        roster, newest = self._deferred.seen_at(event.call) or self.seen, self.newest
        assert roster is not None
        assert newest is not None
        if self._operations.is_tag_in_use(event.tag):
            self._out.raise_(event.call, words.tag_in_use(event.tag))
            return
        if len(self._operations) >= OPERATIONS_OPEN_MAX:
            self._out.raise_(event.call, words.too_many_open())
            return
        if roster.view not in newest.open_views:
            self._out.raise_(event.call, words.lost_before(roster, newest))
            self._membership.show(event.call, newest.version, detached=event.detached)
        elif len(roster.members) < 2:
            self._reduce_alone(event, roster)
        elif (missed := self._operations.take_missed(roster.view, event.tag)) is not None:
            self._membership.show(event.call, missed.roster_version, detached=event.detached)
            self._out.raise_(event.call, words.aborted(missed, attempt=0))
        else:
            self._open(self._opened(event, roster))

    def _on_sync_call(self, event: ev.SyncCall) -> None:
        """Whoever is left, or alone, does it all the same; members that are lost don't matter."""
        if not self._may_call(event):
            return
        if self._is_busy:
            self._out.raise_(event.call, words.operations_open())
            return
        if not self._has_caught_up(event):
            return
        self._admission_unused = False
        repeated = self.left_sync.take_repeat(event.offer)
        if repeated is not None:
            self._membership.show(event.call, repeated.roster_version, detached=False)
            self._out.return_(event.call, repeated.result)
            return
        roster, newest = self.seen, self.newest
        assert roster is not None
        assert newest is not None
        if roster.view not in newest.open_views:
            roster = newest
        while (missed := self._operations.take_missed(roster.view, SYNC_TAG)) is not None:
            if missed.abort is not AbortCause.WITHDRAWN:  # then they have all called again
                self._membership.show(event.call, missed.roster_version, detached=False)
                self._out.raise_(event.call, words.aborted(missed, attempt=0))
                return
        operation = self._next_operation(roster, SYNC_TAG)
        opened = OpenOperation(operation, Descriptor.sync(), roster.ring, event.call)
        opened.made = event.offer
        opened.offer = self.left_sync.offer(event.offer, stale=self.needs_resync)
        self._operations.open(opened)
        self._out.add(ev.PostSync(event.call, operation, roster.ring))
        self._out.send(opened.request())

    def _reduce_alone(self, event: ev.ReduceCall, roster: Roster) -> None:
        if event.descriptor.collective is Collective.ALL_REDUCE:
            self._out.raise_(event.call, words.alone_in_the_group())
        else:  # there is nobody to wait for, and nobody to send anything to
            operation = self._next_operation(roster, event.tag)
            self._out.return_(event.call, ev.ReduceResult(operation, (self.own.peer,)))

    def _opened(self, event: ev.ReduceCall, roster: Roster) -> OpenOperation:
        operation = self._next_operation(roster, event.tag)
        what, call = event.descriptor.settled(roster.algorithms), event.call
        opened = OpenOperation(operation, what, roster.ring, call, event.detached)
        opened.resumes, opened.weight = event.resumes, event.weight
        return opened

    def _next_operation(self, roster: Roster, tag: int) -> OperationId:
        n = self._operations.next_n(roster.view, tag)
        return OperationId(roster.term, self.own.group, roster.view, tag, n)

    def _open(self, operation: OpenOperation) -> None:
        assert operation.call is not None
        self._operations.open(operation)
        what, ring = operation.descriptor, operation.ring
        if operation.resumes is None:
            operation.eager = self._eager.take(operation.id, what, len(ring))
        self._out.add(ev.Post(operation.call, operation.id, what, ring))
        if operation.eager:
            self._out.add(ev.Begin(operation.id, ahead=True))
        self._out.send(operation.request())

    def _on_claim(self, call: int) -> None:
        self._membership.claim(call)
        self._refusals.claim(call)

    def _on_forget(self, call: int) -> None:
        self._membership.forget(call)
        self._operations.forget(call)
        self._refusals.forget(call)

    def _is_blocked(self, callers_blocked: bool) -> bool:
        """Whether nobody here can go on before another member makes a call."""
        free = self._membership.has_unclaimed or not self._operations.all_block_their_callers
        return callers_blocked and self.own.standing is Standing.MEMBER and not free

    def _on_leave_call(self, event: ev.LeaveCall) -> None:
        operation = self._operations.of_call(event.call)
        if operation is not None:
            self._leave_operation(event, operation)
            return
        if self._deferred.leave(event.call, event.reason):
            self._out.raise_(event.call, words.left(event.reason))
            return
        for current in self._rounds:
            if current.call == event.call:
                current.call = None
                kind, waits_for = current.id.kind, current.waits_for
                self._out.raise_(event.call, words.left_round(event.reason, kind, waits_for))
                return
        if self._join is not None and self._join.call == event.call:
            waits_for = self._join.waits_for
            if not self.own.token:
                waits_for = f"a master ({self._why_closed or 'none has answered yet'})"
            self._lose(words.left_join(event.reason, waits_for), goodbye=True)

    def _leave_operation(self, event: ev.LeaveCall, operation: OpenOperation) -> None:
        done = operation.phase is Phase.DONE
        in_doubt = done or self.own.has_standby
        self._operations.leave(operation, None if done else event.reason, in_doubt=in_doubt)
        if done:
            self._out.add(ev.Detach(operation.id))
            self._out.raise_(event.call, words.left_done_operation(event.reason, operation.id))
            return
        self._out.add(ev.End(operation.id, committed=False))
        self._out.send(msg.Withdraw(operation.id, event.reason))
        left = words.left_operation_in_doubt if self.own.has_standby else words.left_operation
        self._out.raise_(event.call, left(event.reason, operation.waits_for))

    def _may_call(self, event: JointCall) -> bool:
        error = self._refusal(event)
        if error is not None:
            self._out.raise_(event.call, error)
            return False
        if not isinstance(event, ev.SyncCall):
            self.left_sync.forget_repeat()
        in_doubt = self._operations.in_doubt()
        for operation in (o for o in in_doubt if o.withdrawn is None):  # others are answered anyway
            self._out.send(msg.OutcomeQuery(operation.id))
        if in_doubt:
            self._deferred.add(event, self.seen)
        return not in_doubt

    def _refusal(self, event: JointCall) -> errors.PCCLError | None:
        if self.own.standing is Standing.CLOSED:
            return words.closed()
        error = self._refusals.refusal(event, self.own.peer)
        if error is not None or self.own.standing is Standing.MEMBER:
            return error
        update = RoundKind.UPDATE_TOPOLOGY
        asks = isinstance(event, ev.RoundCall) and event.kind is update
        if asks and self._join is not None and self._join.rejoins:
            return words.same_call_twice(update.call_name)
        return words.not_a_member(None)

    def _retry_deferred(self) -> None:
        for event in self._deferred.take():
            match event:
                case ev.RoundCall():
                    self._on_round_call(event)
                case ev.ReduceCall():
                    why_left = self._deferred.why_left(event)
                    if why_left is None:
                        self._on_reduce_call(event)
                    else:
                        self._withdraw_unasked(event, why_left)
                case ev.SyncCall():
                    self._on_sync_call(event)

    def _withdraw_unasked(self, event: ev.ReduceCall, reason: str) -> None:
        """Whoever has asked for an operation that was left here must not wait for it for ever.

        It can't be committed without this peer, so nothing has to wait for its outcome.
        """
        if self._operations.in_doubt():
            self._deferred.add(event)
            return
        if not self._has_caught_up(event):
            return
        roster, newest = self._deferred.seen_at(event.call) or self.seen, self.newest
        assert roster is not None
        assert newest is not None
        is_open = roster.view in newest.open_views and len(roster.members) > 1
        if not is_open or self._operations.is_tag_in_use(event.tag):
            return
        if self._operations.take_missed(roster.view, event.tag) is None:
            unasked = self._opened(event, roster)
            self._operations.open(unasked)
            self._operations.leave(unasked, reason, in_doubt=False)
            self._out.send(msg.Withdraw(unasked.id, reason))

    # -- what the master says -------------------------------------------------------------------

    def _on_message(self, message: msg.Message) -> None:
        if not self.own.takes_part:
            return
        match message:
            case msg.Registered():
                self._on_registered(message)
            case msg.LinkPlan() | msg.DialNewcomers() | msg.ProbeAddress() | msg.Undialable():
                self._links.plan(message)
            case msg.Resumed():
                self._on_resumed(message)
            case msg.Refused():
                self._on_refused(message)
            case msg.Admitted():
                self._on_admitted(message)
            case msg.RosterChanged(roster):
                self._on_roster(roster)
            case msg.RoundClosed():
                self._on_round_closed(message)
            case msg.OperationStarted():
                self._on_started(message)
            case msg.SyncStarted(operation, elected):
                self._on_sync_started(operation, elected)
            case msg.CompareStates(operation, reference):
                own = self._operations.get(operation)
                if own is not None and own.call is not None and own.offer is not None:
                    self._out.add(ev.CompareSync(operation, reference))
            case msg.HoldingsQuery():
                self._out.add(self._operations.answer_holdings(message, self.own.peer))
            case msg.Repair():
                self._out.add(*self._operations.send_across(message, self.own.peer))
            case msg.OperationEnded():
                self._on_ended(message)
            case msg.Proposed():
                self._heartbeats.stored(self._finals.store(message))
            case msg.RoundWaits():
                self._report_wait(self._rounds.note_wait(message), message.waited_s)
            case msg.OperationWaits():
                self._report_wait(self._operations.note_wait(message), message.waited_s)
            case msg.AdmissionWaits(waited_s, whom) if self._join is not None:
                self._join.waits_for = whom
                self._report_wait(f"connect waits for {whom}", waited_s)
            case msg.BlockedQuery(query):
                self._out.add(ev.AskCallers(query))
            case msg.MasterHeartbeat(now_ms, settled, ratified):
                self._contact.note_clock(now_ms, self._now_ns)
                self._finals.settle(settled)
                self._membership.ratify(ratified)
            case msg.AdmissionWaits():
                pass
            case _:
                reason = f"the master sent {type(message).__name__}"
                raise errors.RemoteProtocolError(func="control", reason=reason)

    # -- being a member --------------------------------------------------------------------------

    def _begin_membership(self, rounds: tuple[msg.RoundCount, ...], *, rejoins: bool) -> None:
        self._rounds.start_from(rounds)
        self._admission_unused = not rejoins

    def _forget_closed(self, open_views: tuple[int, ...]) -> None:
        self._operations.forget_closed(open_views)
        assert self.newest is not None
        self._eager.close_views(open_views, self.newest.view)

    def _repeat_requests(self) -> None:
        for current in self._rounds:
            if current.answer is None:
                self._out.send(msg.RoundRequest(current.id))
        for message in self._operations.unanswered():
            self._out.send(message)

    def _round_counts(self) -> tuple[msg.RoundCount, ...]:
        return self._rounds.counts()

    def _fail_calls(self, loss: OneTimeError) -> None:
        waiting = [current.call for current in self._rounds if current.call is not None]
        handles: list[int] = []
        for operation in self._operations:
            if operation.withdrawn is None:
                self._out.add(ev.End(operation.id, committed=False))
            if operation.call is not None:
                (handles if operation.detached else waiting).append(operation.call)
                if operation.detached and not operation.forgotten:
                    loss.ends(operation.call, detached=True)
        for deferred in self._deferred:
            detached = isinstance(deferred, ev.ReduceCall) and deferred.detached
            (handles if detached else waiting).append(deferred.call)
            if detached:
                loss.ends(deferred.call, detached=True)
        for call in waiting:  # after those that were launched, all of which are due to be told
            loss.ends(call, detached=False)
        for call in sorted([*waiting, *handles]):
            self._out.raise_(call, loss.error)
        self._deferred.clear()
        self._operations.clear()
        self._rounds.clear()
        self._finals.clear()

    # -- operations ----------------------------------------------------------------------------

    def _on_started(self, message: msg.OperationStarted) -> None:
        operation = self._operations.get(message.operation)
        if operation is None or operation.phase is not Phase.REQUESTED:
            return
        if len(message.weights) != (len(operation.ring) if operation.descriptor.weighted else 0):
            raise errors.RemoteProtocolError(func="control", reason="a start with wrong weights")
        operation.weights = message.weights
        self._start(operation, resumed=message.resumed)

    def _start(self, operation: OpenOperation, *, resumed: bool) -> None:
        """All members have asked for the same."""
        self._operations.enter(operation, Phase.STARTED)
        self._eager.all_asked(operation.id)
        if operation.call is not None:
            weights = operation.weights
            self._out.add(ev.Begin(operation.id, resumed, weights=weights))

    def _on_sync_started(self, operation_id: OperationId, elected: Elected) -> None:
        """What is elected; told again after a reconnect, and when it has changed."""
        operation = self._operations.get(operation_id)
        if operation is None or operation.offer is None:
            return
        if operation.phase is Phase.REQUESTED:
            self._operations.enter(operation, Phase.STARTED)
        known, operation.elected = operation.elected, elected
        if operation.call is not None and operation.phase is Phase.STARTED and elected != known:
            self._out.add(ev.BeginSync(operation_id, elected))

    def _on_starved(self, operation_id: OperationId, reason: str) -> None:
        """Let all try again: what is here already is not lost with the attempt."""
        operation = self._operations.get(operation_id)
        if operation is not None and operation.phase is Phase.STARTED:
            operation.starved = reason
            self._out.send(msg.Withdraw(operation_id, reason))

    def _on_reduce_done(self, operation_id: OperationId, digest: bytes) -> None:
        operation = self._operations.get(operation_id)
        if operation is None or operation.call is None:
            return
        if operation.phase is Phase.REQUESTED:  # everybody's data is here: it needs no telling
            self._start(operation, resumed=False)
        self._operations.enter(operation, Phase.DONE)
        operation.digest = digest
        self._out.send(msg.OperationDone(operation_id, digest))

    def _on_ended(self, message: msg.OperationEnded) -> None:
        ended = message.operation
        posted = self._operations.get(ended)
        if message.abort is None and posted is not None and posted.phase is not Phase.DONE:
            raise errors.RemoteProtocolError(func="control", reason="a commit of what is not done")
        might_come = self.may_come(ended)
        self._finals.see(message)
        if ended.group == self.own.group:
            newest = self.newest
            if newest is not None and ended.view in newest.open_views:
                if message.abort in MISSED_CAUSES:
                    self._operations.miss(message)
                self._operations.use_up(ended)
        self._heartbeats.acknowledge(ended)
        committed = message.abort is None
        operation = self._operations.end(ended, committed=committed)
        if operation is None:  # told twice, or never asked for: others may have gone ahead
            if might_come:
                self._out.add(ev.ForgetEarly())
            return
        if operation.withdrawn is None:
            self._out.add(ev.End(ended, committed))
        if committed and operation.elected is not None:
            lineage = Lineage(self.own.run, ended)
            self.left_sync.commit(operation, lineage, message, self.own.peer)
            if not operation.only_looks:
                self._expected = expected_after(operation.elected, lineage)
        if operation.call is None:
            if committed and not operation.only_looks:
                self._on_left_committed(ended)
            self._retry_deferred()
            return
        if message.abort is AbortCause.DIGEST_MISMATCH and self._may_retry(operation):
            again = self._operations.next_n(ended.view, ended.tag)
            self._open(operation.next_attempt(again))
            return
        detached = operation.detached
        self._membership.show(operation.call, message.roster_version, detached=detached)
        if committed and operation.elected is not None:
            if not operation.only_looks:
                self._refusals.synchronized()
            result = ev.SyncResult(ended, operation.elected, message.contributors)
            self._out.return_(operation.call, result)
        elif committed:
            how, attempts = operation.descriptor.carrier, operation.attempt + 1
            whose = (ended, message.contributors)
            reduced = ev.ReduceResult(*whose, attempts, how, operation.weights)
            self._out.return_(operation.call, reduced)
        else:
            self._out.raise_(operation.call, words.aborted(message, operation.attempt))

    def _on_left_committed(self, operation: OperationId) -> None:
        had_it = self.left_sync.leave(operation)
        if had_it:
            self._refusals.synchronized()
        elif had_it is False:
            self._refusals.require_resync(operation)

    def _may_retry(self, operation: OpenOperation) -> bool:
        """Whether to try again, in the same view (all do alike), before the caller hears of it."""
        newest = self.newest
        is_open = newest is not None and operation.id.view in newest.open_views
        return is_open and operation.attempt == 0 and operation.offer is None

    # -- time ----------------------------------------------------------------------------------

    def _on_tick(self, progress: tuple[msg.Progress, ...], blocked: bool, busy_ns: int) -> None:
        if self.own.takes_part:
            waits = len(self._operations) > 0 or len(self._rounds) > 0
            self._watch_master(progress, busy_ns, blocked=blocked, waits=waits)

    def check(self) -> None:
        """Assert what must always hold (tests and the simulator call this after every event).

        Raises:
            InvariantViolation: a rule of this machine is broken; carries its history.
        """
        if self.own.standing is Standing.MEMBER and (self.seen is None or self.newest is None):
            raise InvariantViolation("a member that knows no roster", self.history)
        open_count = len(self._operations) + len(self._rounds)
        if self.own.standing in (Standing.LOST, Standing.CLOSED) and open_count:
            raise InvariantViolation("outside the run with open calls", self.history)
        for operation in self._operations:
            if operation.phase.ended:
                raise InvariantViolation(f"{operation.id} has ended and is open", self.history)
