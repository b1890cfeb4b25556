"""``GatherTransfer``: every rank gets all contributions, and adds them up.

:mod:`pccl.collectives.schedules.gather` describes the schedule. A rank encodes each segment of its
contribution once, and keeps the bytes for all ranks, itself among them: what it adds is what the
others decode.

Encoded segments are so short that the network would take all of them at once, and the I/O thread
would encode for seconds. So a rank sends at most ``WINDOW`` segments more than it has added. This
also bounds the contributions that wait for those of a late rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pccl.collectives.layout import Segment
from pccl.collectives.schedules.gather import GatherSchedule
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.collective.buffers import Buffers
from pccl.runtime.collective.coding import Coding
from pccl.runtime.collective.operand import Operand
from pccl.runtime.collective.plans import Plan
from pccl.runtime.collective.transfers.inlet import Placement
from pccl.runtime.collective.transfers.transfer import OnDone, Transfer
from pccl.transports.link import Link

WINDOW = 16
"""Segments that a rank sends ahead of its own sums: 14 MiB of the tensor in a round trip."""


class GatherTransfer(Transfer):
    """One operation of a gather.

    Args:
        operation: see ``Transfer``.
        plan: see ``Transfer``.
        operand: see ``Transfer``.
        schedule: schedule of the plan.
        link_to: returns the link to a peer.
        on_done: see ``Transfer``.
        buffers: see ``Transfer``; contributions are read into them.
        coding: quantizes the contributions.
    """

    def __init__(
        self,
        operation: OperationId,
        plan: Plan,
        operand: Operand,
        schedule: GatherSchedule,
        link_to: Callable[[PeerId], Link],
        on_done: OnDone,
        buffers: Buffers,
        coding: Coding,
    ) -> None:
        super().__init__(operation, plan, operand, on_done, buffers, coding)
        self.schedule, ring = schedule, plan.ring
        self._buffered_steps = self._coded_steps = 1
        self._ranks = {peer: rank for rank, peer in enumerate(ring)}
        routes = dict.fromkeys(schedule.others, schedule.route)
        self._connect(ring, routes, routes, link_to)
        self._own: dict[int, memoryview] = {}
        """The own contribution as it was encoded first, by position."""
        self._sums: dict[int, _GatheredSum] = {}
        """Segments of the result that lack contributions, by position."""
        self._sent = self._settled = 0
        """How many segments were offered to all ranks, and how many are complete."""

    @property
    def phase(self) -> str:
        """``gather``."""
        return "gather"

    def begin(
        self, *, weights: tuple[float, ...] = (), infinite: frozenset[int] = frozenset()
    ) -> None:
        """Send the own contribution to all ranks."""
        self.begun = True
        if weights:
            self._weigh(weights, self.schedule.rank, infinite)
        self._send()
        if self.unweighed is not None:
            self._take_unweighed()
        self.report_if_done()

    def _send(self) -> None:
        hops, last = self.schedule.route.hops, self._settled + WINDOW
        while self.begun and self._sent < min(last, len(hops)):
            self._sent += 1
            for outlet in self.outlets.values():
                outlet.offer(hops[self._sent - 1])

    def detach(self) -> None:
        """Release the caller's memory; what others lack is in the encoded contribution."""
        outlets, self.outlets = self.outlets, {}
        super().detach()
        self.outlets = outlets

    def _encoded(self, coding: Coding, step: int, segment: Segment) -> memoryview:
        own = self._own.get(segment.position)
        if own is None:
            values = self._contribution(segment).elements(*segment.span)
            own = self._own[segment.position] = coding.contribute(segment, values)
        return own

    def arrived(self, placement: Placement) -> None:
        """Add a contribution to the result, and those that waited for it."""
        segment, buffer = placement.hop.segment, placement.buffer
        assert buffer is not None
        known = self._sums.get(segment.position)
        if known is None:
            if self._saved:
                self._save(segment)
            known = self._sums[segment.position] = _GatheredSum()
        known.waiting[self._ranks[placement.peer]] = buffer
        coding = self._coding
        assert coding is not None
        while known.folded < self.schedule.world_size:
            if known.folded == self.schedule.rank:
                self._fold(segment, coding, known, self._encoded(coding, 0, segment))
            elif known.folded in known.waiting:
                given = known.waiting.pop(known.folded)
                self._fold(segment, coding, known, given)
                self._buffers.give(given)
            else:
                return
        del self._sums[segment.position]
        self._settle(segment)

    def _fold(
        self, segment: Segment, coding: Coding, known: _GatheredSum, encoded: memoryview
    ) -> None:
        rank = known.folded
        known.folded += 1
        finish = known.folded == self.schedule.world_size
        if rank in self.weighted.muted:
            if finish:
                self._take_alone(segment, self.result if known.has_values else None, finish=True)
            return
        values = coding.decode(segment, encoded)
        if self.weighted.must_be_finite(rank):
            # A refused result is never reported, so nobody gets it.
            self.weighted.refuses(self.operation, rank, values)
        if known.has_values:
            self._combine(segment, self.result, values, finish=finish)
        else:
            self._take_alone(segment, values, finish=finish)
        known.has_values = True

    def _settle(self, segment: Segment) -> None:
        """Make all NaN of a finished segment the same, and hash it."""
        for values in self.result.arrays(*segment.span):
            is_nan = np.isnan(values)
            if is_nan.any():
                values[is_nan] = np.nan
        self._digest.add(segment.position, *self.result.views(*segment.span))
        self._settled += 1
        self._send()


@dataclass(slots=True, eq=False)
class _GatheredSum:
    """A segment of the result that lacks contributions."""

    folded: int = 0
    """Number of ranks, from rank 0, whose contributions are in the sum, or muted."""
    has_values: bool = False
    """Whether a contribution is in the sum; else all were muted."""
    waiting: dict[int, memoryview] = field(default_factory=dict[int, memoryview])
    """Contributions that are not yet in the sum, by rank."""
