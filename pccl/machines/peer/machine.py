"""``PeerMachine``: turns a caller's joint calls into requests, and decisions into results.

Pure: :meth:`PeerMachine.handle` takes one event and the time, and returns effects in the order of
execution. The shell runs the data plane. The machine tells the shell which buffers to post, when to
begin, and how an operation has ended. The shell reports when the own result is complete.

Invariants:

* The membership that a caller sees (``seen``) changes only when a joint call of its own returns. It
  becomes the roster that the answer names, the same for all callers at the same call.
* Buffers are posted before the operation is requested, and released before its call returns.
* Every operation that was posted ends exactly once, and every call returns exactly once.
* When this peer loses its membership, all open calls end with the same error. So does each new call
  until a caller has received it.
* The outcome of a detached operation, with the membership it names, is seen when it is claimed.
* After a reconnect all unanswered requests are repeated; a second answer changes nothing.
"""

from __future__ import annotations

from pccl.machines.history import InvariantViolation
from pccl.machines.key_value.client import StoreClient
from pccl.machines.machine import Machine
from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.calls import (
    CallAllowed,
    CallDeferred,
    CallRejected,
    JointCall,
    JointCalls,
    OneTimeError,
    Refusals,
)
from pccl.machines.peer.collectives import Collectives
from pccl.machines.peer.contact import MasterLiveness, PeerOutbox
from pccl.machines.peer.control import ControlConnection
from pccl.machines.peer.eager import EagerBudget
from pccl.machines.peer.finals import Heartbeats, SeenFinals
from pccl.machines.peer.membership import KnownMembership, OwnLinks, PeerIdentity, Standing
from pccl.machines.peer.operations import OpenOperation, OpenOperations
from pccl.machines.peer.rounds import OpenRounds
from pccl.machines.peer.synchronization import LeftSync, Synchronizations
from pccl.machines.publication.announcer import VersionAnnouncer
from pccl.machines.reachability import AddressTried
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.handshake.certificates import Certificate
from pccl.protocol.limits import Timing
from pccl.protocol.operation import Phase
from pccl.protocol.types import SYNC_TAG, OperationId, PeerId, Roster, RoundKind

__all__ = ["PeerMachine", "Standing"]


class PeerMachine(Machine[ev.PeerEvent, ev.PeerEffect]):
    """One incarnation of one process in a run.

    Args:
        timing: deadlines.
        now_ns: current time.
        eager: chooses the operations that send data before they start; None: no operation does.
        former_loss: the error that ended the previous incarnation; None if this is the first.
        left_sync: the last synchronization of the previous incarnation, in case its caller left it.
    """

    def __init__(
        self,
        timing: Timing,
        now_ns: int,
        eager: EagerBudget | None = None,
        former_loss: errors.PCCLError | None = None,
        left_sync: LeftSync | None = None,
    ) -> None:
        super().__init__("peer", now_ns)
        self.own = own = PeerIdentity()
        self.contact = MasterLiveness(timing, now_ns)
        self.out = out = PeerOutbox(self.contact, self._effects)
        self.membership = membership = KnownMembership(own)
        self.links = OwnLinks(out, own, membership)
        self.finals = SeenFinals(membership)
        self.heartbeats = Heartbeats(timing, now_ns, out, own, membership)
        self.rounds = OpenRounds(out, own, membership, self.finals, self.heartbeats)
        self.operations = operations = OpenOperations(self.history)
        self.eager = eager or EagerBudget()
        self.left_sync = left_sync or LeftSync()
        self.left_sync.forget_repeat()
        self.refusals = Refusals(former_loss)
        self.synchronizations = Synchronizations(
            out, own, membership, operations, self.rounds, self.left_sync, self.refusals
        )
        self.calls = JointCalls(
            out, own, membership, operations, self.rounds, self.left_sync, self.refusals
        )
        self.collectives = Collectives(
            out, own, membership, operations, self.eager, self.synchronizations, self.refusals,
            self.finals, self.heartbeats,
        )  # fmt: skip
        self.store = StoreClient(out, own)
        self.announcer = VersionAnnouncer(out, own)
        self.control = ControlConnection(
            timing, out, self.contact, own, membership, self.heartbeats, self.links, self.finals,
            self.rounds, operations, self.synchronizations, self.store, self.announcer,
        )  # fmt: skip

    # -- queries ---------------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        """The state of this process in the run."""
        return self.own.standing

    @property
    def peer(self) -> PeerId:
        """The id of this peer once it is registered, else ``NOBODY``."""
        return self.own.peer

    @property
    def run(self) -> bytes:
        """The id of the run."""
        return self.own.run

    @property
    def term(self) -> int:
        """The term of the master that this peer follows."""
        return self.own.term

    @property
    def certificate(self) -> Certificate:
        """What a master has signed for this peer."""
        return self.own.certificate

    def has_left(self, peer: PeerId) -> bool:
        """Whether this peer knows that another one is no longer part of the run."""
        newest = self.membership.newest
        return newest is not None and newest.has_left(peer)

    @property
    def newest(self) -> Roster | None:
        """The newest roster that has arrived (callers may not know it yet)."""
        return self.membership.newest

    @property
    def seen(self) -> Roster | None:
        """The roster that the caller knows."""
        return self.membership.seen

    @property
    def loss(self) -> errors.PCCLError | None:
        """Why this peer lost its membership; None if it has not."""
        loss = self.refusals.loss
        return loss.error if loss is not None else None

    @property
    def knows_its_loss(self) -> bool:
        """Whether this peer lost its membership and a caller has received the error."""
        loss = self.refusals.loss
        return self.standing is Standing.LOST and loss is not None and loss.is_reported

    @property
    def needs_resync(self) -> bool:
        """Whether the members have committed a result that this peer lacks: its caller left."""
        return self.refusals.resync is not None

    @property
    def in_round(self) -> bool:
        """Whether a caller waits for the answer to a round."""
        return bool(self.rounds.waiting())

    @property
    def is_awaited(self) -> bool:
        """Whether members wait for this peer's next ``update_topology``, or left it out."""
        is_member = self.standing is Standing.MEMBER
        return is_member and self.rounds.is_awaited(RoundKind.UPDATE_TOPOLOGY)

    @property
    def newcomers_wait(self) -> bool:
        """Whether newcomers are ready for admission in the next ``update_topology``."""
        return self.standing is Standing.MEMBER and self.rounds.newcomers_wait

    @property
    def open_operations(self) -> tuple[OpenOperation, ...]:
        """All operations that are posted here and have no outcome, in the order of the calls."""
        return tuple(self.operations)

    def phase_of(self, operation: OperationId) -> Phase | None:
        """Return the phase of an open operation; None if it is not open."""
        known = self.operations.get(operation)
        return known.phase if known else None

    def has_started(self, operation: OperationId | None) -> bool:
        """Whether all members have requested ``operation``: it can end without its caller."""
        known = self.operations.get(operation) if operation is not None else None
        return known is not None and known.phase is not Phase.REQUESTED

    def waits_for(self, call: int) -> str:
        """Return for which members or events ``call`` waits, as the master last reported."""
        join = self.control.join
        if join is not None and join.call == call:
            return join.waits_for
        waiting = self.operations.of_call(call) or self.rounds.of_call(call)
        return waiting.waits_for if waiting is not None else ""

    # -- events ----------------------------------------------------------------------------------

    def _take(self, event: ev.PeerEvent) -> None:
        match event:
            case ev.JoinCall():
                self.control.begin_join(event, self._now_ns)
            case ev.RoundCall() | ev.ReduceCall() | ev.SyncCall():
                self._make(event)
            case ev.StoreCall() | msg.AnnounceVersions():
                self._tell_master(event)
            case ev.Claim() | ev.Forget():
                self.calls.release(event)
            case ev.LeaveCall(call, reason):
                self._leave(call, reason)
            case ev.CallersAsked(query, blocked):
                free = self.membership.has_unclaimed or self.operations.have_handles
                self.out.send(msg.BlockedReply(query, self._is_blocked(blocked) and not free))
            case ev.Close():
                self._close()
            case ev.ControlOpened(run, term, hosts):
                self.control.opened(run, term, hosts, self._now_ns)
            case ev.ControlMessage(message):
                self.contact.heard(self._now_ns)
                self._hear(message)
            case ev.ControlClosed(reason):
                self._lose_if(self.control.closed(reason, self._now_ns))
            case ev.LinkChanged():
                self.links.changed(event)
            case ev.LinkMeasurements() | AddressTried():
                self.links.measured(event)
            case ev.ReduceDone() | ev.NotFinite() | ev.ResultFetched():
                self.collectives.moved(event)
            case ev.SyncStarved(operation, reason):
                self.synchronizations.starved(operation, reason)
            case ev.ComparisonDone(operation, difference):
                self.out.send(msg.StatesCompared(operation, difference))
            case ev.PrefetchDone():
                self.control.prefetched()
            case ev.HoldingsKnown(operation, lost, complete):
                self.out.send(msg.Holdings(operation, lost, complete))
            case ev.LeftCommitted() | ev.LeftFailed() | ev.LeftAnswered() | ev.LeftAdmitted():
                self._left(event)
            case ev.LeavesSoon():
                self.rounds.hurry()
            case ev.Tick(progress, blocked, busy_ns, step, loss, figures):
                self.heartbeats.reports = step, loss, figures
                self._tick(progress, self._is_blocked(blocked), busy_ns)

    def _left(
        self, event: ev.LeftCommitted | ev.LeftFailed | ev.LeftAnswered | ev.LeftAdmitted
    ) -> None:
        """Process that a caller left before it saw the end of its call."""
        match event:
            case ev.LeftCommitted(operation):
                self.collectives.left_committed(operation)
            case ev.LeftFailed(error):
                self.refusals.left_unnoticed(error)
            case ev.LeftAnswered(kind):
                if self.standing is Standing.MEMBER:
                    self.rounds.left_answered(kind)
            case ev.LeftAdmitted():
                # The other members would wait for a member that makes no calls.
                if self.standing is Standing.MEMBER:
                    self._lose(words.left_join("the caller left"), goodbye=True)

    def _hear(self, message: msg.Message) -> None:
        """Process a message of the master."""
        if not self.own.takes_part:
            return
        match message:
            case msg.Registered():
                self.control.registered(message, self._now_ns)
                self.history.owner = f"peer {message.peer}"
            case (
                msg.LinkPlan()
                | msg.DialNewcomers()
                | msg.Meet()
                | msg.ProbeAddress()
                | msg.Undialable()
            ):
                self.links.plan(message)
            case msg.Resumed():
                self.control.resumed(message, self._now_ns)
            case msg.Refused():
                self._lose_if(self.control.refused(message, self._now_ns))
            case msg.Admitted():
                self._admitted(message)
            case msg.RosterChanged(roster):
                self._learn(roster)
            case msg.RoundClosed():
                if self.rounds.closed(message):
                    self._retry_deferred()
            case msg.OperationNarrowed() | msg.OperationStarted() | msg.Proposed():
                self.collectives.goes_on(message)
            case msg.SyncStarted(operation, elected):
                self.synchronizations.started(operation, elected)
            case msg.CompareStates(operation, reference):
                self.synchronizations.compare(operation, reference)
            case msg.HoldingsQuery():
                self.out.add(self.operations.answer_holdings(message, self.peer))
            case msg.Repair():
                self.out.add(*self.operations.send_across(message, self.peer))
            case msg.OperationEnded():
                self._ended(message)
            case msg.RoundWaits() | msg.RoundAwaits():
                self.rounds.note_wait(message)
            case msg.OperationWaits():
                self.out.add(*self.operations.note_wait(message))
            case msg.StoreAnswer():
                self.store.answered(message)
            case msg.AdmissionWaits():
                self.control.admission_waits(message)
            case msg.BlockedQuery() | msg.EvidenceQuery():
                self._ask_shell(message)
            case msg.MasterHeartbeat(_, settled, ratified):
                self.contact.note_clock(message, self._now_ns)
                self.finals.settle(settled)
                self.membership.ratify(ratified)
            case _:
                reason = f"the master sent an unexpected {type(message).__name__}"
                raise errors.RemoteProtocolError(func="control", reason=reason)

    def _ended(self, message: msg.OperationEnded) -> None:
        """Process the outcome of an operation."""
        if self.collectives.ended(message):
            self._retry_deferred()
        if message.operation.tag == SYNC_TAG and self.peer in message.contributors:
            self.rounds.catch_up(self.own.place_of(message.sequence))

    def _ask_shell(self, message: msg.BlockedQuery | msg.EvidenceQuery) -> None:
        """Let the shell answer a question of the master about this process."""
        match message:
            case msg.BlockedQuery(query):
                if any(one.descriptor.quorum is not None for one in self.operations):
                    self.synchronizations.give_up_late()
                self.out.add(ev.AskCallers(query))
            case msg.EvidenceQuery(query, kind):
                self.out.add(ev.GiveEvidence(query, kind))

    def _tick(self, progress: tuple[msg.Progress, ...], blocked: bool, busy_ns: int) -> None:
        if self.own.takes_part:
            self.heartbeats.tick(progress, self._now_ns, blocked=blocked)
            waits = len(self.operations) > 0 or len(self.rounds) > 0 or len(self.store) > 0
            self._lose_if(self.control.watch(self._now_ns, busy_ns, waits=waits))

    def _is_blocked(self, callers_blocked: bool) -> bool:
        """Whether all callers here wait for a call of another member."""
        waits = self.operations.all_wait_for_requests
        return callers_blocked and self.standing is Standing.MEMBER and waits

    # -- calls -----------------------------------------------------------------------------------

    def _make(self, event: JointCall) -> None:
        """Make a joint call of a caller, or try a deferred call again."""
        self.collectives.note_unclaimed()
        match self.calls.decide(event):
            case CallAllowed(seen, event):
                match event:
                    case ev.RoundCall(kind=kind):
                        if kind is not RoundKind.PEERS_PENDING:
                            self.links.tell_newest()
                        self.rounds.call(event)
                    case ev.ReduceCall():
                        self.collectives.call(event, seen)
                    case ev.SyncCall():
                        self.synchronizations.call(event)
            case CallRejected(error):
                self.out.raise_(event.call, error)
            case CallDeferred(asks):
                for operation in asks:
                    self.out.send(msg.OutcomeQuery(operation))

    def _retry_deferred(self) -> None:
        """Try the deferred calls again, after a decision that they may have waited for."""
        deferred = self.calls.deferred
        for event in deferred.take():
            if not isinstance(event, ev.ReduceCall) or (why := deferred.why_left(event)) is None:
                self._make(event)
                continue
            decision = self.calls.decide_left(event)
            if isinstance(decision, CallAllowed):
                self.collectives.withdraw_unasked(event, decision.seen, why)

    def _tell_master(self, event: ev.StoreCall | msg.AnnounceVersions) -> None:
        """Tell the master what a call wants that no other member waits for."""
        match event:
            case ev.StoreCall():
                self.store.call(event, self.loss)
            case msg.AnnounceVersions(versions):
                self.announcer.announce(versions)

    def _leave(self, call: int, reason: str) -> None:
        """End a call because its caller stopped waiting for ``reason``."""
        operation = self.operations.of_call(call)
        current, join = self.rounds.of_call(call), self.control.join
        if operation is not None:
            self.collectives.leave(operation, reason)
        elif self.collectives.leave_late(call, reason) or self.store.leave(call, reason):
            pass
        elif self.calls.deferred.leave(call, reason):
            self.out.raise_(call, words.left(reason))
        elif current is not None:
            self.rounds.leave(current, reason)
        elif join is not None and join.call == call:
            self._lose(words.left_join(reason, self.control.join_waits_for), goodbye=True)

    # -- membership ------------------------------------------------------------------------------

    def _admitted(self, message: msg.Admitted) -> None:
        if self.standing is not Standing.PENDING:
            return  # a repetition
        join = self.control.join
        assert join is not None
        if not join.has_returned:  # otherwise members may have gone on without it before
            self.membership.first_view = message.roster.view
        self._learn(message.roster)
        self.membership.ratify(message.ratified)
        self.own.become(Standing.MEMBER)
        self.membership.see(message.roster.version)
        self.rounds.start_from(message.rounds, rejoins=self.own.rejoins)
        self.synchronizations.expected = message.expected
        self.control.end_join()
        self.announcer.repeat()
        self.out.return_(join.call)

    def _learn(self, roster: Roster) -> None:
        """Update the membership if ``roster`` is newer."""
        before = self.membership.newest
        if self.membership.learn(roster):
            self.operations.forget_closed(roster.open_views)
            self.eager.close_views(roster.open_views, roster.view)
            self.out.add(ev.ForgetEarly())
            self.links.members_changed(before, roster)
            if self.own.has_standby:
                self.heartbeats.send()  # at once: a majority must acknowledge the roster

    # -- the end ---------------------------------------------------------------------------------

    def _close(self) -> None:
        if self.standing is not Standing.CLOSED:
            self._lose(words.closed(), goodbye=True)
            self.own.become(Standing.CLOSED)

    def _lose_if(self, error: errors.PCCLError | None) -> None:
        """Leave the run if ``error`` is given, without a goodbye to the master."""
        if error is not None:
            self._lose(error, goodbye=False)

    def _lose(self, error: errors.PCCLError, *, goodbye: bool) -> None:
        """Leave the run: fail every open call with ``error``, and restore every input."""
        if goodbye and self.own.is_registered:
            self.out.send(msg.Goodbye())
        self.out.add(ev.CloseControl(error.reason))
        self.contact.connected = False
        loss = self.refusals.loss = self.refusals.loss or OneTimeError(error)
        self.calls.fail(loss)
        self.store.fail(error)
        self.finals.clear()
        join = self.control.end_join()
        if join is not None:
            loss.ends(join, detached=False)
            self.out.raise_(join, error)
        self.membership.leave()
        self.links.leave()
        self.own.become(Standing.LOST)

    def check(self) -> None:
        """Check what must always hold; tests and the simulator call this after every event.

        Raises:
            InvariantViolation: a rule of this machine is broken; the error carries the history.
        """
        if self.standing is Standing.MEMBER and (self.seen is None or self.newest is None):
            raise InvariantViolation("a member has no roster", self.history)
        open_count = len(self.operations) + len(self.rounds) + len(self.calls.deferred)
        open_count += len(self.store)
        if self.standing in (Standing.LOST, Standing.CLOSED) and open_count:
            raise InvariantViolation("calls are open outside the run", self.history)
        joins = self.standing in (Standing.JOINING, Standing.PENDING)
        if joins is not (self.control.join is not None):
            raise InvariantViolation("the standing does not match the join call", self.history)
        for operation in self.operations:
            if operation.phase.ended:
                raise InvariantViolation(f"{operation.id} has ended but is open", self.history)
