"""What newcomers may fetch while nobody waits for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pccl import TensorInfo
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.exhibit import idle_operation
from pccl.runtime.state_exchange import StateExchange
from pccl.runtime.state_memory import StateMemory
from pccl.runtime.state_post import pack_numbers
from pccl.state.digests import piece_digest

NEWCOMER = PeerId(9)
PIECE = 64


class SlowLink:
    """A link whose lanes take nothing yet; also the table of all links."""

    peer = NEWCOMER

    def __init__(self) -> None:
        self.waiting: list[tuple[FrameHeader, Any]] = []

    def send(self, header: FrameHeader, payload: Any, step: int) -> None:
        self.waiting.append((header, payload))

    def revoke(self, operation: OperationId) -> None:
        self.waiting.clear()

    def to(self, peer: PeerId) -> SlowLink:
        return self

    def find(self, peer: PeerId) -> SlowLink:
        return self

    def all(self) -> list[SlowLink]:
        return [self]


class AnyLane:
    """The lane on which a question comes."""

    def __init__(self, link: SlowLink) -> None:
        self.link = link


def ignore(operation: OperationId, what: object) -> None:
    pass


def hashed(tensor: np.ndarray[Any, np.dtype[Any]]) -> StateMemory:
    memory = StateMemory([TensorInfo.from_numpy(tensor, "w")], piece_bytes=PIECE)
    hash_again(memory)
    return memory


def hash_again(memory: StateMemory) -> None:
    for number in memory.stale_pieces():
        memory.piece_map[number] = piece_digest(memory.view(memory.layout.piece(number)))


def ask(exchange: StateExchange, link: SlowLink, kind: FrameKind, content: bytes) -> None:
    memory = hashed(np.zeros(64, np.float32))
    header = FrameHeader(kind, idle_operation(memory.layout, 0), 0, 0, len(content))
    lane: Any = AnyLane(link)
    sink = exchange.frame_started(lane, header)
    if content:
        sink.memory(0)[:] = content
    sink.complete()


def test_who_has_asked_gets_the_contents_of_the_next_synchronization_if_the_link_is_slow() -> None:
    link = SlowLink()
    links: Any = link
    exchange = StateExchange(0, links, lambda: 0, 1, ignore, ignore, ignore)
    tensor = np.zeros(64, np.float32)
    memory = hashed(tensor)
    exchange.show(memory)
    ask(exchange, link, FrameKind.PIECE_ASK, pack_numbers([3, 1]))
    tensor += 5
    hash_again(memory)
    exchange.show(memory)
    frames = [(header.kind, header.offset, bytes(make())) for header, make in link.waiting]
    fives = np.full(16, 5, np.float32).tobytes()
    assert frames == [(FrameKind.PIECE, 3, fives), (FrameKind.PIECE, 1, fives)]
    link.waiting.clear()
    ask(exchange, link, FrameKind.MAP_ASK, b"")
    [(header, make)] = link.waiting
    assert header.kind is FrameKind.MAP
    assert bytes(make()) == 4 * piece_digest(fives)
