"""``StateGiver``: what one peer gives of a shared state to those who ask.

Pieces go straight from the memory that is lent, or from what was fetched and verified here, when a
lane is about to send them. Who asks again for what waits for a lane already gets it once.
"""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameKind
from pccl.protocol.types import PeerId
from pccl.runtime.state_memory import StateMemory
from pccl.runtime.state_post import StatePost, pack_numbers
from pccl.runtime.stock import Stock
from pccl.state.digests import PieceMap

MAP_PIECES_MAX = 32768
"""Digests in one frame: 1 MiB."""

QUEUED_PIECES_MAX = 4096
"""That one peer may ask for before it got any: more is a mistake, or malice."""


class StateGiver:
    """What one peer gives.

    Args:
        memory: what is lent.
        stock: where pieces are that were fetched and verified.
        post: where it goes.
        holds: whether a piece of the memory is the one that others want.
        stocks: whether one of the stock is: it outlives the operation it was fetched in.
    """

    def __init__(
        self,
        memory: StateMemory,
        stock: Stock,
        post: StatePost,
        holds: Callable[[int], bool],
        stocks: Callable[[int], bool],
    ) -> None:
        self.tx_bytes = 0
        self.piece_map: PieceMap = memory.piece_map
        """Of what can be had here."""
        self._memory = memory
        self._stock = stock
        self._post = post
        self._holds = holds
        self._stocks = stocks
        self._is_closed = False
        self._queued: dict[PeerId, dict[int, None]] = {}
        """Pieces that peers wait for and no lane has taken yet."""

    def owes(self, peer: PeerId) -> bool:
        """Whether ``peer`` waits for pieces."""
        return bool(self._queued.get(peer))

    def forget(self, peer: PeerId) -> None:
        """What waited for ``peer`` is dropped."""
        self._queued.pop(peer, None)

    def close(self) -> list[PeerId]:
        """Give nothing more; returns who has asked for anything."""
        self._is_closed = True
        asked = list(self._queued)
        self._queued.clear()
        return asked

    def give_layout(self, peer: PeerId) -> None:
        """Send the layout."""
        self._post.send(peer, FrameKind.LAYOUT, self._memory.layout.pack())

    def give_map(self, peer: PeerId) -> None:
        """Send the digests of all pieces."""
        count = self._memory.layout.piece_count
        for first in range(0, max(count, 1), MAP_PIECES_MAX):
            numbers = range(first, min(first + MAP_PIECES_MAX, count))
            digests = self.piece_map.part(numbers)
            self._post.send(peer, FrameKind.MAP, digests, offset=first, what=count)

    def give_pieces(self, peer: PeerId, numbers: list[int]) -> None:
        """Send these pieces, and say which are not here.

        Raises:
            RemoteProtocolError: there are no such pieces, or it is too much.
        """
        queued = self._queued.setdefault(peer, {})
        lacking: list[int] = []
        for number in numbers:
            if number >= self._memory.layout.piece_count:
                raise RemoteProtocolError(func="lane", reason=f"asks for piece {number}")
            if number in queued:
                continue
            if self._is_closed or not (self._stocks(number) or self._holds(number)):
                lacking.append(number)
                continue
            if len(queued) >= QUEUED_PIECES_MAX:
                raise RemoteProtocolError(func="lane", reason="asks for too much at once")
            queued[number] = None
            length = self._memory.layout.piece(number).length
            payload = self._payload(peer, number)
            self._post.send(peer, FrameKind.PIECE, payload, offset=number, length=length)
        if lacking:
            self._post.send(peer, FrameKind.PIECE_LACK, pack_numbers(lacking))

    def _payload(self, peer: PeerId, number: int) -> Callable[[], memoryview]:
        def make() -> memoryview:
            queued = self._queued.get(peer)
            if queued is not None:
                queued.pop(number, None)
            piece = self._memory.layout.piece(number)
            self.tx_bytes += piece.length
            if self._stocks(number):
                return self._stock.slot(number)
            return self._memory.view(piece)

        return make
