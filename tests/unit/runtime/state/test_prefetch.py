"""What a newcomer fetches and replays before it is admitted: failures, and who may write when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pccl.protocol.data_type import DataType
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.collective.memory import Memory
from pccl.runtime.hashing import InlineHasher, PooledHasher, hash_here
from pccl.runtime.state.exchange import StateExchange
from pccl.runtime.state.frames import StateSender
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.prefetch import Prefetch
from pccl.runtime.state.replay import ObservedReduction, Replay
from pccl.runtime.state.results import ResultNews, Results, result_memory
from pccl.runtime.state.running_prefetch import PrefetchRequest, RunningPrefetch
from pccl.runtime.state.snapshot import idle_operation
from pccl.runtime.tasks import Tasks
from pccl.state.digests import PieceMap
from pccl.transports.link import Links
from tests.support.patience import LIMIT_S
from tests.support.small_state import PIECE, Recorder, filled

MEMBER = PeerId(1)


def memory_of(value: int, *, track_touched: bool = False) -> StateMemory:
    return filled(value, 4, track_touched=track_touched)


def one_byte() -> Memory:
    return Memory([np.zeros(1, np.uint8)])


def hear(
    prefetch: Prefetch, kind: FrameKind, payload: bytes, offset: int = 0, what: int = 0
) -> None:
    header = FrameHeader(kind, prefetch.operation, 0, offset, len(payload), what)
    sink = prefetch.frame_started(MEMBER, header)
    if payload:
        sink.memory(0)[:] = payload
    sink.complete()


class Scene:
    """A newcomer with a link to one member, which holds ``theirs``."""

    def __init__(self, memory_max_bytes: int = 1 << 30, directory: str | None = None) -> None:
        self.memory = memory_of(1, track_touched=True)
        self.links = Links(Recorder)
        self.links.to(MEMBER)
        self.fetched = FetchedPieces(self.memory, memory_max_bytes, directory)
        self.ready = 0
        self.now_ns = 0
        self.operation = idle_operation(self.memory.layout, 0)
        self.prefetch = Prefetch(
            self.memory, self.fetched, self.operation, self.links, self._now, 10, self._on_ready
        )

    def _now(self) -> int:
        return self.now_ns

    def _on_ready(self) -> None:
        self.ready += 1

    def hear(self, kind: FrameKind, payload: bytes, offset: int = 0, what: int = 0) -> None:
        hear(self.prefetch, kind, payload, offset, what)

    def hear_map(self, theirs: PieceMap) -> None:
        self.hear(FrameKind.MAP, theirs.part(range(4)), what=4)

    def fetch(self, theirs: StateMemory) -> None:
        """All of it comes."""
        self.hear_map(theirs.piece_map)
        for number in range(4):
            self.hear_piece(theirs, number)

    def hear_piece(self, theirs: StateMemory, number: int) -> None:
        piece = theirs.view(theirs.layout.piece(number))
        self.hear(FrameKind.PIECE, bytes(piece), offset=number)

    @property
    def value(self) -> set[int]:
        return set(self.memory.views[0])


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_who_has_no_room_is_admitted_without_having_fetched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(0, "/nowhere")
    scene.hear_map(memory_of(2).piece_map)
    assert scene.ready == 1
    assert scene.prefetch.content == b""
    assert "this peer fetches no shared state before its admission: " in caplog.text
    assert "/nowhere" in caplog.text


@pytest.mark.parametrize("dies", [True, False])
def test_a_member_that_does_not_answer_holds_nobody_up(scene: Scene, dies: bool) -> None:
    """It was asked for its map, when all is here from another one."""
    silent = PeerId(2)
    scene.links.to(silent)
    scene.prefetch.link_changed(silent, up=True)
    scene.fetch(memory_of(2))
    assert scene.ready == 0
    if dies:
        scene.prefetch.link_changed(silent, up=False)
    else:
        scene.now_ns = 10
    scene.prefetch.tick()
    assert scene.ready == 1
    assert scene.prefetch.content == memory_of(2).piece_map.digest(may_differ=False)


def test_a_map_that_comes_byte_by_byte_is_waited_for(scene: Scene) -> None:
    """One frame of it may take longer than a silent member is waited for."""
    digests = memory_of(2).piece_map.part(range(4))
    header = FrameHeader(FrameKind.MAP, scene.operation, 0, 0, len(digests), 4)
    sink = scene.prefetch.frame_started(MEMBER, header)
    for received in range(len(digests)):
        sink.memory(received)[:1] = digests[received : received + 1]
        scene.now_ns += 9
        scene.prefetch.tick()
    assert scene.ready == 0
    sink.complete()
    for number in range(4):
        scene.hear_piece(memory_of(2), number)
    assert scene.ready == 1
    assert scene.prefetch.content == memory_of(2).piece_map.digest(may_differ=False)


def test_a_map_of_which_no_more_comes_is_not_waited_for(scene: Scene) -> None:
    header = FrameHeader(FrameKind.MAP, scene.operation, 0, 0, 4 * 32, 4)
    sink = scene.prefetch.frame_started(MEMBER, header)
    sink.memory(0)
    scene.now_ns = 9
    sink.memory(100)
    scene.now_ns = 18
    scene.prefetch.tick()
    assert scene.ready == 0
    scene.now_ns = 19
    scene.prefetch.tick()
    assert scene.ready == 1
    sink.memory(0)[:] = memory_of(2).piece_map.part(range(4))
    sink.complete()
    assert scene.prefetch.download.pieces is not None  # it is not lost either


def test_the_only_source_dies(scene: Scene) -> None:
    scene.hear_map(memory_of(2).piece_map)
    scene.now_ns = 90
    scene.hear_piece(memory_of(2), 0)
    scene.now_ns = 100
    scene.links.drop(MEMBER)
    scene.prefetch.link_changed(MEMBER, up=False)
    scene.now_ns = 109
    scene.prefetch.tick()
    assert scene.ready == 0  # its link may come back
    scene.now_ns = 110
    scene.prefetch.tick()
    assert scene.ready == 1
    assert scene.prefetch.content == b""


def test_the_only_source_lives_and_sends_nothing(scene: Scene) -> None:
    scene.hear_map(memory_of(2).piece_map)
    scene.hear_piece(memory_of(2), 0)
    scene.now_ns = 19
    scene.prefetch.tick()
    assert scene.ready == 0
    scene.now_ns = 20
    scene.prefetch.tick()
    assert scene.ready == 1
    assert list(scene.fetched.verified) == [0]


def test_nothing_else_is_begun_while_fetched_pieces_are_read(scene: Scene) -> None:
    """Its room would be taken for the next contents."""
    scene.fetch(memory_of(2))
    content = scene.prefetch.content
    assert content == memory_of(2).piece_map.digest(may_differ=False)
    scene.prefetch.link_changed(MEMBER, up=True)
    scene.prefetch.download.is_held = True
    scene.hear_map(memory_of(3).piece_map)
    assert scene.prefetch.content == content
    assert sorted(scene.fetched.verified) == [0, 1, 2, 3]
    scene.prefetch.download.is_held = False
    scene.prefetch.link_changed(MEMBER, up=True)
    scene.hear_map(memory_of(3).piece_map)
    assert scene.prefetch.content == b""  # on its way


NO_RESULTS: Any = None
"""An exchange: none is asked for."""


def test_a_piece_that_has_not_arrived_is_not_put_in_place(scene: Scene) -> None:
    scene.fetch(memory_of(2))
    del scene.fetched.verified[3]
    before = scene.value
    with pytest.raises(AssertionError):
        scene.fetched.apply(scene.prefetch.download.wanted)
    assert scene.value == before != {2}


def test_contents_that_are_put_in_place_half_way_are_hashed_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nobody has told of a change."""
    scene.fetch(memory_of(2))
    with monkeypatch.context() as patch:
        patch.setattr(scene.memory, "store", Mock(side_effect=OSError("an error of the device")))
        with pytest.raises(OSError, match="of the device"):
            scene.fetched.apply(scene.prefetch.download.wanted)
    assert scene.memory.stale == {0}
    scene.memory.hashed([0])
    scene.fetched.apply(scene.prefetch.download.wanted)
    assert scene.memory.stale == set()
    assert scene.value == {2}


class Given(Replay):
    """Has no results to fetch."""

    async def _fetch(self, news: Any) -> Any:
        return None


def first_result_of(scene: Scene) -> bytearray:
    """The announcement of the first result after the state that was fetched."""
    content = scene.prefetch.content
    news = ResultNews(content, 0, OPERATION, DataType.UINT8, 1, bytes(32), (MEMBER,))
    return bytearray(news.pack())


def test_fetched_pieces_are_held_while_they_are_put_in_place() -> None:
    scene, held = Scene(), list[bool]()

    class Watching(InlineHasher):
        async def run(self, function: Callable[[], Any]) -> Any:
            held.append(scene.prefetch.download.is_held)
            return function()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        replay = Given(loop, scene.prefetch, NO_RESULTS, Watching(), lambda _: None)
        scene.fetch(memory_of(2))
        replay.end()
        await replay.run()
        assert held == [], "the tensors may hold a newer checkpoint"
        replay.heard(MEMBER, first_result_of(scene))
        await replay.run()

    asyncio.run(work())
    assert held == [True]
    assert not scene.prefetch.download.is_held
    assert scene.value == {2}


def test_the_oldest_results_that_wait_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.runtime.state.replay.NEWS_KEPT_MAX", 2)
    scene = Scene()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        replay = Given(loop, scene.prefetch, NO_RESULTS, InlineHasher(), lambda _: None)
        for index in (5, 6):  # those before came before this newcomer
            news = ResultNews(b"1" * 32, index, OPERATION, DataType.UINT8, 1, bytes(32), (MEMBER,))
            replay.heard(MEMBER, bytearray(news.pack()))
        scene.fetch(memory_of(2))
        replay.heard(MEMBER, first_result_of(scene))
        replay.end()
        await replay.run()

    asyncio.run(work())
    assert scene.value == {2}


class Exchange:
    """Has the prefetch of a scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def begin_prefetch(self, *_: object) -> Prefetch:
        return self.scene.prefetch

    def end_prefetch(self, operation: OperationId) -> None:
        self.scene.prefetch.close()


def test_nothing_is_written_after_whoever_joins_has_left(scene: Scene) -> None:
    """A thread may be putting what was fetched in place just then."""
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow(FetchedPieces):
        def apply(self, numbers: Any) -> None:
            begun.set()
            assert goes_on.wait(LIMIT_S)
            super().apply(numbers)
            ended.set()

    scene.fetched = scene.prefetch.fetched = Slow(scene.memory, 1 << 30)
    scene.prefetch._receiver.fetched = scene.fetched  # pyright: ignore[reportPrivateUsage]

    def ignore(_: ObservedReduction) -> None:
        pass

    async def work() -> None:
        loop = asyncio.get_running_loop()
        hasher, tasks = PooledHasher(loop), Tasks(loop)
        request = PrefetchRequest(scene.memory, scene.fetched, None, ignore)
        exchange: Any = Exchange(scene)
        running = RunningPrefetch(request, hasher, tasks, lambda: 0, lambda: None)
        running.look(exchange, is_pending=True)
        scene.fetch(memory_of(2))
        assert scene.prefetch.on_result is not None
        scene.prefetch.on_result(MEMBER, first_result_of(scene))
        assert await asyncio.to_thread(begun.wait, LIMIT_S)
        closing: Awaitable[None] = asyncio.ensure_future(running.close())
        await asyncio.sleep(0)
        goes_on.set()
        await closing
        assert ended.is_set()
        hasher.close()

    asyncio.run(work())
    assert scene.value == {2}


def test_a_function_that_fails_leaves_tensors_that_are_hashed_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Although nobody has told of a change, and the digests are those of before."""
    scene.fetch(memory_of(2))

    class Given(Replay):
        async def _fetch(self, news: Any) -> Any:
            return np.zeros(1, np.uint8)

    def fail(_: ObservedReduction) -> None:
        scene.memory.views[0][0] = 77
        raise RuntimeError("the program's")

    async def work() -> None:
        loop = asyncio.get_running_loop()
        replay = Given(loop, scene.prefetch, NO_RESULTS, InlineHasher(), fail)
        news = ResultNews(
            scene.prefetch.content, 0, OPERATION, DataType.UINT8, 1, bytes(32), (MEMBER,)
        )
        replay.heard(MEMBER, bytearray(news.pack()))
        await replay.run()

    asyncio.run(work())
    assert "the program's" in caplog.text
    changed = memory_of(2)
    changed.views[0][0] = 77
    hash_here(changed, [0])
    changed.hashed([0])
    here = scene.memory.piece_map.digest(may_differ=False)
    assert here == changed.piece_map.digest(may_differ=False)
    assert not scene.prefetch.download.is_held


@pytest.mark.parametrize("shown", [1, 3])
def test_a_snapshot_that_comes_during_a_replay_is_compared_with_what_it_made(
    scene: Scene, shown: int
) -> None:
    """The tensors are the members', so results count at once; then the first map comes.

    Another member announces the same result again.
    """
    theirs, changed = memory_of(1), memory_of(1)
    changed.views[0][3 * PIECE :] = bytes([shown]) * PIECE
    hash_here(changed, [3])
    changed.hashed([3])
    content = theirs.piece_map.digest(may_differ=False)
    news = ResultNews(content, 0, OPERATION, DataType.UINT8, 1, bytes(32), (MEMBER,))

    class Given(Replay):
        async def _fetch(self, news: Any) -> Any:
            self.heard(PeerId(2), bytearray(news.pack()))
            scene.hear_map(changed.piece_map)
            for number in scene.prefetch.download.wanted:
                scene.hear_piece(changed, number)
            return np.zeros(1, np.uint8)

    def apply(_: ObservedReduction) -> None:
        half = scene.memory.views[0][: 2 * PIECE]
        half[:] = bytes(value + 1 for value in half)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        replay = Given(loop, scene.prefetch, NO_RESULTS, InlineHasher(), apply)
        replay.heard(MEMBER, bytearray(news.pack()))
        replay.end()
        await replay.run()

    asyncio.run(work())
    assert bytes(scene.memory.views[0]) == b"".join(
        bytes([value]) * PIECE for value in (2, 2, 1, 1)
    )


def test_small_results_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.runtime.state.results.KEPT_MAX", 3)
    shown: list[StateMemory] = []
    results = Results(shown.append, shown.remove)
    results.synchronized(b"c" * 32)
    links = Links(Recorder)
    results.watch(PeerId(9), StateSender(OperationId(0, 0, 0, 1, 0), links))
    committed = partial(results.committed, dtype=DataType.UINT8, contributors=(MEMBER,))
    for n in range(5):
        copy = committed(operation=OperationId(1, 0, 1, 5, n), result=one_byte())
        assert copy is not None
        results.announce(copy)
    names = [memory.layout.entries[0].name for memory in shown]
    assert names == ["t1/g0/v1/tag5#2", "t1/g0/v1/tag5#3", "t1/g0/v1/tag5#4"]


OPERATION = OperationId(1, 0, 1, 5, 0)
VALUES = np.arange(64, dtype=np.uint8)


async def some_turns() -> None:
    """More than a replay needs to do all that it can."""
    for _ in range(9):
        await asyncio.sleep(0)


def digest_of_map(memory: StateMemory, piece: bytes) -> bytes:
    digests = PieceMap(memory.layout)
    digests[0] = piece
    return digests.digest(may_differ=False)


@pytest.mark.parametrize("shown", ["right", "another", "none"])
def test_a_result_is_replayed_if_all_of_it_came_and_is_not_hashed_again(
    scene: Scene, shown: str
) -> None:
    """A member that lies may show a map by which nothing need be fetched."""
    scene.fetch(memory_of(2))
    result = result_memory(str(OPERATION), VALUES, DataType.UINT8)
    hash_here(result, range(1))
    digest = result.piece_map.digest(may_differ=False)
    if shown == "another":
        digest = digest_of_map(result, b"a" * 32)
    if shown == "none":
        result.piece_map[0] = bytes(32)
        digest = digest_of_map(result, bytes(32))
    content = scene.prefetch.content
    news = ResultNews(content, 0, OPERATION, DataType.UINT8, VALUES.size, digest, (MEMBER,))
    seen: list[ObservedReduction] = []
    hashed: list[StateMemory] = []

    class Noting(InlineHasher):
        async def hash_pieces(self, memory: StateMemory, numbers: Iterable[int]) -> None:
            hashed.append(memory)
            await super().hash_pieces(memory, numbers)

    async def work() -> None:
        exchange = StateExchange(0, scene.links, lambda: 0, 10, lambda _: None)
        loop = asyncio.get_running_loop()
        replay = Replay(loop, scene.prefetch, exchange, Noting(), seen.append)
        replay.heard(MEMBER, bytearray(news.pack()))
        running = asyncio.ensure_future(replay.run())
        await some_turns()
        (fetch,) = exchange.prefetches.values()
        hear(fetch, FrameKind.MAP, result.piece_map.part(range(1)), what=1)
        if shown != "none":
            hear(fetch, FrameKind.PIECE, VALUES.tobytes())
        replay.end()
        await running

    asyncio.run(work())
    assert [one.values.tolist() for one in seen] == [VALUES.tolist()] * (shown == "right")
    assert all(memory is scene.memory for memory in hashed)


@pytest.mark.parametrize(("nbytes", "is_taken"), [(2048, True), (2049, False)])
def test_a_result_of_many_times_the_state_is_not_fetched(
    scene: Scene, nbytes: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.runtime.state.replay.RESULT_BYTES_MIN", 0)
    scene.fetch(memory_of(2))
    content = scene.prefetch.content
    news = ResultNews(content, 0, OPERATION, DataType.UINT8, nbytes, bytes(32), (MEMBER,))

    async def work() -> bool:
        exchange = StateExchange(0, scene.links, lambda: 0, 10, lambda _: None)
        loop = asyncio.get_running_loop()
        replay = Replay(loop, scene.prefetch, exchange, InlineHasher(), lambda _: None)
        replay.heard(MEMBER, bytearray(news.pack()))
        running = asyncio.ensure_future(replay.run())
        await some_turns()
        running.cancel()
        return bool(exchange.prefetches)

    assert asyncio.run(work()) is is_taken
