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

import enum
from dataclasses import dataclass

from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.history import History, InvariantViolation
from pccl.protocol.limits import ACKNOWLEDGED_BATCH_MAX, Timing
from pccl.protocol.operation import TRANSITIONS, Phase, name_peers
from pccl.protocol.peer_events import (
    Begin,
    Close,
    CloseControl,
    ControlClosed,
    ControlMessage,
    ControlOpened,
    DialControl,
    End,
    ForgetEarly,
    JoinCall,
    LeaveCall,
    LinkChanged,
    PeerEffect,
    PeerEvent,
    Post,
    Raise,
    ReduceCall,
    ReduceDone,
    ReduceResult,
    Return,
    RoundCall,
    Send,
    SetLinks,
    Tick,
)
from pccl.protocol.types import (
    AbortCause,
    Descriptor,
    Member,
    OperationId,
    PeerId,
    RemovalCause,
    Roster,
    RoundId,
    RoundKind,
)


class Standing(enum.Enum):
    """What this process is to the run."""

    OUTSIDE = "outside"
    JOINING = "joining"
    """Not yet registered."""
    PENDING = "pending"
    MEMBER = "member"
    LOST = "lost"
    """No longer a member; the reason is raised once."""
    CLOSED = "closed"


@dataclass(slots=True)
class _Operation:
    id: OperationId
    descriptor: Descriptor
    phase: Phase = Phase.REQUESTED
    call: int | None = None
    """None once the caller has left."""
    digest: bytes = b""
    withdrawn: str | None = None
    attempt: int = 0


@dataclass(slots=True)
class _Round:
    id: RoundId
    call: int | None
    """None once the caller has left; the next call of the kind takes it over."""
    answer: msg.RoundClosed | None = None


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
        self.seen: Roster | None = None
        """Membership as the caller may know it."""
        self._now_ns = now_ns
        self._effects: list[PeerEffect] = []
        self._join: JoinCall | None = None
        self._join_failures = 0
        self._token = b""
        self._connected = False
        self._rosters: dict[int, Roster] = {}
        self._elders: tuple[Member, ...] = ()
        self._links: dict[PeerId, str | None] = {}
        self._links_wanted: tuple[Member, ...] = ()
        self._round_counts: dict[RoundKind, int] = dict.fromkeys(RoundKind, 0)
        self._rounds: dict[RoundKind, _Round] = {}
        self._admission_unused = False
        self._operations: dict[OperationId, _Operation] = {}
        self._next_n: dict[tuple[int, int], int] = {}
        """(view, tag) -> number of the next operation."""
        self._lost: errors.PCCLError | None = None
        self._resync: str | None = None
        self._deferred: list[RoundCall | ReduceCall] = []
        """Calls that wait for the outcome of an operation that the caller had left."""
        self._acknowledge_operations: list[OperationId] = []
        self._acknowledge_rounds: list[RoundId] = []
        self._redial_ns = timing.ns(timing.redial_min_s)
        self._heard_ns = now_ns
        self._beat_ns = now_ns
        self._tick_ns = now_ns

    @property
    def newest(self) -> Roster | None:
        """The newest roster that has arrived (callers may not know it yet)."""
        return next(reversed(self._rosters.values()), None)

    def phase_of(self, operation: OperationId) -> Phase | None:
        """Where an operation is in its life; None once it has ended or if it never was."""
        known = self._operations.get(operation)
        return known.phase if known else None

    def may_come(self, operation: OperationId) -> bool:
        """Whether an operation that is not posted here may still be posted."""
        newest = self.newest
        return (
            newest is not None
            and operation not in self._operations
            and operation.term == self.term
            and operation.group == self.group
            and operation.view in newest.open_views
            and operation.n >= self._next_n.get((operation.view, operation.tag), 0)
        )

    def handle(self, event: PeerEvent, now_ns: int) -> list[PeerEffect]:
        """Take one event; return what must be done, in order."""
        self._now_ns = now_ns
        self.history.record(now_ns, event)
        match event:
            case JoinCall():
                self._on_join_call(event)
            case RoundCall():
                self._on_round_call(event)
            case ReduceCall():
                self._on_reduce_call(event)
            case LeaveCall():
                self._on_leave_call(event)
            case Close():
                self._on_close()
            case ControlOpened():
                self._on_control_opened()
            case ControlMessage(message):
                self._heard_ns = now_ns
                self._on_message(message)
            case ControlClosed(reason):
                self._on_control_closed(reason)
            case LinkChanged(peer, reason):
                self._on_link_changed(peer, reason)
            case ReduceDone(operation, digest):
                self._on_reduce_done(operation, digest)
            case Tick(progress):
                self._on_tick(progress)
        effects, self._effects = self._effects, []
        for effect in effects:
            self.history.record(now_ns, effect)
        return effects

    # -- calls ---------------------------------------------------------------------------------

    def _on_join_call(self, event: JoinCall) -> None:
        if self.standing is not Standing.OUTSIDE:
            self._raise(event.call, errors.PCCLError(errors.Result.INVALID_USAGE,
                        reason="this communicator is connected already"))  # fmt: skip
            return
        self.standing = Standing.JOINING
        self._join = event
        self.group = event.group
        self._heard_ns = self._now_ns
        self._effects.append(DialControl(0))

    def _on_round_call(self, event: RoundCall) -> None:
        if not self._may_call(event):
            return
        if event.kind is RoundKind.UPDATE_TOPOLOGY:
            if any(operation.call is not None for operation in self._operations.values()):
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
            current = _Round(RoundId(event.kind, self._round_counts[event.kind]), event.call)
            self._rounds[event.kind] = current
            self._send(msg.RoundRequest(current.id))
        elif current.call is not None:
            reason = f"another thread is in the same call ({event.kind.name.lower()}) already"
            self._raise(event.call, errors.PendingOperations(reason=reason))
        else:
            current.call = event.call
            if current.answer is not None:
                self._return_round(current, current.answer)

    def _on_reduce_call(self, event: ReduceCall) -> None:
        if not self._may_call(event):
            return
        self._admission_unused = False
        assert self.seen is not None
        if any(o.id.tag == event.tag and o.call is not None for o in self._operations.values()):
            reason = f"tag {event.tag} is in use by a collective that is still open"
            self._raise(event.call, errors.PCCLError(errors.Result.INVALID_ARGUMENT, reason=reason))
            return
        newest = self.newest
        assert newest is not None
        if self.seen.view not in newest.open_views:
            gone = sorted(set(self.seen.ring) - set(newest.ring))
            self._see(newest.version)
            reason = (
                f"the run lost {name_peers(gone)} before this call; the world size is now "
                f"{len(newest.members)}; call again"
            )
            self._raise(event.call, errors.CollectiveAborted(reason=reason))
        elif len(self.seen.members) < 2:
            reason = "alone in the group; wait for others with update_topology()"
            self._raise(event.call, errors.TooFewPeers(reason=reason))
        else:
            self._request(event.call, event.tag, event.descriptor, attempt=0)

    def _request(self, call: int, tag: int, descriptor: Descriptor, attempt: int) -> None:
        assert self.seen is not None
        view = self.seen.view
        n = self._next_n.get((view, tag), 0)
        self._next_n[view, tag] = n + 1
        operation = OperationId(self.term, self.group, view, tag, n)
        self._operations[operation] = _Operation(operation, descriptor, call=call, attempt=attempt)
        self._effects.append(Post(call, operation, descriptor, self.seen.ring))
        self._send(msg.OperationRequest(operation, descriptor))

    def _on_leave_call(self, event: LeaveCall) -> None:
        for operation in self._operations.values():
            if operation.call == event.call:
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
                return
        for deferred in self._deferred:
            if deferred.call == event.call:
                self._deferred.remove(deferred)
                self._raise(event.call, errors.DeadlineExceeded(reason=event.reason))
                return
        for current in self._rounds.values():
            if current.call == event.call:
                current.call = None
                self._raise(event.call, errors.DeadlineExceeded(reason=event.reason))
                return
        if self._join is not None and self._join.call == event.call:
            self._lose(errors.NotAdmitted(reason=event.reason), goodbye=True)

    def _on_close(self) -> None:
        if self.standing is not Standing.CLOSED:
            reason = "the communicator was closed"
            self._lose(errors.NotConnected(reason=reason), goodbye=True)
            self.standing = Standing.CLOSED

    def _may_call(self, event: RoundCall | ReduceCall) -> bool:
        if self.standing is Standing.MEMBER and self._resync is None:
            in_doubt = any(o.call is None and not o.withdrawn for o in self._operations.values())
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
            if isinstance(event, RoundCall):
                self._on_round_call(event)
            else:
                self._on_reduce_call(event)

    # -- the control connection ----------------------------------------------------------------

    def _on_control_opened(self) -> None:
        if self.standing in (Standing.LOST, Standing.CLOSED, Standing.OUTSIDE):
            self._effects.append(CloseControl("not needed any more"))
            return
        self._connected = True
        self._heard_ns = self._now_ns
        self._redial_ns = self.timing.ns(self.timing.redial_min_s)
        if self._token:
            newest = self.newest
            self._send(msg.Resume(self.peer, self._token, newest.version if newest else 0))
        else:
            assert self._join is not None
            self._send(msg.Register(self.group, self._join.host, self._join.port))

    def _on_control_closed(self, reason: str) -> None:
        self._connected = False
        if self.standing in (Standing.LOST, Standing.CLOSED, Standing.OUTSIDE):
            return
        if self._join is not None and not self._token:
            self._on_join_failed(self._join, reason)
            return
        if self._give_up_on_master(reason):
            return
        self._effects.append(DialControl(self._redial_ns))
        self._redial_ns = min(2 * self._redial_ns, self.timing.ns(self.timing.redial_max_s))

    def _on_join_failed(self, join: JoinCall, reason: str) -> None:
        self._join_failures += 1
        if self._join_failures < join.attempts:
            delay_s = self.timing.connect_retry_s
            self._effects.append(DialControl(self.timing.ns(delay_s)))
            return
        text = f"no master after {join.attempts} attempts: {reason}; is it running there?"
        error = errors.MasterLost(errors.Result.MASTER_CONNECTION_FAILED, reason=text)
        self._lose(error, goodbye=False)

    def _give_up_on_master(self, reason: str) -> bool:
        silence_ns = self._now_ns - self._heard_ns
        if silence_ns < self.timing.ns(self.timing.master_lost_s):
            return False
        text = (
            f"no word from the master for {silence_ns / 1e9:.1f} s ({reason}); buffers are intact; "
            "connect() again once it is back"
        )
        self._lose(errors.MasterLost(reason=text), goodbye=False)
        return True

    def _repeat_unanswered(self) -> None:
        for peer, why in self._links.items():
            self._send(msg.LinkReport(peer, why is None, why or ""))
        for current in self._rounds.values():
            if current.answer is None:
                self._send(msg.RoundRequest(current.id))
        for operation in self._operations.values():
            if operation.withdrawn is not None:
                self._send(msg.Withdraw(operation.id, operation.withdrawn))
                continue
            self._send(msg.OperationRequest(operation.id, operation.descriptor))
            if operation.phase is Phase.DONE:
                self._send(msg.OperationDone(operation.id, operation.digest))

    def _on_message(self, message: msg.Message) -> None:
        if self.standing in (Standing.LOST, Standing.CLOSED, Standing.OUTSIDE):
            return
        match message:
            case msg.Registered(peer, term, run, token):
                self.standing = Standing.PENDING
                self.peer, self.term, self.run, self._token = peer, term, run, token
                self.history.owner = f"peer {peer}"
            case msg.LinkPlan(elders):
                self._elders = elders
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
        self._round_counts.update({count.kind: count.n for count in rounds})
        self._on_roster(roster)
        self._see(roster.version)
        self._admission_unused = True
        call, self._join = self._join.call, None
        self._effects.append(Return(call, None))

    def _on_roster(self, roster: Roster) -> None:
        newest = self.newest
        if newest is not None and roster.version <= newest.version:
            return
        self._rosters[roster.version] = roster
        self._next_n = {key: n for key, n in self._next_n.items() if key[0] in roster.open_views}
        self._effects.append(ForgetEarly(roster.open_views))
        self._want_links()

    def _see(self, version: int) -> None:
        """Let the caller see the roster ``version`` (or the oldest newer one that is known)."""
        if self.seen is not None and version <= self.seen.version:
            return
        for known in [v for v in self._rosters if v < version]:
            if len(self._rosters) > 1:
                del self._rosters[known]
        self.seen = next(iter(self._rosters.values()))

    def _want_links(self) -> None:
        newest = self.newest
        wanted = {member.peer: member for member in self._elders}
        wanted.update({member.peer: member for member in (newest.members if newest else ())})
        wanted.pop(self.peer, None)
        peers = tuple(wanted[peer] for peer in sorted(wanted))
        if peers != self._links_wanted:
            self._links_wanted = peers
            self._links = {peer: why for peer, why in self._links.items() if peer in wanted}
            self._effects.append(SetLinks(peers))

    def _on_link_changed(self, peer: PeerId, why: str | None) -> None:
        registered = self.standing in (Standing.PENDING, Standing.MEMBER)
        if registered and self._links.get(peer, "") != why:
            self._links[peer] = why
            self._send(msg.LinkReport(peer, why is None, why or ""))

    def _on_refused(self, cause: RemovalCause | None, reason: str) -> None:
        if self.standing is Standing.MEMBER and cause is None:
            text = f"the master of this run is gone; another one answered: {reason}"
            self._lose(errors.MasterLost(reason=text), goodbye=False)
        elif self.standing is Standing.MEMBER:
            text = f"the run went on without this peer: {reason}; connect() again to rejoin"
            self._lose(errors.Evicted(reason=text), goodbye=False)
        else:
            self._lose(errors.NotAdmitted(reason=f"refused by the master: {reason}"), goodbye=False)

    def _lose(self, error: errors.PCCLError, *, goodbye: bool) -> None:
        """Stop being a part of the run: restore every buffer, fail every call."""
        if goodbye and self._connected and self._token:
            self._send(msg.Goodbye())
        self._effects.append(CloseControl(error.reason))
        self._connected = False
        told = False
        for operation in self._operations.values():
            if operation.call is not None:
                self._effects.append(End(operation.id, committed=False))
                self._raise(operation.call, error)
                told = True
        for current in self._rounds.values():
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
        self._links.clear()
        self._links_wanted = ()
        self._effects.append(SetLinks(()))
        self.standing = Standing.LOST
        self._lost = None if told else error

    # -- rounds --------------------------------------------------------------------------------

    def _on_round_closed(self, message: msg.RoundClosed) -> None:
        current = self._rounds.get(message.round.kind)
        if current is None or current.id != message.round or current.answer is not None:
            self._acknowledge(rounds=message.round)
            return
        current.answer = message
        if current.call is not None:
            self._return_round(current, message)

    def _return_round(self, current: _Round, answer: msg.RoundClosed) -> None:
        assert current.call is not None
        kind = current.id.kind
        del self._rounds[kind]
        self._round_counts[kind] = current.id.n + 1
        self._acknowledge(rounds=current.id)
        if kind is RoundKind.UPDATE_TOPOLOGY:
            self._see(answer.roster_version)
            self._effects.append(Return(current.call, None))
        else:
            self._effects.append(Return(current.call, answer.pending))

    # -- operations ----------------------------------------------------------------------------

    def _on_started(self, operation_id: OperationId) -> None:
        operation = self._operations.get(operation_id)
        if operation is None or operation.phase is not Phase.REQUESTED:
            return
        self._enter(operation, Phase.STARTED)
        if operation.call is not None:
            self._effects.append(Begin(operation_id))

    def _on_reduce_done(self, operation_id: OperationId, digest: bytes) -> None:
        operation = self._operations.get(operation_id)
        if operation is None or operation.call is None:
            return
        if operation.phase is Phase.REQUESTED:  # the data was faster than the start
            self._enter(operation, Phase.STARTED)
        self._enter(operation, Phase.DONE)
        operation.digest = digest
        self._send(msg.OperationDone(operation_id, digest))

    def _on_ended(self, message: msg.OperationEnded) -> None:
        ended = message.operation
        if ended.group == self.group and ended.term == self.term:
            key = (ended.view, ended.tag)
            newest = self.newest
            if newest is not None and ended.view in newest.open_views:
                self._next_n[key] = max(self._next_n.get(key, 0), ended.n + 1)
        self._acknowledge(operation=ended)
        operation = self._operations.pop(ended, None)
        if operation is None:
            return  # told twice, or never asked for
        committed = message.abort is None
        if operation.phase is Phase.REQUESTED and committed:
            raise InvariantViolation(f"{ended} was committed before it started", self.history)
        self._enter(operation, Phase.COMMITTED if committed else Phase.ABORTED)
        if operation.call is None:
            if committed:
                self._resync = (
                    f"the others committed tag {ended.tag}, which this peer had left; its state "
                    "differs from theirs: connect anew and take over their state"
                )
            self._retry_deferred()
            return
        self._effects.append(End(ended, committed))
        if message.abort is AbortCause.DIGEST_MISMATCH and operation.attempt == 0:
            self._request(operation.call, ended.tag, operation.descriptor, attempt=1)
            return
        self._see(message.roster_version)
        if committed:
            self._effects.append(Return(operation.call, ReduceResult(ended, message.contributors)))
        else:
            self._raise(operation.call, _abort_error(message))

    def _enter(self, operation: _Operation, phase: Phase) -> None:
        if phase not in TRANSITIONS[operation.phase]:
            what = f"{operation.id} cannot go from {operation.phase.value} to {phase.value}"
            raise InvariantViolation(what, self.history)
        operation.phase = phase

    # -- time ----------------------------------------------------------------------------------

    def _on_tick(self, progress: tuple[msg.Progress, ...]) -> None:
        gap = self._now_ns - self._tick_ns
        self._tick_ns = self._now_ns
        if gap >= 2 * self.timing.ns(self.timing.tick_s):
            # We slept, not the master: read what has come in meanwhile before judging it.
            self._heard_ns = min(self._heard_ns + gap, self._now_ns)
            return
        if self.standing not in (Standing.JOINING, Standing.PENDING, Standing.MEMBER):
            return
        if not self._connected:
            self._give_up_on_master("cannot reconnect")
            return
        if self._token and self._now_ns - self._beat_ns >= self.timing.ns(self.timing.heartbeat_s):
            self._beat(progress)
        waiting = bool(self._operations or self._rounds or self._join)
        silence_ns = self._now_ns - self._heard_ns
        if waiting and silence_ns >= self.timing.ns(self.timing.deadline_s):
            self._connected = False
            self._effects.append(CloseControl("the master is silent"))
            self._effects.append(DialControl(self._redial_ns))

    def _beat(self, progress: tuple[msg.Progress, ...]) -> None:
        self._beat_ns = self._now_ns
        operations, self._acknowledge_operations = self._acknowledge_operations, []
        rounds, self._acknowledge_rounds = self._acknowledge_rounds, []
        self._send(msg.Heartbeat(progress, tuple(operations), tuple(rounds)))

    def _acknowledge(
        self, operation: OperationId | None = None, rounds: RoundId | None = None
    ) -> None:
        if operation is not None:
            self._acknowledge_operations.append(operation)
        if rounds is not None:
            self._acknowledge_rounds.append(rounds)
        batch = len(self._acknowledge_operations) + len(self._acknowledge_rounds)
        if batch >= ACKNOWLEDGED_BATCH_MAX and self._connected:
            self._beat(())

    # -- helpers -------------------------------------------------------------------------------

    def _send(self, message: msg.PeerMessage) -> None:
        """Send, or leave it to the repetition after the reconnect."""
        if self._connected:
            self._effects.append(Send(message))

    def _raise(self, call: int, error: errors.PCCLError) -> None:
        self._effects.append(Raise(call, error))

    def check(self) -> None:
        """Assert what must always hold (tests and the simulator call this after every event).

        Raises:
            InvariantViolation: a rule of this machine is broken; carries its history.
        """
        if self.standing is Standing.MEMBER and (self.seen is None or not self._rosters):
            raise InvariantViolation("a member that knows no roster", self.history)
        if self.standing in (Standing.LOST, Standing.CLOSED) and (self._operations or self._rounds):
            raise InvariantViolation("outside the run with open calls", self.history)
        for operation in self._operations.values():
            if operation.phase.ended:
                raise InvariantViolation(f"{operation.id} has ended and is open", self.history)


def _abort_error(message: msg.OperationEnded) -> errors.PCCLError:
    tag = message.operation.tag
    match message.abort:
        case AbortCause.DESCRIPTOR_MISMATCH:
            reason = f"{message.reason}; make the calls agree"
            return errors.DescriptorMismatch(reason=reason)
        case AbortCause.DIGEST_MISMATCH:
            reason = f"tag {tag}: {message.reason}, twice in a row; inputs are intact"
            return errors.CollectiveAborted(errors.Result.INTERNAL_ERROR, reason=reason)
        case _:
            reason = f"tag {tag}: {message.reason}; inputs are intact, call again"
            return errors.CollectiveAborted(reason=reason)
