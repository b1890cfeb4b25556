"""``Transfer``: one running collective on this peer: schedule, buffers, received set.

Placement: each arriving segment is read straight into the place of the result that it belongs to.
If it is a partial result, the own contribution is combined with it there; then it travels on from
there. In place the own contribution is saved, segment by segment, right before the place is first
overwritten: that copy serves as the contribution and, after an abort, restores the input.

Exactly once: a segment counts when its last byte is here and it was not here before. While two
lanes carry copies of the same segment, the newest one has the place and the other is discarded.
What was given to a lane that is lost may or may not have arrived: the receiver is asked, and only
what it lacks of that is sent again.

Done is what has begun and lacks nothing: with nothing to receive (the root of a broadcast, anybody
in a barrier) as soon as it begins; never before, though the last segment may come earlier.

Across a gap: when ranks are lost, the rank behind them takes from the one before them what the lost
ones would have sent on: final values only, under the steps and numbers that the receiver knows.

Another attempt: partial sums that an aborted attempt of the same call has left count as received if
everybody resumes that attempt. Which of them the neighbour lacks he is asked before any is sent, so
no segment comes before he has begun; one that does shows that nothing is resumed.

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
from pccl.collectives.ring import RingSchedule
from pccl.collectives.schedule import Schedule
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.messages import Progress
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.carry import Carry, Seeds
from pccl.runtime.discard import discard
from pccl.runtime.operand import Operand, nothing
from pccl.transports.link import Link


@dataclass(slots=True, eq=False)
class Placement:
    """A segment that is arriving; the sink of its frame."""

    transfer: Transfer
    index: int
    """Number among all incoming segments."""
    segment: Segment
    step: int
    received: int = 0
    """Bytes, as of the last read but one."""

    def memory(self, received: int) -> memoryview:
        """See ``Sink``: its place in the result, unless it counts no longer."""
        segment = self.segment
        self.received = received
        if not self.transfer.expects(self):
            return discard(segment.length - received)
        first = segment.offset
        return self.transfer.result_bytes[first + received : first + segment.length]

    def complete(self) -> None:
        """See ``Sink``."""
        self.transfer.complete(self)

    def lost(self) -> None:
        """See ``Sink``: a copy of it will come on another lane."""


class Transfer:
    """The data movement of one operation.

    Args:
        operation: its id.
        reduction: what becomes of the contributions.
        operand: the caller's buffers.
        schedule: the collective as this rank sees it.
        upstream: whom segments come from.
        downstream: the link that segments go to.
        ring: all members, in ring order.
        carry: what an attempt before this one has left in the operand's memory.
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
        ring: tuple[PeerId, ...] = (),
        carry: Carry | None = None,
    ) -> None:
        self.operation = operation
        self.schedule = schedule
        self.upstream = upstream
        self.downstream = downstream
        self.begun = False
        self.what = 0
        """The fingerprint that goes with what is sent ahead of the start; otherwise 0."""
        self.tx_bytes = 0
        """Payload bytes handed to links, repetitions included."""
        self.rx_bytes = 0
        """Payload bytes that counted."""
        self.result_bytes = operand.result.view(np.uint8).data
        self._sends_as = schedule
        """The rank that the downstream peer takes us for: our own, or the last of the lost ones."""
        self._gap = 0
        """How many ranks are lost between us and the downstream peer."""
        self._reduction = reduction
        self._operand = operand
        self._itemsize = operand.result.dtype.itemsize
        self._send_bytes = operand.send.view(np.uint8).data
        self._own_bytes = operand.own.view(np.uint8).data
        self._saved = bytearray(schedule.layout.segment_count if operand.in_place else 0)
        self._received = ReceivedSet(schedule.incoming_count)
        self._claims: dict[int, Placement] = {}
        self._ready = ReceivedSet(schedule.outgoing_count)
        self._held: list[tuple[int, Segment]] = []
        """What can be sent on and came before the beginning: others are ahead of it."""
        self._question = 0
        """Number of the last question to the downstream peer."""
        self._is_resumed = False
        self._unheard = False
        """Whether something is resumed and the downstream peer has not yet shown that it has begun,
        by an answer: it must not be sent any segment before."""
        self._doubtful: dict[int, int] = {}
        """Outgoing segments that were given to a lane that was lost, by number, and the question
        that was asked after that: its answer, or a later one's, says whether they arrived."""
        self._digest = ResultDigest(schedule.layout.segment_count)
        self._on_done = on_done
        self._ring = ring
        self._carry = carry
        self.left: Carry | None = None
        """After the end: what another attempt can use."""
        self._when_begun: dict[object, Callable[[], None]] = {}

    @property
    def progress(self) -> Progress:
        """How far this peer is."""
        partial = sum(placement.received for placement in self._claims.values())
        received_bytes = self.rx_bytes + partial
        return Progress(self.operation, len(self._received), len(self._ready), received_bytes)

    @property
    def lacking(self) -> int:
        """How many segments are still to come."""
        return self._received.missing

    @property
    def phase(self) -> str:
        """``reduce-scatter`` or ``gather`` (for traces)."""
        reduce_segments = self.schedule.first_gather_index
        return "reduce-scatter" if len(self._received) < reduce_segments else "gather"

    @property
    def partners(self) -> tuple[PeerId, ...]:
        """Whom segments come from and go to."""
        receives, sends = self.schedule.incoming_count > 0, self._sends_as.outgoing_count > 0
        return (self.upstream,) * receives + (self.downstream.peer,) * sends

    @property
    def answer_bytes(self) -> int:
        """Length of a bitmap of all outgoing segments."""
        return (self._sends_as.outgoing_count + 7) // 8

    def sends_to(self, peer: PeerId) -> bool:
        """Whether segments go to ``peer``."""
        return self.downstream.peer == peer and self._sends_as.outgoing_count > 0

    # -- sending -------------------------------------------------------------------------------

    def begin(self, *, resumed: bool = False) -> None:
        """Everybody has posted: send what does not wait for others.

        Args:
            resumed: everybody carries on with what the same attempt has left.
        """
        self.begun = True
        carry, self._carry = self._carry, None
        seeds = carry.seeds(self._ring) if carry is not None and resumed else None
        if carry is not None and seeds is not None:
            self._resume(carry, seeds)
        elif carry is not None:
            carry.restore()
        for answer in self._when_begun.values():
            answer()
        self._when_begun.clear()
        if seeds is not None:
            self.ask()
        else:
            for segment in self.schedule.initial_sends():
                self._offer(0, segment)
            for segment in self.schedule.initial_finals():
                self._digest.add(segment.position, self._send_bytes[_range(segment)])
        for step, segment in self._held:
            self._offer(step, segment)
        self._held.clear()
        self._report_if_done()

    def lane_lost(self, numbers: list[int]) -> None:
        """A lane to the downstream peer is gone: ask which of the segments it was given arrived."""
        self._question += 1
        self._doubtful.update(dict.fromkeys(numbers, self._question))
        self.ask()

    def ask(self) -> None:
        """Ask (again) about what is doubtful; for every new lane, so that all have been asked."""
        if self._doubtful or self._unheard:
            number, what = self._question, self.what
            question = FrameHeader(FrameKind.QUERY, self.operation, 0, number, 0, what)
            self.downstream.ask(question)

    def have(self, question: int, bitmap: memoryview) -> None:
        """The downstream peer says which segments it has; send it again what is lost.

        Raises:
            RemoteProtocolError: not a bitmap of this operation's segments, or nobody asked.
        """
        if not 0 < question <= self._question:
            reason = f"answer to question {question}; {self._question} were asked"
            raise RemoteProtocolError(func="lane", reason=reason)
        first, self._unheard = self._unheard, False
        settled = [number for number, asked in self._doubtful.items() if asked <= question]
        if not settled and not first:
            return
        try:
            missing = ReceivedSet.missing_in(bitmap, self._sends_as.outgoing_count)
        except ValueError as error:
            raise RemoteProtocolError(func="lane", reason=str(error)) from error
        for number in settled:
            del self._doubtful[number]
        if first:
            for number in set(range(self._sends_as.outgoing_count)).difference(missing):
                self._ready.add(number)  # it has them from the attempt before
        outgoing = list(self._sends_as.outgoing())
        for number in sorted(set(settled).intersection(missing)):
            self._transmit(*outgoing[number], number)

    def _offer(self, step: int, segment: Segment) -> None:
        step += self._gap
        if step >= self._sends_as.step_count:
            return  # the rank behind the gap has finished it
        number = self._sends_as.outgoing_index(step, segment)
        if not self._ready.add(number):
            return
        if self._unheard:
            self._doubtful[number] = self._question
        else:
            self._transmit(step, segment, number)

    def _transmit(self, step: int, segment: Segment, number: int) -> None:
        source = self.result_bytes if step else self._contribution(segment)
        header = FrameHeader(
            FrameKind.DATA, self.operation, step, segment.offset, segment.length, self.what
        )
        self.tx_bytes += segment.length
        self.downstream.send(header, source[_range(segment)], number)

    def _contribution(self, segment: Segment) -> memoryview:
        saved = self._saved and self._saved[segment.position]
        return self._own_bytes if saved else self._send_bytes

    # -- another attempt -----------------------------------------------------------------------

    def when_begun(self, asker: object, answer: Callable[[], None]) -> None:
        """Answer a question, now or once it is known whether anything is resumed.

        Of one asker only the last question waits.
        """
        if self._carry is None:
            answer()
        else:
            self._when_begun[asker] = answer

    def _resume(self, carry: Carry, seeds: Seeds) -> None:
        """Take what is left for received; what can be sent is doubtful until somebody has asked."""
        schedule = self.schedule = self._sends_as = seeds.schedule
        self._saved = carry.saved
        self._received = ReceivedSet(schedule.incoming_count)
        self._ready = ReceivedSet(schedule.outgoing_count)
        self._digest = ResultDigest(schedule.layout.segment_count)
        here = [(0, segment) for segment in schedule.initial_sends()]
        for index, (step, segment) in enumerate(schedule.incoming_segments()):
            arrival = schedule.arrival(step)
            whole = arrival.finish and not self._reduction.divides
            if not (arrival.reduce and seeds.usable[segment.position]):
                continue
            if whole:
                self._digest.add(segment.position, self.result_bytes[_range(segment)])
            if whole or not arrival.finish:
                self._received.add(index)
                here.append((step + 1, segment))
        self._question += 1
        self._is_resumed = self._unheard = True
        for step, segment in here:
            number = schedule.outgoing_index(step, segment)
            self._ready.add(number)
            self._doubtful[number] = self._question

    def _supersede(self, step: int, segment: Segment) -> None:
        """A final value comes: its partial sum is not needed any more, and must not come after it.

        Somebody further on may have had it from the attempt before, and this rank not.
        """
        found = None
        if step >= self.schedule.world_size:
            partial = step - self.schedule.world_size
            found = self.schedule.incoming(partial, segment.offset, segment.length)
        if found is not None and self._received.add(found[0]):
            self._claims.pop(found[0], None)

    def _set_aside(self) -> Carry | None:
        """Keep what another attempt can use: partial sums that no final value has overwritten."""
        schedule = self.schedule
        if self._carry is not None or not isinstance(schedule, RingSchedule):
            return self._carry
        partial = bytearray(schedule.layout.segment_count)
        for index, (step, segment) in enumerate(schedule.incoming_segments()):
            arrival = schedule.arrival(step)
            if arrival.reduce:
                partial[segment.position] = not arrival.finish and index in self._received
            elif index in self._received or index in self._claims:
                partial[segment.position] = 0
        return Carry(self.operation, self._ring, schedule, self._operand, self._saved, partial)

    # -- across a gap --------------------------------------------------------------------------

    def lacks_irreplaceable(self, gap: int) -> bool:
        """Whether a segment is missing that only the ``gap`` ranks before this one could send."""
        first = range(self.schedule.irreplaceable_count(gap))
        return any(index not in self._received for index in first)

    def send_across(self, downstream: Link, gap: int) -> None:
        """The ``gap`` ranks behind this one are lost: send to the peer behind them instead.

        It is asked first which of the final values that are here it lacks. Told twice changes
        nothing.
        """
        if self.downstream is downstream:
            return
        self.downstream.revoke(self.operation)
        self.downstream = downstream
        self._gap = gap
        self._sends_as = self.schedule.seen_by(self.schedule.rank + gap)
        self._ready = ReceivedSet(self._sends_as.outgoing_count)
        self._doubtful.clear()
        self._unheard = False
        self._question += 1
        there = self.schedule.seen_by(self.schedule.rank + gap + 1).irreplaceable_count(gap)
        for number, (step, segment) in enumerate(self._sends_as.outgoing()):
            if number < there:
                self._ready.add(number)
            elif self._is_final(step - gap, segment):
                self._ready.add(number)
                self._doubtful[number] = self._question
        self.ask()

    def _is_final(self, step: int, segment: Segment) -> bool:
        """Whether the final value of a segment that this rank sends at ``step`` is here."""
        if not step:
            return bool(self.schedule.initial_finals())
        found = self.schedule.incoming(step - 1, segment.offset, segment.length)
        return found is not None and found[0] in self._received

    # -- receiving -----------------------------------------------------------------------------

    def bitmap(self) -> bytes:
        """What has arrived, for the upstream peer."""
        return self._received.to_bitmap()

    def place(self, header: FrameHeader) -> Placement | None:
        """A segment is about to arrive. Returns None if it is here already.

        Raises:
            RemoteProtocolError: the schedule expects no such segment.
        """
        found = self.schedule.incoming(header.step, header.offset, header.length)
        if found is None:
            reason = f"unexpected segment {header} of {self.operation}"
            raise RemoteProtocolError(func="lane", reason=reason)
        if self._carry is not None:
            self._carry.restore()
            self._carry = None
        index, segment = found
        if self._is_second_copy(index):
            return None
        if self._is_resumed:
            self._supersede(header.step, segment)
        self._save(segment)
        placement = self._claims[index] = Placement(self, index, segment, header.step)
        return placement

    def expects(self, placement: Placement) -> bool:
        """Whether a segment that is arriving still counts: nothing has ended, no newer copy."""
        return self._claims.get(placement.index) is placement

    def complete(self, placement: Placement) -> None:
        """The last byte of a placed segment is here."""
        if not self.expects(placement):
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
        if arrival.forward and self.begun:
            self._offer(step + 1, segment)
        elif arrival.forward:
            self._held.append((step + 1, segment))
        if arrival.final:
            self._digest.add(segment.position, self.result_bytes[_range(segment)])
        self._report_if_done()

    def _report_if_done(self) -> None:
        if self.begun and not self._received.missing:
            self._on_done(self.operation, self._digest.value())

    def take_early(self, header: FrameHeader, payload: bytearray) -> None:
        """A segment that arrived before the buffers were posted.

        Raises:
            RemoteProtocolError: the schedule expects no such segment.
        """
        placement = self.place(header)
        if placement is not None:
            self.result_bytes[_range(placement.segment)] = payload
            self.complete(placement)

    # -- the end -------------------------------------------------------------------------------

    def detach(self) -> None:
        """The caller leaves after the result was complete: go on, for the others, from a copy.

        Final values are all that a neighbour may still lack of a peer that is done. The caller's
        memory is let go of, and his input is what it was.
        """
        copy = memoryview(bytes(self.result_bytes))
        self.downstream.detach(self.operation, copy)
        self._restore()
        self._saved = bytearray()
        self._operand = nothing(self._operand.data_type)
        self.result_bytes = self._send_bytes = self._own_bytes = copy

    def end(self, *, committed: bool, keep: bool = False) -> None:
        """Let go of the caller's memory.

        Args:
            committed: otherwise the input becomes what it was,
            keep: or the memory stays as it is, with ``left``, for another attempt.
        """
        self.downstream.revoke(self.operation)
        if keep and not committed:
            self.left = self._set_aside()
        self._claims.clear()
        if self.left is not None:
            return
        if not committed:
            if self._carry is not None:
                self._carry.restore()
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
                self.result_bytes[_range(segment)] = self._own_bytes[_range(segment)]

    def _elements(self, array: npt.NDArray[Any], segment: Segment) -> npt.NDArray[Any]:
        first = segment.offset // self._itemsize
        return array[first : first + segment.length // self._itemsize]


def _range(segment: Segment) -> slice:
    return slice(segment.offset, segment.offset + segment.length)
