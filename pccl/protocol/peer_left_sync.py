"""The last committed synchronization of one peer, in case its caller left before it returned.

State only. The caller's state keeps its revision and lineage then, since nothing was returned to
it. If the peer received nothing, its contents are the elected ones all the same, and it is in step
with the other members:

* The same call once more returns what the call before would have returned. It does so only if no
  other joint call was made since: the other members have gone on to their next call.
* Later offers carry the lineage of that synchronization. If neither revision nor contents have
  changed, the offer is stale: it counts only if no member has got further.

A peer that left another committed operation since then lacks its result. Its offers are stale until
the next synchronization, also after it has joined again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pccl.protocol.messages import OperationEnded
from pccl.protocol.peer_events import SyncResult
from pccl.protocol.peer_operations import OpenOperation
from pccl.protocol.shared_state import Lineage, Offer
from pccl.protocol.types import OperationId, PeerId


@dataclass(frozen=True, slots=True)
class CommittedSync:
    """One that was committed."""

    made: Offer
    """As the caller made it."""
    lineage: Lineage
    result: SyncResult
    roster_version: int
    """Of the membership that the outcome names."""

    def needs_nothing(self, peer: PeerId) -> bool:
        """Whether a member had the elected contents, and their revision, when it called."""
        elected = self.result.elected
        needy = peer in elected.behind or peer in elected.outdated
        return not needy and self.made.revision == elected.revision

    def is_made_again(self, offer: Offer) -> bool:
        """Whether a later call offers the same."""
        what = (offer.purpose, offer.revision, offer.lineage, offer.layout, offer.content)
        made = self.made
        return what == (made.purpose, made.revision, made.lineage, made.layout, made.content)


class LeftSync:
    """What the state of one process is worth after its caller left committed operations."""

    def __init__(self) -> None:
        self._last: CommittedSync | None = None
        """The last one that was committed."""
        self._left: CommittedSync | None = None
        """The last one that the caller left and that this peer needed nothing of."""
        self._may_repeat = False
        """Whether no joint call was made since the caller left that one."""
        self._lacks = False
        """Whether the caller left something else that was committed since the last one."""

    def commit(self, known: OpenOperation, lineage: Lineage, outcome: OperationEnded) -> None:
        """A synchronization was committed."""
        assert known.made is not None
        assert known.elected is not None
        self._lacks = False
        result = SyncResult(known.id, known.elected, outcome.contributors)
        self._last = CommittedSync(known.made, lineage, result, outcome.roster_version)

    def leave(self, operation: OperationId, peer: PeerId) -> bool:
        """The caller left this operation, which was committed.

        Returns:
            Whether it is a synchronization that this peer needed nothing of.
        """
        last = self._last
        if last is None or last.lineage.operation != operation or not last.needs_nothing(peer):
            self._lacks = True
            return False
        self._left, self._may_repeat = last, True
        return True

    def forget_repeat(self) -> None:
        """Another joint call is made, or this peer has lost its place."""
        self._may_repeat = False

    def take_repeat(self, offer: Offer) -> CommittedSync | None:
        """What a call returns that repeats the one that was left; None: it is a new one."""
        left, may_repeat, self._may_repeat = self._left, self._may_repeat, False
        repeats = may_repeat and left is not None and left.is_made_again(offer)
        return left if repeats else None

    def offer(self, made: Offer, *, stale: bool) -> Offer:
        """What the other members are offered, of what the caller offers.

        Args:
            made: by the caller.
            stale: whether the other members have committed something that this peer lacks.
        """
        left, last, lineage = self._left, self._last, made.lineage
        if made.stale:
            return made
        if left is not None and lineage == left.made.lineage:
            lineage, stale = left.lineage, stale or left.is_made_again(made)
        if self._lacks and last is not None and lineage == last.lineage:
            stale = True
        return replace(made, stale=stale, lineage=lineage)
