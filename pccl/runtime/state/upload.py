"""``StateUpload``: what one peer gives of a shared state to those who ask.

Pieces are read when a lane is about to send them, and go from where they are. Who asks again for
what waits for a lane already gets it once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameKind
from pccl.protocol.shared_state import DIGEST_BYTES
from pccl.protocol.types import PeerId
from pccl.runtime.state.frames import (
    MAP_PIECES_MAX,
    QUEUED_PIECES_MAX,
    StateSender,
    pack_numbers,
)
from pccl.state.digests import PieceMap
from pccl.state.layout import StateLayout


class StateUpload:
    """What one peer gives.

    Args:
        layout: of the state.
        piece_map: of what can be had here.
        read: gives a piece.
        holds: whether a piece is the one that others want.
        sender: where it goes.
    """

    def __init__(
        self,
        layout: StateLayout,
        piece_map: PieceMap,
        read: Callable[[int], memoryview],
        holds: Callable[[int], bool],
        sender: StateSender,
    ) -> None:
        self.tx_bytes = 0
        self.piece_map = piece_map
        """Of what can be had here."""
        self._layout = layout
        self._read = read
        self._holds = holds
        self._sender = sender
        self._is_closed = False
        self._queued: dict[PeerId, dict[int, None]] = {}
        """Pieces that peers wait for and no lane has taken yet."""
        self._answers: set[tuple[PeerId, FrameKind, int]] = set()
        """Maps, by their first pieces, and layouts that no lane has taken yet."""
        self._lacking: Counter[PeerId] = Counter()
        """Pieces that peers asked for in vain, and that no lane has told them yet."""

    def owes(self, peer: PeerId) -> bool:
        """Whether ``peer`` waits for pieces."""
        return bool(self._queued.get(peer))

    def forget(self, peer: PeerId) -> None:
        """What waited for ``peer`` is dropped."""
        self._sender.drop(peer)
        self._queued.pop(peer, None)
        self._answers = {answer for answer in self._answers if answer[0] != peer}
        del self._lacking[peer]

    def close(self) -> None:
        """Send nothing more; no memory is read after this."""
        self._is_closed = True
        self._queued.clear()
        self._answers.clear()
        self._sender.end()

    def withdraw(self) -> None:
        """Likewise, and peers that wait for anything are told."""
        waiting = [peer for peer, _, _ in sorted(self._answers)]
        asked = dict.fromkeys((*self._queued, *waiting))
        self.close()
        for peer in asked:
            self._sender.send(peer, FrameKind.PIECE_LACK)

    def send_layout(self, peer: PeerId) -> None:
        """Send the layout."""
        packed = self._layout.pack()
        self._answer(peer, FrameKind.LAYOUT, len(packed), lambda: packed)

    def send_map(self, peer: PeerId) -> None:
        """Send the digests of all pieces."""
        count = self._layout.piece_count
        for first in range(0, max(count, 1), MAP_PIECES_MAX):
            numbers = range(first, min(first + MAP_PIECES_MAX, count))
            length = len(numbers) * DIGEST_BYTES
            part = partial(self.piece_map.part, numbers)
            self._answer(peer, FrameKind.MAP, length, part, offset=first, what=count)

    def _answer(
        self,
        peer: PeerId,
        kind: FrameKind,
        length: int,
        content: Callable[[], bytes],
        *,
        offset: int = 0,
        what: int = 0,
    ) -> None:
        """Send what may be asked for again and again, unless it waits for a lane already."""
        answer = peer, kind, offset
        if answer in self._answers:
            return
        self._answers.add(answer)

        def make() -> memoryview:
            self._answers.discard(answer)
            return memoryview(content())

        self._sender.send(peer, kind, make, offset=offset, what=what, length=length)

    def send_pieces(self, peer: PeerId, numbers: list[int]) -> None:
        """Send these pieces, and say which are not here.

        Raises:
            RemoteProtocolError: there are no such pieces, or it is too much.
        """
        queued = self._queued.setdefault(peer, {})
        lacking: list[int] = []
        for number in numbers:
            if number >= self._layout.piece_count:
                raise RemoteProtocolError(func="lane", reason=f"asks for piece {number}")
            if number in queued:
                continue
            if self._is_closed or not self._holds(number):
                lacking.append(number)
                continue
            if len(queued) >= QUEUED_PIECES_MAX:
                raise RemoteProtocolError(func="lane", reason="asks for too much at once")
            queued[number] = None
            length = self._layout.piece(number).length
            payload = self._payload(peer, number)
            self._sender.send(peer, FrameKind.PIECE, payload, offset=number, length=length)
        if lacking:
            self._refuse(peer, lacking)

    def _refuse(self, peer: PeerId, lacking: list[int]) -> None:
        if self._lacking[peer] + len(lacking) > QUEUED_PIECES_MAX:
            raise RemoteProtocolError(func="lane", reason="asks for too much that is not here")
        self._lacking[peer] += len(lacking)

        def make() -> memoryview:
            self._lacking[peer] -= len(lacking)
            return memoryview(pack_numbers(lacking))

        length = 4 * len(lacking)
        self._sender.send(peer, FrameKind.PIECE_LACK, make, length=length)

    def _payload(self, peer: PeerId, number: int) -> Callable[[], memoryview]:
        def make() -> memoryview:
            queued = self._queued.get(peer)
            if queued is not None:
                queued.pop(number, None)
            self.tx_bytes += self._layout.piece(number).length
            return self._read(number)

        return make
