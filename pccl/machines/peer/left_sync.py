"""The last committed synchronization of one peer, in case its caller left before it returned.

State only. Nothing was returned to the caller, so its state keeps its revision and lineage. If the
peer had nothing to receive, its contents are the elected ones all the same, and it is in step with
the other members:

* If the caller repeats the call, it returns what the first call would have returned. It does so
  only if no other joint call was made since, because the other members have finished that call.
* Later offers carry the lineage of that synchronization. If neither revision nor contents have
  changed, the offer is stale: it counts only if no member has got further.

If the caller leaves another operation and that is committed, the peer lacks its result. Then its
offers are stale until the next synchronization, even if it has rejoined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pccl.machines.peer.events import SyncResult
from pccl.machines.peer.operations import OpenOperation
from pccl.protocol.messages import OperationEnded
from pccl.protocol.shared_state import Lineage, Offer
from pccl.protocol.types import OperationId, PeerId


@dataclass(frozen=True, slots=True)
class CommittedSync:
    """A synchronization that was committed."""

    made: Offer
    """As the caller made it."""
    lineage: Lineage
    result: SyncResult
    roster_version: int
    """Of the membership that the outcome names."""
    had_it: bool
    """Whether this peer had the elected contents, and their revision, when it called."""

    def is_made_again(self, offer: Offer) -> bool:
        """Whether a later call makes the same offer."""
        what = (offer.purpose, offer.revision, offer.lineage, offer.layout, offer.content)
        made = self.made
        return what == (made.purpose, made.revision, made.lineage, made.layout, made.content)


class LeftSync:
    """How the offers of one process change after its caller left committed operations."""

    def __init__(self) -> None:
        self._last: CommittedSync | None = None
        """The last committed synchronization."""
        self._left: CommittedSync | None = None
        """The last one that the caller left and from which this peer needed nothing."""
        self._looked: OperationId | None = None
        """The last operation that has only compared states."""
        self._may_repeat = False
        """Whether no joint call was made since the caller left ``_left``."""
        self._lacks = False
        """Whether the caller left another operation that was committed after ``_last``."""

    def commit(
        self, known: OpenOperation, lineage: Lineage, outcome: OperationEnded, peer: PeerId
    ) -> None:
        """A synchronization was committed, or states were compared."""
        made, elected = known.made, known.elected
        assert made is not None
        assert elected is not None
        if known.only_looks:
            self._looked = known.id
            return
        self._lacks, self._left = False, None
        result = SyncResult(known.id, elected, outcome.contributors)
        needy = peer in elected.behind or peer in elected.outdated
        had_it = not needy and made.revision == elected.revision
        self._last = CommittedSync(made, lineage, result, outcome.roster_version, had_it)

    def leave(self, operation: OperationId) -> bool | None:
        """The caller left this operation, which was committed.

        Returns:
            True: it is a synchronization from which this peer needed nothing. None: it has changed
            nothing.
        """
        last = self._last
        if operation == self._looked:
            return None
        if last is None or last.lineage.operation != operation or not last.had_it:
            self._lacks = True
            return False
        self._left, self._may_repeat = last, True
        return True

    def forget_repeat(self) -> None:
        """Another joint call is made, or this peer has lost its place."""
        self._may_repeat = False

    def take_repeat(self, offer: Offer) -> CommittedSync | None:
        """What this call returns if it repeats the call that was left; None: it is a new call."""
        left, may_repeat, self._may_repeat = self._left, self._may_repeat, False
        repeats = may_repeat and left is not None and left.is_made_again(offer)
        return left if repeats else None

    def offer(self, made: Offer, *, stale: bool) -> Offer:
        """The offer that goes to the other members.

        Args:
            made: the offer as the caller made it.
            stale: whether the other members have committed something that this peer lacks.
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
