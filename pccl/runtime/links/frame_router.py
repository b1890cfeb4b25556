"""``FrameRouter``: passes the frames of all lanes to the collectives or to the shared state.

Those about the lanes themselves go to the keeper of the links.

Collectives (``data_plane``) and shared state (``exchange``) share the lanes, and do not know of
each other.
"""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import PeerId
from pccl.runtime.collective.data_plane import DataPlane
from pccl.runtime.links.pulls import PULL_KINDS, Pulls
from pccl.runtime.state.exchange import KINDS, StateExchange
from pccl.transports.link import Lane, Link
from pccl.transports.sinks import Drain, Sink


def _nobody(lane: Lane, header: FrameHeader) -> None:
    """Ignore a frame for the keeper of the links: there is none."""


class FrameRouter:
    """Passes frames and lane changes to the collectives, the shared state and the pulls."""

    on_meet: Callable[[Lane, FrameHeader], None] = staticmethod(_nobody)
    """Called when the other side dials this one, and asks for the same; the keeper sets it."""

    def __init__(self, data_plane: DataPlane, exchange: StateExchange, pulls: Pulls) -> None:
        self._data_plane = data_plane
        self._exchange = exchange
        self._pulls = pulls

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """Return the sink for the payload of a frame whose header has arrived."""
        if header.kind in KINDS:
            return self._exchange.frame_started(lane, header)
        if header.kind in PULL_KINDS:
            return self._pulls.frame_started(lane, header)
        if header.kind is FrameKind.MEET:
            self.on_meet(lane, header)
            return Drain(0)
        return self._data_plane.frame_started(lane, header)

    def lane_up(self, lane: Lane) -> None:
        """Report that a link has one more lane."""
        self._pulls.lane_up(lane)
        self._data_plane.lane_up(lane.link.peer)
        self._exchange.lane_up(lane)

    def lane_failed(self, link: Link, number: int) -> None:
        """Report a lane that failed before it was up here. The other side may have used it."""
        self._exchange.lane_failed(link, number)

    def lane_lost(self, lane: Lane) -> None:
        """Report that a lane is lost. Frames that it carried may be lost too."""
        self._data_plane.lane_lost(lane)
        self._exchange.lane_lost(lane)
        self._pulls.lane_lost(lane)

    def uses(self, peer: PeerId) -> bool:
        """Whether a collective or a synchronization needs the link to ``peer``."""
        return self._data_plane.uses(peer) or self._exchange.uses(peer)

    def expect_peer(self, peer: PeerId) -> None:
        """Accept early frames from ``peer``, which is a member or a pending one."""
        self._data_plane.expect_peer(peer)

    def forget_peer(self, peer: PeerId) -> None:
        """Drop the early frames of ``peer``, whose link is closed."""
        self._data_plane.forget_peer(peer)
