"""A lane: frames on one connection.

What it does: parse headers, ask for memory before every read of payload, verify what was read, send
what its link has queued, answer whoever asks whether it is alive. What it does not do: know what
frames mean, or keep their payload - queues hold descriptors of the sender's memory, and at most one
frame per lane is partly handed to the network.

Invariants:

* No header is acted on, and no payload is complete, before it was verified; a payload is hashed
  right after each read, and right before its frame is sent: while it is in cache.
* Once :meth:`Lane.revoke` has returned, no memory of the operation is read any more. A frame that
  is already partly on its way is completed from a copy: the operation has ended here, but perhaps
  not yet for whoever receives it, and counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from pccl.protocol.checksum import DamagedData, PayloadHasher, payload_hash
from pccl.protocol.frame import (
    HEADER_BYTES,
    NO_OPERATION,
    FrameHeader,
    FrameKind,
    decode_header,
    encode_header,
)
from pccl.protocol.types import OperationId, PeerId
from pccl.transports.base import Connection


class Sink(Protocol):
    """Where the payload of one frame goes."""

    def memory(self, received: int) -> memoryview:
        """Memory for the next bytes; asked before every read.

        ``received`` bytes of the payload have been read so far. The memory may be shorter than
        what is missing, never longer, and must not be empty.
        """
        ...

    def counts(self) -> bool:
        """Whether all the payload, which is here, has to be what was sent.

        Not what nobody wants any more, or what is verified otherwise: its sender may have used the
        memory for something else meanwhile.
        """
        ...

    def complete(self) -> None:
        """The payload is here. May raise RemoteProtocolError: the lane is closed."""
        ...

    def lost(self) -> None:
        """The lane is gone before the payload was complete."""
        ...


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


Payload = memoryview | bytes | list[memoryview] | Callable[[], memoryview]
"""Bytes, in one piece or in several, or what makes them when a lane is about to send them."""


class Frame:
    """A frame on its way out.

    Args:
        header: its header.
        payload: what follows; must stay valid until it is sent or revoked.
        number: of the segment among all that its operation sends; -1: no segment.
        check: the payload's hash; None: it is made when a lane is about to send the frame.
    """

    __slots__ = ("_check", "_head", "_payload", "header", "number", "sent", "size")

    def __init__(
        self,
        header: FrameHeader,
        payload: Payload = b"",
        number: int = -1,
        check: int | None = None,
    ) -> None:
        self.header = header
        self.number = number
        self.size = HEADER_BYTES + header.length
        """Bytes of header and payload together."""
        self.sent = 0
        """How many of them the network has taken."""
        self._payload = payload
        self._check = check
        self._head = b""

    def detach(self, tensor: memoryview) -> None:
        """If it is a segment, take it from ``tensor`` instead."""
        if self.number >= 0:
            self._payload = tensor[self.header.offset : self.header.offset + self.header.length]

    def keep(self) -> None:
        """Make a copy of the payload: the memory that it is in is about to be used otherwise."""
        payload = self._made()
        self._payload = b"".join(payload) if isinstance(payload, list) else bytes(payload)

    def rest(self) -> list[bytes | memoryview]:
        """What is still to be sent."""
        payload = self._made() if callable(self._payload) else self._payload
        if not self._head:
            check = self._check
            if check is None and self.header.length:
                check = (
                    payload_hash(*payload) if isinstance(payload, list) else payload_hash(payload)
                )
            self._head = encode_header(self.header, check or 0)
        if self.sent >= HEADER_BYTES:
            if isinstance(payload, list):
                return _behind(payload, self.sent - HEADER_BYTES)
            return [memoryview(payload)[self.sent - HEADER_BYTES :]]
        head = self._head[self.sent :] if self.sent else self._head
        if isinstance(payload, list):
            return [head, *payload]
        return [head, payload] if self.header.length else [head]

    def _made(self) -> memoryview | bytes | list[memoryview]:
        """What follows the header; made now if it was not yet."""
        if callable(self._payload):
            self._payload = self._payload()
        return self._payload

    @property
    def missing(self) -> int:
        """How many bytes are still to be sent."""
        return self.size - self.sent


def _behind(views: list[memoryview], sent: int) -> list[bytes | memoryview]:
    """What follows the first ``sent`` bytes."""
    number = 0
    while sent >= len(views[number]):
        sent -= len(views[number])
        number += 1
    return [views[number][sent:], *views[number + 1 :]]


class LaneGroup(Protocol):
    """A link as its lanes and their handler see it."""

    @property
    def peer(self) -> PeerId:
        """The other end."""
        ...

    @property
    def up(self) -> bool:
        """Whether it has a lane."""
        ...

    def next_frame(self, lane: Lane) -> Frame | None:
        """Take the next segment for ``lane``; None: there is none."""
        ...

    def remove(self, lane: Lane) -> bool:
        """Use ``lane`` no longer; return False if it was not in use."""
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
        self, connection: Connection, number: int, link: LaneGroup, handler: FrameHandler
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
        """See ``Receiver``."""
        if self._sink is None:
            return self._head_view[self._received :]
        self._memory = self._sink.memory(self._received)
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        """See ``Receiver``."""
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
        """See ``Receiver``."""
        self.ready = self._open
        self.pump()

    def connection_lost(self, error: Exception | None) -> None:
        """See ``Receiver``."""
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
