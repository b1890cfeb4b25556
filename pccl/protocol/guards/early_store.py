"""Bounded memory for frames that arrive before their operation is posted here.

Buffers are posted before the operation is requested, so frames of a started operation always find
them; this store is for what is sent ahead of that (``eager``). It never grows
beyond its bound: a sender that exceeds it broke the protocol, and lanes are never paused.

After the loss of a lane a sender asks what of an operation has arrived. That can't be said before
the operation is posted, so the last question waits with the frames.
"""

from __future__ import annotations

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import HEADER_BYTES, FrameHeader
from pccl.protocol.limits import EARLY_STORE_BYTES_MAX
from pccl.protocol.types import OperationId


def _cost(header: FrameHeader) -> int:
    """What a frame counts: its header too, so that empty frames are not free."""
    return HEADER_BYTES + header.length


class EarlyStore:
    """Frames of one link whose operation is not posted yet."""

    def __init__(self, bytes_max: int = EARLY_STORE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self.used_bytes = 0
        """What the frames and questions that are kept count."""
        self._frames: dict[OperationId, list[tuple[FrameHeader, bytearray]]] = {}
        self._questions: dict[OperationId, FrameHeader] = {}

    def reserve(self, header: FrameHeader) -> bytearray:
        """Return memory for the payload of an early frame that is about to be read.

        Raises:
            RemoteProtocolError: the store is full. Close the lane.
        """
        if self.used_bytes + _cost(header) > self._bytes_max:
            raise RemoteProtocolError(
                func="lane",
                reason=f"more than {self._bytes_max} bytes sent ahead of operation "
                f"{header.operation}",
            )
        self.used_bytes += _cost(header)
        return bytearray(header.length)

    def release(self, header: FrameHeader) -> None:
        """Give back a reservation whose frame was never completed."""
        self.used_bytes -= _cost(header)

    def put(self, header: FrameHeader, payload: bytearray) -> None:
        """Keep a complete frame (its memory was reserved)."""
        self._frames.setdefault(header.operation, []).append((header, payload))

    def take(self, operation: OperationId) -> list[tuple[FrameHeader, bytearray]]:
        """Hand out the frames of an operation that is posted now, in order of arrival."""
        frames = self._frames.pop(operation, [])
        self.used_bytes -= sum(_cost(header) for header, _ in frames)
        return frames

    def put_question(self, question: FrameHeader) -> None:
        """Keep a question, in place of the one before it of the same operation.

        Raises:
            RemoteProtocolError: the store is full. Close the lane.
        """
        before = self._questions.get(question.operation)
        if before is None:
            self.reserve(question)
        if before is None or before.offset < question.offset:
            self._questions[question.operation] = question

    def take_question(self, operation: OperationId) -> FrameHeader | None:
        """Hand out the question about an operation that is posted now, if there is one."""
        question = self._questions.pop(operation, None)
        if question is not None:
            self.release(question)
        return question

    def discard(self, operation: OperationId) -> None:
        """Forget the frames of an operation that will never be posted."""
        self.take(operation)
        self.take_question(operation)

    def operations(self) -> list[OperationId]:
        """The operations that anything is kept of."""
        return list(self._frames | self._questions)
