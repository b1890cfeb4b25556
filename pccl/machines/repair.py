"""Repair: an operation that has lost a member goes on, if all that the member had to give is here.

In a ring everything travels from one member to the next, so whatever has left a lost member has
gone to the one behind it. The members before and behind a gap in the ring decide everything:

* Whoever is behind the gap is asked whether it lacks only what the one before the gap can send:
  values that are final. From its yes on it takes them from there, and nothing from the lost ones.
* When all who are behind a gap have said yes, those before a gap are told to send across it. They
  ask first what is missing, and send only that; the ring carries it on.
* One no, and the operation is aborted: a contribution is lost with its member.

The order keeps senders and receivers of one mind: who sends across a gap was told to after the
receiver has agreed. Another loss begins the same again, with all gaps as they are then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pccl.protocol.messages import HoldingsQuery, MasterMessage, Repair
from pccl.protocol.types import OperationId, PeerId


@dataclass(frozen=True, slots=True)
class Gap:
    """Members that are lost, one behind the other, and who is left on either side."""

    upstream: PeerId
    """Before them. Of a ring with one member left both sides are that one."""
    downstream: PeerId
    """Behind them."""
    size: int
    """How many are lost."""


def find_gaps(ring: tuple[PeerId, ...], lost: Collection[PeerId]) -> list[Gap]:
    """The gaps that ``lost`` leaves in a ring, in ring order; none if nobody is left."""
    gaps: list[Gap] = []
    for rank, peer in enumerate(ring):
        size = 0
        while size < len(ring) and ring[rank - 1 - size] in lost:
            size += 1
        if peer not in lost and size:
            gaps.append(Gap(ring[rank - 1 - size], peer, size))
    return gaps


@dataclass(frozen=True, slots=True)
class Tell:
    """A decision to go on: these members have to know."""

    peers: tuple[PeerId, ...]
    message: MasterMessage


class RingRepair:
    """What the master knows of one operation's repair.

    Args:
        operation: its id.
        ring: all members of its view, in ring order.
        present: those that are left, at least one.
        done: those that hold the whole result: they lack nothing.
    """

    def __init__(
        self,
        operation: OperationId,
        ring: tuple[PeerId, ...],
        present: Collection[PeerId],
        done: Collection[PeerId],
    ) -> None:
        self._operation = operation
        self._lost = tuple(peer for peer in ring if peer not in present)
        self._gaps = [gap for gap in find_gaps(ring, self._lost) if gap.downstream not in done]
        self._unanswered = {gap.downstream: None for gap in self._gaps}

    def begin(self) -> Tell | None:
        """Ask whoever is behind a gap."""
        if not self._unanswered:
            return None
        return Tell(tuple(self._unanswered), HoldingsQuery(self._operation, self._lost))

    def waits_for(self, peer: PeerId, lost_count: int) -> bool:
        """Whether this is an answer that is still waited for, and not one from before a loss."""
        return peer in self._unanswered and lost_count == len(self._lost)

    def agrees(self, peer: PeerId) -> Tell | None:
        """A member lacks only what can be sent across the gap before it."""
        if peer not in self._unanswered:
            return None
        del self._unanswered[peer]
        senders = self._senders()
        return Tell(senders, Repair(self._operation, self._lost)) if senders else None

    def is_done(self, peer: PeerId) -> Tell | None:
        """A member holds the whole result: nothing need be sent to it."""
        awaited = peer in self._unanswered
        self._gaps = [gap for gap in self._gaps if gap.downstream != peer]
        return self.agrees(peer) if awaited else None

    def owed_to(self, peer: PeerId) -> Iterator[MasterMessage]:
        """What a member may have missed while its connection was lost."""
        if peer in self._unanswered:
            yield HoldingsQuery(self._operation, self._lost)
        if peer in self._senders():
            yield Repair(self._operation, self._lost)

    def _senders(self) -> tuple[PeerId, ...]:
        """Who sends across a gap: nobody before all answers are here."""
        return () if self._unanswered else tuple(gap.upstream for gap in self._gaps)
