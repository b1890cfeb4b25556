"""What a member shows to newcomers while nobody waits for them."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import PeerId
from pccl.runtime.hashing import hash_here
from pccl.runtime.state.exchange import StateExchange
from pccl.runtime.state.frames import pack_numbers
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.snapshot import StateSnapshot, idle_operation
from pccl.transports.link import Links
from pccl.transports.outgoing import Payload
from tests.support.small_state import PIECE, Recorder, memory_of

NEWCOMER = PeerId(7)


class Scene:
    def __init__(self) -> None:
        self.values = np.arange(4 * PIECE, dtype=np.uint8)
        self.memory: StateMemory | None = memory_of(self.values)
        self.links = Links(Recorder)
        self.operation = idle_operation(self.memory.layout, 3)
        self.snapshot = StateSnapshot(self.memory, self.operation, self.links)

    @property
    def queued(self) -> list[tuple[FrameHeader, Payload]]:
        link = self.links.to(NEWCOMER)
        assert isinstance(link, Recorder)
        return link.sent

    def ask(self, kind: FrameKind, payload: bytes = b"") -> None:
        header = FrameHeader(kind, self.operation, 0, 0, len(payload))
        sink = self.snapshot.frame_started(NEWCOMER, header)
        if payload:
            sink.memory(0)[:] = payload
        sink.complete()


def test_it_is_of_no_term_and_named_by_group_and_layout() -> None:
    scene = Scene()
    assert (scene.operation.term, scene.operation.group) == (0, 3)
    other = memory_of(np.zeros(5, np.uint8))
    assert idle_operation(other.layout, 3) != scene.operation


def test_pieces_are_read_when_their_turn_comes() -> None:
    scene = Scene()
    scene.ask(FrameKind.PIECE_ASK, pack_numbers([2]))
    ((header, payload),) = scene.queued
    assert (header.kind, header.offset, header.length) == (FrameKind.PIECE, 2, PIECE)
    scene.values[2 * PIECE] = 99
    assert callable(payload)
    assert bytes(payload()) == scene.values[2 * PIECE : 3 * PIECE].tobytes()


def test_who_waits_for_pieces_goes_on_waiting_when_the_members_synchronize() -> None:
    scene = Scene()
    assert scene.memory is not None
    scene.ask(FrameKind.PIECE_ASK, pack_numbers([0, 1]))
    scene.values[:] = 1
    hash_here(scene.memory, scene.memory.stale_pieces())
    scene.snapshot.renew(scene.memory)
    assert [header.offset for header, _ in scene.queued] == [0, 1]
    scene.ask(FrameKind.MAP_ASK)
    _, payload = scene.queued[-1]
    assert callable(payload)
    assert bytes(payload()) == scene.memory.piece_map.part(range(4))


def test_who_waits_when_it_ends_is_told() -> None:
    scene = Scene()
    scene.ask(FrameKind.PIECE_ASK, pack_numbers([0, 1]))
    scene.snapshot.close()
    assert [(h.kind, h.length) for h, _ in scene.queued] == [(FrameKind.PIECE_LACK, 0)]


def test_it_does_not_keep_a_state_alive() -> None:
    scene = Scene()
    scene.ask(FrameKind.PIECE_ASK, pack_numbers([1]))
    scene.memory = None
    gc.collect()
    ((_, payload),) = scene.queued
    assert callable(payload)
    assert bytes(payload()) == bytes(PIECE)  # which no newcomer takes for the piece


def test_what_does_not_exist_is_an_offence() -> None:
    scene = Scene()
    with pytest.raises(RemoteProtocolError, match="there is no piece 4"):
        scene.ask(FrameKind.PIECE_ASK, pack_numbers([4]))
    with pytest.raises(RemoteProtocolError, match="a PIECE_ASK frame must not have 3 bytes"):
        scene.ask(FrameKind.PIECE_ASK, b"123")


def test_who_waits_for_a_map_when_it_ends_is_told() -> None:
    scene = Scene()
    scene.ask(FrameKind.MAP_ASK)
    scene.snapshot.close()
    assert [(h.kind, h.length) for h, _ in scene.queued] == [(FrameKind.PIECE_LACK, 0)]


def test_what_the_program_has_let_go_of_is_not_shown_any_more() -> None:
    """Whoever waits is told, rather than given zeros."""
    scene = Scene()

    def ignore(*_: object) -> None:
        pass

    exchange = StateExchange(3, scene.links, lambda: 0, 1, ignore)
    exchange.snapshots[scene.operation] = scene.snapshot
    exchange.tick()
    assert scene.operation in exchange.snapshots
    scene.ask(FrameKind.PIECE_ASK, pack_numbers([1]))
    scene.memory = None
    gc.collect()
    exchange.tick()
    assert not exchange.snapshots
    assert [(h.kind, h.length) for h, _ in scene.queued] == [(FrameKind.PIECE_LACK, 0)]
