"""``StateSnapshot``: a shared state that newcomers may fetch while nobody waits for them.

It shows what the last synchronization has made of a state, by the digests of then. Contents are
read from the program's tensors when a lane is about to send them; the program may be changing them
meanwhile. Whoever fetches sees that by the digest, and nobody is to blame.
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
    """Names what is fetched of a state of this layout while no operation is under way."""
    tag = int.from_bytes(layout_digest(layout)[:8])
    return OperationId(term=0, group=group, view=0, tag=tag, n=0)


class StateSnapshot:
    """One state that can be had.

    It ends with the program's last reference to the state.

    Args:
        memory: of the state; hashed.
        operation: by which it is asked for.
        links: of this peer.
    """

    def __init__(self, memory: StateMemory, operation: OperationId, links: Links) -> None:
        self._memory = weakref.ref(memory)
        self._layout = memory.layout
        digests = memory.piece_map.copy()
        sender = StateSender(operation, links)
        self._upload = StateUpload(self._layout, digests, self._read, lambda _: True, sender)

    def renew(self, memory: StateMemory) -> None:
        """Show what another synchronization has made of it; who waits for pieces goes on so."""
        self._memory = weakref.ref(memory)
        self._upload.piece_map = memory.piece_map.copy()

    @property
    def is_over(self) -> bool:
        """Whether the program has let go of the state."""
        return self._memory() is None

    def _read(self, number: int) -> memoryview:
        piece, memory = self._layout.piece(number), self._memory()
        return memory.view(piece) if memory is not None else memoryview(bytes(piece.length))

    def frame_started(self, peer: PeerId, header: FrameHeader) -> Sink:
        """Somebody asks.

        Raises:
            RemoteProtocolError: for what does not exist.
        """
        check_length(header)
        return Collect(bytearray(header.length), partial(self._take, peer, header.kind))

    def _take(self, peer: PeerId, kind: FrameKind, payload: bytearray) -> None:
        if kind is FrameKind.MAP_ASK:
            self._upload.send_map(peer)
        elif kind is FrameKind.PIECE_ASK:
            self._upload.send_pieces(peer, numbers_of(payload))

    def forget(self, peer: PeerId) -> None:
        """The link to ``peer`` is down."""
        self._upload.forget(peer)

    def owes(self, peer: PeerId) -> bool:
        """Whether ``peer`` waits for pieces."""
        return self._upload.owes(peer)

    def close(self) -> None:
        """Show nothing more; peers that wait are told."""
        self._upload.withdraw()
