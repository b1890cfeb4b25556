"""``Transfer``: one running collective on this peer: buffers, received sets, outlets.

What all schedules share; :mod:`~pccl.runtime.collective.chain_transfer` and
:mod:`~pccl.runtime.collective.direct_transfer` say what an arrival causes.

Placement: each arriving segment is read straight into the place of the result that it belongs to,
or, if it is first to be decoded or to be added to what is there, into a buffer that is reused. In
place the own contribution is saved, segment by segment, right before the place is first
overwritten: that copy serves as the contribution and, after an abort, restores the input.

Exactly once: a segment counts when its last byte is here and it was not here before. While two
lanes carry copies of the same segment, the newest one has the place and the other is discarded.

Of a weighted average nothing is combined before the beginning, which tells the weights: what comes
earlier, as others are ahead, stays where it was read to.

Done is what has begun and lacks nothing: with nothing to receive (the root of a broadcast, anybody
in a barrier) as soon as it begins; never before, though the last segment may come earlier.

After :meth:`Transfer.end` nothing reads or writes the caller's memory any more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from pccl.collectives.digest import ResultDigest
from pccl.collectives.layout import Segment, SegmentLayout
from pccl.collectives.reductions import Reduction
from pccl.collectives.route import Route
from pccl.collectives.weighting import weigh
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader
from pccl.protocol.messages import Progress
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.collective.buffers import Buffers
from pccl.runtime.collective.coding import Coding
from pccl.runtime.collective.memory import Array, Memory, cut
from pccl.runtime.collective.operand import Operand
from pccl.runtime.collective.outlet import Outlet
from pccl.transports.outgoing import Payload
from pccl.transports.sinks import discard

OnDone = Callable[[OperationId, bytes], None]


@dataclass(slots=True, eq=False)
class Placement:
    """A segment that is arriving; the sink of its frame."""

    transfer: Transfer
    peer: PeerId
    """Whom it comes from."""
    inlet: Inlet
    index: int
    """Number among all segments from there."""
    segment: Segment
    step: int
    check: int
    """The hash of its bytes, as they have to be."""
    buffer: memoryview | None
    """Where it is read to if it does not go straight into the result."""
    received: int = 0
    """Bytes, as of the last read but one."""

    def memory(self, received: int) -> memoryview:
        """The rest of the segment's place or buffer; discarded if a newer copy has its place."""
        segment = self.segment
        self.received = received
        if self.inlet.claims.get(self.index) is not self:
            return discard(segment.wire_length - received)
        if self.buffer is not None:
            return self.buffer[received : segment.wire_length]
        first, last = segment.wire_span
        return self.transfer.result.beginning(first + received, last)

    def counts(self) -> bool:
        """Whether no newer copy has its place."""
        return self.inlet.claims.get(self.index) is self

    def complete(self) -> None:
        """Count the segment, unless a newer copy has its place."""
        self.transfer.complete(self)

    def lost(self) -> None:
        """Nothing to do: the segment is sent again on another lane."""


class Inlet:
    """What comes from one peer.

    Args:
        route: all of it.
    """

    def __init__(self, route: Route) -> None:
        self.route = route
        self.missing = set(range(route.count))
        """Numbers of the segments that are still to come."""
        self.claims: dict[int, Placement] = {}
        """Segments that are arriving, by number: the newest copy of each."""

    @property
    def received_count(self) -> int:
        """How many segments are here."""
        return self.route.count - len(self.missing)

    @property
    def arriving_bytes(self) -> int:
        """Bytes that are here of segments that are not complete."""
        return sum(placement.received for placement in self.claims.values())


class Transfer(ABC):
    """The data movement of one operation.

    Args:
        operation: its id.
        reduction: what becomes of the contributions.
        operand: the caller's buffers.
        layout: its segments.
        on_done: called once with the digest, when the operation has begun and the result is
            complete; maybe from within :meth:`begin`.
        buffers: for segments that cannot be read straight into their place.
        coding: how values are quantized; None: they travel as they are.
    """

    def __init__(
        self,
        operation: OperationId,
        reduction: Reduction,
        operand: Operand,
        layout: SegmentLayout,
        on_done: OnDone,
        buffers: Buffers,
        coding: Coding | None = None,
    ) -> None:
        self.operation = operation
        self.begun = False
        self.what = 0
        """The fingerprint that goes with what is sent ahead of the start; otherwise 0."""
        self.rx_bytes = 0
        """Payload bytes that counted."""
        self.result = operand.target
        self.inlets: dict[PeerId, Inlet] = {}
        self.outlets: dict[PeerId, Outlet] = {}
        self._layout = layout
        self._reduction = reduction
        self._operand = operand
        self._dtype = operand.target.dtype
        self._saved = bytearray(layout.segment_count if operand.in_place else 0)
        self._unweighed: list[Placement] = []
        """What came before the weights."""
        self._digest = ResultDigest(layout.segment_count)
        self._on_done = on_done
        self._buffers = buffers
        self._coding = coding

    # -- how far it is -------------------------------------------------------------------------

    @property
    def tx_bytes(self) -> int:
        """Payload bytes handed to links, repetitions included."""
        return sum(outlet.sent_bytes for outlet in self.outlets.values())

    @property
    def raw_tx_bytes(self) -> int:
        """What those would have been without quantization."""
        return sum(outlet.raw_bytes for outlet in self.outlets.values())

    @property
    def progress(self) -> Progress:
        """How far this peer is."""
        received = sum(inlet.received_count for inlet in self.inlets.values())
        ready = sum(outlet.ready_count for outlet in self.outlets.values())
        arriving = sum(inlet.arriving_bytes for inlet in self.inlets.values())
        return Progress(self.operation, received, ready, self.rx_bytes + arriving)

    @property
    def quantization_error(self) -> float:
        """Relative L2 error of what this peer has rounded; 0.0 if that is nothing."""
        return self._coding.error if self._coding is not None else 0.0

    @property
    def lacking(self) -> int:
        """How many segments are still to come."""
        return sum(len(inlet.missing) for inlet in self.inlets.values())

    @property
    @abstractmethod
    def phase(self) -> str:
        """``reduce-scatter`` or ``gather`` (for traces)."""

    @property
    def partners(self) -> tuple[PeerId, ...]:
        """Whom segments come from and go to."""
        return (*self.inlets, *self.outlets)

    def sends_to(self, peer: PeerId) -> bool:
        """Whether segments go to ``peer``."""
        return peer in self.outlets

    def lacks_from(self, peer: PeerId) -> bool:
        """Whether segments from ``peer`` are still to come."""
        inlet = self.inlets.get(peer)
        return inlet is not None and bool(inlet.missing)

    # -- what the data plane does ----------------------------------------------------------------

    @abstractmethod
    def begin(self, *, weights: tuple[float, ...] = ()) -> None:
        """Send the segments that depend on no other member: all members have posted the operation.

        Args:
            weights: one per member in ring order, for a weighted average.
        """

    def place(self, peer: PeerId, header: FrameHeader) -> Placement | None:
        """A segment is about to arrive. Returns None if it is here already.

        Raises:
            RemoteProtocolError: the schedule expects no such segment from there.
        """
        inlet = self.inlets.get(peer)
        if inlet is None:
            reason = f"peer {peer} is not upstream in {self.operation}"
            raise RemoteProtocolError(func="lane", reason=reason)
        found = inlet.route.find(header.step, header.offset, header.length)
        if found is None:
            reason = f"unexpected segment {header} of {self.operation}"
            raise RemoteProtocolError(func="lane", reason=reason)
        index, segment = found
        if index not in inlet.missing:
            return None
        buffer = self._place(header.step, segment)
        result = self.result
        if buffer is None and not result.is_one and result.is_shredded(*segment.wire_span):
            buffer = self._buffers.take(segment.wire_length)
        placement = inlet.claims[index] = Placement(
            self, peer, inlet, index, segment, header.step, header.check, buffer
        )
        return placement

    def complete(self, placement: Placement) -> None:
        """The last byte of a placed segment is here."""
        inlet, index = placement.inlet, placement.index
        if inlet.claims.get(index) is not placement:
            return
        del inlet.claims[index]
        inlet.missing.discard(index)
        self.rx_bytes += placement.segment.wire_length
        if self._reduction.lacks_weights:
            self._unweighed.append(placement)
            return
        self._arrived(placement)
        if not inlet.missing:
            self._report_if_done()

    def take_early(self, peer: PeerId, header: FrameHeader, payload: bytearray) -> None:
        """A segment that arrived before the buffers were posted.

        Raises:
            RemoteProtocolError: the schedule expects no such segment from there.
        """
        placement = self.place(peer, header)
        if placement is None:
            return
        received = 0
        while received < len(payload):
            memory = placement.memory(received)
            memory[:] = payload[received : received + len(memory)]
            received += len(memory)
        self.complete(placement)

    def detach(self) -> None:
        """The caller leaves after the result was complete: go on, for the others, from a copy.

        Final values are all that another may still lack of a peer that is done. The caller's memory
        is let go of, and his input is what it was.
        """
        copy = self.result.copy()
        for outlet in self.outlets.values():
            outlet.detach(copy.view(np.uint8).data)
        if self._coding is not None:
            self._coding.detach()
        self._restore()
        self._saved = bytearray()
        self.result = memory = Memory([copy])
        self._operand = Operand(memory, memory, memory, self._operand.data_type, in_place=True)

    def end(self, *, committed: bool) -> None:
        """Let go of the caller's memory.

        Args:
            committed: otherwise the input becomes what it was.
        """
        for outlet in self.outlets.values():
            outlet.revoke()
        for inlet in self.inlets.values():
            inlet.claims.clear()
        self._unweighed.clear()
        if self._coding is not None:
            self._coding.end(committed=committed)
        if not committed:
            self._restore()
            return
        if self._saved:
            self._operand.overwritten[0] = all(self._saved)

    # -- for those that know the schedule --------------------------------------------------------

    @abstractmethod
    def _place(self, step: int, segment: Segment) -> memoryview | None:
        """A segment is about to be read: into this buffer, or into the result if None."""

    @abstractmethod
    def _arrived(self, placement: Placement) -> None:
        """A segment is here, for the first time."""

    def _weigh(self, weights: tuple[float, ...], rank: int) -> None:
        if weights:
            weighting = weigh(weights, rank)
            self._reduction.weigh(weighting)
            if self._coding is not None:
                self._coding.weigh(weighting)

    def _take_unweighed(self) -> None:
        """The weights are known: what came before them has arrived."""
        for placement in self._unweighed:
            self._arrived(placement)
        self._unweighed.clear()

    def _report_if_done(self) -> None:
        if self.begun and not self.lacking:
            self._on_done(self.operation, self._digest.value())

    def _contribution(self, segment: Segment) -> Memory:
        """Where the own contribution is."""
        saved = self._saved and self._saved[segment.position]
        return self._operand.saved if saved else self._operand.source

    def _plain_payload(self, segment: Segment) -> Payload:
        """What the own contribution is on the wire if it is not quantized."""
        if self._reduction.scales:
            return partial(self._scaled, segment)
        return self._contribution(segment).payload(*segment.span)

    def _scaled(self, segment: Segment) -> memoryview:
        own = self._contribution(segment).elements(*segment.span)
        return self._reduction.sendable(own).view(np.uint8).data

    def _put(self, placement: Placement) -> None:
        """Put what was read into a buffer in its place."""
        if placement.buffer is not None:
            self.result.write(placement.segment.offset, placement.buffer)
            self._buffers.give(placement.buffer)

    def _combine(
        self, segment: Segment, left: Memory | Array, right: Memory | Array, *, finish: bool
    ) -> None:
        """The result becomes ``left`` op ``right``; arrays are those of the segment."""
        result, where = self.result, segment.span
        if result.is_one or result.is_shredded(*where):
            values = left if isinstance(left, np.ndarray) else left.elements(*where)
            others = right if isinstance(right, np.ndarray) else right.elements(*where)
            out = result.elements(*where) if result.is_one else np.empty_like(values)
            self._reduction.combine(values, others, out=out, finish=finish)
            if not result.is_one:
                result.write(segment.offset, out)
            return
        parts = result.arrays(*where)
        lefts = cut([left] if isinstance(left, np.ndarray) else left.arrays(*where), parts)
        rights = cut([right] if isinstance(right, np.ndarray) else right.arrays(*where), parts)
        for part, values, others in zip(parts, lefts, rights, strict=True):
            self._reduction.combine(values, others, out=part, finish=finish)

    def _add_to_digest(self, segment: Segment) -> int:
        """The final bytes of a segment are in the result; return their hash."""
        return self._digest.add(segment.position, *self.result.views(*segment.wire_span))

    def _save(self, segment: Segment) -> None:
        """In place: the own contribution is about to be overwritten."""
        if not self._saved[segment.position]:
            self._saved[segment.position] = 1
            self._operand.save(*segment.span)

    def _restore(self) -> None:
        for segment in self._layout.segments():
            if self._saved and self._saved[segment.position]:
                self._operand.put_back(*segment.span)
