"""Frames on their way out: descriptors of the sender's memory, which they do not copy."""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.checksum import payload_hash
from pccl.protocol.frame import HEADER_BYTES, FrameHeader, encode_header

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
