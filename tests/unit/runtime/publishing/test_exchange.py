"""What a reader can make a member do: get what it serves, and nothing else."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from pccl.protocol.data_type import DataType
from pccl.protocol.frame import HEADER_BYTES, FrameHeader, FrameKind, decode_header
from pccl.protocol.limits import READER_LINKS_MAX
from pccl.protocol.types import NS_PER_S, OperationId, PeerId
from pccl.runtime.hashing import hash_here
from pccl.runtime.publishing.exchange import VersionExchange
from pccl.runtime.publishing.fetch import VersionFetch
from pccl.runtime.state.frames import QUEUED_PIECES_MAX, pack_numbers
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.results import Loose
from pccl.state.versions import name_of, version_operation
from tests.support.frames import encode_frame
from tests.support.wires import FakeClock, Wire

COUNT = 6


def state() -> StateMemory:
    """A state of six pieces."""
    arrays = [np.full(10, n, np.uint8) for n in range(COUNT)]
    memory = StateMemory([Loose(f"{n}", one, DataType.UINT8) for n, one in enumerate(arrays)])
    hash_here(memory, range(COUNT))
    return memory


def wire_of(sent: bytearray | None = None) -> Any:
    """The end of a connection that a process serves; None: the other side reads nothing."""
    return Wire(None if sent is None else sent.extend)


class Stage:
    """A member that serves one state, and one reader. ``takes``: whether the reader reads."""

    def __init__(self, *, takes: bool = True) -> None:
        self.exchange = VersionExchange(FakeClock(), 0, NS_PER_S)
        self.memory = state()
        self.exchange.offer([self.memory])
        self.operation = version_operation(name_of(self.memory.piece_map), 0)
        self.sent = bytearray()
        self.wire = wire_of(self.sent if takes else None)
        self.exchange.accept(self.wire, PeerId(9))

    def hear(
        self, kind: FrameKind, payload: bytes = b"", operation: OperationId | None = None
    ) -> None:
        header = FrameHeader(kind, operation or self.operation, 0, 0, len(payload))
        self.wire.feed(encode_frame(header, payload), Random(1))
        if self.wire.error is not None:
            self.wire.end()

    def frames(self) -> list[tuple[FrameKind, int, bytes]]:
        """Kind, offset and payload of all that was sent."""
        found: list[tuple[FrameKind, int, bytes]] = []
        data = bytes(self.sent)
        while data:
            header = decode_header(data[:HEADER_BYTES])
            end = HEADER_BYTES + header.length
            found.append((header.kind, header.offset, data[HEADER_BYTES:end]))
            data = data[end:]
        self.sent.clear()
        return found


def test_it_serves_layout_map_and_pieces() -> None:
    stage = Stage()
    stage.hear(FrameKind.LAYOUT_ASK)
    stage.hear(FrameKind.MAP_ASK)
    stage.hear(FrameKind.PIECE_ASK, pack_numbers([4]))
    stage.hear(FrameKind.WATCH)
    layout, digests, piece, have = stage.frames()
    assert layout == (FrameKind.LAYOUT, 0, stage.memory.layout.pack())
    assert digests == (FrameKind.MAP, 0, stage.memory.piece_map.part(range(COUNT)))
    assert piece == (FrameKind.PIECE, 4, bytes([4]) * 10)
    assert have == (FrameKind.PIECE_HAVE, 0, pack_numbers(range(COUNT)))


def test_it_refuses_what_it_does_not_serve() -> None:
    stage = Stage()
    other = OperationId(1, 0, 0, 5, 0)
    stage.hear(FrameKind.MAP_ASK, operation=other)
    stage.hear(FrameKind.MAP, bytes(64))
    stage.hear(FrameKind.PIECE, bytes(10))
    stage.exchange.offer([])
    stage.hear(FrameKind.PIECE_ASK, pack_numbers([0]))
    assert stage.frames() == [(FrameKind.PIECE_LACK, 0, b"")] * 2
    assert stage.wire.error is None


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (FrameKind.DATA, bytes(8)),
        (FrameKind.RESULT, bytes(8)),
        (FrameKind.QUERY, b""),
        (FrameKind.PULL_ASK, bytes(8)),
        (FrameKind.PIECE_ASK, bytes(3)),
        (FrameKind.PIECE_ASK, pack_numbers([COUNT])),
        (FrameKind.PIECE_ASK, bytes(4 * QUEUED_PIECES_MAX + 4)),
    ],
)
def test_other_frames_end_its_lane(kind: FrameKind, payload: bytes) -> None:
    stage = Stage()
    stage.hear(kind, payload)
    assert stage.wire.error is not None
    assert stage.exchange.links.find(PeerId(9)) is None


def test_a_piece_that_has_come_from_elsewhere_is_not_sent() -> None:
    stage = Stage(takes=False)
    stage.hear(FrameKind.PIECE_ASK, pack_numbers(range(COUNT)))
    stage.hear(FrameKind.PIECE_HAVE, pack_numbers([1, 2, 3]))
    stage.wire.on_sent = stage.sent.extend
    for link in stage.exchange.links.all():
        for lane in link.lanes:
            lane.writable()
    assert [offset for _, offset, _ in stage.frames()] == [0, 4, 5]


def test_a_fetch_that_ends_refuses_what_readers_have_asked() -> None:
    stage, memory = Stage(takes=False), state()
    exchange, name = stage.exchange, name_of(memory.piece_map)
    exchange.offer([])
    fetch = exchange.fetch = VersionFetch(
        name, 0, PeerId(1), exchange.links, int, NS_PER_S,
        on_layout=lambda fetch, _: fetch.begin(memory), on_done=lambda _: None,
    )  # fmt: skip
    fetch.set_sources((), (0, 2))
    fetch.knows_layout(memory.layout)
    stage.hear(FrameKind.LAYOUT_ASK)
    fetch.close()
    stage.wire.on_sent = stage.sent.extend
    for link in exchange.links.all():
        for lane in link.lanes:
            lane.writable()
    kinds = [kind for kind, _, _ in stage.frames()]
    assert kinds[-1] is FrameKind.PIECE_LACK


def test_readers_are_few() -> None:
    stage = Stage()
    wires = [wire_of() for _ in range(READER_LINKS_MAX)]
    for number, wire in enumerate(wires):
        stage.exchange.accept(wire, PeerId(100 + number))
    assert [wire.open for wire in wires] == [True] * (READER_LINKS_MAX - 1) + [False]
    again = wire_of()
    stage.exchange.accept(again, PeerId(9))
    assert again.open
    assert not stage.wire.open
