"""A link to one other peer, and its lanes: connections that carry frames.

The link queues segments, and a lane that has sent its segment takes the next. So a fast lane takes
more than a slow one, and losing a lane loses no queued segment. Operations take turns, so a small
one does not wait for a large one. Within an operation, segments may arrive in any order. To another
machine, the link sends the lowest step first. Contributions of all members then spread early, so
losing a member late in an operation costs little. Inside one machine, the link sends the newest
segment first, because it is still in the cache. A link is up while it has a lane.

A lane parses headers, asks for memory before every read of payload, and verifies the payload. It
sends queued frames, and answers PINGs. It neither interprets frames nor keeps their payload.

Invariants:

* No lane acts on a header with a wrong checksum, or completes a payload with a wrong hash, unless
  its sink ignores the hash. It hashes a payload right after each read, and right before sending.
* Once :meth:`Lane.revoke` has returned, no lane reads memory of the operation. A lane
  completes a partly sent frame from a copy. The operation has ended here, but perhaps not yet at
  the receiver, which counts the frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Protocol

from pccl.protocol.checksum import DamagedData, PayloadHasher
from pccl.protocol.frame import (
    HEADER_BYTES,
    NO_OPERATION,
    SEGMENT_KINDS,
    FrameHeader,
    FrameKind,
    Moved,
    decode_header,
)
from pccl.protocol.types import OperationId, PeerId
from pccl.transports.base import Connection, Traffic
from pccl.transports.outgoing import Frame, Payload
from pccl.transports.sinks import Sink


class FrameHandler(Protocol):
    """The callbacks of a lane. An implementation interprets its frames."""

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """Return the sink for the payload of a frame whose header has arrived.

        The lane handles PING and PONG itself. If this raises RemoteProtocolError, the lane closes.
        """
        ...

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        """Handle the end of ``lane``. Called last, once; ``error`` is None if this side closed."""
        ...


LONG_FRAME_NS = 1_000_000
"""A lane that worked so long on one frame sends the next one in another turn of the loop. A sparse
segment is 1/150 of what is encoded for it, so the network would take seconds of work at once."""

_NO_MEMORY = memoryview(b"")
"""Replaces memory of an operation that has ended, so that the lane does not keep it alive."""


class Lane:
    """One connection that carries frames. The lane is the receiver of that connection.

    Args:
        connection: a connection whose handshake is over; the lane starts it.
        number: number of the lane within its link.
        link: supplies the segments to send.
        handler: interprets incoming frames, and handles the end of the lane.
        moved: takes every segment that the lane sends or receives; None: they are not recorded.
        now_ns: gives the time.
    """

    def __init__(
        self,
        connection: Connection,
        number: int,
        link: Link,
        handler: FrameHandler,
        moved: deque[Moved] | None = None,
        now_ns: Callable[[], int] = int,
    ) -> None:
        self.connection = connection
        self.number = number
        self.link = link
        self.carried: dict[OperationId, list[int]] = {}
        """Numbers of the segments that this lane took; losing the lane may lose them."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self.payload_bytes = 0
        """Payload bytes received."""
        self.intact_bytes = 0
        """Bytes of received payloads with the right hash."""
        self.damaged_bytes = 0
        """Length of the damaged payload that ended the lane; 0 if there was none."""
        self.moved_bytes = 0
        """Bytes of segments sent, and of payload and PONGs received. PINGs of the other side do not
        count, because they prove nothing about the path to it."""
        self.asks = 0
        """PINGs of the other side."""
        self._handler = handler
        self._note = (deque[Moved](maxlen=0) if moved is None else moved).append
        self._now_ns = now_ns
        self._sending_ns = self._receiving_ns = 0
        """When the lane took the current frame, and when the last header arrived."""
        self._current: Frame | None = None
        self._own: dict[tuple[FrameKind, OperationId], Frame] = {}
        """Frames for this lane only; the lane sends them before segments."""
        self.ready = True
        """Whether the lane has nothing to send and the network accepts bytes."""
        self._open = True
        self._head = bytearray(HEADER_BYTES)
        self._head_view = memoryview(self._head)
        self._memory = _NO_MEMORY
        """Memory of the current payload read, between ``get_buffer`` and ``buffer_updated``."""
        self._sink: Sink | None = None
        self._hasher = PayloadHasher()
        self._header: FrameHeader | None = None
        """Hash and header of the payload that is arriving."""
        self._received = 0
        connection.start(self)

    @property
    def receiving(self) -> bool:
        """Whether a header has arrived whose payload is not complete yet."""
        return self._sink is not None

    @property
    def backlog_bytes(self) -> int:
        """Unsent bytes that only this lane can send."""
        current = self._current.missing if self._current is not None else 0
        if not self._own:  # nearly always, and every tick asks
            return current
        return current + sum(frame.missing for frame in self._own.values())

    # -- sending -------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send frames until the network is full or no frame is left."""
        while self.ready:
            frame = self._current
            if frame is None:
                if not (self._own or self.link.queues):
                    return
                frame = self._next_frame()
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
                header = frame.header
                if header.kind in SEGMENT_KINDS:  # a call for each segment would cost more
                    times = self._sending_ns, self._now_ns()
                    self._note((*times, self.link.peer, self.number, True, header.length, header))
                    if taken == frame.size and times[1] - times[0] >= LONG_FRAME_NS:
                        self.ready = False
                        self.connection.notify_writable()
                        return

    def pulled(self, nbytes: int) -> None:
        """Count ``nbytes`` of a segment that was announced on this lane, and pulled."""
        self.payload_bytes += nbytes
        self.intact_bytes += nbytes
        self.moved_bytes += nbytes

    def say(self, header: FrameHeader, payload: bytes = b"") -> None:
        """Send a frame on this lane, before segments.

        It replaces a queued frame of the same kind and operation, so PINGs do not pile up.
        """
        if not self._open:
            return
        like = (header.kind, header.operation)
        waiting = self._own.get(like)
        if waiting is not None and waiting.header.offset > header.offset:
            # Both frames answer numbered queries. The newer frame also answers the later query.
            number = waiting.header.offset
            header = replace(header, offset=number)
        self._own[like] = Frame(header, payload)
        self.pump()

    def ping(self) -> None:
        """Ask the other side to answer on this lane, to prove that the lane works."""
        self.say(FrameHeader(FrameKind.PING, NO_OPERATION, 0, 0, 0))

    def pong(self) -> None:
        """Answer a PING, to show the other side that its frames arrive on this lane."""
        self.say(FrameHeader(FrameKind.PONG, NO_OPERATION, 0, 0, 0))

    def revoke(self, operation: OperationId) -> None:
        """Drop the frames of ``operation``. The lane no longer reads or keeps its memory."""
        self._memory = _NO_MEMORY  # left by a read that found no data
        self.carried.pop(operation, None)
        for kind in (FrameKind.QUERY, FrameKind.HAVE):
            self._own.pop((kind, operation), None)
        frame = self._current
        if frame is not None and frame.header.operation == operation:
            if frame.sent:
                frame.keep()
            else:
                self._current = None

    def detach(self, operation: OperationId, payload_of: Callable[[FrameHeader], Payload]) -> None:
        """Send the rest of ``operation`` from other memory; see ``Link.detach``."""
        frame = self._current
        if frame is not None and frame.header.operation == operation:
            frame.detach(payload_of)

    def carry(self, frame: Frame) -> None:
        """Send a segment at once. The lane must be ready."""
        self._current = frame
        self._sending_ns = self._now_ns()
        if frame.number >= 0:
            self.carried.setdefault(frame.header.operation, []).append(frame.number)
        self.pump()

    def _next_frame(self) -> Frame:
        first = next(iter(self._own), None)
        frame = self.link.next_frame() if first is None else self._own.pop(first)
        self._current = frame
        self._sending_ns = self._now_ns()
        if frame.number >= 0:
            self.carried.setdefault(frame.header.operation, []).append(frame.number)
        return frame

    # -- callbacks of the connection -------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return memory for the rest of a header, or the sink's memory for the payload."""
        if self._sink is None:
            return self._head_view[self._received :]
        self._memory = self._sink.memory(self._received)
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes read: find the sink for a header, verify and complete a payload."""
        self.received_bytes += nbytes
        self._received += nbytes
        sink, header = self._sink, self._header
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
                self.asks += 1
                self.pong()
                return
            if header.kind is FrameKind.PONG:
                self.moved_bytes += HEADER_BYTES
                return
            self._receiving_ns = self._now_ns()
            self._header = header
            self._hasher.reset()
            sink = self._sink = self._handler.frame_started(self, header)
        assert header is not None
        length = header.length
        if self._received == length:
            if not length or self._hasher.intdigest() == header.check:
                self.intact_bytes += length
            elif sink.counts():
                self._refuse_damaged(length)
            self._sink = None
            self._received = 0
            if header.kind not in SEGMENT_KINDS:
                sink.complete()
                return
            began_ns, ended_ns = self._receiving_ns, self._now_ns()
            payload_bytes = self.payload_bytes
            sink.complete()
            if header.kind is FrameKind.ANNOUNCE:  # the segment has been pulled now
                ended_ns, length = self._now_ns(), self.payload_bytes - payload_bytes
            self._note((began_ns, ended_ns, self.link.peer, self.number, False, length, header))

    def _refuse_damaged(self, length: int) -> None:
        reason = f"a payload of {length} bytes was damaged on the way"
        self.damaged_bytes = length
        raise DamagedData(func="lane", reason=reason)

    def writable(self) -> None:
        """Send queued frames, because the network accepts bytes again."""
        self.ready = self._open
        self.pump()

    def connection_lost(self, error: Exception | None) -> None:
        """Report the loss to the sink of the incoming frame, if any, and to the handler."""
        self._stop()
        sink, self._sink = self._sink, None
        if isinstance(error, DamagedData) and sink is not None and self._header is not None:
            self.damaged_bytes = self._header.length  # at most: a sealed record failed
        if sink is not None:
            sink.lost()
        self._handler.lane_lost(self, error)

    def close(self) -> None:
        """Close the lane. Bytes that the network accepted still arrive, queued frames do not."""
        self._stop()
        self.connection.close()

    def abort(self) -> None:
        """Close at once; bytes in transit may be lost."""
        self._stop()
        self.connection.abort()

    def _stop(self) -> None:
        self._open = self.ready = False
        self._current = None
        self._own.clear()


class Link:
    """The lanes to ``peer``, and the segments that wait for them.

    Invariant: while a lane is ready, no segment waits.

    Attributes:
        peer: the peer at the other end.
        near: whether that peer is on this machine.
        told: number of lanes that the dialling side announced; 0: no lane was connected yet.
        process: id of the peer's process, if this one can pull segments from its memory.
        pulls: whether the peer pulls segments that this process announces.
        broken: numbers of lanes that were lost, or failed, and are not replaced yet.
    """

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.broken: set[int] = set()
        self._by_number: tuple[Lane, ...] = ()
        self._lanes: deque[Lane] = deque()
        """Lanes in the order in which they are offered the next segment."""
        self.near = False
        self.told = 0
        self.process: int | None = None
        self.pulls = False
        self.queues: dict[OperationId, deque[Frame]] = {}
        """Queued segments by operation; the operation whose turn is next comes first."""

    @property
    def up(self) -> bool:
        """Whether the link has a lane, so that it can send frames."""
        return bool(self._lanes)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All lanes, ordered by number."""
        return self._by_number

    @property
    def backlog_bytes(self) -> int:
        """Unsent bytes of all lanes and of the queued segments."""
        lanes = sum(lane.backlog_bytes for lane in self.lanes)
        return lanes + sum(frame.missing for queue in self.queues.values() for frame in queue)

    def waiting_bytes(self, kind: FrameKind) -> int:
        """Return the bytes of queued frames of this kind that no lane has taken."""
        waiting = (frame for queue in self.queues.values() for frame in queue)
        return sum(frame.size for frame in waiting if frame.header.kind is kind)

    # -- sending -------------------------------------------------------------------------------

    def send(
        self, header: FrameHeader, payload: Payload, number: int, check: int | None = None
    ) -> None:
        """Queue a segment. If the link is down, the segment waits for a lane.

        Args:
            header: header of the frame.
            payload: the payload, valid until sent or revoked; or a function that makes it.
            number: number of the segment among all that its operation sends; -1: what is sent shows
                no progress.
            check: hash of the payload; None: the lane computes it.
        """
        frame = Frame(header, payload, number, check)
        lanes = self._lanes
        for _ in range(len(lanes)):
            lane = lanes[0]
            lanes.rotate(-1)
            if lane.ready:
                lane.carry(frame)
                return
        queue = self.queues.get(header.operation)
        if queue is None:
            self.queues[header.operation] = deque((frame,))
        elif self.near and header.step and header.kind is FrameKind.DATA:
            queue.appendleft(frame)
        else:
            place = len(queue)
            while place and queue[place - 1].header.step > header.step and not self.near:
                place -= 1
            queue.insert(place, frame)

    def ask(self, header: FrameHeader) -> None:
        """Send a query on every lane, because a lane may have failed unnoticed."""
        for lane in self.lanes:
            lane.say(header)

    def next_frame(self) -> Frame:
        """Remove and return the next segment. At least one must be queued."""
        for operation in self.queues:
            if operation.term:
                break
        else:  # no member waits for an operation of term 0, so it goes last
            operation = next(iter(self.queues))
        queue = self.queues.pop(operation)
        frame = queue.popleft()
        if queue:
            self.queues[operation] = queue
        return frame

    def stop_pulling(self) -> None:
        """Tell the peer that its memory cannot be read, so that it sends what it announced.

        Every lane carries this, because a lane may fail unnoticed.
        """
        self.process = None
        for lane in self.lanes:
            lane.say(FrameHeader(FrameKind.PULL_FAILED, NO_OPERATION, 0, 0, 0))

    def revoke(self, operation: OperationId) -> None:
        """Drop the frames of ``operation``; the link no longer reads its memory."""
        self.queues.pop(operation, None)
        for lane in self._lanes:
            lane.revoke(operation)

    def unqueue(self, operation: OperationId, pieces: Container[int]) -> None:
        """Drop the queued pieces of ``operation`` with these numbers."""
        queue = self.queues.pop(operation, deque())
        kept = deque(
            frame
            for frame in queue
            if frame.header.kind is not FrameKind.PIECE or frame.header.offset not in pieces
        )
        if kept:
            self.queues[operation] = kept

    def detach(self, operation: OperationId, payload_of: Callable[[FrameHeader], Payload]) -> None:
        """Send the rest of ``operation`` from the memory that ``payload_of`` returns.

        Afterwards the link reads no other memory of the operation.
        """
        for frame in self.queues.get(operation, ()):
            frame.detach(payload_of)
        for lane in self.lanes:
            lane.detach(operation, payload_of)

    # -- lanes ---------------------------------------------------------------------------------

    def lane(self, number: int) -> Lane | None:
        """Return the lane with this number, or None."""
        return next((lane for lane in self.lanes if lane.number == number), None)

    def add(self, lane: Lane) -> None:
        """Add a lane, and let it send queued segments."""
        self._lanes.append(lane)
        self._by_number = tuple(sorted(self._lanes, key=_number))
        self.near = lane.connection.local.host == lane.connection.remote.host
        lane.pump()

    def remove(self, lane: Lane) -> bool:
        """Remove ``lane``; return False if the link does not have it."""
        if lane not in self._lanes:
            return False
        self._lanes.remove(lane)
        self._by_number = tuple(sorted(self._lanes, key=_number))
        if not self._lanes:
            self.process, self.pulls = None, False
        return True

    def close(self) -> None:
        """Close all lanes. Queued segments stay, for new lanes or until they are revoked."""
        for lane in self.lanes:
            lane.close()


def _number(lane: Lane) -> int:
    return lane.number


class Links:
    """The links of this peer to other peers, up or down.

    Args:
        make_link: returns a new link to a peer.
        ended: counts the bytes of lanes that have ended; None: a new count.
    """

    def __init__(
        self, make_link: Callable[[PeerId], Link] = Link, ended: Traffic | None = None
    ) -> None:
        self._make_link = make_link
        self.ended = ended if ended is not None else Traffic()
        self._links: dict[PeerId, Link] = {}

    def to(self, peer: PeerId) -> Link:
        """Return the link to ``peer``, which may be down; make a new link if there is none."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = self._make_link(peer)
        return link

    def find(self, peer: PeerId) -> Link | None:
        """Return the link to ``peer`` if it is up, else None."""
        link = self._links.get(peer)
        return link if link is not None and link.up else None

    def all(self) -> list[Link]:
        """Return all links, up or down."""
        return list(self._links.values())

    def drop(self, peer: PeerId) -> None:
        """Close and forget the link to ``peer``, if there is one."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()
