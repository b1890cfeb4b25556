"""Results that a member shows: who hears of them, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pccl.protocol.data_type import DataType
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import Descriptor, OperationId, PeerId, Quorum, ReduceOp
from pccl.runtime.collective.memory import Memory
from pccl.runtime.hashing import hash_here
from pccl.runtime.state.exchange import StateExchange
from pccl.runtime.state.frames import StateSender
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.results import LateResults, Loose, ResultCopy, Results, late_memory
from pccl.state.digests import layout_digest
from pccl.transports.link import Link, Links
from pccl.transports.sinks import Drain

SLOW, QUICK = PeerId(8), PeerId(9)
UNREAD_BYTES_MAX = 1000
COMMITS = 50


class Scene:
    """A member; what it sends waits until it is read."""

    def __init__(self) -> None:
        self.links = Links(Link)
        self.shown: list[StateMemory] = []
        self.results = Results(self.shown.append, self.shown.remove)
        self.results.synchronized(b"c" * 32)
        self.n = 0

    def watch(self, peer: PeerId, tag: int = 1) -> None:
        watched = OperationId(term=0, group=0, view=0, tag=tag, n=0)
        self.results.watch(peer, StateSender(watched, self.links))

    def commit(self) -> None:
        copy = self.copy()
        if copy is not None:
            hash_here(copy.memory, range(1))
            self.results.announce(copy)

    def copy(self) -> ResultCopy | None:
        result = Memory([np.zeros(1, np.uint8)])
        operation = OperationId(1, 0, 1, 5, self.n)
        self.n += 1
        return self.results.committed(operation, DataType.UINT8, result, (SLOW,))

    def read(self, peer: PeerId) -> int:
        """All that waits for ``peer``; returns how much news that is."""
        link, count = self.links.to(peer), 0
        while link.queues:
            link.next_frame()
            count += 1
        return count


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr("pccl.runtime.state.results.UNREAD_BYTES_MAX", UNREAD_BYTES_MAX)
    return Scene()


def test_copies_that_wait_for_their_hashes_take_bounded_memory(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.runtime.state.results.KEPT_BYTES_MAX", 2)
    scene.watch(QUICK)
    copies = [scene.copy() for _ in range(5)]
    assert [copy is not None for copy in copies] == [True, True, True, False, False]
    for copy in copies[:3]:
        assert copy is not None
        hash_here(copy.memory, range(1))
        scene.results.announce(copy)
    assert scene.copy() is not None


def test_a_watcher_that_does_not_read_takes_bounded_memory(scene: Scene) -> None:
    scene.watch(SLOW)
    scene.commit()
    one = scene.links.to(SLOW).backlog_bytes
    assert 0 < one < UNREAD_BYTES_MAX
    for _ in range(COMMITS):
        scene.commit()
    assert UNREAD_BYTES_MAX < scene.links.to(SLOW).backlog_bytes <= UNREAD_BYTES_MAX + one
    assert scene.shown == []  # nobody watches


def test_a_watcher_that_reads_goes_on_beside_it(scene: Scene) -> None:
    scene.watch(SLOW)
    scene.watch(QUICK)
    heard = 0
    for _ in range(COMMITS):
        scene.commit()
        heard += scene.read(QUICK)
    assert heard == COMMITS
    assert len(scene.shown) == COMMITS


def test_a_watcher_that_was_dropped_may_watch_again_when_it_has_read(scene: Scene) -> None:
    scene.watch(SLOW)
    for _ in range(COMMITS):
        scene.commit()
    for tag in range(COMMITS):
        scene.watch(SLOW, tag)  # under whichever operation
        scene.commit()
    assert 0 < scene.read(SLOW) < COMMITS
    scene.watch(SLOW)
    scene.commit()
    assert scene.read(SLOW) == 1


def test_a_watcher_gets_no_more_old_news_than_it_may_leave_unread(scene: Scene) -> None:
    scene.watch(QUICK)
    scene.commit()
    one = scene.links.to(QUICK).backlog_bytes
    for _ in range(COMMITS):
        scene.read(QUICK)
        scene.commit()
    scene.watch(SLOW)
    assert UNREAD_BYTES_MAX < scene.links.to(SLOW).backlog_bytes <= UNREAD_BYTES_MAX + one


def test_a_result_is_not_announced_when_the_last_watcher_has_gone(scene: Scene) -> None:
    scene.watch(QUICK)
    copy = scene.copy()
    assert copy is not None
    scene.results.forget([QUICK])
    scene.results.announce(copy)
    assert scene.shown == []
    assert scene.read(QUICK) == 0


def test_pieces_that_wait_are_no_news(scene: Scene) -> None:
    """A newcomer asks for as much as its line carries in a second."""
    sender = StateSender(OperationId(0, 0, 0, 1, 0), scene.links)
    sender.send(SLOW, FrameKind.PIECE, bytes(UNREAD_BYTES_MAX + 1))
    scene.watch(SLOW)
    scene.commit()
    assert scene.read(SLOW) == 2


def test_a_newcomer_that_refuses_another_one_does_not_close_its_lane(scene: Scene) -> None:
    """It fetches the same itself: the question must not be taken for an answer."""
    memory = StateMemory([Loose("w", np.zeros(9, np.uint8), DataType.UINT8)])
    exchange = StateExchange(0, scene.links, lambda: 0, 10, lambda _: None)
    prefetch = exchange.begin_prefetch(memory, FetchedPieces(memory, 0), lambda: None)
    sender = StateSender(prefetch.operation, scene.links)
    sender.send(SLOW, FrameKind.RESULT, bytes(UNREAD_BYTES_MAX + 1))
    lane: Any = SimpleNamespace(link=scene.links.to(SLOW))
    header = FrameHeader(FrameKind.WATCH, prefetch.operation, 0, 0, 0)
    assert isinstance(exchange.frame_started(lane, header), Drain)


# -- for late members ----------------------------------------------------------------------------

SECOND = 1_000_000_000
LATE_KEPT_NS = 120 * SECOND
LATE_BYTES_MAX = 4000


class Kept:
    """A member that keeps results; ``shown`` has those that late members may fetch."""

    def __init__(self) -> None:
        self.shown: list[StateMemory] = []
        self.late = LateResults(self.shown.append, self.shown.remove)

    def keep(self, n: int, count: int = 250, now_ns: int = 0) -> None:
        self.stage(n, count)
        self.late.ended(operation(n), now_ns, committed=True)

    def stage(self, n: int, count: int = 250) -> None:
        values = np.full(count, n, np.float32)
        self.late.stage(operation(n), asked(count), values)

    @property
    def firsts(self) -> list[float]:
        return [memory.views[0].cast("B").cast("f")[0] for memory in self.shown]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr("pccl.runtime.state.results.LATE_BYTES_MAX", LATE_BYTES_MAX)
    return Kept()


def operation(n: int) -> OperationId:
    return OperationId(1, 0, 1, 5, n)


def asked(count: int, op: ReduceOp = ReduceOp.SUM) -> Descriptor:
    return Descriptor(DataType.FLOAT, op, count, quorum=Quorum(2))


def test_results_are_kept_up_to_so_many_bytes(kept: Kept) -> None:
    for n in range(4):
        kept.keep(n)
    assert kept.firsts == [0, 1, 2, 3]
    kept.keep(4)
    assert kept.firsts == [1, 2, 3, 4]
    kept.keep(5, count=600)
    assert kept.firsts == [4, 5]


def test_a_copy_of_an_undecided_operation_takes_room_but_is_not_shown(kept: Kept) -> None:
    for n in range(3):
        kept.keep(n)
    kept.stage(3, count=500)
    assert kept.late.is_staged(operation(3))
    assert kept.firsts == [1, 2]
    kept.late.ended(operation(3), 0, committed=True)
    assert not kept.late.is_staged(operation(3))
    assert kept.firsts == [1, 2, 3]


def test_an_aborted_operation_gives_its_room_back(kept: Kept) -> None:
    kept.stage(0, count=1000)
    kept.late.ended(operation(0), 0, committed=False)
    kept.late.ended(operation(0), 0, committed=True)  # of another call: there is nothing to show
    for n in range(1, 5):
        kept.keep(n)
    assert kept.firsts == [1, 2, 3, 4]


def test_results_are_kept_for_so_long(kept: Kept) -> None:
    kept.keep(0, now_ns=5 * SECOND)
    kept.keep(1, now_ns=65 * SECOND)
    kept.late.tick(5 * SECOND + LATE_KEPT_NS - 1)
    assert kept.firsts == [0, 1]
    kept.late.tick(5 * SECOND + LATE_KEPT_NS)
    assert kept.firsts == [1]
    for n in (2, 3, 4):  # the room of the first one is free
        kept.keep(n, now_ns=130 * SECOND)
    assert kept.firsts == [1, 2, 3, 4]
    kept.late.tick(1000 * SECOND)
    assert kept.shown == []


def test_small_results_are_bounded_in_number(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.runtime.state.results.KEPT_MAX", 3)
    for n in range(5):
        kept.keep(n, count=1)
    assert kept.firsts == [2, 3, 4]


def test_none_is_kept_after_the_end(kept: Kept) -> None:
    kept.keep(0)
    kept.stage(1)
    kept.late.clear()
    kept.late.tick(0)
    assert kept.shown == []
    assert not kept.late.is_staged(operation(1))


def test_a_result_is_found_by_its_operation_and_descriptor_only(kept: Kept) -> None:
    kept.keep(3, count=8)
    values = np.zeros(8, np.float32)
    right = late_memory(operation(3), asked(8), values)
    assert layout_digest(right.layout) == layout_digest(kept.shown[0].layout)
    for other in (
        late_memory(operation(4), asked(8), values),
        late_memory(operation(3), asked(8, ReduceOp.MAX), values),
        late_memory(operation(3), asked(7), values[:7]),
    ):
        assert layout_digest(other.layout) != layout_digest(right.layout)
