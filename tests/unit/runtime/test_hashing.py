"""Hashing and copying in threads: right digests, prompt ends, nothing read after the return."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
from blake3 import blake3

from pccl.protocol.shared_state import PIECE_BYTES
from pccl.runtime import hashing
from pccl.runtime.hashing import Hasher, InlineHasher, PooledHasher
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.shared_state import TensorInfo
from tests.support.patience import LIMIT_S

_T = TypeVar("_T")


def with_pool(work: Callable[[PooledHasher], Coroutine[Any, Any, _T]]) -> _T:
    async def run() -> _T:
        hasher = PooledHasher(asyncio.get_running_loop())
        try:
            return await work(hasher)
        finally:
            hasher.close()

    return asyncio.run(run())


def zeros_of(length: int) -> StateMemory:
    return StateMemory([TensorInfo.from_numpy(np.zeros(length, np.uint8), "t")])


def memory_of(*lengths: int) -> tuple[StateMemory, list[Any]]:
    arrays = [np.arange(-(-length // 8)).view(np.uint8)[:length] for length in lengths]
    infos = [TensorInfo.from_numpy(array, f"t{n}") for n, array in enumerate(arrays)]
    return StateMemory(infos), arrays


def digests_of(array: Any) -> list[bytes]:
    content = array.tobytes()
    starts = range(0, len(content), PIECE_BYTES)
    return [blake3(content[start : start + PIECE_BYTES]).digest() for start in starts]


def workers() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("pccl-work")]


@pytest.fixture(autouse=True)
def two_threads_that_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hashing, "processor_count", lambda: 2)
    yield
    assert workers() == []


@pytest.mark.parametrize("kind", ["inline", "pooled"])
def test_digests_are_those_of_the_bytes(kind: str) -> None:
    memory, arrays = memory_of(40 * PIECE_BYTES + 7, 1, 3 * PIECE_BYTES)
    expected = [digest for array in arrays for digest in digests_of(array)]

    async def work(hasher: Hasher) -> None:
        await hasher.hash_pieces(memory, range(0, 45, 2))
        found = [memory.piece_map[number] for number in range(45)]
        assert found == [expected[n] if n % 2 == 0 else bytes(32) for n in range(45)]
        await hasher.hash_pieces(memory, (number for number in range(1, 45, 2)))
        await hasher.hash_pieces(memory, [])

    if kind == "inline":
        asyncio.run(work(InlineHasher()))
    else:
        with_pool(work)
    assert [memory.piece_map[number] for number in range(45)] == expected


def test_a_little_is_hashed_without_threads() -> None:
    memory, (array, _) = memory_of(300, hashing.ALONE_BYTES_MAX - 300)

    async def work(hasher: PooledHasher) -> None:
        await hasher.hash_pieces(memory, [0, 1])
        assert workers() == []

    with_pool(work)
    assert memory.piece_map[0] == digests_of(array)[0]


async def test_threads_are_shared_and_end_with_the_last_user() -> None:
    memory = zeros_of(64 * PIECE_BYTES)
    loop = asyncio.get_running_loop()
    first, second = PooledHasher(loop), PooledHasher(loop)
    for hasher in (first, second, first):
        await hasher.hash_pieces(memory, range(64))
    assert len(workers()) == 2
    first.close()
    assert len(workers()) == 2
    second.close()
    assert workers() == []
    first.close()  # a second time changes nothing
    await first.hash_pieces(memory, range(64))  # and it may begin anew
    first.close()


class Gate:
    """Stands in for the hash: threads stay in it until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Semaphore(0), threading.Event()
        self.inside = self.passed = 0
        self._lock = threading.Lock()
        monkeypatch.setattr(hashing, "piece_digest", self.digest)

    def digest(self, content: memoryview) -> bytes:
        with self._lock:
            self.inside += 1
        self.reached.release()
        assert self.opened.wait(LIMIT_S)
        with self._lock:
            self.inside -= 1
            self.passed += 1
        return bytes(32)


def test_a_cancelled_call_returns_when_no_thread_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = zeros_of(400 * PIECE_BYTES)
    gate = Gate(monkeypatch)

    async def work(hasher: PooledHasher) -> None:
        task = asyncio.ensure_future(hasher.hash_pieces(memory, range(400)))
        await asyncio.sleep(0)
        for _ in range(2):
            assert gate.reached.acquire(timeout=LIMIT_S)
        for _ in range(3):  # however often
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gate.inside == 0
        assert gate.passed == 2 * hashing.BATCH_PIECES  # what they had begun, of 25 batches

    with_pool(work)


def test_what_fails_in_a_thread_is_raised_and_ends_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = zeros_of(400 * PIECE_BYTES)
    seen: list[int] = []

    def fail(content: memoryview) -> bytes:
        seen.append(len(content))
        raise OSError(5, "the page is gone")

    monkeypatch.setattr(hashing, "piece_digest", fail)

    async def work(hasher: PooledHasher) -> None:
        with pytest.raises(OSError, match="the page is gone"):
            await hasher.hash_pieces(memory, range(400))
        with pytest.raises(IndexError, match="no piece 400"):
            await hasher.hash_pieces(memory, range(396, 402))

    with_pool(work)
    assert len(seen) <= 2


def test_several_callers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "processor_count", lambda: 1)
    memory = zeros_of(64 * PIECE_BYTES)
    order: list[str] = []
    inner = hashing.hash_here

    def hash_here(where: StateMemory, numbers: Any) -> None:
        order.append("hash")
        inner(where, numbers)

    monkeypatch.setattr(hashing, "hash_here", hash_here)

    async def work(hasher: PooledHasher) -> None:
        held, begun = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            held.wait(LIMIT_S)

        blocker = asyncio.ensure_future(hasher.run(hold))
        await asyncio.sleep(0)
        assert begun.wait(LIMIT_S)
        hashed = asyncio.ensure_future(hasher.hash_pieces(memory, range(64)))
        await asyncio.sleep(0)
        copied = asyncio.ensure_future(hasher.run(lambda: order.append("run")))
        await asyncio.sleep(0)
        held.set()
        await blocker
        await copied
        await hashed

    with_pool(work)
    assert order == ["hash", "run", "hash", "hash", "hash"]


def test_run_returns_raises_and_is_never_left_half_way() -> None:
    async def work(hasher: PooledHasher) -> None:
        assert await hasher.run(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await hasher.run(lambda: 1 // 0)
        begun, opened, ended = threading.Event(), threading.Event(), threading.Event()

        def slow() -> None:
            begun.set()
            assert opened.wait(LIMIT_S)
            ended.set()

        task = asyncio.ensure_future(hasher.run(slow))
        await asyncio.sleep(0)
        assert begun.wait(LIMIT_S)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    with_pool(work)
    assert asyncio.run(InlineHasher().run(threading.get_ident)) == threading.get_ident()
    InlineHasher().close()


def test_the_loop_goes_on_meanwhile() -> None:
    memory = zeros_of(256 * PIECE_BYTES)

    async def work(hasher: PooledHasher) -> int:
        turns = 0
        task = asyncio.ensure_future(hasher.hash_pieces(memory, range(256)))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert with_pool(work) > 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    memory, (array,) = memory_of(64 * PIECE_BYTES)
    expected = digests_of(array)

    loop = asyncio.new_event_loop()
    hasher = PooledHasher(loop)
    loop.run_until_complete(hasher.hash_pieces(memory, range(64)))
    child = os.fork()
    if not child:
        status = 1
        try:
            memory.piece_map[5] = bytes(32)
            status = 0 if _hashes_again(memory, expected) else 2
        finally:
            os._exit(status)
    assert _status_of(child) == 0
    loop.run_until_complete(hasher.hash_pieces(memory, [5, 6]))  # the parent's go on
    hasher.close()
    loop.close()


def _status_of(child: int) -> int:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def _hashes_again(memory: StateMemory, expected: list[bytes]) -> bool:
    """In the child: on a loop of its own, in a thread of its own, as pccl does."""
    found: list[bool] = []

    def run() -> None:
        with_pool(lambda hasher: hasher.hash_pieces(memory, range(64)))
        found.append([memory.piece_map[number] for number in range(64)] == expected)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT_S)
    return found == [True]
