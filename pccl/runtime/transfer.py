"""``Transfer``: one running collective on this peer: schedule, buffers, received set.

Placement: each arriving segment is read straight into the place of the result that it belongs to.
If it is a partial result, the own contribution is combined with it there; then it travels on from
there. In place the own contribution is saved, segment by segment, right before the place is first
overwritten: that copy serves as the contribution and, after an abort, restores the input.

Exactly once: a segment counts when its last byte is here and it was not here before. While two
lanes carry copies of the same segment, the newest one has the place and the other is discarded.

Done is what has begun and lacks nothing: with nothing to receive (the root of a broadcast, anybody
in a barrier) as soon as it begins; never before, though the last segment may come earlier.

After :meth:`Transfer.end` nothing reads or writes the caller's memory any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.collectives.digest import ResultDigest
from pccl.collectives.layout import Segment
from pccl.collectives.received_set import ReceivedSet
from pccl.collectives.reductions import Reduction
from pccl.collectives.schedule import Schedule
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.messages import Progress
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.operand import Operand, nothing
from pccl.transports.lane import Lane
from pccl.transports.link import Link


@dataclass(slots=True)
class Placement:
    """A segment that a lane is receiving."""

    transfer: Transfer
    index: int
    """Number among all incoming segments."""
    segment: Segment
    step: int


class Transfer:
    """The data movement of one operation.

    Args:
        operation: its id.
        reduction: what becomes of the contributions.
        operand: the caller's buffers.
        schedule: the collective as this rank sees it.
        upstream: whom segments come from.
        downstream: the link that segments go to.
        on_done: called once with the digest, when the operation has begun and the result is
            complete; maybe from within :meth:`begin`.
    """

    def __init__(
        self,
        operation: OperationId,
        reduction: Reduction,
        operand: Operand,
        schedule: Schedule,
        upstream: PeerId,
        downstream: Link,
        on_done: Callable[[OperationId, bytes], None],
    ) -> None:
        self.operation = operation
        self.schedule = schedule
        self.upstream = upstream
        self.downstream = downstream
        self.begun = False
        self.ended = False
        self.tx_bytes = 0
        """Payload bytes handed to links, repetitions included."""
        self.rx_bytes = 0
        """Payload bytes that counted."""
        self._reduction = reduction
        self._operand = operand
        self._itemsize = operand.result.dtype.itemsize
        self._result_bytes = operand.result.view(np.uint8).data
        self._send_bytes = operand.send.view(np.uint8).data
        self._own_bytes = operand.own.view(np.uint8).data
        self._saved = bytearray(schedule.layout.segment_count if operand.in_place else 0)
        self._received = ReceivedSet(schedule.incoming_count)
        self._claims: dict[int, Lane | None] = {}
        self._ready = ReceivedSet(schedule.outgoing_count)
        self._flowing = downstream.up
        """Whether segments go out as soon as they are ready (not while the link is being mended)"""
        self._asked = False
        self._sent_since_asked: set[int] = set()
        """Of the outgoing segments; the answer, which may be older, says nothing about them."""
        self._watched = (-1, 0)
        """(bytes sent, since when) as last looked at."""
        self._digest = ResultDigest(schedule.layout.segment_count)
        self._on_done = on_done

    @property
    def progress(self) -> Progress:
        """How far this peer is."""
        return Progress(self.operation, len(self._received), len(self._ready))

    @property
    def lacking(self) -> int:
        """How many segments are still to come."""
        return self._received.missing

    @property
    def phase(self) -> str:
        """``reduce-scatter`` or ``gather`` (for traces)."""
        reduce_segments = self.schedule.first_gather_index
        return "reduce-scatter" if len(self._received) < reduce_segments else "gather"

    # -- sending -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Everybody has posted: send what does not wait for others."""
        self.begun = True
        for segment in self.schedule.initial_sends():
            self._offer(0, segment)
        if not self._flowing:
            self._query()
        for segment in self.schedule.initial_finals():
            self._digest.add(segment.position, self._send_bytes[_range(segment)])
        self._report_if_done()

    def link_changed(self) -> None:
        """The link to the downstream peer was lost or made anew.

        What was on its way may or may not have arrived, so nothing is sent until the other side
        has said what it lacks.
        """
        self._flowing = False
        if self.begun:
            self._query()

    def ask_if_idle(self, now_ns: int, patience_ns: int) -> None:
        """Ask the downstream peer what it has if nothing was sent for ``patience_ns``.

        Everything may have been handed to a connection that is dead, and the other side cannot
        always say so: only the younger of two peers dials. The answer, or that none comes, shows.
        """
        idle = self.begun and not self._asked and not self.downstream.backlog_bytes
        if not idle or self.tx_bytes != self._watched[0]:
            self._watched = (self.tx_bytes, now_ns)
        elif now_ns - self._watched[1] >= patience_ns:
            self._query()

    def awaits_answer_from(self, peer: PeerId) -> bool:
        """Whether ``peer`` was asked what it has and has not answered."""
        return self._asked and self.downstream.peer == peer

    def _query(self) -> None:
        if self.downstream.up and self.schedule.outgoing_count:
            self._asked = True
            self._sent_since_asked.clear()
            self.downstream.send(FrameHeader(FrameKind.QUERY, self.operation, 0, 0, 0))

    def have(self, bitmap: memoryview) -> None:
        """The downstream peer says which segments it has; send it the others that are ready.

        Only in answer to a query: nobody else decides what is sent twice.

        Raises:
            RemoteProtocolError: not a bitmap of this operation's segments.
        """
        try:
            missing = ReceivedSet.missing_in(bitmap, self.schedule.outgoing_count)
        except ValueError as error:
            raise RemoteProtocolError(func="lane", reason=str(error)) from error
        if not self._asked:
            return
        self._asked = False
        self._flowing = True
        outgoing = list(self.schedule.outgoing())
        for index in missing:
            if index in self._ready and index not in self._sent_since_asked:
                self._transmit(*outgoing[index])

    def _offer(self, step: int, segment: Segment) -> None:
        index = self.schedule.outgoing_index(step, segment)
        if self._ready.add(index) and self._flowing:
            if self._asked:
                self._sent_since_asked.add(index)
            self._transmit(step, segment)

    def _transmit(self, step: int, segment: Segment) -> None:
        source = self._result_bytes if step else self._send_bytes
        header = FrameHeader(FrameKind.DATA, self.operation, step, segment.offset, segment.length)
        self.tx_bytes += segment.length
        self.downstream.send(header, source[_range(segment)])

    # -- receiving -----------------------------------------------------------------------------

    def bitmap(self) -> bytes:
        """What has arrived, for the upstream peer."""
        return self._received.to_bitmap()

    def place(self, lane: Lane | None, header: FrameHeader) -> Placement | None:
        """A segment is about to arrive on ``lane`` (None: from the early store).

        Returns None if it is here already.

        Raises:
            RemoteProtocolError: the schedule expects no such segment.
        """
        found = self.schedule.incoming(header.step, header.offset, header.length)
        if found is None:
            reason = f"unexpected segment {header} of {self.operation}"
            raise RemoteProtocolError(func="lane", reason=reason)
        index, segment = found
        if self._is_second_copy(index):
            return None
        self._save(segment)
        self._claims[index] = lane
        return Placement(self, index, segment, header.step)

    def destination(self, placement: Placement, lane: Lane, received: int) -> memoryview | None:
        """Where the next bytes of a placed segment go; None: they count no longer."""
        if self.ended or self._claims.get(placement.index) is not lane:
            return None
        segment = placement.segment
        return self._result_bytes[segment.offset + received : segment.offset + segment.length]

    def complete(self, placement: Placement, lane: Lane | None) -> None:
        """The last byte of a placed segment is here."""
        index = placement.index
        if self.ended or index not in self._claims or self._claims[index] is not lane:
            return
        del self._claims[placement.index]
        if not self._received.add(placement.index):
            return
        segment, step = placement.segment, placement.step
        self.rx_bytes += segment.length
        arrival = self.schedule.arrival(step)
        if arrival.reduce:
            self._reduction.combine(
                self._elements(self._operand.result, segment),
                self._elements(self._operand.own, segment),
                finish=arrival.finish,
            )
        if arrival.forward:
            self._offer(step + 1, segment)
        if arrival.final:
            self._digest.add(segment.position, self._result_bytes[_range(segment)])
        self._report_if_done()

    def _report_if_done(self) -> None:
        if self.begun and not self._received.missing:
            self._on_done(self.operation, self._digest.value())

    def take_early(self, header: FrameHeader, payload: bytearray) -> None:
        """A segment that arrived before the buffers were posted.

        Raises:
            RemoteProtocolError: the schedule expects no such segment.
        """
        placement = self.place(None, header)
        if placement is not None:
            self._result_bytes[_range(placement.segment)] = payload
            self.complete(placement, None)

    # -- the end -------------------------------------------------------------------------------

    def detach(self) -> None:
        """The caller leaves after the result was complete: go on, for the others, from a copy.

        Final values are all that a neighbour may still lack of a peer that is done. The caller's
        memory is let go of, and his input is what it was.
        """
        copy = memoryview(bytes(self._result_bytes))
        self.downstream.detach(self.operation)
        self._restore()
        self._saved = bytearray()
        self._operand = nothing(self._operand.data_type)
        self._result_bytes = self._send_bytes = self._own_bytes = copy

    def end(self, *, committed: bool) -> None:
        """Let go of the caller's memory; unless committed, make the input what it was."""
        self.downstream.revoke(self.operation)
        self.ended = True
        self._claims.clear()
        if not committed:
            self._restore()
        elif self._saved:
            self._operand.overwritten[0] = all(self._saved)

    def _is_second_copy(self, index: int) -> bool:
        return index in self._received

    def _save(self, segment: Segment) -> None:
        if self._operand.in_place and not self._saved[segment.position]:
            self._saved[segment.position] = 1
            self._own_bytes[_range(segment)] = self._send_bytes[_range(segment)]

    def _restore(self) -> None:
        for segment in self.schedule.layout.segments():
            if self._saved and self._saved[segment.position]:
                self._result_bytes[_range(segment)] = self._own_bytes[_range(segment)]

    def _elements(self, array: npt.NDArray[Any], segment: Segment) -> npt.NDArray[Any]:
        first = segment.offset // self._itemsize
        return array[first : first + segment.length // self._itemsize]


def _range(segment: Segment) -> slice:
    return slice(segment.offset, segment.offset + segment.length)
