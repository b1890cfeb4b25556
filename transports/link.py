"""A link: all lanes between this peer and one other.

Segments wait here, and each lane takes the next one when it has sent the last: a fast lane takes
more of them than a slow one, and what waits is not lost with a lane. Operations take turns, so a
small one does not wait for a large one. Within one, segments may arrive in any order. To another
machine those of the lowest step go first: what all have contributed is then spread early, and the
loss of a member late in an operation costs little. Inside one machine the newest of those that were
computed here goes first: it is still in the cache. A link is up while at least one of its lanes is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import OperationId, PeerId
from pccl.transports.lane import Frame, Lane, Payload


class Link:
    """The lanes to ``peer``.

    Invariant: while a lane is ready, nothing waits.

    Attributes:
        peer: the other end.
        near: whether the other end is on this machine.
        told: how many lanes the other end was told that the link should have; 0: nobody told it.
    """

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self._lanes: deque[Lane] = deque()
        """The next one to be given a segment comes first."""
        self.near = False
        self.told = 0
        self._queues: dict[OperationId, deque[Frame]] = {}
        """What waits of each operation; the one whose turn is next comes first."""

    @property
    def up(self) -> bool:
        """Whether frames can be sent."""
        return bool(self._lanes)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All lanes, by number."""
        return tuple(sorted(self._lanes, key=_number))

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait for the network, on all lanes and here."""
        lanes = sum(lane.backlog_bytes for lane in self.lanes)
        return lanes + sum(frame.missing for queue in self._queues.values() for frame in queue)

    def waiting_bytes(self, kind: FrameKind) -> int:
        """Bytes of frames of this kind that no lane has taken."""
        waiting = (frame for queue in self._queues.values() for frame in queue)
        return sum(frame.size for frame in waiting if frame.header.kind is kind)

    # -- sending -------------------------------------------------------------------------------

    def send(
        self, header: FrameHeader, payload: Payload, number: int, check: int | None = None
    ) -> None:
        """Queue a segment; without a lane it waits for one.

        Args:
            header: of a DATA frame.
            payload: must stay valid until it is sent or revoked, or is made when it is sent.
            number: of the segment among all that its operation sends.
            check: the payload's hash, if it is known.
        """
        frame = Frame(header, payload, number, check)
        queue = self._queues.get(header.operation)
        if queue is None:
            self._queues[header.operation] = deque((frame,))
        elif self.near and header.step and header.kind is FrameKind.DATA:
            queue.appendleft(frame)
        else:
            place = len(queue)
            while place and queue[place - 1].header.step > header.step and not self.near:
                place -= 1
            queue.insert(place, frame)
        lanes = self._lanes
        for _ in range(len(lanes)):
            lane = lanes[0]
            lanes.rotate(-1)
            if lane.ready:
                lane.pump()
                return

    def ask(self, header: FrameHeader) -> None:
        """Send a question on every lane: one of them may be dead and not know it yet."""
        for lane in self.lanes:
            lane.say(header)

    def next_frame(self, lane: Lane) -> Frame | None:
        """See ``LaneGroup``."""
        if not self._queues:
            return None
        for operation in self._queues:
            if operation.term:
                break
        else:  # what no member waits for goes when nothing else does
            operation = next(iter(self._queues))
        queue = self._queues.pop(operation)
        frame = queue.popleft()
        if queue:
            self._queues[operation] = queue
        return frame

    def revoke(self, operation: OperationId) -> None:
        """Drop the frames of ``operation``; its memory is not read after this."""
        self._queues.pop(operation, None)
        for lane in self.lanes:
            lane.revoke(operation)

    def detach(self, operation: OperationId, tensor: memoryview) -> None:
        """Send what is still to be sent of ``operation`` from ``tensor``, a copy of the result.

        No other memory is read after this.
        """
        for frame in self._queues.get(operation, ()):
            frame.detach(tensor)
        for lane in self.lanes:
            lane.detach(operation, tensor)

    # -- lanes ---------------------------------------------------------------------------------

    def lane(self, number: int) -> Lane | None:
        """The lane with this number."""
        return next((lane for lane in self.lanes if lane.number == number), None)

    def add(self, lane: Lane) -> None:
        """Use one more lane."""
        self._lanes.append(lane)
        self.near = lane.connection.local.host == lane.connection.remote.host
        lane.pump()

    def remove(self, lane: Lane) -> bool:
        """See ``LaneGroup``."""
        if lane not in self._lanes:
            return False
        self._lanes.remove(lane)
        return True

    def close(self) -> None:
        """Close all lanes. What waits goes on waiting: for new lanes, or to be revoked."""
        for lane in self.lanes:
            lane.close()


def _number(lane: Lane) -> int:
    return lane.number


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

    def find(self, peer: PeerId) -> Link | None:
        """The link to ``peer`` if it is up."""
        link = self._links.get(peer)
        return link if link is not None and link.up else None

    def all(self) -> list[Link]:
        """Every link, also those that are down."""
        return list(self._links.values())

    def drop(self, peer: PeerId) -> None:
        """Close the link to ``peer``, if there is one, and forget it."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()
