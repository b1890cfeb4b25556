"""Work that takes a processor for long, off the event loop: hashing pieces, copying memory.

The threads are shared by the process. They start with the first work and end when their last user
closes, so that a closed library leaves nothing behind; a child made by fork starts its own. Nothing
returns while a thread still reads or writes what it was given, not even when it is cancelled.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ClassVar, Protocol, TypeVar

from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.waiting import settled
from pccl.state.digests import piece_digest

_T = TypeVar("_T")

BATCH_PIECES = 16
"""A thread takes so many at a time: some milliseconds, so that all end together and soon."""

ALONE_BYTES_MAX = 64 << 10
"""So little is hashed on the loop itself: to hand it over would take longer."""


class Hasher(Protocol):
    """Does such work on behalf of coroutines."""

    async def hash_pieces(self, memory: StateMemory, numbers: Iterable[int]) -> None:
        """Put the digests of pieces into ``memory.piece_map``.

        If it is cancelled, or fails, those of some of the pieces are there.
        """
        ...

    async def run(self, function: Callable[[], _T]) -> _T:
        """Return what a blocking function returns, or raise what it raises.

        A cancellation is raised when the function has ended.
        """
        ...

    def close(self) -> None:
        """End the threads, unless others use them; to be called when no work is under way."""
        ...


class InlineHasher:
    """Does everything at once, in the thread of the loop: for the simulator."""

    async def hash_pieces(self, memory: StateMemory, numbers: Iterable[int]) -> None:
        """Put the digests of pieces into ``memory.piece_map``."""
        hash_here(memory, numbers)

    async def run(self, function: Callable[[], _T]) -> _T:
        """Return what a function returns."""
        return function()

    def close(self) -> None:
        """Nothing is open."""


class PooledHasher:
    """Uses the process's threads.

    Args:
        loop: on which it is awaited.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def hash_pieces(self, memory: StateMemory, numbers: Iterable[int]) -> None:
        """Put the digests of pieces into ``memory.piece_map``, with all processors.

        A cancellation drops what no thread has begun, and is raised when no thread reads any more.
        """
        ordered = tuple(numbers)
        if _is_little(memory, ordered):
            hash_here(memory, ordered)
            return
        batches = deque(
            ordered[start : start + BATCH_PIECES] for start in range(0, len(ordered), BATCH_PIECES)
        )

        def step() -> bool:
            try:
                batch = batches.popleft()
            except IndexError:  # another thread was faster
                return False
            hash_here(memory, batch)
            return bool(batches)

        await _Work(self._loop, step).done_by(_Threads.shared(self), len(batches))

    async def run(self, function: Callable[[], _T]) -> _T:
        """Return what a blocking function returns, or raise what it raises.

        A cancellation is raised when the function has ended, or will never begin.
        """
        values: list[_T] = []

        def step() -> bool:
            values.append(function())
            return False

        await _Work(self._loop, step).done_by(_Threads.shared(self), 1)
        return values[0]

    def close(self) -> None:
        """End the threads, unless others use them; to be called when no work is under way."""
        _Threads.give_up(self)


def hash_here(memory: StateMemory, numbers: Iterable[int]) -> None:
    """Put the digests of pieces into ``memory.piece_map``, in this thread."""
    for number in numbers:
        memory.piece_map[number] = piece_digest(memory.view(memory.layout.piece(number)))


def _is_little(memory: StateMemory, numbers: tuple[int, ...]) -> bool:
    pieces = map(memory.layout.piece, numbers)
    return len(numbers) <= BATCH_PIECES and sum(piece.length for piece in pieces) <= ALONE_BYTES_MAX


class _Work:
    """One piece of work that threads do step by step.

    After each step it goes to the end of the queue, so that others have their turn.

    Args:
        loop: whose coroutine waits for it.
        step: does a part of it, in several threads at once; whether there may be more to do.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, step: Callable[[], bool]) -> None:
        self._loop = loop
        self._step = step
        self._ended: asyncio.Future[None] = loop.create_future()
        self._lock = threading.Lock()
        self._thread_count = 0
        self._stopped = False
        self._error: BaseException | None = None

    async def done_by(self, threads: _Threads, step_count: int) -> None:
        """Have it done; return, or raise, when no thread is at it any more."""
        self._thread_count = min(threads.count, step_count)
        for _ in range(self._thread_count):
            self._take_turn(threads)
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.done():
            try:
                await settled(self._ended)
            except asyncio.CancelledError as error:
                cancelled = error
                self._stopped = True
        if cancelled is not None:
            raise cancelled
        if self._error is not None:
            raise self._error

    def _take_turn(self, threads: _Threads) -> None:
        try:
            threads.submit(lambda: self._turn(threads))
        except RuntimeError as error:  # the interpreter is ending
            self._leave(error)

    def _turn(self, threads: _Threads) -> None:
        try:
            if not self._stopped and self._step():
                self._take_turn(threads)
                return
        except BaseException as error:  # noqa: BLE001 - raised in the coroutine
            self._leave(error)
        else:
            self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        with self._lock:
            if error is not None:
                self._stopped = True
                self._error = self._error or error
            self._thread_count -= 1
            if self._thread_count:
                return
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


class _Threads:
    """The process's threads for such work; ``count`` is how many they are."""

    _shared: ClassVar[_Threads | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.count = processor_count()
        self._users: set[object] = set()
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="pccl-work")

    @classmethod
    def shared(cls, user: object) -> _Threads:
        """Those of this process; they last until all their users have given them up."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared._users.add(user)
            return cls._shared

    @classmethod
    def give_up(cls, user: object) -> None:
        """Use them no more; the last user waits until they have ended."""
        with cls._lock:
            held = cls._shared
            if held is None:
                return
            held._users.discard(user)
            if held._users:
                return
            cls._shared = None
        held._pool.shutdown()

    @classmethod
    def abandon(cls) -> None:
        """Forget the parent's after a fork."""
        cls._lock = threading.Lock()  # some thread of the parent may have held it
        cls._shared = None

    def submit(self, function: Callable[[], None]) -> None:
        """Have it called by one of them."""
        self._pool.submit(function)


def processor_count() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Threads.abandon)
