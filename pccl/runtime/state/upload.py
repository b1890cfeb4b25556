"""``StateUpload``: sends pieces, maps and layouts of one shared state to peers that ask.

It reads a piece only when a lane is about to send it, and makes no copy. A repeated request for a
frame that still waits for a lane changes nothing.
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
    """The upload side of one shared state.

    Args:
        layout: layout of the state.
        piece_map: digests of the pieces that this peer sends.
        read: returns the bytes of a piece.
        holds: returns whether this peer can send the right contents of a piece.
        sender: queues the frames.
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
        """Digests of the pieces that this peer sends."""
        self._layout = layout
        self._read = read
        self._holds = holds
        self._sender = sender
        self._is_closed = False
        self._queued: dict[PeerId, dict[int, None]] = {}
        """Requested pieces that still wait for a lane, by peer."""
        self._answers: set[tuple[PeerId, FrameKind, int]] = set()
        """Parts of maps, by their first pieces, and layouts that still wait for a lane."""
        self._lacking: Counter[PeerId] = Counter()
        """Number of refused pieces whose refusals still wait for a lane."""

    def owes(self, peer: PeerId) -> bool:
        """Whether ``peer`` waits for pieces."""
        return bool(self._queued.get(peer))

    def forget(self, peer: PeerId) -> None:
        """Drop all frames that wait for a lane to ``peer``."""
        self._sender.drop(peer)
        self._queued.pop(peer, None)
        self._answers = {answer for answer in self._answers if answer[0] != peer}
        del self._lacking[peer]

    def close(self) -> None:
        """Drop all waiting frames. The upload reads no memory after this."""
        self._is_closed = True
        self._queued.clear()
        self._answers.clear()
        self._sender.end()

    def withdraw(self) -> None:
        """Close the upload, and send a refusal to each peer that waits for a frame."""
        waiting = [peer for peer, _, _ in sorted(self._answers)]
        asked = dict.fromkeys((*self._queued, *waiting))
        self.close()
        for peer in asked:
            self._sender.send(peer, FrameKind.PIECE_LACK)

    def send_layout(self, peer: PeerId) -> None:
        """Send the layout to ``peer``."""
        packed = self._layout.pack()
        self._answer(peer, FrameKind.LAYOUT, len(packed), lambda: packed)

    def send_map(self, peer: PeerId) -> None:
        """Send the digests of all pieces to ``peer``."""
        count = self._layout.piece_count
        for first in range(0, max(count, 1), MAP_PIECES_MAX):
            numbers = range(first, min(first + MAP_PIECES_MAX, count))
            length = len(numbers) * DIGEST_BYTES
            part = partial(self.piece_map.part, numbers)
            self._answer(peer, FrameKind.MAP, length, part, offset=first, what=count)

    def send_have(self, peer: PeerId) -> None:
        """Send the numbers of all pieces that this peer has to ``peer``."""
        if (peer, FrameKind.PIECE_HAVE, 0) in self._answers:
            return
        numbers = [n for n in range(self._layout.piece_count) if self._holds(n)]
        for first in range(0, len(numbers), QUEUED_PIECES_MAX):
            packed = pack_numbers(numbers[first : first + QUEUED_PIECES_MAX])
            part = partial(bytes, packed)
            self._answer(peer, FrameKind.PIECE_HAVE, len(packed), part, offset=first)

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
        """Queue an answer, unless the same answer already waits for a lane."""
        answer = peer, kind, offset
        if answer in self._answers:
            return
        self._answers.add(answer)

        def make() -> memoryview:
            self._answers.discard(answer)
            return memoryview(content())

        self._sender.send(peer, kind, make, offset=offset, what=what, length=length)

    def send_pieces(self, peer: PeerId, numbers: list[int]) -> None:
        """Queue these pieces for ``peer``, and refuse pieces that this peer does not have.

        Raises:
            RemoteProtocolError: a number is above the last piece, or too many answers wait.
        """
        queued = self._queued.setdefault(peer, {})
        lacking: list[int] = []
        count = self._layout.piece_count
        for number in numbers:
            if number >= count:
                raise RemoteProtocolError(func="lane", reason=f"there is no piece {number}")
            if number in queued:
                continue
            if self._is_closed or not self._holds(number):
                lacking.append(number)
                continue
            if len(queued) >= QUEUED_PIECES_MAX:
                raise RemoteProtocolError(func="lane", reason="the peer asks for too many pieces")
            queued[number] = None
            length = self._layout.piece(number).length
            payload = self._payload(peer, number)
            self._sender.send(peer, FrameKind.PIECE, payload, offset=number, length=length)
        if lacking:
            self._refuse(peer, lacking)

    def cancel(self, peer: PeerId, numbers: list[int]) -> None:
        """Do not send these pieces, which ``peer`` has from another source."""
        queued = self._queued.get(peer, {})
        if unsent := {number for number in numbers if number in queued}:
            for number in unsent:
                del queued[number]
            self._sender.unqueue(peer, unsent)

    def _refuse(self, peer: PeerId, lacking: list[int]) -> None:
        if self._lacking[peer] + len(lacking) > QUEUED_PIECES_MAX:
            raise RemoteProtocolError(func="lane", reason="it asks for too many unavailable pieces")
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
