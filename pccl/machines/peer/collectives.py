"""The operations of one peer from call to outcome: what this peer posts, sends and returns.

``synchronization`` contains what differs for operations on shared state.
"""

from __future__ import annotations

from dataclasses import replace

from pccl.machines.blocks import blocks_of
from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.calls import Refusals
from pccl.machines.peer.contact import PeerOutbox
from pccl.machines.peer.eager import EagerBudget
from pccl.machines.peer.finals import Heartbeats, SeenFinals
from pccl.machines.peer.membership import KnownMembership, PeerIdentity
from pccl.machines.peer.operations import (
    MISSED_CAUSES,
    LateCall,
    OpenOperation,
    OpenOperations,
)
from pccl.machines.peer.synchronization import AfterLeaving, Synchronizations
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import OPERATIONS_OPEN_MAX
from pccl.protocol.operation import Phase, is_kept_for_late, of_ranks
from pccl.protocol.types import (
    QUORUM_MIN,
    AbortCause,
    Collective,
    Descriptor,
    OperationId,
    PeerId,
    Roster,
)
from pccl.protocol.vocabulary.tags import is_of_subset


class Collectives:
    """Turns reduces, broadcasts and barriers into operations, and outcomes into results.

    Args:
        out: for effects.
        own: this peer.
        membership: the rosters; callers see a new one when a call returns.
        operations: operations that are posted and have no outcome.
        eager: chooses the operations that send data before they start.
        synchronizations: records which synchronizations were committed.
        refusals: records whether this peer lacks a committed result.
        finals: keeps the outcomes for another master.
        heartbeats: acknowledges the outcomes.
    """

    def __init__(
        self,
        out: PeerOutbox,
        own: PeerIdentity,
        membership: KnownMembership,
        operations: OpenOperations,
        eager: EagerBudget,
        synchronizations: Synchronizations,
        refusals: Refusals,
        finals: SeenFinals,
        heartbeats: Heartbeats,
    ) -> None:
        self._out, self._own, self._membership = out, own, membership
        self._operations, self._eager = operations, eager
        self._synchronizations, self._refusals = synchronizations, refusals
        self._finals, self._heartbeats = finals, heartbeats

    def may_come(self, operation: OperationId) -> bool:
        """Whether an operation that is not posted here may still be posted."""
        return (
            operation.term <= self._own.term
            and operation.group == self._own.group
            and self._membership.is_open(operation.view)
            and operation.n >= self._operations.next_n(operation.view, operation.tag)
        )

    # -- calls ---------------------------------------------------------------------------------

    def call(self, event: ev.ReduceCall, seen: Roster) -> None:
        """Start an operation for a caller, in the membership that the caller saw."""
        newest = self._membership.newest
        assert newest is not None
        if self._operations.is_tag_in_use(event.tag):
            self._out.raise_(event.call, words.tag_in_use(event.tag, event.among))
            return
        if len(self._operations) >= OPERATIONS_OPEN_MAX:
            self._out.raise_(event.call, words.too_many_open())
            return
        missed = self._operations.take_missed(seen.view, event.tag)
        if missed is not None and missed.abort is None:
            self._call_late(event, seen, missed)
        elif seen.view not in newest.open_views:
            self._out.raise_(event.call, words.lost_before(seen, newest))
            self._membership.show(event.call, newest.version, detached=event.detached)
        elif len(event.members_of(seen)) < 2:
            self._call_alone(event, seen)
        elif missed is not None:
            self._membership.show(event.call, missed.roster_version, detached=event.detached)
            asked = _settled(event, seen)
            self._out.raise_(event.call, words.aborted(missed, asked, among=event.among))
        else:
            self._open(self._made(event, seen))

    def _call_late(self, event: ev.ReduceCall, seen: Roster, outcome: msg.OperationEnded) -> None:
        """Answer a call for an operation that the members have committed without this peer."""
        asked = _settled(event, seen)
        self._fetch(LateCall(event.call, asked, event.detached, outcome))
        self._out.send(msg.BlockedReply(0, False))  # it makes calls again

    def _fetch(self, late: LateCall) -> None:
        effect = self._operations.fetch(late)
        if effect.content:
            self._out.add(effect)
        else:  # it is too large to be kept
            self._fetched(late.call, has_arrived=False)

    def _fetched(self, call: int, *, has_arrived: bool) -> None:
        """Answer a late call. Its result has arrived, or no participant has it any more."""
        late = self._operations.fetched(call)
        if late is None:
            return
        if late.sync is not None:
            self._synchronizations.fetched(late, late.sync, has_arrived=has_arrived)
            return
        self._membership.show(call, late.outcome.roster_version, detached=late.detached)
        if has_arrived:
            self._out.return_(call, late.result)
            return
        self._refusals.require_resync(late.outcome.operation, was_left=False)
        self._refusals.raise_resync(self._out, call, detached=late.detached)

    def leave_late(self, call: int, reason: str) -> bool:
        """Raise in a caller that leaves a late call; return False if the call is not late."""
        late = self._operations.fetched(call)
        if late is None:
            return False
        if late.sync is not None:
            known = (late.same, late.outcome)
            self._operations.put_back([one for one in known if one is not None])
            self._out.raise_(call, words.left(reason))
            return True
        self._refusals.require_resync(late.outcome.operation, was_left=False)
        self._out.raise_(call, words.left_late(reason, late.outcome.operation))
        return True

    def note_unclaimed(self) -> None:
        """Require a synchronization if no call can get a missed result any more."""
        seen = self._membership.seen
        operation = self._operations.take_unclaimed(seen.view) if seen is not None else None
        if operation is not None:
            self._refusals.require_resync(operation, was_left=False)

    def withdraw_unasked(self, event: ev.ReduceCall, seen: Roster, reason: str) -> None:
        """Withdraw a deferred call that its caller left, because other members may wait for it.

        Without a quorum it cannot be committed without this peer, so no call waits for its outcome.
        If the members have committed it already, this peer lacks the result.
        """
        is_open = self._membership.is_open(seen.view) and len(event.members_of(seen)) > 1
        if not is_open or self._operations.is_tag_in_use(event.tag):
            return
        missed = self._operations.take_missed(seen.view, event.tag)
        if missed is None:
            unasked = self._made(event, seen)
            self._operations.open(unasked)
            in_doubt = event.descriptor.quorum is not None
            self._operations.leave(unasked, reason, in_doubt=in_doubt)
            self._out.send(unasked.withdrawal(reason))
        elif missed.abort is None:
            self._refusals.require_resync(missed.operation)

    def leave(self, operation: OpenOperation, reason: str) -> None:
        """Withdraw ``operation``, or detach it if done here; ``reason``: why its caller left."""
        call, done = operation.call, operation.phase is Phase.DONE
        assert call is not None
        may_go_on = operation.descriptor.quorum is not None
        in_doubt = done or self._own.has_standby or may_go_on
        self._operations.leave(operation, None if done else reason, in_doubt=in_doubt)
        if done:
            self._out.add(ev.Detach(operation.id))
            self._out.raise_(call, words.left_done_operation(reason, operation.id, operation.among))
            return
        self._out.add(ev.End(operation.id, committed=False))
        self._out.send(operation.withdrawal(reason))
        left: errors.PCCLError
        if in_doubt:
            why = words.BY_QUORUM if may_go_on else words.BY_STANDBY
            left = words.left_operation_in_doubt(reason, operation.waits_for, why)
        else:
            left = words.left_operation(reason, operation.waits_for)
        self._out.raise_(call, left)

    def left_committed(self, operation: OperationId) -> None:
        """Record that the caller of ``operation`` left, and the members committed it."""
        match self._synchronizations.left_sync.leave(operation):
            case AfterLeaving.UP_TO_DATE:
                self._refusals.synchronized()
            case AfterLeaving.LACKS_RESULT:
                self._refusals.require_resync(operation)
            case AfterLeaving.UNCHANGED:
                pass

    def _call_alone(self, event: ev.ReduceCall, seen: Roster) -> None:
        if event.descriptor.collective not in (Collective.BROADCAST, Collective.BARRIER):
            is_part = event.among is not None and len(seen.members) > 1
            self._out.raise_(event.call, words.alone(of_subgroup=is_part))
        else:  # no other member takes part
            operation = self._operations.next_id(seen, self._own.group, event.tag)
            self._out.return_(event.call, ev.ReduceResult(operation, (self._own.peer,)))

    def _made(self, event: ev.ReduceCall, seen: Roster) -> OpenOperation:
        operation = self._operations.next_id(seen, self._own.group, event.tag)
        what, call, ring = _settled(event, seen), event.call, event.members_of(seen)
        made = OpenOperation(operation, what, ring, call, event.detached)
        made.weight, made.norm, made.among = event.weight, event.norm, event.among
        if what.follows_mesh_plan:
            view, plan = seen.ring, seen.algorithms.mesh
            made.view_mesh = plan if ring == view else plan.among([*map(view.index, ring)])
        if event.buffers is not None and what.is_exchange:
            made.blocks = blocks_of(what, event.buffers, ring.index(self._own.peer), len(ring))
        return made

    def _open(self, operation: OpenOperation) -> None:
        assert operation.call is not None
        assert self._membership.is_open(operation.id.view)
        self._operations.open(operation)
        what = operation.descriptor
        operation.eager = self._eager.take(operation.id, what, len(operation.ring))
        begin = (ev.Begin(operation.id, operation.eager),) if operation.eager else ()
        self._post(operation, *begin)

    def _post(self, operation: OpenOperation, *begin: ev.Begin) -> None:
        assert operation.call is not None
        what, ring = operation.descriptor, operation.ring
        post = ev.Post(operation.call, operation.id, what, ring, operation.blocks, operation.mesh)
        self._out.add(post, *begin)
        self._out.send(operation.request())

    # -- from the start to the outcome -----------------------------------------------------------

    def goes_on(self, message: msg.OperationNarrowed | msg.OperationStarted | msg.Proposed) -> None:
        """Process what the master has decided about an operation before its outcome."""
        match message:
            case msg.OperationNarrowed():
                self._narrowed(message)
            case msg.OperationStarted():
                self._started(message)
            case msg.Proposed(outcome=outcome):
                self._heartbeats.stored(self._finals.store(message))
                if outcome is not None and outcome.abort is None:
                    self._proposed(outcome.operation, outcome.contributors)

    def _proposed(self, operation: OperationId, contributors: tuple[PeerId, ...]) -> None:
        """Let calls wait for a result that this peer may lack, until its outcome arrives."""
        seen, is_own = self._membership.seen, not is_of_subset(operation.tag)
        is_later = seen is not None and operation.view >= seen.view  # else it was no member yet
        if is_own and is_later and self._own.peer not in contributors:
            self._goes_on_without(operation)

    def _goes_on_without(self, operation: OperationId) -> None:
        first_view = self._membership.first_view
        if operation.group == self._own.group and operation.view >= first_view:
            self._operations.go_on_without(operation)

    def _narrowed(self, message: msg.OperationNarrowed) -> None:
        """Post the buffers of an operation for its participants only, and request it again."""
        operation, ranks = self._operations.get(message.operation), message.participants
        if operation is None:
            self._goes_on_without(message.operation)
            return
        if operation.call is None:
            return
        ring = of_ranks(ranks, operation.view_ring or operation.ring)
        if operation.descriptor.quorum is None or ring is None or len(ring) < QUORUM_MIN:
            raise errors.RemoteProtocolError(
                func="control", reason="the master goes on with members that make no quorum"
            )
        if operation.participants == ranks:
            self._out.send(operation.request())
        elif operation.phase is not Phase.REQUESTED:
            self._out.send(operation.withdrawal(words.STARTED_TWICE))
        elif self._own.peer in ring:  # otherwise it waits for the outcome
            operation.narrow(ranks, ring)
            self._post(operation)

    def _started(self, message: msg.OperationStarted) -> None:
        """Start an operation, because all members have requested it."""
        operation = self._operations.get(message.operation)
        if operation is None or operation.phase is not Phase.REQUESTED:
            if operation is not None and operation.phase is Phase.STARTED:
                self._compare_starts(message, operation)
            return
        if not _fits(message, operation):
            raise errors.RemoteProtocolError(
                func="control", reason="the master sent weights that do not fit the operation"
            )
        operation.weights, operation.flagged = message.weights, message.flagged
        self._start(operation)

    def _compare_starts(self, message: msg.OperationStarted, operation: OpenOperation) -> None:
        """Withdraw an operation that a later master has started in another way.

        It does not know the norms of earlier rounds, so its guard may exclude other contributions.
        """
        known = operation.weights, operation.flagged
        if _fits(message, operation) and (message.weights, message.flagged) != known:
            self._out.send(operation.withdrawal(words.STARTED_TWICE))

    def _start(self, operation: OpenOperation) -> None:
        self._operations.enter(operation, Phase.STARTED)
        if not operation.participants:
            self._eager.all_asked(operation.id)
        if operation.call is not None:
            infinite = frozenset(one.rank for one in operation.flagged if one.norm is None)
            self._out.add(ev.Begin(operation.id, weights=operation.weights, infinite=infinite))

    def moved(self, event: ev.ReduceDone | ev.NotFinite | ev.ResultFetched) -> None:
        """Process the end of a transfer here."""
        match event:
            case ev.ReduceDone(operation, digest, is_kept):
                self.done(operation, digest, is_kept=is_kept)
            case ev.NotFinite(operation, peer):
                self._refuse(operation, peer)
            case ev.ResultFetched(call, has_arrived):
                self._fetched(call, has_arrived=has_arrived)

    def done(self, operation_id: OperationId, digest: bytes, *, is_kept: bool = False) -> None:
        """Report to the master that this peer's result, or the elected state, is complete.

        If the operation has left members out, keep the result first: its content digest goes into
        the outcome, so that no member can give a late one other values.
        """
        operation = self._operations.get(operation_id)
        if operation is None or operation.call is None:
            return
        if operation.phase is Phase.REQUESTED:  # all data is here, so all members have requested it
            self._start(operation)
        if operation.participants and is_kept_for_late(operation.descriptor) and not is_kept:
            self._out.add(ev.KeepResult(operation_id, operation.descriptor))
            return
        self._operations.enter(operation, Phase.DONE)
        operation.digest = digest
        self._out.send(msg.OperationDone(operation_id, digest))

    def _refuse(self, operation_id: OperationId, peer: PeerId) -> None:
        """Withdraw an operation, because a contribution is not what its member declared."""
        operation = self._operations.get(operation_id)
        if operation is not None and operation.call is not None:
            operation.given_up = words.not_finite(peer)
            self._out.send(operation.withdrawal(operation.given_up))

    def ended(self, message: msg.OperationEnded) -> bool:
        """Process an outcome; return whether deferred calls may have waited for it."""
        ended, committed = message.operation, message.abort is None
        posted = self._operations.get(ended)
        is_late = committed and self._own.peer not in message.contributors
        may_be_late = posted is None or posted.descriptor.quorum is not None
        is_done = posted is None or posted.phase is Phase.DONE
        if committed and not (may_be_late if is_late else is_done):
            raise errors.RemoteProtocolError(
                func="control", reason="the master committed an operation that is not complete here"
            )
        might_come = posted is None and self.may_come(ended)
        was_elsewhere = self._operations.take_elsewhere(ended)
        self._finals.see(message)
        placed = replace(message, sequence=self._own.place_of(message.sequence))
        if ended.group == self._own.group:
            is_open = self._membership.is_open(ended.view)
            is_late = is_late and ended.view >= self._membership.first_view
            if is_late or (is_open and message.abort in MISSED_CAUSES):
                self._operations.miss(placed)
            if posted is None and (is_open or is_late):
                self._operations.use_up(ended)
        self._heartbeats.acknowledge(ended)
        operation = self._operations.end(ended, committed=committed and not is_late)
        if operation is None:  # a repetition, or never requested here; there may be early data
            if might_come:
                self._out.add(ev.ForgetEarly())
            return was_elsewhere
        if operation.withdrawn is None:
            self._out.add(ev.End(ended, committed and not is_late))
        if committed and not is_late and operation.elected is not None:
            self._synchronizations.committed(operation, operation.elected, message)
        if operation.call is None:
            if committed and not operation.only_looks:
                self.left_committed(ended)
            return True
        if is_late and operation.offer is not None:
            self._synchronizations.late(operation, placed)
        elif is_late:
            self._fetch(LateCall(operation.call, operation.descriptor, operation.detached, message))
        elif message.abort is AbortCause.DIGEST_MISMATCH and self._may_retry(operation):
            again = self._operations.next_n(ended.view, ended.tag)
            self._open(operation.next_attempt(again))
        else:
            version, detached = message.roster_version, operation.detached
            self._membership.show(operation.call, version, detached=detached)
            self._answer(operation, operation.call, message)
        return was_elsewhere

    def _may_retry(self, operation: OpenOperation) -> bool:
        """Whether to retry in the same view, as all members do, before the caller gets an error."""
        is_open = self._membership.is_open(operation.id.view)
        return is_open and operation.attempt == 0 and operation.offer is None

    def _answer(self, operation: OpenOperation, call: int, message: msg.OperationEnded) -> None:
        ended, contributors = message.operation, message.contributors
        if message.abort is not None:
            asked = operation.offer or operation.descriptor
            error = words.aborted(message, asked, operation.attempt, operation.among)
            self._out.raise_(call, error)
        elif operation.elected is not None:
            if not operation.only_looks:
                self._refusals.synchronized()
                self._operations.forget_missed(self._own.place_of(message.sequence))
            self._out.return_(call, ev.SyncResult(ended, operation.elected, contributors))
        else:
            attempts, carrier = operation.attempt + 1, operation.descriptor.carrier
            reduced = ev.ReduceResult(
                ended, contributors, attempts, carrier, operation.weights, operation.flagged
            )
            self._out.return_(call, reduced)


def _settled(event: ev.ReduceCall, seen: Roster) -> Descriptor:
    """Return the descriptor with what the view determines for the members of the call."""
    is_near = seen.is_near
    if event.among is not None:
        peers = frozenset(event.among.peers)
        machines = {member.machine for member in seen.members if member.peer in peers}
        is_near = len(machines) == 1 and 0 not in machines
    return event.descriptor.settled(seen.algorithms, near=is_near)


def _fits(started: msg.OperationStarted, operation: OpenOperation) -> bool:
    """Whether a start has the weights and flags that the operation must have."""
    asked, weights = operation.descriptor, started.weights
    if len(weights) != (len(operation.ring) if asked.weighted else 0):
        return False
    ranks = [one.rank for one in started.flagged]
    if ranks and (asked.guard is None or ranks[-1] >= len(weights)):
        return False
    return ranks == sorted(set(ranks)) and all(
        one.excluded == (not weights[one.rank]) for one in started.flagged
    )
