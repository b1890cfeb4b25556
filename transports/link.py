"""A link: all lanes between this peer and one other.

Frames go to the lane with the smallest backlog and may arrive in any order. A link is up while at
least one of its lanes is. (For now links are made of one lane; nothing above knows.)
"""

from __future__ import annotations

from collections.abc import Callable

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

    def send_newest(self, header: FrameHeader, payload: bytes) -> None:
        """Send a frame instead of one like it that still waits: who asks often costs no memory."""
        if not any(lane.replace(header, payload) for lane in self.lanes):
            self.send(header, payload)

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


class Links:
    """The links of one peer by the other end, up or down.

    Args:
        make_link: makes the link to a peer.
    """

    def __init__(self, make_link: Callable[[PeerId], Link] = Link) -> None:
        self._make_link = make_link
        self._links: dict[PeerId, Link] = {}

    def to(self, peer: PeerId) -> Link:
        """The link to ``peer``, which may be down."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = self._make_link(peer)
        return link

    def all(self) -> list[Link]:
        """Every link, also those that are down."""
        return list(self._links.values())

    def drop(self, peer: PeerId) -> None:
        """Close the link to ``peer``, if there is one, and forget it."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()
