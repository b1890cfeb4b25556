"""Synchronizations of shared state: the call, the election, and what the peer expects afterwards.

``LeftSync`` remembers the last committed synchronization, in case its caller left before it
returned. Nothing was returned to the caller, so its state keeps its revision and lineage. If the
peer had nothing to receive, its contents still equal the elected ones, and the peer is up to date
with the other members:

* If the caller repeats the call, it returns what the first call would have returned. It does so
  only if no other joint call was made since, because the other members have finished that call.
* Later offers carry the lineage of that synchronization. If neither revision nor contents have
  changed, the offer is stale: it counts only if no member has advanced further.

If members synchronized without this peer, its late call fetches what they elected last, unless it
has that. If no member offers it, the call returns for an earlier synchronization whose contents it
has; else it raises ``ResyncRequired``, and a further call takes part in the next synchronization.

If the caller leaves another operation and that is committed, the peer lacks its result. Then its
offers are stale until the next synchronization, even if it has rejoined.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.contact import PeerOutbox
from pccl.machines.peer.membership import KnownMembership, PeerIdentity
from pccl.machines.peer.operations import LateCall, OpenOperation, OpenOperations
from pccl.protocol import messages as msg
from pccl.protocol.operation import Phase
from pccl.protocol.shared_state import NOTHING_EXPECTED, Elected, Lineage, Offer, expected_after
from pccl.protocol.types import SYNC_TAG, AbortCause, Descriptor, OperationId, PeerId

if TYPE_CHECKING:
    from pccl.machines.peer.calls import Refusals
    from pccl.machines.peer.rounds import OpenRounds


@dataclass(frozen=True, slots=True)
class CommittedSync:
    """A synchronization that the members have committed."""

    made: Offer
    """The offer as the caller made it."""
    lineage: Lineage
    result: ev.SyncResult
    roster_version: int
    """Version of the roster that the outcome names."""
    had_it: bool
    """Whether this peer had the elected contents, and their revision, when it called."""

    def is_made_again(self, offer: Offer) -> bool:
        """Whether a later call makes the same offer."""
        what = (offer.purpose, offer.revision, offer.lineage, offer.layout, offer.content)
        made = self.made
        return what == (made.purpose, made.revision, made.lineage, made.layout, made.content)


class AfterLeaving(enum.Enum):
    """The state of a peer, compared with other members, after its caller left an operation."""

    UP_TO_DATE = enum.auto()
    """The operation was a synchronization from which this peer needed nothing."""
    LACKS_RESULT = enum.auto()
    UNCHANGED = enum.auto()
    """The operation only compared states."""


class LeftSync:
    """How the offers of one process change after its caller left committed operations.

    State only; it outlives the machine of one membership.
    """

    def __init__(self) -> None:
        self._last: CommittedSync | None = None
        """The last committed synchronization."""
        self._left: CommittedSync | None = None
        """The last synchronization that the caller left and from which this peer needed nothing."""
        self._looked: OperationId | None = None
        """The last operation that only compared states."""
        self._may_repeat = False
        """Whether no joint call was made since the caller left ``_left``."""
        self._lacks = False
        """Whether the caller left another operation that was committed after ``_last``."""

    def commit(
        self, known: OpenOperation, lineage: Lineage, outcome: msg.OperationEnded, peer: PeerId
    ) -> None:
        """Record a committed synchronization, or a comparison of states."""
        made, elected = known.made, known.elected
        assert made is not None
        assert elected is not None
        if known.only_looks:
            self._looked = known.id
            return
        self._lacks, self._left = False, None
        result = ev.SyncResult(known.id, elected, outcome.contributors)
        needy = peer in elected.behind or peer in elected.outdated
        had_it = not needy and made.revision == elected.revision
        self._last = CommittedSync(made, lineage, result, outcome.roster_version, had_it)

    def leave(self, operation: OperationId) -> AfterLeaving:
        """Record that the caller left ``operation``, which was committed; return the result."""
        last = self._last
        if operation == self._looked:
            return AfterLeaving.UNCHANGED
        if last is None or last.lineage.operation != operation or not last.had_it:
            self._lacks = True
            return AfterLeaving.LACKS_RESULT
        self._left, self._may_repeat = last, True
        return AfterLeaving.UP_TO_DATE

    def forget_repeat(self) -> None:
        """Forget the call to repeat, after another joint call or the loss of the membership."""
        self._may_repeat = False

    def take_repeat(self, offer: Offer) -> CommittedSync | None:
        """Return the earlier result if this call repeats the call that was left, else None."""
        left, may_repeat, self._may_repeat = self._left, self._may_repeat, False
        repeats = may_repeat and left is not None and left.is_made_again(offer)
        return left if repeats else None

    def offer(self, made: Offer, *, stale: bool) -> Offer:
        """Return the offer for the other members.

        Args:
            made: the offer as the caller made it.
            stale: whether the members have committed a result that this peer lacks.
        """
        left, last, lineage = self._left, self._last, made.lineage
        if made.stale:
            return made
        same = left is not None and (lineage, made.layout) == (left.made.lineage, left.made.layout)
        if left is not None and same:
            lineage, stale = left.lineage, stale or left.is_made_again(made)
        if self._lacks and last is not None and lineage == last.lineage:
            stale = True
        return replace(made, stale=stale, lineage=lineage)


class Synchronizations:
    """Handles what differs for operations on shared state.

    Args:
        out: for effects.
        own: this peer.
        membership: the rosters; callers see a new one when a call returns.
        operations: operations that are posted and have no outcome.
        rounds: the joint calls that members made before a synchronization without this peer.
        left_sync: the last committed synchronization.
        refusals: whether this peer lacks a committed result.
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
        self._operations, self._rounds, self._refusals = operations, rounds, refusals
        self.left_sync = left_sync
        self.expected = NOTHING_EXPECTED
        """What this peer expects of the group's shared state."""

    def call(self, event: ev.SyncCall) -> None:
        """Start a synchronization in an open view, unless its outcome is known already."""
        stale = self._refusals.resync is not None
        repeated = self.left_sync.take_repeat(event.offer)
        if repeated is not None:
            self._membership.show(event.call, repeated.roster_version, detached=False)
            self._out.return_(event.call, repeated.result)
            return
        roster, newest = self._membership.seen, self._membership.newest
        assert roster is not None
        assert newest is not None
        seen_view = roster.view
        if roster.view not in newest.open_views:
            roster = newest
        newest_missed: msg.OperationEnded | None = None
        same: msg.OperationEnded | None = None
        after_same: list[msg.OperationEnded] = []
        for missed in self._operations.missed_syncs(roster.view):
            after_same.append(missed)
            if missed.abort is None:
                newest_missed = missed
                if self._has_same(event.offer, missed):
                    same, after_same = missed, []
            elif newest_missed is not None:
                pass  # the newest contents are all that this peer needs
            elif missed.operation.view not in (seen_view, roster.view):
                pass  # an attempt of members in a view that the caller does not know
            elif missed.abort is not AbortCause.WITHDRAWN:  # after that, all members call again
                self._membership.show(event.call, missed.roster_version, detached=False)
                self._out.raise_(event.call, words.aborted(missed, event.offer))
                return
        if newest_missed is not None:
            what = LateCall(event.call, Descriptor.sync(), detached=False, outcome=newest_missed)
            self._answer_late(replace(what, same=same, after_same=tuple(after_same)), event)
            return
        operation = self._operations.next_id(roster, self._own.group, SYNC_TAG)
        asked = replace(Descriptor.sync(), quorum=event.quorum)
        opened = OpenOperation(operation, asked, roster.ring, event.call)
        opened.made = event.offer
        opened.offer = self.left_sync.offer(event.offer, stale=stale)
        self._operations.open(opened)
        self._out.add(ev.PostSync(event.call, operation, roster.ring))
        self._out.send(opened.request())

    def late(self, operation: OpenOperation, outcome: msg.OperationEnded) -> None:
        """Answer a call for a synchronization that the members made without this peer."""
        assert operation.call is not None
        assert operation.made is not None
        quorum = operation.descriptor.quorum
        late = LateCall(operation.call, Descriptor.sync(), detached=False, outcome=outcome)
        event = ev.SyncCall(operation.call, operation.made, quorum=quorum)
        self._answer_late(late, event, had_begun=operation.elected is not None)

    def give_up_late(self) -> None:
        """Raise in the call of a late member, because the other members wait for other calls.

        Otherwise they would never make that synchronization.
        """
        missed = self._operations.missed_sync
        for operation in list(self._operations):
            call, offer = operation.call, operation.offer
            if call is None or offer is None or operation.phase is not Phase.REQUESTED:
                continue
            if self._refusals.resync is None and missed is not None:
                self._refusals.require_resync(missed, was_left=False)
            elif self._refusals.resync is None or not offer.stale:
                continue
            self._operations.leave(operation, words.LATE_SYNC, in_doubt=True)
            self._out.add(ev.End(operation.id, committed=False))
            self._out.send(msg.Withdraw(operation.id, words.LATE_SYNC))
            self._refusals.raise_resync(self._out, call)

    def _has_same(self, offer: Offer, outcome: msg.OperationEnded) -> bool:
        """Whether this peer has the contents that the members elected without it."""
        elected = outcome.elected
        if elected is None or offer.stale or self._refusals.resync is not None:
            return False
        return (offer.layout, offer.content) == (elected.layout, elected.content)

    def _answer_late(self, late: LateCall, event: ev.SyncCall, *, had_begun: bool = False) -> None:
        """Return from a late call; fetch the elected contents first if this peer lacks them.

        ``had_begun``: whether this peer had begun to fetch what an earlier master elected. It may
        have overwritten contents, so only a fetch tells whether it has the elected ones.
        """
        self._out.send(msg.BlockedReply(0, False))  # this peer makes calls again
        if not had_begun and self._has_same(event.offer, late.outcome):
            self._adopt(late, event)
        else:
            self._out.add(self._operations.fetch(replace(late, sync=event)))

    def fetched(self, late: LateCall, event: ev.SyncCall, *, has_arrived: bool) -> None:
        """Return from a late call, or raise if its contents have not arrived."""
        if not has_arrived and late.same is not None:
            self._operations.put_back(late.after_same)  # for the next call
            late, has_arrived = replace(late, outcome=late.same), True
        if has_arrived:
            self._adopt(late, event)
            return
        if self._refusals.resync is None:
            self._refusals.require_resync(late.outcome.operation, was_left=False)
        self._refusals.raise_resync(self._out, event.call)

    def _adopt(self, late: LateCall, event: ev.SyncCall) -> None:
        outcome, elected = late.outcome, late.outcome.elected
        assert elected is not None
        known = OpenOperation(outcome.operation, Descriptor.sync(), (), event.call)
        known.made, known.offer, known.elected = event.offer, event.offer, elected
        self.committed(known, elected, outcome)
        self._refusals.synchronized()
        self._operations.forget_missed(outcome.sequence)
        self._rounds.catch_up(outcome.sequence)  # or its next calls would be those before
        self._membership.show(event.call, outcome.roster_version, detached=False)
        result = ev.SyncResult(outcome.operation, elected, outcome.contributors)
        self._out.return_(event.call, result)

    def started(self, operation_id: OperationId, elected: Elected) -> None:
        """Fetch the elected state; ignore a repetition, but fetch again if the election changed."""
        operation = self._operations.get(operation_id)
        if operation is None or operation.offer is None:
            return
        if operation.phase is Phase.REQUESTED:
            self._operations.enter(operation, Phase.STARTED)
        known, operation.elected = operation.elected, elected
        if operation.call is not None and operation.phase is Phase.STARTED and elected != known:
            self._out.add(ev.BeginSync(operation_id, elected))

    def compare(self, operation: OperationId, reference: PeerId) -> None:
        """Compare this peer's state with that of ``reference``, while its call is open."""
        own = self._operations.get(operation)
        if own is not None and own.call is not None and own.offer is not None:
            self._out.add(ev.CompareSync(operation, reference))

    def starved(self, operation_id: OperationId, reason: str) -> None:
        """Make all members try again, because a source is missing; fetched pieces are kept."""
        operation = self._operations.get(operation_id)
        if operation is not None and operation.phase is Phase.STARTED:
            operation.given_up = reason
            self._out.send(msg.Withdraw(operation_id, reason))

    def committed(
        self, operation: OpenOperation, elected: Elected, outcome: msg.OperationEnded
    ) -> None:
        """Record a committed synchronization, or a comparison of states."""
        lineage = Lineage(self._own.run, operation.id)
        self.left_sync.commit(operation, lineage, outcome, self._own.peer)
        if not operation.only_looks:
            self.expected = expected_after(elected, lineage)
