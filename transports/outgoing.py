"""Outgoing frames. They refer to the sender's memory, and do not copy it."""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.checksum import bytes_hash, payload_hash
from pccl.protocol.frame import HEADER_BYTES, FrameHeader, FrameKind, encode_header

Payload = memoryview | bytes | list[memoryview] | Callable[[], memoryview]
"""Bytes, in one or several pieces; or a function that makes them just before sending."""


class Frame:
    """An outgoing frame.

    Args:
        header: header of the frame.
        payload: payload of the frame; it must stay valid until it is sent or revoked.
        number: number of the segment among all that its operation sends; -1: not a segment.
        check: hash of the payload; None: computed just before sending.
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
        """Bytes that the network has accepted."""
        self._payload = payload
        self._check = check
        self._head = b""

    def detach(self, payload_of: Callable[[FrameHeader], Payload]) -> None:
        """If this frame has a segment, take its payload from ``payload_of`` instead."""
        if self.header.kind is FrameKind.DATA:
            self._payload = payload_of(self.header)

    def keep(self) -> None:
        """Copy the payload, because its owner is about to reuse the memory."""
        payload = self._made()
        self._payload = b"".join(payload) if isinstance(payload, list) else bytes(payload)

    def rest(self) -> list[bytes | memoryview]:
        """Return the bytes that are still to be sent."""
        payload = self._made() if callable(self._payload) else self._payload
        if not self._head:
            check = self._check
            if check is None and self.header.length:
                check = payload_hash(*payload) if isinstance(payload, list) else bytes_hash(payload)
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
        """Return the payload; make it first if it is still a function."""
        if callable(self._payload):
            self._payload = self._payload()
        return self._payload

    @property
    def missing(self) -> int:
        """Number of bytes that are still to be sent."""
        return self.size - self.sent


def _behind(views: list[memoryview], sent: int) -> list[bytes | memoryview]:
    """Return ``views`` without their first ``sent`` bytes."""
    number = 0
    while sent >= len(views[number]):
        sent -= len(views[number])
        number += 1
    return [views[number][sent:], *views[number + 1 :]]
