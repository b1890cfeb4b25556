"""``ExchangeTransfer``: each member gives blocks of its input to others, and combines nothing.

The schedule is in :mod:`pccl.collectives.schedules.exchange`. Members read a block into its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pccl.collectives.layout import Segment
from pccl.collectives.schedules.exchange import ExchangeSchedule
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.collective.buffers import Buffers
from pccl.runtime.collective.coding import Coding
from pccl.runtime.collective.operand import Operand
from pccl.runtime.collective.plans import Plan
from pccl.runtime.collective.transfers.inlet import Placement
from pccl.runtime.collective.transfers.transfer import OnDone, Transfer
from pccl.transports.base import LocalMemory
from pccl.transports.link import Link


class ExchangeTransfer(Transfer):
    """One exchange.

    Args:
        operation: see ``Transfer``.
        plan: see ``Transfer``.
        operand: see ``Transfer``; the input may be the own block of the result.
        schedule: schedule of the plan.
        link_to: returns the link to a peer.
        on_done: see ``Transfer``.
        buffers: see ``Transfer``.
        memory: see ``Transfer``.
    """

    def __init__(
        self,
        operation: OperationId,
        plan: Plan,
        operand: Operand,
        schedule: ExchangeSchedule,
        link_to: Callable[[PeerId], Link],
        on_done: OnDone,
        buffers: Buffers,
        memory: LocalMemory | None = None,
    ) -> None:
        super().__init__(operation, plan, operand, on_done, buffers, memory=memory)
        self.schedule = schedule
        self._to_rank = self._connect(
            plan.ring, schedule.incoming_from, schedule.outgoing_to, link_to
        )
        self._own = deque(schedule.kept)
        """Segments of the own block that are not yet in the result: (in the input, there)."""

    @property
    def phase(self) -> str:
        """``gather``."""
        return "gather"

    def begin(
        self, *, weights: tuple[float, ...] = (), infinite: frozenset[int] = frozenset()
    ) -> None:
        """Send all blocks."""
        self.begun = True
        checks: dict[int, int] = {}
        for rank, hop in self.schedule.initial_sends:
            number = hop.number
            if self._gives_all_the_same and number not in checks:  # all get this block
                given, kept = self.schedule.kept[number]
                views = self._operand.source.views(*given.span)
                checks[number] = self._digest.add(kept.position, *views)
            self._to_rank[rank].offer(hop, checks.get(number))
        self.report_if_done()

    def arrived(self, placement: Placement) -> None:
        """Process a segment that has arrived for the first time."""
        if placement.buffer is not None:
            self._put(placement.hop.segment, placement.buffer)
        if self._gives_all_the_same:
            self._take_final(placement)
        self._keep(1)  # piecemeal, because a long copy would delay the I/O thread

    def report_if_done(self) -> None:
        """Complete the own block, and report, if it has begun and no segment is missing."""
        if self.begun and not self.lacking:
            self._keep(len(self._own))
            super().report_if_done()

    def _keep(self, count: int) -> None:
        """Copy up to ``count`` segments of the own block into the result."""
        source, result = self._operand.source, self.result
        for given, kept in (self._own.popleft() for _ in range(min(count, len(self._own)))):
            at = kept.span[0]
            for view in source.views(*given.span):
                result.write(at, view)
                at += len(view)

    def _encoded(self, coding: Coding, step: int, segment: Segment) -> memoryview:
        raise AssertionError("an exchange encodes nothing")
