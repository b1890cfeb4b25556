"""What the callers of one peer may do now: which joint calls end before they begin, and which wait.

Callers hear two errors once: that this peer lost its place in the run, and that the other members
committed a result that this peer had left. Each error is due to every caller that might not know.

A call waits while the outcome of an operation is in doubt that its caller has left. The other
members made the same call at once. So a deferred call is made for the membership that its caller
saw at that time, though the caller has looked at another outcome since. State only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.contact import PeerOutbox
from pccl.machines.peer.membership import KnownMembership, PeerIdentity, Standing
from pccl.machines.peer.operations import OpenOperations
from pccl.machines.peer.rounds import OpenRounds
from pccl.machines.peer.synchronization import LeftSync
from pccl.protocol import errors
from pccl.protocol.types import NOBODY, SYNC_TAG, OperationId, PeerId, Roster, RoundKind

JointCall = ev.RoundCall | ev.ReduceCall | ev.SyncCall


class OneTimeError:
    """An error that callers hear once.

    A call that waits reports the error by raising it. A launched call has it for its outcome and
    reports it when somebody looks at that. Until the first report, and until all calls that were
    launched before that report have been looked at or dropped, the error is due to every caller.

    Args:
        error: what callers are told.
    """

    def __init__(self, error: errors.PCCLError) -> None:
        self.error = error
        self._reports = 0
        """Calls whose callers have been told."""
        self._launched: set[int] = set()
        """Calls launched before the first report, whose outcome nobody has looked at."""

    @property
    def is_reported(self) -> bool:
        """Whether a caller has been told."""
        return self._reports > 0

    @property
    def is_due(self) -> bool:
        """Whether a call that is made now ends with it, too."""
        return not self._reports or bool(self._launched)

    def ends(self, call: int, *, detached: bool) -> None:
        """Record that ``call`` ends with this loss.

        ``detached``: no caller waits for the call yet.
        """
        if not detached:
            self._reports += 1
        elif not self._reports:
            self._launched.add(call)

    def claim(self, call: int) -> None:
        """The caller of a launched call looks at its outcome."""
        if call in self._launched:
            self._launched.remove(call)
            self._reports += 1

    def forget(self, call: int) -> None:
        """Nobody will look at the outcome of a launched call."""
        self._launched.discard(call)

    def overlooked(self) -> None:
        """The caller of a call that raised it left before the error reached him."""
        self._reports = max(0, self._reports - 1)


class Refusals:
    """What the callers of one incarnation of a peer are told once.

    Args:
        former_loss: how the incarnation before this one ended; None: there was none.
    """

    def __init__(self, former_loss: errors.PCCLError | None = None) -> None:
        self.loss: OneTimeError | None = None
        """Why this peer is not a part of the run any more."""
        self.resync: OneTimeError | None = None
        """The others have committed something that this peer's caller had left."""
        self.sync_missed = False
        """That was a synchronization, which the caller may want to repeat."""
        self._former_loss = former_loss

    def refuse(self, event: JointCall, peer: PeerId) -> errors.PCCLError | None:
        """A call is made; return what it ends with at once, None if nothing prevents it.

        Args:
            event: the call.
            peer: this incarnation; 0 before it is registered.
        """
        begun_by = NOBODY if isinstance(event, ev.RoundCall) else event.begun_by
        if begun_by not in (NOBODY, peer):
            # The caller has been inside since before this peer lost its place and came back.
            return self._former_loss or words.not_a_member(None)
        detached = isinstance(event, ev.ReduceCall) and event.detached
        if self.loss is not None:
            was_inside = begun_by == peer  # between two attempts when another caller was told
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
        """Whether a synchronization is what the caller makes good with what he had left."""
        return not self.sync_missed or self.resync is None or self.resync.is_reported

    def require_resync(self, operation: OperationId) -> None:
        """The others have committed this, which a caller had left."""
        self.sync_missed = operation.tag == SYNC_TAG or not self._may_sync
        self.resync = OneTimeError(words.resync_required(operation))

    def synchronized(self) -> None:
        """This peer's state is that of the others."""
        self.resync, self.sync_missed = None, False

    def claim(self, call: int) -> None:
        """The caller of a launched call looks at its outcome."""
        for news in (self.loss, self.resync):
            if news is not None:
                news.claim(call)

    def forget(self, call: int) -> None:
        """Nobody will look at the outcome of a launched call."""
        for news in (self.loss, self.resync):
            if news is not None:
                news.forget(call)

    def left_unnoticed(self, error: errors.PCCLError) -> None:
        """A caller left after its call had ended with this error, and has not seen it."""
        resyncs = isinstance(error, errors.ResyncRequired)
        news = self.resync if resyncs else self.loss
        if news is not None:
            news.overlooked()


class DeferredCalls:
    """The calls that wait, in the order in which they were made."""

    def __init__(self) -> None:
        self._calls: dict[int, JointCall] = {}
        self._left: dict[int, str] = {}
        """Collectives that the caller has left as well -> why; others may wait for them."""
        self._seen: dict[int, Roster] = {}
        """What their callers saw when they made them, of those to which that matters."""

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[JointCall]:
        """Those that have a caller."""
        return (event for call, event in self._calls.items() if call not in self._left)

    def add(self, event: JointCall, seen: Roster | None = None) -> None:
        """It has to wait, perhaps once more; ``seen``: it is made for that, if it is new."""
        self._calls[event.call] = event
        if seen is not None:
            self._seen.setdefault(event.call, seen)

    def seen_at(self, call: int) -> Roster | None:
        """What the caller saw when he made one of these; None: what he sees now."""
        return self._seen.get(call)

    def see_anew(self) -> None:
        """A round that was left has ended, before them all: they are made for what it brought."""
        self._seen.clear()

    def leave(self, call: int, reason: str) -> bool:
        """A caller leaves; return whether it is one of these."""
        known = self._calls.get(call)
        if isinstance(known, ev.ReduceCall):
            self._left[call] = reason
        elif known is not None:
            del self._calls[call]
            self._seen.pop(call, None)
        return known is not None

    def why_left(self, event: ev.ReduceCall) -> str | None:
        """Why the caller of one of these has left; None if it waits."""
        return self._left.get(event.call)

    def take(self) -> Iterator[JointCall]:
        """Take all out, to try them again; who left one is known until the next is tried."""
        taken, self._calls = self._calls, {}
        for call, event in taken.items():
            yield event
            if call not in self._calls:
                self._left.pop(call, None)
                self._seen.pop(call, None)

    def clear(self) -> None:
        """This peer is no longer a part of the run."""
        self._calls.clear()
        self._left.clear()
        self._seen.clear()


@dataclass(frozen=True, slots=True)
class CallAllowed:
    """The call can be made now."""

    seen: Roster
    """The membership that its caller saw when he made it."""


@dataclass(frozen=True, slots=True)
class CallRejected:
    """The call ends before it begins."""

    error: errors.PCCLError | ValueError


@dataclass(frozen=True, slots=True)
class CallDeferred:
    """The call is kept until something is decided."""

    asks: tuple[OperationId, ...] = ()
    """Operations whose outcomes the master has to be asked for."""


class JointCalls:
    """Decides which joint calls of one peer can be made now, and keeps those that have to wait.

    Args:
        out: for effects.
        own: this peer.
        membership: what callers see.
        operations: what is open for callers, or was left by them.
        rounds: likewise.
        left_sync: forgets what a call may repeat once another call is made.
        refusals: what callers are told once.
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
        """A caller makes a call now, or a deferred call is tried once more."""
        decision = self._decide(event)
        if not isinstance(event, ev.SyncCall) and not isinstance(decision, CallRejected):
            self._left_sync.forget_repeat()
        return decision

    def _decide(self, event: JointCall) -> CallAllowed | CallRejected | CallDeferred:
        error = self._refuse(event)
        if error is not None:
            return CallRejected(error)
        in_doubt = self._operations.in_doubt()
        if in_doubt:
            self.deferred.add(event, self._membership.seen)
            # Withdrawn ones are answered anyway.
            return CallDeferred(tuple(known.id for known in in_doubt if known.withdrawn is None))
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
        """A deferred call whose caller has left is tried once more."""
        if self._operations.in_doubt():
            self.deferred.add(event)
            return CallDeferred()
        return self._catch_up(event)

    def claim(self, call: int) -> None:
        """The caller of a launched call looks at its outcome."""
        self._membership.claim(call)
        self._refusals.claim(call)

    def forget(self, call: int) -> None:
        """Nobody will look at the outcome of a launched call."""
        self._membership.forget(call)
        self._operations.forget(call)
        self._refusals.forget(call)

    def fail(self, loss: OneTimeError) -> None:
        """End all calls that are open with ``loss``."""
        waiting = [current.call for current in self._rounds.waiting() if current.call is not None]
        handles: list[int] = []
        for operation in self._operations:
            if operation.withdrawn is None:
                self._out.add(ev.End(operation.id, committed=False))
            if operation.call is not None:
                (handles if operation.detached else waiting).append(operation.call)
                if operation.detached and not operation.forgotten:
                    loss.ends(operation.call, detached=True)
        for deferred in self.deferred:
            detached = isinstance(deferred, ev.ReduceCall) and deferred.detached
            (handles if detached else waiting).append(deferred.call)
            if detached:
                loss.ends(deferred.call, detached=True)
        for call in waiting:  # after those that were launched, all of which are due to be told
            loss.ends(call, detached=False)
        for call in sorted([*waiting, *handles]):
            self._out.raise_(call, loss.error)
        self.deferred.clear()
        self._operations.clear()
        self._rounds.clear()

    def _catch_up(self, event: JointCall) -> CallAllowed | CallRejected | CallDeferred:
        """Catch up with the other members, or defer the call until that is possible.

        The caller may have left a round that the others will have with him.
        """
        if self._rounds.follow_left():
            self.deferred.see_anew()
        if self._rounds.is_update_left:
            self.deferred.add(event)
            return CallDeferred()
        return self._allow(event)

    def _allow(self, event: JointCall) -> CallAllowed | CallRejected:
        """Make the call in the membership that its caller saw, or that a left round has brought."""
        seen = self.deferred.seen_at(event.call) or self._membership.seen
        assert seen is not None
        root = event.descriptor.root if isinstance(event, ev.ReduceCall) else 0
        if root >= len(seen.members):
            return CallRejected(words.no_such_root(root, len(seen.members)))
        return CallAllowed(seen)

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
    def _is_busy(self) -> bool:
        """Whether operations are open for callers, or have outcomes that nobody has looked at."""
        return self._membership.has_unclaimed or self._operations.have_callers
