"""Frames of shared state: sent and checked.

What is sent belongs to one operation. Pieces are received by the ``receiver``, each straight to
where it belongs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import PAYLOAD_BYTES_MAX, FrameHeader, FrameKind
from pccl.protocol.shared_state import DIGEST_BYTES
from pccl.protocol.types import OperationId, PeerId
from pccl.transports.link import Links
from pccl.transports.outgoing import Payload

MAP_PIECES_MAX = 32768
"""Digests in one frame: 1 MiB."""

QUEUED_PIECES_MAX = 4096
"""Pieces that one peer has asked for and not received."""

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
"""Payloads of what is no piece, in bytes: nobody sends more at once."""


class StateSender:
    """Sends frames of one operation.

    Args:
        operation: its id.
        links: of this peer.
    """

    def __init__(self, operation: OperationId, links: Links) -> None:
        self._operation = operation
        self._links = links
        self._used: dict[PeerId, None] = {}

    def links(self) -> dict[PeerId, bool]:
        """The peers to which there are links, and whether those are up."""
        return {link.peer: link.up for link in self._links.all()}

    def is_up(self, peer: PeerId) -> bool:
        """Whether there is a link to ``peer``."""
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
        """Queue a frame; without a lane it waits for one.

        Args:
            peer: whom to.
            kind: of the frame.
            payload: bytes, or what makes them when a lane is about to send them.
            offset: for the header.
            what: for the header.
            length: of the payload, if it is yet to be made.
        """
        self._used[peer] = None
        if length is None:
            assert isinstance(payload, bytes)
            length = len(payload)
        step = 1 if kind is FrameKind.PIECE else 0  # questions and news go first
        header = FrameHeader(kind, self._operation, step, offset, length, what)
        self._links.to(peer).send(header, payload, 0)

    def waiting_bytes(self, peer: PeerId, kind: FrameKind) -> int:
        """Bytes of frames of this kind for ``peer``, of any operation, that no lane has taken."""
        return self._links.to(peer).waiting_bytes(kind)

    def drop(self, peer: PeerId) -> None:
        """Forget what waits for ``peer``."""
        for link in self._links.all():
            if link.peer == peer:
                link.revoke(self._operation)

    def end(self) -> None:
        """Forget all that waits; no memory is read after this."""
        for link in self._links.all():
            if link.peer in self._used:
                link.revoke(self._operation)


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Numbers of pieces, u32 each."""
    listed = list(numbers)
    return struct.pack(f"<{len(listed)}I", *listed)


def numbers_of(payload: bytearray) -> list[int]:
    """What was packed.

    Raises:
        RemoteProtocolError: nothing was.
    """
    if len(payload) % 4:
        raise RemoteProtocolError(func="lane", reason="not a list of pieces")
    return [number for (number,) in struct.iter_unpack("<I", payload)]


def check_length(header: FrameHeader) -> None:
    """Check the length of a frame that is no piece.

    Raises:
        RemoteProtocolError: nobody sends one like that.
    """
    most = _LENGTHS_MAX.get(header.kind, -1)
    if header.length > most or (header.kind in _LISTS and header.length % 4):
        reason = f"a {header.kind.name} of {header.length} bytes"
        raise RemoteProtocolError(func="lane", reason=reason)
