"""``DirectTransfer``: each segment has an owner, which gets contributions and sends the result.

This module implements mesh and star; the schedule is in :mod:`pccl.collectives.schedules.direct`.
The owner, or who collects for a site, reads a contribution into a buffer and adds it to its result.
Members read a result into its place. The result of a reduce-scatter is the own chunk; a reduce
needs memory for it on other ranks than the root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pccl.collectives.layout import Segment
from pccl.collectives.schedules.direct import COLLECT, CONTRIBUTE, PUBLISH, DirectSchedule
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader
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
        self._buffered_steps = COLLECT + 1
        self._coded_steps = COLLECT + 1 if coding is not None else 0
        self._ranks = {peer: rank for rank, peer in enumerate(ring)}
        self._to_rank = self._connect(ring, schedule.incoming_from, schedule.outgoing_to, link_to)
        self._sums: dict[int, _Sum] = {}
        """Segments that this rank adds up and that lack contributions, by position."""
        self._held: list[tuple[int, Segment, int | None]] = []
        """Segments to send on that were finished before ``begin``, with their step and hash."""
        self._unfinished = set(schedule.sources)
        """Positions of the segments that this rank has still to add up."""
        self._stands_for = {rank: schedule.stands_for(rank) for rank in schedule.incoming_from}
        """By rank: the ranks whose contributions are in what it sends."""
        self._muted: frozenset[int] = frozenset()
        """Ranks that send only contributions of muted ranks."""

    @property
    def phase(self) -> str:
        """``reduce-scatter`` until this rank has added up all its segments, then ``gather``."""
        return "reduce-scatter" if self._unfinished else "gather"

    def begin(
        self, *, weights: tuple[float, ...] = (), infinite: frozenset[int] = frozenset()
    ) -> None:
        """Send contributions to the owners, and publish own results that are finished already."""
        self.begun = True
        if weights:
            self._weigh(weights, self.schedule.rank, infinite)
            muted = self.weighted.muted
            self._muted = frozenset(
                rank for rank, ranks in self._stands_for.items() if ranks <= muted
            )
        for rank, segment in self.schedule.initial_sends:
            outlet = self._to_rank[rank]
            outlet.offer(outlet.route.legs[CONTRIBUTE][segment.offset])
        held, self._held = self._held, []
        for each in held:
            self._send_on(*each)
        if self.unweighed is not None:
            self._take_unweighed()
        self.report_if_done()

    def _encoded(self, coding: Coding, step: int, segment: Segment) -> memoryview:
        if step == COLLECT:
            return coding.encode(segment, self.result.elements(*segment.span))
        own = self._contribution(segment).elements(*segment.span)
        return coding.contribute(segment, own)

    # -- receiving -----------------------------------------------------------------------------

    def place(self, peer: PeerId, header: FrameHeader) -> Placement | None:
        """Return the sink for a segment that is about to arrive; None if it has arrived before.

        Raises:
            RemoteProtocolError: the schedule expects no such segment from ``peer``; or it is a
                result without the sum of the own site, which would then overwrite the result.
        """
        if header.step == PUBLISH and self._unfinished and peer in self.inlets:
            hop = self.inlets[peer].route.legs[PUBLISH].get(header.offset)
            if hop is not None and hop.segment.position in self._unfinished:
                reason = f"peer {peer} sent a result of {self.operation} that lacks contributions"
                raise RemoteProtocolError(func="lane", reason=reason)
        return super().place(peer, header)

    def arrived(self, placement: Placement) -> None:
        """Process a segment that has arrived for the first time."""
        segment, buffer = placement.hop.segment, placement.buffer
        if placement.hop.step != PUBLISH:
            assert buffer is not None
            self._contributed(segment, self._ranks[placement.peer], buffer)
            return
        if buffer is not None:
            self._put(segment, buffer)
        check = self._take_final(placement)
        coding, passes_on = self._coding, self.schedule.collects(segment)
        if coding is not None and not passes_on:
            coding.decode_in_place(segment)
            coding = None
        rank = self._ranks[placement.peer]
        if self.weighted.refuses_final(self.operation, rank, segment, self.result, coding):
            return
        if passes_on:
            if coding is not None:
                coding.keep_coded(segment)
            self._send_on(PUBLISH, segment, check)

    def _contributed(self, segment: Segment, rank: int, buffer: memoryview) -> None:
        known = self._sums.get(segment.position)
        if known is None:
            if self._saved:
                self._save(segment)
            known = self._sums[segment.position] = self._begun(segment)
        known.waiting[rank] = buffer
        while (rank := self._next_rank(known)) in known.waiting:
            self._fold(segment, known, rank, known.waiting.pop(rank))
        if not known.lacking:
            del self._sums[segment.position]
            if not self.weighted.is_refused:  # otherwise a contribution may be missing in the sum
                self._unfinished.discard(segment.position)
                self._settle(segment)

    def _next_rank(self, known: _Sum) -> int:
        """Return the rank whose contribution is next, even if it has not arrived; -1: no rank."""
        if self.schedule.in_rank_order:
            return (self.schedule.rank - known.lacking) % self.schedule.world_size
        return next(iter(known.waiting), -1)

    def _begun(self, segment: Segment) -> _Sum:
        lacking = len(self.schedule.sources[segment.position])
        if self.schedule.rank not in self.weighted.muted:
            return _Sum(lacking, self._first_values(segment), is_own=True)
        if self._coding is not None:
            self._coding.abstain(segment)
        return _Sum(lacking, None)

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
        known.lacking -= 1
        finish = not known.lacking and not self.schedule.collects(segment)
        if rank not in self._muted:
            self._read(segment, known, rank, buffer, finish=finish)
            known.values, known.is_own = self.result, False
        elif not known.lacking:
            self._take_alone(segment, self._values(segment, known), finish=finish)
        self._buffers.give(buffer)

    def _values(self, segment: Segment, known: _Sum) -> Memory | Array | None:
        """Return the values of the sum so far, the own ones with their weight; None: none."""
        values, is_plain = known.values, known.is_own and self._coding is None
        if values is None or not is_plain or not self._reduction.scales:
            return values
        return self._reduction.contribution(values.elements(*segment.span))

    def _read(
        self, segment: Segment, known: _Sum, rank: int, buffer: memoryview, *, finish: bool
    ) -> None:
        if self._coding is None:
            arrived: Array = np.frombuffer(buffer, self._dtype)
        else:
            arrived = self._coding.decode(segment, buffer)
        must_be_finite = all(map(self.weighted.must_be_finite, self._stands_for[rank]))
        if must_be_finite and self.weighted.refuses(self.operation, rank, arrived):
            return  # no result is settled any more, so nobody gets this one
        before = self._values(segment, known)
        if before is None:
            self._take_alone(segment, arrived, finish=finish)
        else:
            self._combine(segment, before, arrived, finish=finish)

    def _settle(self, segment: Segment) -> None:
        """Send the sum of the own site to the owner; or encode, hash and publish a result."""
        if self.schedule.collects(segment):
            self._send_on(COLLECT, segment)
            return
        if self._coding is not None:
            self._coding.settle(segment)
        self._send_on(PUBLISH, segment, self._add_to_digest(segment))

    def _send_on(self, step: int, segment: Segment, check: int | None = None) -> None:
        """Send a segment to all ranks that expect it at a step, or hold it until ``begin``."""
        if not self.begun:
            self._held.append((step, segment, check))
            return
        for outlet in self._to_rank.values():
            hop = outlet.route.legs[step].get(segment.offset)
            if hop is not None:
                outlet.offer(hop, check)


@dataclass(slots=True, eq=False)
class _Sum:
    """A segment of the result that lacks contributions."""

    lacking: int
    """How many contributions, or sums of sites, have not been read or skipped."""
    values: Memory | None
    """Memory of the sum so far: of the own contribution at first; None: nothing was read."""
    is_own: bool = False
    """Whether the own contribution is the whole sum so far."""
    waiting: dict[int, memoryview] = field(default_factory=dict[int, memoryview])
    """Contributions that are not yet in the sum, by rank."""
