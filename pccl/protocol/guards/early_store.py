"""Bounded memory for frames that arrive before this peer has posted their operation.

A peer posts its buffers before it requests an operation, so frames of a started operation always
find them. This store is for frames sent before the start (``eager``). It never exceeds its limit: a
sender that sends more violates the protocol. The receiver never pauses a lane.

After the loss of a lane a sender asks which frames of an operation have arrived. The receiver
cannot answer before it has posted the operation, so the store also keeps the last query.
"""

from __future__ import annotations

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import HEADER_BYTES, FrameHeader
from pccl.protocol.limits import EARLY_STORE_BYTES_MAX
from pccl.protocol.types import OperationId


class EarlyStore:
    """The frames of one link whose operation is not posted yet."""

    def __init__(self, bytes_max: int = EARLY_STORE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self.used_bytes = 0
        """Size of the stored queries, and of the stored and arriving frames."""
        self._frames: dict[OperationId, list[tuple[FrameHeader, bytearray]]] = {}
        self._questions: dict[OperationId, FrameHeader] = {}

    def reserve(self, header: FrameHeader) -> bytearray:
        """Reserve and return memory for the payload of an early frame.

        Raises:
            RemoteProtocolError: the store is full. Close the lane.
        """
        cost = HEADER_BYTES + header.length  # so that empty frames are not free
        if self.used_bytes + cost > self._bytes_max:
            raise RemoteProtocolError(
                func="lane",
                reason=f"it sent more than {self._bytes_max} bytes of frames before this peer "
                f"posted {header.operation}",
            )
        self.used_bytes += cost
        return bytearray(header.length)

    def release(self, header: FrameHeader) -> None:
        """Release the memory of a frame that was not received completely."""
        self.used_bytes -= HEADER_BYTES + header.length

    def put(self, header: FrameHeader, payload: bytearray) -> None:
        """Store a complete frame in its reserved memory."""
        self._frames.setdefault(header.operation, []).append((header, payload))

    def take(self, operation: OperationId) -> list[tuple[FrameHeader, bytearray]]:
        """Remove and return the frames of an operation, in the order of arrival."""
        frames = self._frames.pop(operation, [])
        for header, _ in frames:
            self.used_bytes -= HEADER_BYTES + header.length
        return frames

    def put_question(self, question: FrameHeader) -> None:
        """Store a query. Of several queries about an operation, only the newest is kept.

        Raises:
            RemoteProtocolError: the store is full. Close the lane.
        """
        before = self._questions.get(question.operation)
        if before is None:
            self.reserve(question)
        if before is None or before.offset < question.offset:
            self._questions[question.operation] = question

    def take_question(self, operation: OperationId) -> FrameHeader | None:
        """Remove and return the query about an operation; None: there is none."""
        question = self._questions.pop(operation, None)
        if question is not None:
            self.release(question)
        return question

    def discard(self, operation: OperationId) -> None:
        """Drop frames and query of an operation that this peer will never post."""
        self.take(operation)
        self.take_question(operation)

    def operations(self) -> list[OperationId]:
        """Return the operations with stored frames or a stored query."""
        return list(self._frames | self._questions)
