"""A lane: frames on one connection.

What it does: parse headers, ask the handler for memory before every read of payload, send queued
frames in order. What it does not do: know what frames mean, or keep their payload - the queue
holds descriptors of the sender's memory, and at most one frame is partly handed to the network.

Invariant: once :meth:`Lane.revoke` has returned, no memory of the operation is read any more. A
frame that is already partly on its way is completed with zeros: the operation has ended, so nobody
will use them, but the stream of frames stays intact.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from pccl.protocol.frame import HEADER_BYTES, FrameHeader, decode_header, encode_header
from pccl.protocol.types import OperationId
from pccl.transports.base import Connection


class FrameHandler(Protocol):
    """Who understands the frames of a lane."""

    def frame_started(self, lane: Lane, header: FrameHeader) -> None:
        """A header has arrived. May raise RemoteProtocolError: the lane is closed."""
        ...

    def frame_buffer(self, lane: Lane, header: FrameHeader, received: int) -> memoryview:
        """Memory for the payload's next bytes; called before every read.

        ``received`` bytes of ``header.length`` have been read so far. The memory may be shorter
        than what is missing, never longer, and must not be empty.
        """
        ...

    def frame_received(self, lane: Lane, header: FrameHeader) -> None:
        """The payload is complete. May raise RemoteProtocolError: the lane is closed."""
        ...

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        """The lane is gone; called exactly once, and last. ``error`` is None if we closed it."""
        ...


@dataclass(slots=True)
class _Outgoing:
    operation: OperationId
    header: bytes
    payload: memoryview
    sent: int = 0
    """Of header and payload together."""

    def rest(self) -> list[bytes | memoryview]:
        if self.sent >= HEADER_BYTES:
            return [self.payload[self.sent - HEADER_BYTES :]]
        head = self.header[self.sent :]
        return [head, self.payload] if self.payload else [head]

    @property
    def missing(self) -> int:
        return HEADER_BYTES + len(self.payload) - self.sent


class Lane:
    """One connection that carries frames; the receiver of that connection.

    Args:
        connection: a connection that was not started yet; it is started here.
        handler: whom to tell.
    """

    def __init__(self, connection: Connection, handler: FrameHandler) -> None:
        self.connection = connection
        self.context: object = None
        """Belongs to the handler: what it knows about the frame that is being received."""
        self.owner: object = None
        """Belongs to the handler: the link that this lane is a part of."""
        self.watched: tuple[int, int, int] = (0, 0, 0)
        """Belongs to the handler: (sent, received, since when) as last looked at."""
        self.backlog_bytes = 0
        """Bytes queued and not yet taken by the network."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self._handler = handler
        self._queue: deque[_Outgoing] = deque()
        self._waiting = False
        self._open = True
        self._head = bytearray(HEADER_BYTES)
        self._head_view = memoryview(self._head)
        self._header: FrameHeader | None = None
        self._received = 0
        connection.start(self)

    @property
    def receiving(self) -> FrameHeader | None:
        """Header of the frame whose payload is being received."""
        return self._header

    # -- sending -------------------------------------------------------------------------------

    def send(self, header: FrameHeader, payload: memoryview | bytes = b"") -> None:
        """Queue a frame. ``payload`` must stay valid until it is sent or revoked."""
        if not self._open:
            return
        view = memoryview(payload)
        assert len(view) == header.length
        frame = _Outgoing(header.operation, encode_header(header), view)
        self._queue.append(frame)
        self.backlog_bytes += frame.missing
        if not self._waiting:
            self._flush()

    def replace(self, header: FrameHeader, payload: bytes) -> bool:
        """Put ``payload`` into a queued frame with just this header, if none of it is sent yet.

        Returns whether there was one: if not, nothing is queued.
        """
        encoded = encode_header(header)
        for frame in self._queue:
            if frame.header == encoded and not frame.sent:
                frame.payload = memoryview(payload)
                return True
        return False

    def revoke(self, operation: OperationId) -> None:
        """Drop the frames of ``operation``; its memory is not read after this."""
        if not any(frame.operation == operation for frame in self._queue):
            return
        kept: deque[_Outgoing] = deque()
        for frame in self._queue:
            if frame.operation != operation:
                kept.append(frame)
            elif frame.sent:
                frame.payload = memoryview(bytes(len(frame.payload)))
                kept.append(frame)
            else:
                self.backlog_bytes -= frame.missing
        self._queue = kept

    def detach(self, operation: OperationId) -> None:
        """Copy what is still to be sent of ``operation``; its memory is not read after this."""
        for frame in self._queue:
            if frame.operation == operation:
                frame.payload = memoryview(bytes(frame.payload))

    def _flush(self) -> None:
        while self._queue:
            frame = self._queue[0]
            taken = self.connection.send(frame.rest())
            frame.sent += taken
            self.backlog_bytes -= taken
            self.sent_bytes += taken
            if frame.missing:
                self._waiting = True
                self.connection.notify_writable()
                return
            self._queue.popleft()

    # -- what the connection calls ---------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """See ``Receiver``."""
        if self._header is None:
            return self._head_view[self._received :]
        return self._handler.frame_buffer(self, self._header, self._received)

    def buffer_updated(self, nbytes: int) -> None:
        """See ``Receiver``."""
        self.received_bytes += nbytes
        self._received += nbytes
        if self._header is None:
            if self._received < HEADER_BYTES:
                return
            self._received = 0
            self._header = decode_header(self._head)
            self._handler.frame_started(self, self._header)
        header = self._header
        if self._received == header.length:
            self._header = None
            self._received = 0
            self._handler.frame_received(self, header)

    def writable(self) -> None:
        """See ``Receiver``."""
        self._waiting = False
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        """See ``Receiver``."""
        self._open = False
        self._queue.clear()
        self.backlog_bytes = 0
        self._handler.lane_lost(self, error)

    def close(self) -> None:
        """Close in order: what the network has taken still arrives; what is queued does not."""
        self._open = False
        self._queue.clear()
        self.backlog_bytes = 0
        self.connection.close()

    def abort(self) -> None:
        """Close at once."""
        self._open = False
        self._queue.clear()
        self.backlog_bytes = 0
        self.connection.abort()
