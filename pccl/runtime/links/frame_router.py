"""``FrameRouter``: hands the frames of all lanes to whom they concern.

Collectives (``data_plane``) and shared state (``exchange``)
share the lanes and know nothing of each other.
"""

from __future__ import annotations

from pccl.protocol.frame import FrameHeader
from pccl.protocol.types import PeerId
from pccl.runtime.collective.data_plane import DataPlane
from pccl.runtime.state.exchange import KINDS, StateExchange
from pccl.transports.link import Lane
from pccl.transports.sinks import Sink


class FrameRouter:
    """Who understands the frames of all links."""

    def __init__(self, data_plane: DataPlane, exchange: StateExchange) -> None:
        self._data_plane = data_plane
        self._exchange = exchange

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """A header has arrived; where does the payload go?"""
        if header.kind in KINDS:
            return self._exchange.frame_started(lane, header)
        return self._data_plane.frame_started(lane, header)

    def lane_up(self, peer: PeerId) -> None:
        """There is one more lane to ``peer``."""
        self._data_plane.lane_up(peer)

    def lane_failed(self, peer: PeerId) -> None:
        """A lane broke before it was up here; the other side may have used it already."""
        self._exchange.lane_failed(peer)

    def lane_lost(self, lane: Lane) -> None:
        """The lane is gone, and what it carried perhaps with it."""
        self._data_plane.lane_lost(lane)
        self._exchange.lane_lost(lane)

    def uses(self, peer: PeerId) -> bool:
        """Whether anything needs the link to ``peer`` to be alive."""
        return self._data_plane.uses(peer) or self._exchange.uses(peer)

    def expect_peer(self, peer: PeerId) -> None:
        """``peer`` is a member, or about to be one."""
        self._data_plane.expect_peer(peer)

    def forget_peer(self, peer: PeerId) -> None:
        """Nobody needs ``peer`` any more."""
        self._data_plane.forget_peer(peer)
