"""A link to one other peer, and its lanes: connections that carry frames.

Segments wait in the link, and each lane takes the next one when it has sent the last: a fast lane
takes more of them than a slow one, and what waits is not lost with a lane. Operations take turns,
so a small one does not wait for a large one. Within one, segments may arrive in any order. To
another machine, those of the lowest step go first: what all have contributed then spreads early,
and the loss of a member late in an operation costs little. Inside one machine, the newest of those
that were computed here goes first: it is still in the cache. A link is up while one lane is.

A lane parses headers, asks for memory before every read of payload, verifies what it has read,
sends what the link has queued, and answers a peer that asks whether it is alive. It does not know
what frames mean, and does not keep their payload.

Invariants:

* No lane acts on a header, or completes a payload, before it has verified it. It hashes a payload
  right after each read, and right before it sends the frame: while the payload is in the cache.
* Once :meth:`Lane.revoke` has returned, no lane reads memory of the operation any more. A frame
  that is already partly on its way is completed from a copy: the operation has ended here, but
  perhaps not yet for its receiver, which counts the frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from pccl.protocol.checksum import DamagedData, PayloadHasher
from pccl.protocol.frame import (
    HEADER_BYTES,
    NO_OPERATION,
    FrameHeader,
    FrameKind,
    decode_header,
)
from pccl.protocol.types import OperationId, PeerId
from pccl.transports.base import Connection
from pccl.transports.outgoing import Frame, Payload
from pccl.transports.sinks import Sink


class FrameHandler(Protocol):
    """Who understands the frames of a lane."""

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """A header has arrived. May raise RemoteProtocolError: the lane is closed.

        PINGs and PONGs are not passed on.
        """
        ...

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        """The lane is gone; called exactly once, and last. ``error`` is None if we closed it."""
        ...


_NO_MEMORY = memoryview(b"")
"""A lane keeps no memory of an operation alive that has ended."""


class Lane:
    """One connection that carries frames; the receiver of that connection.

    Args:
        connection: a connection whose handshake is over; it is started here.
        number: of the lane within its link.
        link: where segments to be sent come from.
        handler: whom to tell.
    """

    def __init__(
        self, connection: Connection, number: int, link: Link, handler: FrameHandler
    ) -> None:
        self.connection = connection
        self.number = number
        self.link = link
        self.carried: dict[OperationId, list[int]] = {}
        """Numbers of the segments that this lane was given: if it is lost, they may be, too."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self.payload_bytes = 0
        """Received of what frames carry."""
        self.intact_bytes = 0
        """Of payload whose hash is the sent one."""
        self.damaged_bytes = 0
        """Length of the payload that made it end because it was not intact."""
        self.moved_bytes = 0
        """Of segments sent, payload and PONGs received. Questions of the other side show nothing:
        they come although nothing from here may reach it."""
        self._handler = handler
        self._current: Frame | None = None
        self._own: dict[tuple[FrameKind, OperationId], Frame] = {}
        """Frames for this lane only; they come before segments."""
        self.ready = True
        """Whether it has nothing to send and the network would take something."""
        self._open = True
        self._head = bytearray(HEADER_BYTES)
        self._head_view = memoryview(self._head)
        self._memory = _NO_MEMORY
        """Where payload is being read to, between ``get_buffer`` and ``buffer_updated``."""
        self._sink: Sink | None = None
        self._hasher = PayloadHasher()
        """Of the payload that is arriving."""
        self._length = self._check = 0
        self._received = 0
        connection.start(self)

    @property
    def receiving(self) -> bool:
        """Whether a frame has begun to arrive."""
        return self._sink is not None

    @property
    def backlog_bytes(self) -> int:
        """Bytes that only this lane can send and the network has not taken."""
        current = self._current.missing if self._current is not None else 0
        return current + sum(frame.missing for frame in self._own.values())

    # -- sending -------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send until the network is full or nothing is left."""
        while self.ready:
            frame = self._current
            if frame is None:
                frame = self._next_frame()
                if frame is None:
                    return
            taken = self.connection.send(frame.rest())
            frame.sent += taken
            self.sent_bytes += taken
            if frame.number >= 0:
                self.moved_bytes += taken
            if frame.sent < frame.size:
                self.ready = False
                self.connection.notify_writable()
            else:
                self._current = None

    def say(self, header: FrameHeader, payload: bytes = b"") -> None:
        """Send a frame on this lane, before segments.

        It takes the place of one like it that still waits: who asks often costs no memory.
        """
        if not self._open:
            return
        like = (header.kind, header.operation)
        waiting = self._own.get(like)
        if waiting is not None and waiting.header.offset > header.offset:
            # Both answer numbered questions, and what is newer answers either.
            number = waiting.header.offset
            header = replace(header, offset=number)
        self._own[like] = Frame(header, payload)
        self.pump()

    def ping(self) -> None:
        """Ask the other side for a sign of life on this lane."""
        self.say(FrameHeader(FrameKind.PING, NO_OPERATION, 0, 0, 0))

    def pong(self) -> None:
        """Tell the other side that something arrives here on this lane."""
        self.say(FrameHeader(FrameKind.PONG, NO_OPERATION, 0, 0, 0))

    def revoke(self, operation: OperationId) -> None:
        """Drop the frames of ``operation``; its memory is not read after this, nor kept alive."""
        self._memory = _NO_MEMORY  # of a read that brought nothing
        self.carried.pop(operation, None)
        for kind in (FrameKind.QUERY, FrameKind.HAVE):
            self._own.pop((kind, operation), None)
        frame = self._current
        if frame is not None and frame.header.operation == operation:
            if frame.sent:
                frame.keep()
            else:
                self._current = None

    def detach(self, operation: OperationId, tensor: memoryview) -> None:
        """Send what is still to be sent of ``operation`` from ``tensor``; see ``Link.detach``."""
        frame = self._current
        if frame is not None and frame.header.operation == operation:
            frame.detach(tensor)

    def _next_frame(self) -> Frame | None:
        first = next(iter(self._own), None)
        frame = self.link.next_frame(self) if first is None else self._own.pop(first)
        self._current = frame
        if frame is not None and frame.number >= 0:
            self.carried.setdefault(frame.header.operation, []).append(frame.number)
        return frame

    # -- what the connection calls ---------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Memory for the rest of a header, or what the sink gives for the payload."""
        if self._sink is None:
            return self._head_view[self._received :]
        self._memory = self._sink.memory(self._received)
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        """Find the sink for a header; check payload by its hash, and complete the sink."""
        self.received_bytes += nbytes
        self._received += nbytes
        sink = self._sink
        if sink is not None:
            self.payload_bytes += nbytes
            self.moved_bytes += nbytes
            memory, self._memory = self._memory, _NO_MEMORY
            self._hasher.update(memory if len(memory) == nbytes else memory[:nbytes])
        else:
            if self._received < HEADER_BYTES:
                return
            self._received = 0
            header = decode_header(self._head)
            if header.kind is FrameKind.PING:
                self.pong()
                return
            if header.kind is FrameKind.PONG:
                self.moved_bytes += HEADER_BYTES
                return
            self._length, self._check = header.length, header.check
            self._hasher.reset()
            sink = self._sink = self._handler.frame_started(self, header)
        if self._received == self._length:
            if not self._length or self._hasher.intdigest() == self._check:
                self.intact_bytes += self._length
            elif sink.counts():
                self._refuse_damaged()
            self._sink = None
            self._received = 0
            sink.complete()

    def _refuse_damaged(self) -> None:
        reason = f"{self._length} bytes of payload were damaged on the way"
        self.damaged_bytes = self._length
        raise DamagedData(func="lane", reason=reason)

    def writable(self) -> None:
        """Send what waits."""
        self.ready = self._open
        self.pump()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell the sink of the frame that was arriving, and the handler."""
        self._stop()
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.lost()
        self._handler.lane_lost(self, error)

    def close(self) -> None:
        """Close in order: what the network has taken still arrives; what is queued does not."""
        self._stop()
        self.connection.close()

    def abort(self) -> None:
        """Close at once."""
        self._stop()
        self.connection.abort()

    def _stop(self) -> None:
        self._open = self.ready = False
        self._current = None
        self._own.clear()


class Link:
    """The lanes to ``peer``.

    Invariant: while a lane is ready, nothing waits.

    Attributes:
        peer: the other end.
        near: whether the other end is on this machine.
        told: how many lanes the other end was told that the link should have; 0: nobody told it.
    """

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self._lanes: deque[Lane] = deque()
        """The next one to be given a segment comes first."""
        self.near = False
        self.told = 0
        self._queues: dict[OperationId, deque[Frame]] = {}
        """What waits of each operation; the one whose turn is next comes first."""

    @property
    def up(self) -> bool:
        """Whether frames can be sent."""
        return bool(self._lanes)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All lanes, by number."""
        return tuple(sorted(self._lanes, key=_number))

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait for the network, on all lanes and here."""
        lanes = sum(lane.backlog_bytes for lane in self.lanes)
        return lanes + sum(frame.missing for queue in self._queues.values() for frame in queue)

    def waiting_bytes(self, kind: FrameKind) -> int:
        """Bytes of frames of this kind that no lane has taken."""
        waiting = (frame for queue in self._queues.values() for frame in queue)
        return sum(frame.size for frame in waiting if frame.header.kind is kind)

    # -- sending -------------------------------------------------------------------------------

    def send(
        self, header: FrameHeader, payload: Payload, number: int, check: int | None = None
    ) -> None:
        """Queue a segment; without a lane it waits for one.

        Args:
            header: of a DATA frame.
            payload: must stay valid until it is sent or revoked, or is made when it is sent.
            number: of the segment among all that its operation sends.
            check: the payload's hash, if it is known.
        """
        frame = Frame(header, payload, number, check)
        queue = self._queues.get(header.operation)
        if queue is None:
            self._queues[header.operation] = deque((frame,))
        elif self.near and header.step and header.kind is FrameKind.DATA:
            queue.appendleft(frame)
        else:
            place = len(queue)
            while place and queue[place - 1].header.step > header.step and not self.near:
                place -= 1
            queue.insert(place, frame)
        lanes = self._lanes
        for _ in range(len(lanes)):
            lane = lanes[0]
            lanes.rotate(-1)
            if lane.ready:
                lane.pump()
                return

    def ask(self, header: FrameHeader) -> None:
        """Send a question on every lane: one of them may be dead and not know it yet."""
        for lane in self.lanes:
            lane.say(header)

    def next_frame(self, lane: Lane) -> Frame | None:
        """Take the next segment for ``lane``; None: there is none."""
        if not self._queues:
            return None
        for operation in self._queues:
            if operation.term:
                break
        else:  # what no member waits for goes when nothing else does
            operation = next(iter(self._queues))
        queue = self._queues.pop(operation)
        frame = queue.popleft()
        if queue:
            self._queues[operation] = queue
        return frame

    def revoke(self, operation: OperationId) -> None:
        """Drop the frames of ``operation``; its memory is not read after this."""
        self._queues.pop(operation, None)
        for lane in self.lanes:
            lane.revoke(operation)

    def detach(self, operation: OperationId, tensor: memoryview) -> None:
        """Send what is still to be sent of ``operation`` from ``tensor``, a copy of the result.

        No other memory is read after this.
        """
        for frame in self._queues.get(operation, ()):
            frame.detach(tensor)
        for lane in self.lanes:
            lane.detach(operation, tensor)

    # -- lanes ---------------------------------------------------------------------------------

    def lane(self, number: int) -> Lane | None:
        """The lane with this number."""
        return next((lane for lane in self.lanes if lane.number == number), None)

    def add(self, lane: Lane) -> None:
        """Use one more lane."""
        self._lanes.append(lane)
        self.near = lane.connection.local.host == lane.connection.remote.host
        lane.pump()

    def remove(self, lane: Lane) -> bool:
        """Use ``lane`` no longer; return False if it was not in use."""
        if lane not in self._lanes:
            return False
        self._lanes.remove(lane)
        return True

    def close(self) -> None:
        """Close all lanes. What waits goes on waiting: for new lanes, or to be revoked."""
        for lane in self.lanes:
            lane.close()


def _number(lane: Lane) -> int:
    return lane.number


class Links:
    """The links of one peer by the other end, up or down.

    Args:
        make_link: makes the link to a peer.
    """

    def __init__(self, make_link: Callable[[PeerId], Link] = Link) -> None:
        self._make_link = make_link
        self._links: dict[PeerId, Link] = {}

    def to(self, peer: PeerId) -> Link:
        """The link to ``peer``, which may be down."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = self._make_link(peer)
        return link

    def find(self, peer: PeerId) -> Link | None:
        """The link to ``peer`` if it is up."""
        link = self._links.get(peer)
        return link if link is not None and link.up else None

    def all(self) -> list[Link]:
        """Every link, also those that are down."""
        return list(self._links.values())

    def drop(self, peer: PeerId) -> None:
        """Close the link to ``peer``, if there is one, and forget it."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()
