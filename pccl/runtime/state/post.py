"""``StatePost``: frames of shared state to other peers, on behalf of one operation."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import OperationId, PeerId
from pccl.transports.lane import Payload
from pccl.transports.link import Links


class StatePost:
    """Sends frames of one operation.

    Args:
        operation: its id.
        links: of this peer.
    """

    def __init__(self, operation: OperationId, links: Links) -> None:
        self._operation = operation
        self._links = links
        self._used: dict[PeerId, None] = {}

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
