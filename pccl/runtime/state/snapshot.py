"""``StateSnapshot``: a synchronized state that newcomers may fetch while the members keep working.

A snapshot is no copy. It keeps the digests of the last synchronization, and reads the program's
tensors when a lane is about to send a piece. If the program has changed the piece, the
newcomer sees a wrong digest, and does not distrust the member.
"""

from __future__ import annotations

import weakref
from functools import partial

from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.state.frames import StateSender, check_length, numbers_of
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.upload import StateUpload
from pccl.state.digests import layout_digest
from pccl.state.layout import StateLayout
from pccl.transports.link import Links
from pccl.transports.sinks import Collect, Sink


def idle_operation(layout: StateLayout, group: int) -> OperationId:
    """Return the operation id (of term 0) for snapshots and prefetches of this layout."""
    tag = int.from_bytes(layout_digest(layout)[:8])
    return OperationId(term=0, group=group, view=0, tag=tag, n=0)


class StateSnapshot:
    """One state that newcomers may fetch.

    It ends with the program's last reference to the state.

    Args:
        memory: memory of the state; its digests are up to date.
        operation: operation id in the frames of the snapshot.
        links: links of this peer.
    """

    def __init__(self, memory: StateMemory, operation: OperationId, links: Links) -> None:
        self._memory = weakref.ref(memory)
        self._layout = memory.layout
        digests = memory.piece_map.copy()
        sender = StateSender(operation, links)
        self._upload = StateUpload(self._layout, digests, self._read, lambda _: True, sender)

    def renew(self, memory: StateMemory) -> None:
        """Switch to the contents and digests of a newer synchronization; keep pending requests."""
        self._memory = weakref.ref(memory)
        self._upload.piece_map = memory.piece_map.copy()

    @property
    def is_over(self) -> bool:
        """Whether the program no longer holds the state."""
        return self._memory() is None

    def _read(self, number: int) -> memoryview:
        piece, memory = self._layout.piece(number), self._memory()
        return memory.view(piece) if memory is not None else memoryview(bytes(piece.length))

    def frame_started(self, peer: PeerId, header: FrameHeader) -> Sink:
        """Return the sink that receives a request.

        Raises:
            RemoteProtocolError: the frame has a wrong length.
        """
        check_length(header)
        return Collect(bytearray(header.length), partial(self._take, peer, header.kind))

    def _take(self, peer: PeerId, kind: FrameKind, payload: bytearray) -> None:
        if kind is FrameKind.MAP_ASK:
            self._upload.send_map(peer)
        elif kind is FrameKind.PIECE_ASK:
            self._upload.send_pieces(peer, numbers_of(payload))

    def forget(self, peer: PeerId) -> None:
        """Drop the requests of ``peer``, because its link is down."""
        self._upload.forget(peer)

    def owes(self, peer: PeerId) -> bool:
        """Whether ``peer`` waits for pieces."""
        return self._upload.owes(peer)

    def close(self) -> None:
        """End the snapshot, and refuse all pending requests."""
        self._upload.withdraw()
