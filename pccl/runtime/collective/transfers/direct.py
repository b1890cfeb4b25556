"""``DirectTransfer``: each segment has an owner, which gets contributions and sends the result.

This module implements mesh and star; the schedule is in :mod:`pccl.collectives.schedules.direct`.
The owner reads a contribution into a buffer and adds it to its result. Members read a result into
its place. The result of a reduce-scatter is the own chunk; a reduce needs memory for it on other
ranks than the root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pccl.collectives.layout import Segment
from pccl.collectives.schedules.direct import CONTRIBUTE, PUBLISH, DirectSchedule
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.collective.buffers import Buffers
from pccl.runtime.collective.coding import Coding
from pccl.runtime.collective.memory import Array, Memory
from pccl.runtime.collective.operand import Operand
from pccl.runtime.collective.plans import Plan
from pccl.runtime.collective.transfers.inlet import Placement
from pccl.runtime.collective.transfers.transfer import OnDone, Transfer
from pccl.transports.base import LocalMemory
from pccl.transports.link import Link


class DirectTransfer(Transfer):
    """One operation of a mesh or a star.

    Args:
        operation: see ``Transfer``.
        plan: see ``Transfer``.
        operand: see ``Transfer``.
        schedule: schedule of the plan.
        link_to: returns the link to a peer.
        on_done: see ``Transfer``.
        buffers: see ``Transfer``; contributions are read into them too.
        coding: see ``Transfer``.
        memory: see ``Transfer``.
    """

    def __init__(
        self,
        operation: OperationId,
        plan: Plan,
        operand: Operand,
        schedule: DirectSchedule,
        link_to: Callable[[PeerId], Link],
        on_done: OnDone,
        buffers: Buffers,
        coding: Coding | None = None,
        memory: LocalMemory | None = None,
    ) -> None:
        super().__init__(operation, plan, operand, on_done, buffers, coding, memory)
        self.schedule, ring = schedule, plan.ring
        self._buffered_steps = CONTRIBUTE + 1
        self._coded_steps = CONTRIBUTE + 1 if coding is not None else 0
        self._ranks = {peer: rank for rank, peer in enumerate(ring)}
        self._to_rank = self._connect(ring, schedule.incoming_from, schedule.outgoing_to, link_to)
        self._sums: dict[int, _Sum] = {}
        """Results of own segments that lack contributions, by position."""
        self._held: list[tuple[Segment, int]] = []
        """Own results that were finished before ``begin``, and their hashes."""
        self._unfinished = len(schedule.owned)

    @property
    def phase(self) -> str:
        """``reduce-scatter`` until all own segments are reduced, then ``gather``."""
        return "reduce-scatter" if self._unfinished else "gather"

    def begin(
        self, *, weights: tuple[float, ...] = (), infinite: frozenset[int] = frozenset()
    ) -> None:
        """Send contributions to the owners, and publish own results that are finished already."""
        self.begun = True
        if weights:
            self._weigh(weights, self.schedule.rank, infinite)
        for rank, segment in self.schedule.initial_sends:
            outlet = self._to_rank[rank]
            outlet.offer(outlet.route.legs[CONTRIBUTE][segment.offset])
        for segment, check in self._held:
            self._publish(segment, check)
        self._held.clear()
        if self.unweighed is not None:
            self._take_unweighed()
        self.report_if_done()

    def _encoded(self, coding: Coding, step: int, segment: Segment) -> memoryview:
        own = self._contribution(segment).elements(*segment.span)
        return coding.contribute(segment, own)

    # -- receiving -----------------------------------------------------------------------------

    def arrived(self, placement: Placement) -> None:
        """Process a segment that has arrived for the first time."""
        segment, buffer = placement.hop.segment, placement.buffer
        if placement.hop.step == CONTRIBUTE:
            assert buffer is not None
            self._contributed(segment, self._ranks[placement.peer], buffer)
            return
        if buffer is not None:
            self._put(segment, buffer)
        self._take_final(placement)
        if self._coding is not None:
            self._coding.decode_in_place(segment)
        rank = self._ranks[placement.peer]
        self.weighted.refuses_final(self.operation, rank, segment, self.result)

    def _contributed(self, segment: Segment, rank: int, buffer: memoryview) -> None:
        known = self._sums.get(segment.position)
        if known is None:
            if self._saved:
                self._save(segment)
            known = self._sums[segment.position] = self._begun(segment)
        known.waiting[rank] = buffer
        while (rank := self._next_rank(known)) in known.waiting:
            self._fold(segment, known, rank, known.waiting.pop(rank))
        if known.folded == self.schedule.world_size:
            del self._sums[segment.position]
            if not self.weighted.is_refused:  # otherwise a contribution may be missing in the sum
                self._settle(segment)

    def _next_rank(self, known: _Sum) -> int:
        """Return the rank whose contribution is next, even if it has not arrived; -1: no rank."""
        if self.schedule.in_rank_order:
            return (self.schedule.rank + known.folded) % self.schedule.world_size
        return next(iter(known.waiting), -1)

    def _begun(self, segment: Segment) -> _Sum:
        if self.schedule.rank not in self.weighted.muted:
            return _Sum(self._first_values(segment), is_own=True)
        if self._coding is not None:
            self._coding.abstain(segment)
        return _Sum(None)

    def _first_values(self, segment: Segment) -> Memory:
        memory = self._contribution(segment)
        if self._coding is None:
            return memory
        own = memory.elements(*segment.span)
        total = self._coding.own(segment, own)
        if total is own:
            return memory
        self.result.write(segment.offset, total)
        return self.result

    def _fold(self, segment: Segment, known: _Sum, rank: int, buffer: memoryview) -> None:
        known.folded += 1
        finish = known.folded == self.schedule.world_size
        if rank not in self.weighted.muted:
            self._read(segment, known, rank, buffer, finish=finish)
            known.values, known.is_own = self.result, False
        elif finish:
            self._take_alone(segment, known.values, finish=True)
        self._buffers.give(buffer)

    def _read(
        self, segment: Segment, known: _Sum, rank: int, buffer: memoryview, *, finish: bool
    ) -> None:
        if self._coding is None:
            arrived: Array = np.frombuffer(buffer, self._dtype)
        else:
            arrived = self._coding.decode(segment, buffer)
        if self.weighted.must_be_finite(rank) and self.weighted.refuses(
            self.operation, rank, arrived
        ):
            return  # no result is settled any more, so nobody gets this one
        values = known.values
        if values is None:
            self._take_alone(segment, arrived, finish=finish)
            return
        own: Memory | Array = values
        if known.is_own and self._coding is None and self._reduction.scales:
            own = self._reduction.contribution(values.elements(*segment.span))
        self._combine(segment, own, arrived, finish=finish)

    def _settle(self, segment: Segment) -> None:
        """Encode and hash the finished result of an own segment; publish it after ``begin``."""
        self._unfinished -= 1
        if self._coding is not None:
            self._coding.settle(segment)
        check = self._add_to_digest(segment)
        if self.begun:
            self._publish(segment, check)
        else:
            self._held.append((segment, check))

    def _publish(self, segment: Segment, check: int) -> None:
        for outlet in self._to_rank.values():
            leg = outlet.route.legs[PUBLISH]
            if leg:  # otherwise the rank does not need the result
                outlet.offer(leg[segment.offset], check)


@dataclass(slots=True, eq=False)
class _Sum:
    """A segment of the result that lacks contributions."""

    values: Memory | None
    """Memory of the sum so far: of the own contribution at first; None: nothing was read."""
    is_own: bool = False
    """Whether the own contribution is the whole sum so far."""
    folded: int = 1
    """Number of contributions that are in the sum, or muted."""
    waiting: dict[int, memoryview] = field(default_factory=dict[int, memoryview])
    """Contributions that are not yet in the sum, by rank."""
