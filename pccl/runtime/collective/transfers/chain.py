"""``ChainTransfer``: a collective in which each peer sends to the next one: ring and broadcast.

A peer combines an arriving partial result with its own contribution in the place of the result. It
sends the combined values from there.

When ranks are lost, the rank before the gap sends to the rank behind the gap what the lost ranks
would have forwarded: final values only, with the steps and numbers that the receiver expects.
"""

from __future__ import annotations

import numpy as np

from pccl.collectives.layout import Segment
from pccl.collectives.route import NO_HOPS
from pccl.collectives.schedules.chain import ChainSchedule
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.collective.buffers import Buffers
from pccl.runtime.collective.coding import Coding
from pccl.runtime.collective.memory import Array, Memory
from pccl.runtime.collective.operand import Operand
from pccl.runtime.collective.outlet import Outlet
from pccl.runtime.collective.plans import Plan
from pccl.runtime.collective.transfers.inlet import Inlet, Placement
from pccl.runtime.collective.transfers.transfer import OnDone, Transfer
from pccl.transports.base import LocalMemory
from pccl.transports.link import Link


class ChainTransfer(Transfer):
    """One operation on a chain of ranks.

    Args:
        operation: see ``Transfer``.
        plan: see ``Transfer``.
        operand: see ``Transfer``.
        schedule: schedule of the plan.
        downstream: link to the next rank.
        on_done: see ``Transfer``.
        buffers: see ``Transfer``; encoded partial results are read into them too.
        coding: see ``Transfer``; each rank encodes a partial result again.
        memory: see ``Transfer``.
    """

    def __init__(
        self,
        operation: OperationId,
        plan: Plan,
        operand: Operand,
        schedule: ChainSchedule,
        downstream: Link,
        on_done: OnDone,
        buffers: Buffers,
        coding: Coding | None = None,
        memory: LocalMemory | None = None,
    ) -> None:
        super().__init__(operation, plan, operand, on_done, buffers, coding, memory)
        self.schedule = schedule
        if coding is not None:
            self._coded_steps = self._buffered_steps = schedule.world_size - 1
        self._inlet = Inlet(schedule.incoming)
        self._outlet = Outlet(
            operation, downstream, schedule.outgoing, self._payload, self._announcer
        )
        if schedule.incoming.count:
            self.inlets[plan.ring[schedule.upstream]] = self._inlet
        if schedule.outgoing.count:
            self.outlets[downstream.peer] = self._outlet
        self._gap = 0
        """Number of lost ranks between this rank and the peer that it sends to."""
        self._muted_before = self._finite_before = 0
        """Number of ranks right before this rank that are muted, or must send finite values."""
        self._held: list[tuple[int, Segment, int | None]] = []
        """Segments to forward that arrived before ``begin``, with their step and hash."""

    @property
    def phase(self) -> str:
        """``reduce-scatter`` while fewer segments arrived than are partial; then ``gather``."""
        reduce_segments = self.schedule.first_gather_index
        return "reduce-scatter" if self._inlet.received_count < reduce_segments else "gather"

    # -- sending -------------------------------------------------------------------------------

    def begin(
        self, *, weights: tuple[float, ...] = (), infinite: frozenset[int] = frozenset()
    ) -> None:
        """Send the first segments, and forward the segments that arrived before this call."""
        self.begun = True
        if weights:
            self._weigh(weights, self.schedule.rank, infinite)
            self._muted_before = self.weighted.muted_before(self.schedule.rank)
            self._finite_before = self.weighted.finite_before(self.schedule.rank)
        check = None
        for segment in self.schedule.initial_sends:
            if self.schedule.sends_finals:
                views = self._operand.source.views(*segment.span)
                check = self._digest.add(segment.position, *views)
            self._outlet.offer(self._outlet.route.legs[0][segment.offset], check)
        for held in self._held:
            self._offer(*held)
        self._held.clear()
        if self.unweighed is not None:
            self._take_unweighed()
        self.report_if_done()

    def _offer(self, step: int, segment: Segment, check: int | None) -> None:
        leg = self._outlet.route.legs.get(step + self._gap)
        if leg is not None:  # otherwise the rank behind the gap does not need it
            self._outlet.offer(leg[segment.offset], check)

    def _encoded(self, coding: Coding, step: int, segment: Segment) -> memoryview:
        if step:
            return coding.encode(segment, self.result.elements(*segment.span))
        own = self._contribution(segment).elements(*segment.span)
        return coding.contribute(segment, own)

    # -- receiving -----------------------------------------------------------------------------

    def place(self, peer: PeerId, header: FrameHeader) -> Placement | None:
        """Return the sink for a segment that is about to arrive; None if it has arrived before.

        Raises:
            RemoteProtocolError: the schedule expects no such segment from ``peer``; or it is a
                result before the partial result that this rank adds to, and then overwrites it.
        """
        partial = self._inlet.route.legs.get(header.step - self.schedule.world_size, NO_HOPS)
        hop = partial.get(header.offset)
        is_added = hop is None or (hop.number not in self._inlet.missing and not self.unweighed)
        if not is_added and peer in self.inlets:
            reason = f"peer {peer} sent a result of {self.operation} that lacks contributions"
            raise RemoteProtocolError(func="lane", reason=reason)
        return super().place(peer, header)

    def arrived(self, placement: Placement) -> None:
        """Process a segment that has arrived for the first time."""
        segment, step = placement.hop.segment, placement.hop.step
        arrival = self.schedule.arrivals[step]
        check = None
        if arrival.reduce:
            if not self._add(segment, placement.buffer, step, finish=arrival.finish):
                return
        elif placement.buffer is not None:
            self._put(segment, placement.buffer)
        if step == self.schedule.world_size - 1 and self.weighted.refuses_final(
            self.operation, self.schedule.upstream, segment, self.result, self._coding
        ):
            return
        if self._coding is not None and arrival.finish:
            self._coding.settle(segment)
        if arrival.finish:
            check = self._add_to_digest(segment)
        elif arrival.final:
            check = self._take_final(placement)
        if arrival.forward and self.begun:
            self._offer(step + 1, segment, check)
        elif arrival.forward:
            self._held.append((step + 1, segment, check))
        if self._coding is not None and arrival.final and not arrival.finish:
            if arrival.forward:
                self._coding.keep_coded(segment)
            else:
                self._coding.decode_in_place(segment)

    def _add(self, segment: Segment, buffer: memoryview | None, step: int, *, finish: bool) -> bool:
        """Combine an arrived partial result with the own contribution, and read no muted one.

        Return False if the partial result must be finite and is not. It is not forwarded, so only
        the rank right behind the source of the NaN refuses the result.
        """
        arrived: Memory | Array = self.result
        saved = self._operand.saved
        own: Memory | Array = saved
        is_muted = self.schedule.rank in self.weighted.muted
        is_empty = step < self._muted_before  # it has contributions of muted ranks only
        if self._coding is not None:
            assert buffer is not None
            if self._saved:
                self._save(segment)
            if not is_empty:
                self.result.write(segment.offset, self._coding.decode(segment, buffer))
            if is_muted:
                self._coding.abstain(segment)
            else:
                own = self._coding.own(segment, saved.elements(*segment.span))
        else:
            if buffer is not None:
                arrived = np.frombuffer(buffer, self._dtype)
            if self._reduction.scales and not is_muted:
                own = self._reduction.contribution(saved.elements(*segment.span))
        if step < self._finite_before and not is_empty:
            values = arrived if isinstance(arrived, np.ndarray) else arrived.elements(*segment.span)
            if self.weighted.refuses(self.operation, self.schedule.upstream, values):
                return False
        if not (is_empty or is_muted):
            self._combine(segment, arrived, own, finish=finish)
        elif is_empty:
            self._take_alone(segment, None if is_muted else own, finish=finish)
        elif finish or (buffer is not None and self._coding is None):
            self._take_alone(segment, arrived, finish=finish)
        if buffer is not None:
            self._buffers.give(buffer)
        return True

    # -- across a gap --------------------------------------------------------------------------

    def lacks_irreplaceable(self, gap: int) -> bool:
        """Whether a segment is missing that only the ``gap`` ranks before this one could send."""
        first = range(self.schedule.irreplaceable_count(gap))
        return not self._inlet.missing.isdisjoint(first)

    def take_from(self, upstream: PeerId) -> None:
        """Receive missing segments from ``upstream``; the ranks from there to this one are lost."""
        self.inlets = {upstream: self._inlet}

    def send_across(self, downstream: Link, gap: int) -> None:
        """Send to ``downstream`` from now on, because the ``gap`` ranks before it are lost.

        This rank first asks ``downstream`` which final values it lacks. A second call changes
        nothing.
        """
        if self._outlet.link is downstream:
            return
        self._gap = gap
        rank = self.schedule.rank
        route = self.schedule.seen_by(rank + gap).outgoing
        there = self.schedule.seen_by(rank + gap + 1).irreplaceable_count(gap)
        here = [
            hop.number for hop in route.hops[there:] if self._is_final(hop.step - gap, hop.segment)
        ]
        self.outlets = {downstream.peer: self._outlet} if route.count else {}
        self._outlet.begin_anew(route, here, there=range(there), link=downstream)
        self._outlet.ask()

    def _is_final(self, step: int, segment: Segment) -> bool:
        """Whether the final value of a segment that this rank sends at ``step`` is here."""
        if not step:
            return self.schedule.sends_finals
        hop = self._inlet.route.find(step - 1, segment.offset, segment.wire_length)
        return hop is not None and hop.number not in self._inlet.missing
