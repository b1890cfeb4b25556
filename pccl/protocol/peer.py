"""``PeerMachine``: turns a caller's joint calls into requests, and decisions into results.

Pure: :meth:`PeerMachine.handle` takes one event and the time and returns effects in the order in
which they must happen. The data plane is the shell's: the machine tells it which buffers to post,
when to begin and how an operation has ended, and hears when the own result is complete.

Invariants:

* What a caller sees of the membership (``seen``) changes only when one of his joint calls returns,
  and to the roster that the answer names: the same for all callers at the same call.
* Buffers are posted before the operation is requested, and released before its call returns.
* Every operation that was posted ends exactly once, and every call returns exactly once.
* Everything unanswered is repeated after a reconnect; a second answer changes nothing.
"""

from __future__ import annotations

from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol import peer_events as ev
from pccl.protocol.history import History, InvariantViolation
from pccl.protocol.limits import JOIN_REASONS_MAX, Timing
from pccl.protocol.operation import Phase
from pccl.protocol.peer_contact import MasterContact
from pccl.protocol.peer_events import (
    Begin,
    CloseControl,
    DialControl,
    End,
    ForgetEarly,
    PeerEffect,
    Post,
    Raise,
    ReduceResult,
    Return,
    Send,
    SetLinks,
)
from pccl.protocol.peer_membership import (
    KnownMembership,
    Standing,
    loss_error,
    master_lost_error,
    refusal_error,
)
from pccl.protocol.peer_operations import OpenOperation, OpenOperations, abort_error
from pccl.protocol.peer_rounds import OpenRound, OpenRounds
from pccl.protocol.types import (
    AbortCause,
    Descriptor,
    OperationId,
    PeerId,
    RemovalCause,
    Roster,
    RoundId,
    RoundKind,
)

__all__ = ["PeerMachine", "Standing"]


class PeerMachine:
    """One incarnation of one process in a run.

    Args:
        timing: deadlines.
        now_ns: the present.
    """

    def __init__(self, timing: Timing, now_ns: int) -> None:
        self.timing = timing
        self.history = History("peer")
        self.standing = Standing.OUTSIDE
        self.peer = PeerId(0)
        """Own id, once registered."""
        self.term = 0
        self.run = b""
        self.group = 0
        self._now_ns = now_ns
        self._effects: list[PeerEffect] = []
        self._join: ev.JoinCall | None = None
        self._join_failures = 0
        self._join_reasons: dict[str, None] = {}
        self._token = b""
        self._contact = MasterContact(timing, now_ns)
        self._membership = KnownMembership()
        self._rounds = OpenRounds()
        self._admission_unused = False
        self._operations = OpenOperations(self.history)
        self._lost: errors.PCCLError | None = None
        self._resync: str | None = None
        self._deferred: list[ev.RoundCall | ev.ReduceCall] = []
        """Calls that wait for the outcome of an operation that the caller had left."""

    @property
    def newest(self) -> Roster | None:
        """The newest roster that has arrived (callers may not know it yet)."""
        return self._membership.newest

    @property
    def seen(self) -> Roster | None:
        """Membership as the caller may know it."""
        return self._membership.seen

    @property
    def in_round(self) -> bool:
        """Whether the caller waits for the answer of a round."""
        return any(current.call is not None for current in self._rounds)

    def phase_of(self, operation: OperationId) -> Phase | None:
        """Where an operation is in its life; None once it has ended or if it never was."""
        known = self._operations.get(operation)
        return known.phase if known else None

    def may_come(self, operation: OperationId) -> bool:
        """Whether an operation that is not posted here may still be posted."""
        newest = self.newest
        return (
            newest is not None
            and self._operations.get(operation) is None
            and operation.term == self.term
            and operation.group == self.group
            and operation.view in newest.open_views
            and operation.n >= self._operations.next_n(operation.view, operation.tag)
        )

    @property
    def needs_resync(self) -> bool:
        """Whether the others have committed something that this peer's caller had left."""
        return self._resync is not None

    def handle(self, event: ev.PeerEvent, now_ns: int) -> list[PeerEffect]:
        """Take one event; return what must be done, in order."""
        self._now_ns = now_ns
        self.history.record(now_ns, event)
        match event:
            case ev.JoinCall():
                self._on_join_call(event)
            case ev.RoundCall():
                self._on_round_call(event)
            case ev.ReduceCall():
                self._on_reduce_call(event)
            case ev.LeaveCall():
                self._on_leave_call(event)
            case ev.Close():
                self._on_close()
            case ev.ControlOpened():
                self._on_control_opened()
            case ev.ControlMessage(message):
                self._contact.heard(now_ns)
                self._on_message(message)
            case ev.ControlClosed(reason):
                self._on_control_closed(reason)
            case ev.LinkChanged(peer, reason):
                self._on_link_changed(peer, reason)
            case ev.ReduceDone(operation, digest):
                self._on_reduce_done(operation, digest)
            case ev.LeftCommitted(operation):
                self._require_resync(operation)
            case ev.Tick(progress):
                self._on_tick(progress)
        effects, self._effects = self._effects, []
        for effect in effects:
            self.history.record(now_ns, effect)
        return effects

    # -- calls ---------------------------------------------------------------------------------

    def _on_join_call(self, event: ev.JoinCall) -> None:
        if self.standing is not Standing.OUTSIDE:
            self._raise(event.call, errors.PCCLError(errors.Result.INVALID_USAGE,
                        reason="this communicator is connected already"))  # fmt: skip
            return
        self.standing = Standing.JOINING
        self._join = event
        self.group = event.group
        self._contact.heard(self._now_ns)  # the time to wait for a master begins now
        self._effects.append(DialControl(0))

    def _on_round_call(self, event: ev.RoundCall) -> None:
        if not self._may_call(event):
            return
        if event.kind is RoundKind.UPDATE_TOPOLOGY:
            if any(operation.call is not None for operation in self._operations):
                reason = "collectives of this peer are still open; wait for them first"
                self._raise(event.call, errors.PendingOperations(reason=reason))
                return
            if self._admission_unused:
                self._admission_unused = False
                self._effects.append(Return(event.call, None))
                return
        self._admission_unused = False
        current = self._rounds.get(event.kind)
        if current is None:
            current = self._rounds.open(event.kind, event.call)
            self._send(msg.RoundRequest(current.id))
        elif current.call is not None:
            reason = f"another thread is in the same call ({event.kind.name.lower()}) already"
            self._raise(event.call, errors.PendingOperations(reason=reason))
        else:
            current.call = event.call
            if current.answer is not None:
                self._return_round(current, current.answer)

    def _on_reduce_call(self, event: ev.ReduceCall) -> None:
        if not self._may_call(event):
            return
        left = self._rounds.get(RoundKind.UPDATE_TOPOLOGY)
        if left is not None and left.call is None:
            # The caller left a round that the others have had, or will have, with him: he must see
            # what they see, or their collectives would wait for each other in different views.
            if left.answer is None:
                self._deferred.append(event)
                return
            self._take_answer(left, left.answer)
        self._admission_unused = False
        assert self.seen is not None
        if any(o.id.tag == event.tag and o.call is not None for o in self._operations):
            reason = f"tag {event.tag} is in use by a collective that is still open"
            self._raise(event.call, errors.PCCLError(errors.Result.INVALID_ARGUMENT, reason=reason))
            return
        newest = self.newest
        assert newest is not None
        if self.seen.view not in newest.open_views:
            error = loss_error(self.seen, newest)
            self._membership.see(newest.version)
            self._raise(event.call, error)
        elif len(self.seen.members) < 2:
            reason = "alone in the group; wait for others with update_topology()"
            self._raise(event.call, errors.TooFewPeers(reason=reason))
        elif (missed := self._operations.take_missed(self.seen.view, event.tag)) is not None:
            self._membership.see(missed.roster_version)
            self._raise(event.call, abort_error(missed, attempt=0))
        else:
            self._request(event.call, event.tag, event.descriptor, self.seen)

    def _request(self, call: int, tag: int, descriptor: Descriptor, roster: Roster) -> None:
        n = self._operations.next_n(roster.view, tag)
        operation = OperationId(self.term, self.group, roster.view, tag, n)
        self._open(OpenOperation(operation, descriptor, roster.ring, call))

    def _open(self, operation: OpenOperation) -> None:
        assert operation.call is not None
        self._operations.open(operation)
        what = operation.descriptor
        self._effects.append(Post(operation.call, operation.id, what, operation.ring))
        self._send(msg.OperationRequest(operation.id, what))

    def _on_leave_call(self, event: ev.LeaveCall) -> None:
        operation = self._operations.of_call(event.call)
        if operation is not None:
            self._leave_operation(event, operation)
            return
        for deferred in self._deferred:
            if deferred.call == event.call:
                self._deferred.remove(deferred)
                self._raise(event.call, errors.DeadlineExceeded(reason=event.reason))
                return
        for current in self._rounds:
            if current.call == event.call:
                current.call = None
                self._raise(event.call, errors.DeadlineExceeded(reason=event.reason))
                return
        if self._join is not None and self._join.call == event.call:
            self._lose(errors.NotAdmitted(reason=event.reason), goodbye=True)

    def _leave_operation(self, event: ev.LeaveCall, operation: OpenOperation) -> None:
        operation.call = None
        done = operation.phase is Phase.DONE
        self._effects.append(End(operation.id, committed=False, data_needed=done))
        if done:
            reason = f"left tag {operation.id.tag} after its result was complete"
            self._raise(event.call, errors.OutcomeUnknown(reason=reason))
        else:
            operation.withdrawn = event.reason
            self._send(msg.Withdraw(operation.id, event.reason))
            self._raise(event.call, errors.CollectiveAborted(reason=event.reason))

    def _on_close(self) -> None:
        if self.standing is not Standing.CLOSED:
            reason = "the communicator was closed"
            self._lose(errors.NotConnected(reason=reason), goodbye=True)
            self.standing = Standing.CLOSED

    def _may_call(self, event: ev.RoundCall | ev.ReduceCall) -> bool:
        if self.standing is Standing.MEMBER and self._resync is None:
            in_doubt = [operation.id for operation in self._operations if operation.in_doubt]
            for operation in in_doubt:
                self._send(msg.OutcomeQuery(operation))
            if in_doubt:
                self._deferred.append(event)
            return not in_doubt
        if self.standing is Standing.MEMBER:
            self._raise(event.call, errors.ResyncRequired(reason=self._resync or ""))
        elif self.standing is Standing.LOST and self._lost is not None:
            self._raise(event.call, self._lost)
            self._lost = None
        else:
            reason = "not a member of a run; call connect() first"
            self._raise(event.call, errors.NotConnected(reason=reason))
        return False

    def _retry_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            if isinstance(event, ev.RoundCall):
                self._on_round_call(event)
            else:
                self._on_reduce_call(event)

    # -- the control connection ----------------------------------------------------------------

    def _on_control_opened(self) -> None:
        if self.standing in (Standing.LOST, Standing.CLOSED, Standing.OUTSIDE):
            self._effects.append(CloseControl("not needed any more"))
            return
        self._contact.opened(self._now_ns)
        if self._token:
            newest = self.newest
            self._send(msg.Resume(self.peer, self._token, newest.version if newest else 0))
        else:
            assert self._join is not None
            self._send(msg.Register(self.group, self._join.host, self._join.port))

    def _on_control_closed(self, reason: str) -> None:
        self._contact.connected = False
        if self.standing in (Standing.LOST, Standing.CLOSED, Standing.OUTSIDE):
            return
        if self._join is not None and not self._token:
            self._on_join_failed(self._join, reason)
            return
        if self._give_up_on_master(reason):
            return
        self._effects.append(DialControl(self._contact.redial_delay_ns()))

    def _on_join_failed(self, join: ev.JoinCall, reason: str) -> None:
        self._join_failures += 1
        self._join_reasons[reason] = None
        if self._join_failures < join.attempts:
            delay_s = self.timing.connect_retry_s
            self._effects.append(DialControl(self.timing.ns(delay_s)))
            return
        reasons = "; ".join(list(self._join_reasons)[-JOIN_REASONS_MAX:])
        tries = f"{join.attempts} attempt{'s' if join.attempts > 1 else ''}"
        text = f"no master after {tries}: {reasons}; is it running there?"
        error = errors.MasterLost(errors.Result.MASTER_CONNECTION_FAILED, reason=text)
        self._lose(error, goodbye=False)

    def _give_up_on_master(self, reason: str) -> bool:
        if not self._contact.is_lost(self._now_ns):
            return False
        silence_s = (self._now_ns - self._contact.heard_ns) / 1e9
        self._lose(master_lost_error(silence_s, reason), goodbye=False)
        return True

    def _repeat_unanswered(self) -> None:
        for report in self._membership.link_reports():
            self._send(report)
        for current in self._rounds:
            if current.answer is None:
                self._send(msg.RoundRequest(current.id))
        for message in self._operations.unanswered():
            self._send(message)

    def _on_message(self, message: msg.Message) -> None:
        if self.standing in (Standing.LOST, Standing.CLOSED, Standing.OUTSIDE):
            return
        match message:
            case msg.Registered(peer, term, run, token):
                self.standing = Standing.PENDING
                self.peer, self.term, self.run, self._token = peer, term, run, token
                self.history.owner = f"peer {peer}"
            case msg.LinkPlan(elders):
                self._membership.learn_elders(elders)
                self._want_links()
            case msg.Resumed():
                self._repeat_unanswered()
            case msg.Refused(cause, reason):
                self._on_refused(cause, reason)
            case msg.Admitted(roster, rounds):
                self._on_admitted(roster, rounds)
            case msg.RosterChanged(roster):
                self._on_roster(roster)
            case msg.RoundClosed():
                self._on_round_closed(message)
            case msg.OperationStarted(operation):
                self._on_started(operation)
            case msg.OperationEnded():
                self._on_ended(message)
            case msg.MasterHeartbeat():
                pass
            case _:
                reason = f"the master sent {type(message).__name__}"
                raise errors.RemoteProtocolError(func="control", reason=reason)

    # -- membership ----------------------------------------------------------------------------

    def _on_admitted(self, roster: Roster, rounds: tuple[msg.RoundCount, ...]) -> None:
        if self.standing is not Standing.PENDING or self._join is None:
            return  # told twice
        self.standing = Standing.MEMBER
        self._rounds.start_from(rounds)
        self._on_roster(roster)
        self._membership.see(roster.version)
        self._admission_unused = True
        call, self._join = self._join.call, None
        self._effects.append(Return(call, None))

    def _on_roster(self, roster: Roster) -> None:
        if self._membership.learn(roster):
            self._operations.forget_closed(roster.open_views)
            self._effects.append(ForgetEarly())
            self._want_links()

    def _want_links(self) -> None:
        peers = self._membership.want_links(self.peer)
        if peers is not None:
            self._effects.append(SetLinks(peers))

    def _on_link_changed(self, peer: PeerId, why: str | None) -> None:
        registered = self.standing in (Standing.PENDING, Standing.MEMBER)
        if registered and self._membership.link_changed(peer, why):
            self._send(msg.LinkReport(peer, why is None, why or ""))

    def _on_refused(self, cause: RemovalCause | None, reason: str) -> None:
        error = refusal_error(self.standing is Standing.MEMBER, cause, reason)
        self._lose(error, goodbye=False)

    def _lose(self, error: errors.PCCLError, *, goodbye: bool) -> None:
        """Stop being a part of the run: restore every buffer, fail every call."""
        if goodbye and self._contact.connected and self._token:
            self._send(msg.Goodbye())
        self._effects.append(CloseControl(error.reason))
        self._contact.connected = False
        told = False
        for operation in self._operations:
            if operation.call is not None:
                self._effects.append(End(operation.id, committed=False))
                self._raise(operation.call, error)
                told = True
        for current in self._rounds:
            if current.call is not None:
                self._raise(current.call, error)
                told = True
        for call in [self._join, *self._deferred]:
            if call is not None:
                self._raise(call.call, error)
                told = True
        self._join = None
        self._deferred.clear()
        self._operations.clear()
        self._rounds.clear()
        self._membership.drop_links()
        self._effects.append(SetLinks(()))
        self.standing = Standing.LOST
        self._lost = None if told else error

    # -- rounds --------------------------------------------------------------------------------

    def _on_round_closed(self, message: msg.RoundClosed) -> None:
        current = self._rounds.answer(message)
        if current is None:
            self._acknowledge(message.round)
        elif current.call is not None:
            self._return_round(current, message)
        else:
            self._retry_deferred()

    def _return_round(self, current: OpenRound, answer: msg.RoundClosed) -> None:
        assert current.call is not None
        self._take_answer(current, answer)
        asked = current.id.kind is RoundKind.PEERS_PENDING
        self._effects.append(Return(current.call, answer.pending if asked else None))

    def _take_answer(self, current: OpenRound, answer: msg.RoundClosed) -> None:
        self._rounds.close(current)
        self._acknowledge(current.id)
        if current.id.kind is RoundKind.UPDATE_TOPOLOGY:
            self._membership.see(answer.roster_version)

    # -- operations ----------------------------------------------------------------------------

    def _on_started(self, operation_id: OperationId) -> None:
        operation = self._operations.get(operation_id)
        if operation is None or operation.phase is not Phase.REQUESTED:
            return
        self._operations.enter(operation, Phase.STARTED)
        if operation.call is not None:
            self._effects.append(Begin(operation_id))

    def _on_reduce_done(self, operation_id: OperationId, digest: bytes) -> None:
        operation = self._operations.get(operation_id)
        if operation is None or operation.call is None:
            return
        if operation.phase is Phase.REQUESTED:  # the data was faster than the start
            self._operations.enter(operation, Phase.STARTED)
            self._effects.append(Begin(operation_id))
        self._operations.enter(operation, Phase.DONE)
        operation.digest = digest
        self._send(msg.OperationDone(operation_id, digest))

    def _on_ended(self, message: msg.OperationEnded) -> None:
        ended = message.operation
        if ended.group == self.group and ended.term == self.term:
            newest = self.newest
            if newest is not None and ended.view in newest.open_views:
                if message.abort is AbortCause.DESCRIPTOR_MISMATCH:
                    self._operations.miss(message)
                self._operations.use_up(ended)
        self._acknowledge(ended)
        committed = message.abort is None
        operation = self._operations.end(ended, committed=committed)
        if operation is None:
            return  # told twice, or never asked for
        if operation.call is None:
            if committed:
                self._require_resync(ended)
            self._retry_deferred()
            return
        self._effects.append(End(ended, committed))
        if message.abort is AbortCause.DIGEST_MISMATCH and self._may_retry(operation):
            again = self._operations.next_n(ended.view, ended.tag)
            self._open(operation.next_attempt(again))
            return
        self._membership.see(message.roster_version)
        if committed:
            self._effects.append(Return(operation.call, ReduceResult(ended, message.contributors)))
        else:
            self._raise(operation.call, abort_error(message, operation.attempt))

    def _may_retry(self, operation: OpenOperation) -> bool:
        """Whether to try again, in the same view (all do alike), before the caller hears of it."""
        newest = self.newest
        is_open = newest is not None and operation.id.view in newest.open_views
        return is_open and operation.attempt == 0

    def _require_resync(self, operation: OperationId) -> None:
        self._resync = (
            f"the others committed tag {operation.tag}, which this peer had left; its state "
            "differs from theirs: connect() again to rejoin, and take over their state"
        )

    # -- time ----------------------------------------------------------------------------------

    def _on_tick(self, progress: tuple[msg.Progress, ...]) -> None:
        if self.standing not in (Standing.JOINING, Standing.PENDING, Standing.MEMBER):
            return
        if self._contact.connected and self._token and self._contact.is_beat_due(self._now_ns):
            self._send(self._contact.beat(progress, self._now_ns))
        if self._contact.is_tick_late(self._now_ns):
            return  # we slept, not the master: read what has come in meanwhile before judging it
        if not self._contact.connected:
            if self._token:
                self._give_up_on_master("cannot reconnect")
            return
        waiting = len(self._operations) or len(self._rounds) or self._join
        if waiting and self._contact.is_silent(self._now_ns, known=bool(self._token)):
            self._effects.append(CloseControl("the master is silent"))
            self._on_control_closed("it takes connections but does not answer as a master does")

    def _acknowledge(self, final: OperationId | RoundId) -> None:
        self._contact.acknowledge(final)
        if self._contact.is_batch_full() and self._contact.connected:
            self._send(self._contact.batch())

    # -- helpers -------------------------------------------------------------------------------

    def _send(self, message: msg.PeerMessage) -> None:
        """Send, or leave it to the repetition after the reconnect."""
        if self._contact.connected:
            self._effects.append(Send(message))

    def _raise(self, call: int, error: errors.PCCLError) -> None:
        self._effects.append(Raise(call, error))

    def check(self) -> None:
        """Assert what must always hold (tests and the simulator call this after every event).

        Raises:
            InvariantViolation: a rule of this machine is broken; carries its history.
        """
        if self.standing is Standing.MEMBER and (self.seen is None or self.newest is None):
            raise InvariantViolation("a member that knows no roster", self.history)
        open_count = len(self._operations) + len(self._rounds)
        if self.standing in (Standing.LOST, Standing.CLOSED) and open_count:
            raise InvariantViolation("outside the run with open calls", self.history)
        for operation in self._operations:
            if operation.phase.ended:
                raise InvariantViolation(f"{operation.id} has ended and is open", self.history)
