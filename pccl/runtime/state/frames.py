"""Sends frames of shared state, and checks their lengths.

A ``StateSender`` belongs to one operation. The ``receiver`` reads pieces directly into their slots.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import PAYLOAD_BYTES_MAX, FrameHeader, FrameKind
from pccl.protocol.shared_state import DIGEST_BYTES
from pccl.protocol.types import OperationId, PeerId
from pccl.transports.link import Links
from pccl.transports.outgoing import Payload

MAP_PIECES_MAX = 32768
"""Largest number of digests in one frame; they take 1 MiB."""

QUEUED_PIECES_MAX = 4096
"""Largest number of pieces that one peer may have requested and not received."""

QUESTIONS = (FrameKind.MAP_ASK, FrameKind.LAYOUT_ASK, FrameKind.PIECE_ASK)
"""Frames that ask for an answer. They are sent again if none comes."""

_LISTS = (FrameKind.PIECE_ASK, FrameKind.PIECE_LACK, FrameKind.PIECE_HAVE)

_LENGTHS_MAX = {
    FrameKind.MAP_ASK: 0,
    FrameKind.LAYOUT_ASK: 0,
    FrameKind.WATCH: 0,
    FrameKind.MAP: MAP_PIECES_MAX * DIGEST_BYTES,
    FrameKind.LAYOUT: PAYLOAD_BYTES_MAX,
    FrameKind.RESULT: 64 << 10,
    **dict.fromkeys(_LISTS, 4 * QUEUED_PIECES_MAX),
}
"""Kind of a frame, except PIECE -> largest payload in bytes."""


class StateSender:
    """Sends frames of one operation.

    Args:
        operation: id of the operation.
        links: links of this peer.
    """

    def __init__(self, operation: OperationId, links: Links) -> None:
        self._operation = operation
        self._links = links
        self._used: dict[PeerId, None] = {}

    def links(self) -> dict[PeerId, bool]:
        """Return each peer with a link, and whether the link is up."""
        return {link.peer: link.up for link in self._links.all()}

    def is_up(self, peer: PeerId) -> bool:
        """Whether the link to ``peer`` is up."""
        return self._links.find(peer) is not None

    def send(
        self,
        peer: PeerId,
        kind: FrameKind,
        payload: Payload = b"",
        *,
        offset: int = 0,
        what: int = 0,
        length: int | None = None,
    ) -> None:
        """Queue a frame for ``peer`` until a lane takes it.

        Args:
            peer: the receiver.
            kind: kind of the frame.
            payload: bytes, or a function that makes them when a lane is about to send them.
            offset: field of the header.
            what: field of the header.
            length: length of the payload in bytes; needed if ``payload`` is a function.
        """
        self._used[peer] = None
        if length is None:
            assert isinstance(payload, bytes)
            length = len(payload)
        step = 1 if kind is FrameKind.PIECE else 0  # pieces go last
        header = FrameHeader(kind, self._operation, step, offset, length, what)
        # A question that is sent again and again shows no progress of its lane.
        number = -1 if kind in QUESTIONS else 0
        self._links.to(peer).send(header, payload, number)

    def waiting_bytes(self, peer: PeerId, kind: FrameKind) -> int:
        """Return the bytes of waiting frames of this kind for ``peer``, of all operations."""
        return self._links.to(peer).waiting_bytes(kind)

    def unqueue(self, peer: PeerId, pieces: Container[int]) -> None:
        """Drop the pieces with these numbers that wait for a lane to ``peer``."""
        link = self._links.find(peer)
        if link is not None:
            link.unqueue(self._operation, pieces)

    def drop(self, peer: PeerId) -> None:
        """Drop the frames of this operation that wait for a lane to ``peer``."""
        for link in self._links.all():
            if link.peer == peer:
                link.revoke(self._operation)

    def end(self) -> None:
        """Drop all waiting frames of this operation. Their payloads are not read after this."""
        for link in self._links.all():
            if link.peer in self._used:
                link.revoke(self._operation)


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Encode numbers of pieces, as u32 each."""
    listed = list(numbers)
    return struct.pack(f"<{len(listed)}I", *listed)


def numbers_of(payload: bytearray) -> list[int]:
    """Decode numbers of pieces.

    Raises:
        RemoteProtocolError: the length of ``payload`` is not a multiple of 4.
    """
    if len(payload) % 4:
        raise RemoteProtocolError(func="lane", reason=f"{len(payload)} bytes are not a piece list")
    return list(struct.unpack(f"<{len(payload) // 4}I", payload))


def check_length(header: FrameHeader) -> None:
    """Check the length of a frame of any kind except PIECE.

    Raises:
        RemoteProtocolError: the frame has a wrong length for its kind.
    """
    most = _LENGTHS_MAX.get(header.kind, -1)
    if header.length > most or (header.kind in _LISTS and header.length % 4):
        reason = f"a {header.kind.name} frame must not have {header.length} bytes"
        raise RemoteProtocolError(func="lane", reason=reason)
