"""Runs long CPU work off the event loop: hashing pieces, copying memory.

All users in the process share the threads. The threads start with the first work and end when their
last user closes; a forked child starts new threads. No method returns while a thread still reads or
writes its arguments, even if it is cancelled.
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
"""Pieces that a thread hashes in one step; few, so that a cancellation takes milliseconds."""

ALONE_BYTES_MAX = 64 << 10
"""Size up to which the loop hashes one batch of pieces itself: a thread would take longer."""


class Hasher(Protocol):
    """Does long CPU work for coroutines."""

    async def hash_pieces(self, memory: StateMemory, numbers: Iterable[int]) -> None:
        """Put the digests of the pieces ``numbers`` into ``memory.piece_map``.

        After a cancellation or an error, the map may lack some of these digests.
        """
        ...

    async def run(self, function: Callable[[], _T]) -> _T:
        """Return the result of a blocking function, or raise its exception.

        A cancellation is raised when the function has ended.
        """
        ...

    def close(self) -> None:
        """End the threads, unless they have other users. No work of this user may be running."""
        ...


class InlineHasher:
    """Does all work at once, in the thread of the loop (for the simulator)."""

    async def hash_pieces(self, memory: StateMemory, numbers: Iterable[int]) -> None:
        """Put the digests of the pieces ``numbers`` into ``memory.piece_map``."""
        hash_here(memory, numbers)

    async def run(self, function: Callable[[], _T]) -> _T:
        """Return the result of ``function``, or raise its exception."""
        return function()

    def close(self) -> None:
        """Do nothing: this class has no threads."""


class PooledHasher:
    """Does all work on the shared threads of the process.

    Args:
        loop: event loop of the coroutines that wait for the work.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def hash_pieces(self, memory: StateMemory, numbers: Iterable[int]) -> None:
        """Put the digests of the pieces ``numbers`` into ``memory.piece_map``, on all processors.

        A cancellation drops batches that no thread has begun. It is raised once all threads stop.
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
        """Return the result of a blocking function, or raise its exception.

        A cancellation is raised when the function has ended or can no longer begin.
        """
        values: list[_T] = []

        def step() -> bool:
            values.append(function())
            return False

        await _Work(self._loop, step).done_by(_Threads.shared(self), 1)
        return values[0]

    def close(self) -> None:
        """End the threads, unless they have other users. No work of this user may be running."""
        _Threads.give_up(self)


def hash_here(memory: StateMemory, numbers: Iterable[int]) -> None:
    """Put the digests of the pieces ``numbers`` into ``memory.piece_map``, in this thread."""
    for number in numbers:
        memory.piece_map[number] = piece_digest(memory.view(memory.layout.piece(number)))


def _is_little(memory: StateMemory, numbers: tuple[int, ...]) -> bool:
    pieces = map(memory.layout.piece, numbers)
    return len(numbers) <= BATCH_PIECES and sum(piece.length for piece in pieces) <= ALONE_BYTES_MAX


class _Work:
    """A piece of work that threads do in steps.

    After each step, a thread queues the next step behind all other work.

    Args:
        loop: event loop of the coroutine that waits for the work.
        step: does one step, in several threads at once; returns False if no step is left.
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
        """Do the work on ``threads``; return or raise when no thread works on it."""
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
        with suppress(RuntimeError):  # the loop is closed: no coroutine waits any more
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


class _Threads:
    """The worker threads of the process; ``count`` is their number."""

    _shared: ClassVar[_Threads | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.count = processor_count()
        self._users: set[object] = set()
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="pccl-work")

    @classmethod
    def shared(cls, user: object) -> _Threads:
        """Add ``user``; return the threads. They end once all users have called ``give_up``."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared._users.add(user)
            return cls._shared

    @classmethod
    def give_up(cls, user: object) -> None:
        """Remove ``user``. The last user ends the threads, and waits until they have ended."""
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
        """Drop the parent's threads in a forked child."""
        cls._lock = threading.Lock()  # some thread of the parent may have held it
        cls._shared = None

    def submit(self, function: Callable[[], None]) -> None:
        """Call ``function`` on one of the threads."""
        self._pool.submit(function)


def processor_count() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Threads.abandon)
