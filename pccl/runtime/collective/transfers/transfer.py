"""``Transfer``: one running collective on this peer: its buffers, received segments and outlets.

This class is the part that all schedules share. Subclasses implement what an arrival causes.

Placement: a segment is read straight into its place in the result. It is read into a reusable
buffer if it must be decoded first, or added to other values. If the collective works in place, each
segment of the input is saved right before it is first overwritten. The copy then serves as the
contribution, and restores the input after an abort.

Exactly once: a segment counts when its last byte arrives for the first time. While two lanes carry
copies of the same segment, the newer copy is read into the place, and the older one is discarded.

A weighted average combines nothing before :meth:`Transfer.begin`, which brings the weights. Earlier
segments stay in the place or buffer that they were read into.

A transfer is done when it has begun and lacks no segment. If it receives nothing (the root of a
broadcast, any member of a barrier), it is done as soon as it begins.

After :meth:`Transfer.end` nothing reads or writes the caller's memory any more.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from pccl.collectives.digest import DIGEST_BYTES, ResultDigest
from pccl.collectives.layout import Segment
from pccl.collectives.route import NO_HOPS, Route
from pccl.collectives.weighting import weigh
from pccl.protocol.checksum import bytes_hash
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.messages import Flow, Progress
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.collective.announcer import Announcer
from pccl.runtime.collective.buffers import Buffers
from pccl.runtime.collective.coding import Coding
from pccl.runtime.collective.memory import Array, Memory, cut
from pccl.runtime.collective.operand import Operand
from pccl.runtime.collective.outlet import Outlet
from pccl.runtime.collective.plans import Plan
from pccl.runtime.collective.transfers.inlet import Inlet, Placement
from pccl.runtime.collective.weighted_ranks import WeightedRanks
from pccl.transports.announcement import decode_announcement
from pccl.transports.base import LocalMemory
from pccl.transports.link import Link
from pccl.transports.outgoing import Payload

_log = logging.getLogger("pccl.link")

OnDone = Callable[[OperationId, bytes], None]

_NO_DIGEST = bytes(DIGEST_BYTES)
"""Of a result that only its member has."""


class Transfer(ABC):
    """The data movement of one operation.

    Args:
        operation: id of the operation.
        plan: what the operation needs besides its memory.
        operand: the caller's buffers.
        on_done: called once with the digest, when the operation has begun and the result is
            complete; :meth:`begin` may call it.
        buffers: pool of buffers for segments that cannot be read straight into their place.
        coding: quantizes the values; None: no quantization.
        memory: lets peers of this machine pull segments; None: all segments are sent.
    """

    def __init__(
        self,
        operation: OperationId,
        plan: Plan,
        operand: Operand,
        on_done: OnDone,
        buffers: Buffers,
        coding: Coding | None = None,
        memory: LocalMemory | None = None,
    ) -> None:
        self.operation = operation
        self.begun = False
        self.what = plan.fingerprint
        """Fingerprint of the request until all members are known to have made it; then 0, without a
        quorum. Frames with other fingerprints are discarded; the master reports the mismatch."""
        self.has_quorum = plan.descriptor.quorum is not None
        self._is_direct = plan.descriptor.is_direct
        self._gives_all_the_same = plan.descriptor.gives_all_the_same
        self.rx_bytes = 0
        """Payload bytes of the segments that counted."""
        self.result = operand.target
        self.inlets: dict[PeerId, Inlet] = {}
        self.outlets: dict[PeerId, Outlet] = {}
        self._flows: list[PeerId] = []
        """Peers whose flows ``progress`` tells one by one; none in a chain."""
        self._layout = layout = plan.schedule.layout
        self._reduction = plan.reduction
        self._operand = operand
        self._dtype = operand.target.dtype
        self._itemsize = self._dtype.itemsize
        self._saved = bytearray(layout.segment_count if operand.in_place else 0)
        self.unweighed: list[Placement] | None = [] if plan.reduction.lacks_weights else None
        """Segments that arrived before the weights; None: no weights are missing."""
        self.weighted = WeightedRanks(plan.descriptor.guard, plan.ring)
        self._digest = ResultDigest(layout.segment_count)
        self._on_done = on_done
        self._buffers = buffers
        self._coding = coding
        # Coded bytes change before they are pulled.
        self._announcer = Announcer(memory) if memory is not None and coding is None else None
        self._buffered_steps = self._coded_steps = 0
        """How many steps, from the first, read segments into buffers, or encode what they send."""

    # -- progress ------------------------------------------------------------------------------

    @property
    def tx_bytes(self) -> int:
        """Payload bytes handed to links, repetitions included."""
        return sum(outlet.sent_bytes for outlet in self.outlets.values())

    @property
    def progress(self) -> Progress:
        """Progress of this peer in the operation."""
        received = {peer: inlet.received_count for peer, inlet in self.inlets.items()}
        ready = {peer: outlet.ready_count for peer, outlet in self.outlets.items()}
        flows = tuple(Flow(peer, received.get(peer, 0), ready.get(peer, 0)) for peer in self._flows)
        nbytes = self.rx_bytes + sum(inlet.arriving_bytes for inlet in self.inlets.values())
        return Progress(self.operation, sum(received.values()), sum(ready.values()), nbytes, flows)

    @property
    def quantization_error(self) -> float:
        """Relative L2 error of all values that this peer has rounded; 0.0 if there are none."""
        return self._coding.error if self._coding is not None else 0.0

    @property
    def lacking(self) -> int:
        """Number of segments that have not arrived."""
        return sum(len(inlet.missing) for inlet in self.inlets.values())

    @property
    @abstractmethod
    def phase(self) -> str:
        """``reduce-scatter`` or ``gather`` (for traces)."""

    def sends_to(self, peer: PeerId) -> bool:
        """Whether this peer sends segments to ``peer``."""
        return peer in self.outlets

    def lacks_from(self, peer: PeerId) -> bool:
        """Whether segments from ``peer`` have not arrived yet."""
        inlet = self.inlets.get(peer)
        return inlet is not None and bool(inlet.missing)

    # -- what the data plane does ----------------------------------------------------------------

    @abstractmethod
    def begin(
        self, *, weights: tuple[float, ...] = (), infinite: frozenset[int] = frozenset()
    ) -> None:
        """Send the segments that depend on no other member. See ``DataPlane.begin``."""

    def accepts(self, what: int) -> bool:
        """Whether frames with this fingerprint belong to the request that this peer posted."""
        return what in (0, self.what or what)

    def place(self, peer: PeerId, header: FrameHeader) -> Placement | None:
        """Return the sink for a segment that is about to arrive; None if it has arrived before.

        Raises:
            RemoteProtocolError: the schedule expects no such segment from ``peer``.
        """
        inlet = self.inlets.get(peer)
        if inlet is None:
            reason = f"peer {peer} sent a segment, but is not upstream in {self.operation}"
            raise RemoteProtocolError(func="lane", reason=reason)
        hop = inlet.route.legs.get(header.step, NO_HOPS).get(header.offset)
        if hop is None or hop.segment.wire_length != header.length:
            reason = f"unexpected segment {header} of {self.operation}"
            raise RemoteProtocolError(func="lane", reason=reason)
        if hop.number not in inlet.missing:
            return None
        segment, result, buffer, view = hop.segment, self.result, None, None
        if hop.step < self._buffered_steps:
            buffer = view = self._buffers.take(segment.wire_length)
        else:
            if self._saved:
                self._save(segment)
            first, last = segment.wire_span
            if result.is_one:
                view = result.first[first:last]
            elif result.is_shredded(first, last):
                buffer = view = self._buffers.take(segment.wire_length)
        placement = Placement(self, peer, inlet, hop, header.check, buffer, view)
        inlet.claims[hop.number] = placement
        return placement

    @abstractmethod
    def arrived(self, placement: Placement) -> None:
        """Process a segment that has arrived for the first time."""

    def pull(
        self, memory: LocalMemory | None, link: Link, at: FrameHeader, payload: bytearray
    ) -> int:
        """Copy an announced segment from the memory of its sender, and count it.

        If this peer cannot read that memory, it sends PULL_FAILED: the sender then asks which
        segments arrived. The sender may not know that the link was down here.

        Args:
            memory: copies the segment; None: this peer pulls nothing.
            link: link to the sender.
            at: header of the announcement.
            payload: payload of the announcement.

        Returns:
            Number of bytes that counted; 0 if they had arrived before, or cannot be read.

        Raises:
            RemoteProtocolError: the schedule expects no such segment from the sender, or the
                announcement is malformed.
        """
        where = decode_announcement(payload)
        if memory is None or link.process is None:
            link.stop_pulling()
            return 0
        length = where.length
        header = FrameHeader(FrameKind.DATA, at.operation, at.step, at.offset, length)
        placement = self.place(link.peer, header)
        if placement is None:
            return 0
        placement.check = None
        into = [placement.view] if placement.view is not None else []
        received = length if into else 0
        while received < length:
            into.append(placement.memory(received))
            received += len(into[-1])
        arrived = False
        try:
            arrived = memory.pull(link.process, where, into)
        except OSError as error:
            _log.debug("cannot read the memory of peer %d: %s; using TCP", link.peer, error)
            link.stop_pulling()
        if arrived:
            placement.complete()
            return length
        del placement.inlet.claims[placement.hop.number]
        if placement.buffer is not None:
            self._buffers.give(placement.buffer)
        return 0

    def take_early(self, peer: PeerId, header: FrameHeader, payload: bytearray) -> None:
        """Copy a segment that arrived before the buffers were posted to its place, and count it.

        Raises:
            RemoteProtocolError: the schedule expects no such segment from ``peer``.
        """
        placement = self.place(peer, header)
        if placement is None:
            return
        received = 0
        while received < len(payload):
            memory = placement.memory(received)
            memory[:] = payload[received : received + len(memory)]
            received += len(memory)
        placement.complete()

    def copy_into(self, values: Array) -> Iterator[int]:
        """Copy the complete result as its caller will get it; yield the length of each segment."""
        for segment in self._layout.segments():
            span, coding = segment.span, self._coding
            part = coding.values_in_place(segment) if coding is not None else None
            part = self.result.elements(*span) if part is None else part
            values[span[0] // self._itemsize : span[1] // self._itemsize] = part
            yield segment.length

    def detach(self) -> None:
        """Release the caller's memory and restore the input, but keep sending from copies.

        The result is complete on this peer. So other members can only lack final values, which the
        copy of the result holds, and in a direct collective the input.
        """
        source = self.result = Memory([self.result.copy()], self.result.start)
        final: memoryview | None = self.result.first
        if self._coding is not None:
            self._coding.detach()
        if self._announcer is not None:
            self._announcer.withdraw()
        self._restore()
        self._saved = bytearray()
        if self._is_direct:
            source, final = Memory([self._operand.source.copy()]), None
        self._operand = Operand(
            source, self.result, source, self._operand.data_type, in_place=source is self.result
        )
        for outlet in self.outlets.values():
            outlet.detach(final)

    def end(self, *, committed: bool) -> None:
        """Release the caller's memory.

        Args:
            committed: whether the result counts; otherwise the input is restored.
        """
        for outlet in self.outlets.values():
            outlet.revoke()
        if self._announcer is not None:
            self._announcer.end()
        for inlet in self.inlets.values():
            inlet.claims.clear()
        if self.unweighed:
            self.unweighed.clear()
        if self._coding is not None:
            self._coding.end(committed=committed)
        if not committed:
            self._restore()
            return
        if self._saved:
            self._operand.is_overwritten = all(self._saved)

    # -- for the subclasses ----------------------------------------------------------------------

    def _connect(
        self,
        ring: tuple[PeerId, ...],
        incoming: Mapping[int, Route],
        outgoing: Mapping[int, Route],
        link_to: Callable[[PeerId], Link],
    ) -> dict[int, Outlet]:
        """Make inlets and outlets for segments that go straight from rank to rank.

        Returns:
            The outlets by rank, in the order of ``outgoing``.
        """
        self.inlets = {ring[rank]: Inlet(route) for rank, route in incoming.items()}
        to_rank = {
            rank: Outlet(self.operation, link_to(ring[rank]), route, self._payload, self._announcer)
            for rank, route in outgoing.items()
        }
        self.outlets = {ring[rank]: outlet for rank, outlet in to_rank.items()}
        self._flows = [peer for peer in ring if peer in self.inlets or peer in self.outlets]
        return to_rank

    @abstractmethod
    def _encoded(self, coding: Coding, step: int, segment: Segment) -> memoryview:
        """Return the encoded bytes of a contribution (step 0) or of a partial result."""

    def _payload(self, step: int, segment: Segment) -> Payload:
        """Return the wire bytes of a segment to send; at step 0, of the own contribution."""
        if step < self._coded_steps:
            assert self._coding is not None
            return partial(self._encoded, self._coding, step, segment)
        memory, (first, last) = self.result, segment.wire_span
        if not step:
            if self._reduction.scales:
                return partial(self._scaled, segment)
            memory = self._contribution(segment)
        return memory.first[first:last] if memory.is_one else memory.payload(first, last)

    def _weigh(self, weights: tuple[float, ...], rank: int, infinite: frozenset[int]) -> None:
        weighting = weigh(weights, rank)
        self.weighted.begin(weighting.muted, infinite)
        self._reduction = self._reduction.weigh(weighting)
        if self._coding is not None:
            self._coding.weigh(weighting)

    def _take_unweighed(self) -> None:
        """Process the segments that arrived before the weights."""
        waiting, self.unweighed = self.unweighed or (), None
        for placement in waiting:
            self.arrived(placement)

    def report_if_done(self) -> None:
        """Report the digest of the result if it has begun and no segment is missing."""
        if self.begun and not self.weighted.is_refused and not self.lacking:
            alike = self._gives_all_the_same
            self._on_done(self.operation, self._digest.value() if alike else _NO_DIGEST)

    def _contribution(self, segment: Segment) -> Memory:
        """Return the memory that holds the own contribution to a segment."""
        saved = self._saved and self._saved[segment.position]
        return self._operand.saved if saved else self._operand.source

    def _scaled(self, segment: Segment) -> memoryview:
        own = self._contribution(segment).elements(*segment.span)
        return self._reduction.sendable(own).view(np.uint8).data

    def _put(self, segment: Segment, buffer: memoryview) -> None:
        """Copy a segment from its buffer to its place in the result."""
        self.result.write(segment.span[0], buffer)
        self._buffers.give(buffer)

    def _combine(
        self, segment: Segment, left: Memory | Array, right: Memory | Array, *, finish: bool
    ) -> None:
        """Set a segment of the result to ``left`` op ``right``; arrays hold just this segment."""
        result, where = self.result, segment.span
        is_shredded = result.is_shredded(*where)
        parts = [] if is_shredded else result.arrays(*where)
        if len(parts) < 2:
            values = left if isinstance(left, np.ndarray) else left.elements(*where)
            others = right if isinstance(right, np.ndarray) else right.elements(*where)
            out = np.empty_like(values) if is_shredded else parts[0]
            self._reduction.combine(values, others, out, finish=finish)
            if is_shredded:
                result.write(segment.offset, out)
            return
        lefts = cut([left] if isinstance(left, np.ndarray) else left.arrays(*where), parts)
        rights = cut([right] if isinstance(right, np.ndarray) else right.arrays(*where), parts)
        for part, values, others in zip(parts, lefts, rights, strict=True):
            self._reduction.combine(values, others, out=part, finish=finish)

    def _take_alone(self, segment: Segment, only: Memory | Array | None, *, finish: bool) -> None:
        """Set a segment of the result to one contribution; None: to zeros."""
        values = only.elements(*segment.span) if isinstance(only, Memory) else only
        if values is None:
            values = np.zeros(segment.length // self._itemsize, self._dtype)
        self.result.write(segment.offset, self._reduction.finished(values) if finish else values)

    def _add_to_digest(self, segment: Segment) -> int:
        """Add the final bytes of a segment to the digest; return their hash."""
        result, (first, last) = self.result, segment.wire_span
        if result.is_one:
            check = self._digest.hashes[segment.position] = bytes_hash(result.first[first:last])
            return check
        return self._digest.add(segment.position, *result.views(first, last))

    def _take_final(self, placement: Placement) -> int:
        """Add an arrived final segment to the digest; return its hash."""
        if placement.check is None:
            return self._add_to_digest(placement.hop.segment)
        self._digest.hashes[placement.hop.segment.position] = placement.check
        return placement.check

    def _save(self, segment: Segment) -> None:
        """Save the own contribution to a segment before its place is first overwritten."""
        if not self._saved[segment.position]:
            self._saved[segment.position] = 1
            self._operand.save(*segment.span)

    def _restore(self) -> None:
        for segment in self._layout.segments():
            if self._saved and self._saved[segment.position]:
                self._operand.put_back(*segment.span)
