"""Averages values in memory, with the library's arithmetic and without a network.

Each member has a production ``DataPlane``, with the codecs, residuals and schedules of a real run.
The planes are joined by links that queue frames, and each frame arrives in the order in which it
was sent. So the same values give the same bits, for any number of members. In a mesh of more than
two members, contributions are added in the order of arrival; this is one of the orders that a real
run may have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import pccl
from pccl._api.arguments import reduce_request
from pccl.protocol.checksum import payload_hash
from pccl.protocol.frame import FrameHeader
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.collective.data_plane import DataPlane
from pccl.topology.cost_model import AssumedLinks
from pccl.topology.planner import plan_view
from pccl.transports.link import Link
from pccl.transports.outgoing import Payload


@dataclass(frozen=True, slots=True)
class _Flying:
    """A frame between two members."""

    source: int
    target: int
    header: FrameHeader
    payload: Payload


class QueueLink(Link):
    """A link that queues references to memory, as a send queue does. It is its own only lane.

    Args:
        peer: the peer at the other end.
        source: number of the member at this end.
        target: number of the member at the other end.
        frames: the queue.
    """

    def __init__(self, peer: PeerId, source: int, target: int, frames: deque[_Flying]) -> None:
        super().__init__(peer)
        self.link = self
        self._ends = source, target
        self._frames = frames

    @property
    def up(self) -> bool:
        """True: the link is never lost."""
        return True

    def send(
        self, header: FrameHeader, payload: Payload, number: int, check: int | None = None
    ) -> None:
        """Queue a frame; its payload is read on arrival."""
        self._frames.append(_Flying(*self._ends, header, payload))


class MemoryExchange:
    """The members of one run, and what they need to average values.

    Args:
        count: number of members, at least 2.
    """

    def __init__(self, count: int) -> None:
        self.ids = tuple(range(1, count + 1))
        self._peers = tuple(map(PeerId, self.ids))
        self._frames: deque[_Flying] = deque()
        self._table = plan_view(self._peers, AssumedLinks({}), ())
        self._links = {
            (source, target): QueueLink(peer, source, target, self._frames)
            for source in range(count)
            for target, peer in enumerate(self._peers)
        }
        self._done: list[bytes] = []
        self._planes = [
            DataPlane(
                partial(self._link_to, rank),
                lambda _: False,
                lambda _, digest: self._done.append(digest),
                None,
            )
            for rank in range(count)
        ]
        self._number = 0

    def _link_to(self, source: int, peer: PeerId) -> Link:
        return self._links[source, self._peers.index(peer)]

    def average(
        self,
        values: Sequence[torch.Tensor],
        weights: Sequence[float],
        options: Sequence[pccl.QuantizationOptions | None],
    ) -> None:
        """Replace the values of all members by their weighted average, the same bits for all.

        Args:
            values: one tensor of each member, shape (n,), float32, contiguous.
            weights: weight of each member.
            options: wire format and error feedback of each member; None: values are not encoded.
        """
        operation = OperationId(1, 0, 1, 0, self._number)
        self._number += 1
        for rank, plane in enumerate(self._planes):
            request = reduce_request(
                values[rank],
                op=pccl.ReduceOp.AVG,
                weight=weights[rank],
                quantization_options=options[rank],
            )
            descriptor = request.asks.descriptor.settled(self._table)
            residual = request.open_residual() if request.open_residual is not None else None
            peers = self._peers
            plane.post(operation, descriptor, request.operand, peers, peers[rank], residual)
        for plane in self._planes:
            plane.begin(operation, weights=tuple(weights))
        while self._frames:
            self._deliver(self._frames.popleft())
        assert len(self._done) == len(self.ids), "all members have a result"
        assert len(set(self._done)) == 1, "all members have the same result"
        self._done.clear()
        for plane in self._planes:
            plane.end(operation, committed=True)

    def _deliver(self, frame: _Flying) -> None:
        payload = frame.payload() if callable(frame.payload) else frame.payload
        read = memoryview(b"".join(payload) if isinstance(payload, list) else payload)
        header = replace(frame.header, check=payload_hash(read))
        lane: Any = self._links[frame.target, frame.source]
        sink, received = self._planes[frame.target].frame_started(lane, header), 0
        while received < len(read):
            memory = sink.memory(received)
            memory[:] = read[received : received + len(memory)]
            received += len(memory)
        sink.complete()
