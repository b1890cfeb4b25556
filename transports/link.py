"""A link: all lanes between this peer and one other.

Frames go to the lane with the smallest backlog and may arrive in any order. A link is up while at
least one of its lanes is. (For now links are made of one lane; nothing above knows.)
"""

from __future__ import annotations

from pccl.protocol.frame import FrameHeader
from pccl.protocol.types import OperationId, PeerId
from pccl.transports.lane import Lane


class Link:
    """The lanes to ``peer``."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.lanes: list[Lane] = []

    @property
    def up(self) -> bool:
        """Whether frames can be sent."""
        return bool(self.lanes)

    @property
    def backlog_bytes(self) -> int:
        """Bytes queued on all lanes and not yet taken by the network."""
        return sum(lane.backlog_bytes for lane in self.lanes)

    def send(self, header: FrameHeader, payload: memoryview | bytes = b"") -> None:
        """Queue a frame on the least busy lane; without a lane it is dropped."""
        if self.lanes:
            min(self.lanes, key=lambda lane: lane.backlog_bytes).send(header, payload)

    def revoke(self, operation: OperationId) -> None:
        """Drop the frames of ``operation``; its memory is not read after this."""
        for lane in self.lanes:
            lane.revoke(operation)

    def detach(self, operation: OperationId) -> None:
        """Copy what is still to be sent of ``operation``; its memory is not read after this."""
        for lane in self.lanes:
            lane.detach(operation)

    def close(self) -> None:
        """Close all lanes."""
        for lane in list(self.lanes):
            lane.close()
