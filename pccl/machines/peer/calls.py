"""Decides which joint calls of one peer may be made now, which fail at once, and which wait.

Two errors reach callers only once: this peer lost its membership, or the members committed a result
that a caller here had left. Each of the two is due to every caller that may not know it yet.

A new call is deferred while the outcome of an operation that its caller left is in doubt, or while
an operation of a closed view continues, or has a proposed outcome, without this peer. The other
members do not defer that call. So a deferred call uses the membership that its caller saw when it
called, even if the caller has read another outcome since. State only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pccl.machines.blocks import blocks_of
from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.contact import PeerOutbox
from pccl.machines.peer.membership import KnownMembership, PeerIdentity, Standing
from pccl.machines.peer.operations import OpenOperations
from pccl.machines.peer.rounds import OpenRounds
from pccl.machines.peer.synchronization import LeftSync
from pccl.protocol import errors
from pccl.protocol.types import (
    NOBODY,
    SYNC_TAG,
    OperationId,
    PeerId,
    Roster,
    RoundKind,
)

JointCall = ev.RoundCall | ev.ReduceCall | ev.SyncCall


class OneTimeError:
    """An error that callers get only once.

    A waiting call reports the error by raising it. A launched call keeps the error as its outcome,
    and reports it when its caller reads the outcome. The error is due to every caller until it was
    reported, and all calls launched before the first report were read or dropped.

    Args:
        error: the error for callers.
    """

    def __init__(self, error: errors.PCCLError) -> None:
        self.error = error
        self._reports = 0
        """How many callers have received the error."""
        self._launched: set[int] = set()
        """Calls launched before the first report, whose outcome no caller has read."""

    @property
    def is_reported(self) -> bool:
        """Whether a caller has received the error."""
        return self._reports > 0

    @property
    def is_due(self) -> bool:
        """Whether a call that is made now ends with the error, too."""
        return not self._reports or bool(self._launched)

    def ends(self, call: int, *, detached: bool) -> None:
        """Record that ``call`` ends with this error.

        ``detached``: no caller waits for the call yet.
        """
        if not detached:
            self._reports += 1
        elif not self._reports:
            self._launched.add(call)

    def claim(self, call: int) -> None:
        """Record that the caller of a launched call reads its outcome."""
        if call in self._launched:
            self._launched.remove(call)
            self._reports += 1

    def forget(self, call: int) -> None:
        """Record that no caller will read the outcome of a launched call."""
        self._launched.discard(call)

    def overlooked(self) -> None:
        """Undo a report, because the caller left before it received the error."""
        self._reports = max(0, self._reports - 1)


class Refusals:
    """The errors that callers of one incarnation of a peer get only once.

    Args:
        former_loss: the error that ended the previous incarnation; None if this is the first.
    """

    def __init__(self, former_loss: errors.PCCLError | None = None) -> None:
        self.loss: OneTimeError | None = None
        """Why this peer lost its membership; None: it has not."""
        self.resync: OneTimeError | None = None
        """The error to raise while this peer lacks a committed result that its caller left."""
        self.sync_missed = False
        """Whether this peer missed a synchronization, which its caller may want to repeat."""
        self._former_loss = former_loss

    def refuse(self, event: JointCall, peer: PeerId) -> errors.PCCLError | None:
        """Return the error that a new call ends with at once; None if the call may be made.

        Args:
            event: the call.
            peer: the id of this incarnation; 0 before it is registered.
        """
        begun_by = NOBODY if isinstance(event, ev.RoundCall) else event.begun_by
        if begun_by not in (NOBODY, peer):
            # The call began before this peer lost its membership and rejoined.
            return self._former_loss or words.not_a_member(None)
        detached = isinstance(event, ev.ReduceCall) and event.detached
        if self.loss is not None:
            was_inside = begun_by == peer  # between two attempts when another caller got the error
            if not (self.loss.is_due or was_inside):
                return words.not_a_member(self.loss.error)
            self.loss.ends(event.call, detached=detached)
            return self.loss.error
        if self.resync is None or (isinstance(event, ev.SyncCall) and self._may_sync):
            return None
        self.resync.ends(event.call, detached=detached)
        return self.resync.error

    @property
    def _may_sync(self) -> bool:
        """Whether a synchronization may begin: none was missed, or the error was reported."""
        return not self.sync_missed or self.resync is None or self.resync.is_reported

    def require_resync(self, operation: OperationId, *, was_left: bool = True) -> None:
        """Record that the members committed ``operation``, whose result this peer lacks.

        Args:
            operation: the operation.
            was_left: whether its caller here had left it.
        """
        self.sync_missed = operation.tag == SYNC_TAG or not self._may_sync
        self.resync = OneTimeError(words.resync_required(operation, was_left=was_left))

    def raise_resync(self, out: PeerOutbox, call: int, *, detached: bool = False) -> None:
        """Raise in the caller of ``call`` that this peer lacks a committed result."""
        assert self.resync is not None
        self.resync.ends(call, detached=detached)
        out.raise_(call, self.resync.error)

    def synchronized(self) -> None:
        """Record that this peer's state equals that of the other members."""
        self.resync, self.sync_missed = None, False

    def claim(self, call: int) -> None:
        """Record that the caller of a launched call reads its outcome."""
        for news in (self.loss, self.resync):
            if news is not None:
                news.claim(call)

    def forget(self, call: int) -> None:
        """Record that no caller will read the outcome of a launched call."""
        for news in (self.loss, self.resync):
            if news is not None:
                news.forget(call)

    def left_unnoticed(self, error: errors.PCCLError) -> None:
        """Record that a caller left before it received ``error``, so the error is due again."""
        resyncs = isinstance(error, errors.ResyncRequired)
        news = self.resync if resyncs else self.loss
        if news is not None:
            news.overlooked()


class DeferredCalls:
    """The deferred calls, in the order in which they were made."""

    def __init__(self) -> None:
        self._calls: dict[int, JointCall] = {}
        self._left: dict[int, str] = {}
        """Collectives whose callers have left -> why; other members may wait for them."""
        self._seen: dict[int, Roster] = {}
        """Call -> the roster that its caller saw at the call; other calls use the present one."""

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[JointCall]:
        """Iterate over the calls that have a caller."""
        return (event for call, event in self._calls.items() if call not in self._left)

    def add(self, event: JointCall, seen: Roster | None = None) -> None:
        """Defer a call, perhaps again; ``seen``: the roster to use if the call is new."""
        self._calls[event.call] = event
        if seen is not None:
            self._seen.setdefault(event.call, seen)

    def seen_at(self, call: int) -> Roster | None:
        """Return the roster that the caller saw at its call; None: use the present one."""
        return self._seen.get(call)

    def see_anew(self) -> None:
        """Use the present membership for all deferred calls, as a left round has changed it."""
        self._seen.clear()

    def leave(self, call: int, reason: str) -> bool:
        """Record that the caller of ``call`` leaves; return False if the call is not deferred."""
        known = self._calls.get(call)
        if isinstance(known, ev.ReduceCall):
            self._left[call] = reason
        elif known is not None:
            del self._calls[call]
            self._seen.pop(call, None)
        return known is not None

    def why_left(self, event: ev.ReduceCall) -> str | None:
        """Return why the caller of a deferred call has left; None if it waits."""
        return self._left.get(event.call)

    def take(self) -> Iterator[JointCall]:
        """Take out and yield all calls; ``why_left`` knows each until the next one is taken."""
        taken, self._calls = self._calls, {}
        for call, event in taken.items():
            yield event
            if call not in self._calls:
                self._left.pop(call, None)
                self._seen.pop(call, None)

    def clear(self) -> None:
        """Drop all deferred calls, because this peer leaves the run."""
        self._calls.clear()
        self._left.clear()
        self._seen.clear()


@dataclass(frozen=True, slots=True)
class CallAllowed:
    """The call may be made now."""

    seen: Roster
    """The roster that its caller saw at the call."""
    event: JointCall
    """The call; one to another member has its final tag."""


@dataclass(frozen=True, slots=True)
class CallRejected:
    """The call fails before it begins."""

    error: errors.PCCLError | ValueError


@dataclass(frozen=True, slots=True)
class CallDeferred:
    """The call waits for a decision."""

    asks: tuple[OperationId, ...] = ()
    """Operations whose outcome this peer must ask the master for."""


class JointCalls:
    """Decides which joint calls of one peer may be made now, and keeps the deferred ones.

    Args:
        out: for effects.
        own: this peer.
        membership: the rosters that callers see.
        operations: operations that are open, or that callers have left.
        rounds: rounds that are open, or that callers have left.
        left_sync: forgets the synchronization to repeat when another call is made.
        refusals: errors that callers get only once.
    """

    def __init__(
        self,
        out: PeerOutbox,
        own: PeerIdentity,
        membership: KnownMembership,
        operations: OpenOperations,
        rounds: OpenRounds,
        left_sync: LeftSync,
        refusals: Refusals,
    ) -> None:
        self._out, self._own, self._membership = out, own, membership
        self._operations, self._rounds = operations, rounds
        self._left_sync, self._refusals = left_sync, refusals
        self.deferred = DeferredCalls()

    def decide(self, event: JointCall) -> CallAllowed | CallRejected | CallDeferred:
        """Decide on a new call, or again on a deferred one."""
        decision = self._decide(event)
        if not isinstance(event, ev.SyncCall) and not isinstance(decision, CallRejected):
            self._left_sync.forget_repeat()
        return decision

    def _decide(self, event: JointCall) -> CallAllowed | CallRejected | CallDeferred:
        error = self._refuse(event)
        if error is not None:
            return CallRejected(error)
        if isinstance(event, ev.ReduceCall) and not event.fits:
            misfit = self._misfit(event, self._membership.seen)
            if misfit is not None:
                return CallRejected(misfit)
            if event.buffers or event.ring or event.among:
                event = replace(event, fits=True)
        in_doubt = self._operations.in_doubt()
        if in_doubt:
            self.deferred.add(event, self._membership.seen)
            # The master reports the outcome of withdrawn operations without being asked.
            return CallDeferred(tuple(known.id for known in in_doubt if known.withdrawn is None))
        if elsewhere := self._elsewhere:
            self.deferred.add(event, self._membership.seen)
            return CallDeferred(elsewhere)
        match event:
            case ev.RoundCall(kind=RoundKind.PEERS_PENDING):
                return self._allow(event)
            case ev.RoundCall() | ev.SyncCall() if self._is_busy:
                return CallRejected(words.operations_open())
            case ev.RoundCall(kind=RoundKind.UPDATE_TOPOLOGY):
                return self._allow(event)
            case ev.RoundCall():
                self._rounds.use_admission()
                return self._catch_up(event)
            case ev.ReduceCall() | ev.SyncCall():
                decision = self._catch_up(event)
                if isinstance(decision, CallAllowed):
                    self._rounds.use_admission()
                return decision

    def decide_left(self, event: ev.ReduceCall) -> CallAllowed | CallRejected | CallDeferred:
        """Decide again on a deferred call whose caller has left."""
        if self._operations.in_doubt() or self._elsewhere:
            self.deferred.add(event)
            return CallDeferred()
        return self._catch_up(event)

    def release(self, event: ev.Claim | ev.Forget) -> None:
        """Record that the caller of a launched call reads its outcome, or that no caller will."""
        if isinstance(event, ev.Claim):
            self._membership.claim(event.call)
            self._refusals.claim(event.call)
        else:
            self._membership.forget(event.call)
            self._operations.forget(event.call)
            self._refusals.forget(event.call)

    def fail(self, loss: OneTimeError) -> None:
        """End all open calls with ``loss``."""
        waiting = [current.call for current in self._rounds.waiting() if current.call is not None]
        handles: list[int] = []
        for operation in self._operations:
            if operation.withdrawn is None:
                self._out.add(ev.End(operation.id, committed=False))
            if operation.call is not None:
                (handles if operation.detached else waiting).append(operation.call)
                if operation.detached and not operation.forgotten:
                    loss.ends(operation.call, detached=True)
        for late in self._operations.late_calls():
            (handles if late.detached else waiting).append(late.call)
            if late.detached:
                loss.ends(late.call, detached=True)
        for deferred in self.deferred:
            detached = isinstance(deferred, ev.ReduceCall) and deferred.detached
            (handles if detached else waiting).append(deferred.call)
            if detached:
                loss.ends(deferred.call, detached=True)
        for call in waiting:  # after the launched calls, so that each of those reports it, too
            loss.ends(call, detached=False)
        for call in sorted([*waiting, *handles]):
            self._out.raise_(call, loss.error)
        self.deferred.clear()
        self._operations.clear()
        self._rounds.clear()

    def _catch_up(self, event: JointCall) -> CallAllowed | CallRejected | CallDeferred:
        """Catch up with the other members, or defer the call until that is possible.

        The caller may have left a round that the other members complete without it.
        """
        if len(self._rounds):
            if self._rounds.follow_left():
                self.deferred.see_anew()
            if self._rounds.is_update_left:
                self.deferred.add(event)
                return CallDeferred()
        return self._allow(event)

    def _allow(self, event: JointCall) -> CallAllowed | CallRejected:
        """Allow the call in the membership that its caller saw, if it fits that group."""
        seen = self.deferred.seen_at(event.call) or self._membership.seen
        assert seen is not None
        if not isinstance(event, ev.ReduceCall):
            return CallAllowed(seen, event)
        root, size = event.descriptor.root, len(event.members_of(seen))
        if root >= size:
            error = words.root_lost if event.begun_by != NOBODY else words.no_such_root
            return CallRejected(error(root, size))
        misfit = self._misfit(event, seen)
        if isinstance(misfit, ValueError):
            # The caller had left the call that changed the group.
            misfit = words.group_changed(len(seen.members))
        if misfit is not None:
            return CallRejected(misfit)
        return CallAllowed(seen, event)

    def _misfit(
        self, event: ev.ReduceCall, seen: Roster | None
    ) -> ValueError | errors.CollectiveAborted | None:
        """Return why a call or its buffers do not fit a group; None: they do."""
        if seen is None:
            return None
        if event.ring and event.ring != seen.ring:
            return words.member_lost_between()
        ring = event.members_of(seen)
        if event.among is not None and (gone := set(ring) - set(seen.ring)):
            return words.subset_lost(sorted(gone))
        if event.buffers is None or self._own.peer not in ring:
            return None
        rank, size, root = ring.index(self._own.peer), len(ring), event.descriptor.root
        if root >= size:
            return words.no_such_root(root, size)
        try:
            blocks_of(event.descriptor, event.buffers, rank, size)
        except ValueError as error:
            return error if size > 1 else None  # a peer that is alone gets another error
        return None

    def _refuse(self, event: JointCall) -> errors.PCCLError | None:
        if self._own.standing is Standing.CLOSED:
            return words.closed()
        error = self._refusals.refuse(event, self._own.peer)
        if error is not None or self._own.standing is Standing.MEMBER:
            return error
        asks = isinstance(event, ev.RoundCall) and event.kind is RoundKind.UPDATE_TOPOLOGY
        if asks and self._own.rejoins:
            return words.same_call_twice(RoundKind.UPDATE_TOPOLOGY.call_name)
        return words.not_a_member(None)

    @property
    def _elsewhere(self) -> tuple[OperationId, ...]:
        """The undecided operations of closed views that continue without this peer."""
        newest = self._membership.newest
        return self._operations.elsewhere(newest.open_views) if newest is not None else ()

    @property
    def _is_busy(self) -> bool:
        """Whether operations are open for callers, or have outcomes that no caller has read."""
        return self._membership.has_unclaimed or self._operations.have_callers
