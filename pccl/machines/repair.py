"""Repair: an operation in a ring continues without lost members if no data is missing.

In a ring all data travels from each member to the next one. So everything that a lost member sent
was sent to its successor. Consecutive lost members form a gap, and its two neighbours repair it:

* The master asks the member behind each gap whether it lacks only final values, which the member
  before the gap can send. If so, it receives these values from that member.
* When all these members have agreed, the master makes each member before a gap send across it.
  That member first asks what is missing and sends only that; the ring forwards the data.
* If one member disagrees, the master aborts the operation: a contribution is lost.

A sender starts only after its receiver has agreed, so both use the same route. After another loss
the repair starts again with all gaps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pccl.protocol.messages import HoldingsQuery, MasterMessage, Repair
from pccl.protocol.types import OperationId, PeerId


@dataclass(frozen=True, slots=True)
class Gap:
    """Consecutive lost members of a ring, and the remaining members on both sides."""

    upstream: PeerId
    """The member before the gap; the same as ``downstream`` if only one member remains."""
    downstream: PeerId
    """The member behind the gap."""
    size: int
    """How many members are lost."""


def find_gaps(ring: tuple[PeerId, ...], lost: Collection[PeerId]) -> list[Gap]:
    """Return the gaps that ``lost`` leaves in a ring, in ring order; none if no member remains."""
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
    """A message that the master must send to ``peers`` to continue the repair."""

    peers: tuple[PeerId, ...]
    message: MasterMessage


class RingRepair:
    """The master's state of the repair of one operation.

    Args:
        operation: id of the operation.
        ring: all members of its view, in ring order.
        present: the remaining members, at least one.
        done: the members that have the whole result and need no data.
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
        """Return the question for the members behind a gap; None if no member needs data."""
        if not self._unanswered:
            return None
        return Tell(tuple(self._unanswered), HoldingsQuery(self._operation, self._lost))

    def waits_for(self, peer: PeerId, lost_count: int) -> bool:
        """Whether the query about ``lost_count`` losses still needs an answer of ``peer``."""
        return peer in self._unanswered and lost_count == len(self._lost)

    def agrees(self, peer: PeerId) -> Tell | None:
        """Record that ``peer`` lacks only final values; the last answer yields what to send."""
        if peer not in self._unanswered:
            return None
        del self._unanswered[peer]
        senders = self._senders()
        return Tell(senders, Repair(self._operation, self._lost)) if senders else None

    def is_done(self, peer: PeerId) -> Tell | None:
        """Record that ``peer`` needs no more data; the last answer yields what to send."""
        awaited = peer in self._unanswered
        self._gaps = [gap for gap in self._gaps if gap.downstream != peer]
        return self.agrees(peer) if awaited else None

    def owed_to(self, peer: PeerId) -> Iterator[MasterMessage]:
        """Yield the messages that ``peer`` may have missed while it was disconnected."""
        if peer in self._unanswered:
            yield HoldingsQuery(self._operation, self._lost)
        if peer in self._senders():
            yield Repair(self._operation, self._lost)

    def _senders(self) -> tuple[PeerId, ...]:
        """Return the members that send across a gap; none until all answers have arrived."""
        return () if self._unanswered else tuple(gap.upstream for gap in self._gaps)
