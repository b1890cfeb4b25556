"""``Exhibit``: a shared state that newcomers may fetch while nobody waits for them.

It shows what the last synchronization has made of a state, by the digests of then. Contents are
read from the program's tensors when a lane is about to send them; the program may be changing them
meanwhile. Whoever fetches sees that by the digest, and nobody is to blame.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.shared_state import DIGEST_BYTES
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.state_giver import StateGiver
from pccl.runtime.state_intake import Drain, Whole
from pccl.runtime.state_memory import StateMemory
from pccl.runtime.state_post import StatePost, numbers_of
from pccl.state.digests import layout_digest
from pccl.state.layout import Layout
from pccl.transports.lane import Sink
from pccl.transports.link import Links


def idle_operation(layout: Layout, group: int) -> OperationId:
    """Names what is fetched of a state of this layout while no operation is under way."""
    tag = int.from_bytes(layout_digest(layout)[:8])
    return OperationId(term=0, group=group, view=0, tag=tag, n=0)


class Exhibit:
    """One state that can be had.

    It ends with the program's last reference to the state.

    Args:
        memory: of the state; hashed.
        operation: by which it is asked for.
        links: of this peer.
    """

    def __init__(self, memory: StateMemory, operation: OperationId, links: Links) -> None:
        self.post = StatePost(operation, links)
        self._giver = StateGiver(
            memory.layout, memory.piece_map.copy(), _reader(memory), lambda _: True, self.post
        )

    def renew(self, memory: StateMemory) -> None:
        """Show another state of the same layout, or the same with other contents.

        Who has asked for pieces gets those of now: a newcomer whose link is slow asks for more than
        is sent between two synchronizations.
        """
        self._giver.change(memory.piece_map.copy(), _reader(memory))

    def frame_started(self, peer: PeerId, header: FrameHeader) -> Sink:
        """Somebody asks.

        Raises:
            RemoteProtocolError: for what does not exist.
        """
        if header.length > len(self._giver.piece_map) * DIGEST_BYTES:
            return Drain(header.length)
        return Whole(self._take, peer, header, bytearray(header.length))

    def _take(self, peer: PeerId, header: FrameHeader, payload: bytearray) -> None:
        if header.kind is FrameKind.MAP_ASK:
            self._giver.give_map(peer)
        elif header.kind is FrameKind.PIECE_ASK:
            self._giver.give_pieces(peer, numbers_of(payload))

    def forget(self, peer: PeerId) -> None:
        """The link to ``peer`` is down."""
        self.post.drop(peer)
        self._giver.forget(peer)

    def owes(self, peer: PeerId) -> bool:
        """Whether ``peer`` waits for pieces."""
        return self._giver.owes(peer)

    def close(self) -> None:
        """Show nothing more."""
        self._giver.close()
        self.post.end()


def _reader(memory: StateMemory) -> Callable[[int], memoryview]:
    """Reads pieces as long as the state lives, and keeps it alive no longer than that."""
    layout, found = memory.layout, weakref.ref(memory)

    def read(number: int) -> memoryview:
        piece, held = layout.piece(number), found()
        return held.view(piece) if held is not None else memoryview(bytes(piece.length))

    return read
