"""The callers of a communicator, and whether all of them wait in joint calls.

A caller is a thread or an asyncio task that has made a joint call and is still alive. It counts
while it is idle, too, because it may call again. If all callers are inside joint calls, this
process cannot start another one. Members that all report this, and that wait for different calls,
would wait forever.

Callers register on their own threads, and the I/O thread asks. Each step is one operation on a
dict, which the interpreter lock makes atomic, so this module needs no locks.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")

THREADS = "/proc/self/task"

Caller = threading.Thread | asyncio.Task[Any]


class _Record:
    """One caller: a weak reference, its thread's id, and how many joint calls it is inside of."""

    __slots__ = ("caller", "depth", "thread")

    def __init__(self, caller: weakref.ref[Caller]) -> None:
        self.caller = caller
        self.depth = 0
        self.thread = 0


class Callers:
    """The callers of one communicator."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._open = 0
        """Joint calls whose work has begun and has not ended."""

    def note(self, caller: Caller) -> None:
        """Record ``caller``, which is not inside a joint call."""
        self._record_of(caller)

    @contextmanager
    def inside(self, caller: Caller) -> Generator[None, None, None]:
        """Record that ``caller`` is inside a joint call, and cannot start another."""
        record = self._record_of(caller)
        record.depth += 1
        try:
            yield
        finally:
            record.depth -= 1

    async def counted(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Do the work of a joint call, and count it as open meanwhile. I/O thread."""
        self._open += 1
        try:
            return await work()
        finally:
            self._open -= 1

    def all_blocked(self) -> bool:
        """Whether every living caller waits inside a joint call. I/O thread.

        If more callers are inside than calls are open, the call of one caller has ended, and this
        caller will wake up soon.
        """
        inside = 0
        for record in list(self._records.values()):
            caller = record.caller()
            if caller is None or not _lives(caller, record.thread):
                continue
            if not record.depth:
                return False
            inside += record.depth
        return 0 < inside <= self._open

    def __len__(self) -> int:
        return len(self._records)

    def _record_of(self, caller: Caller) -> _Record:
        key = id(caller)
        record = self._records.get(key)
        if record is None or record.caller() is not caller:
            records = self._records  # not self: a caller may outlive the communicator

            def forget(gone: weakref.ref[Caller]) -> None:
                known = records.get(key)
                if known is not None and known.caller is gone:
                    records.pop(key, None)

            record = _Record(weakref.ref(caller, forget))
            records[key] = record
        record.thread = threading.get_native_id()
        return record


def _lives(caller: Caller, thread: int) -> bool:
    """Whether a caller can go on.

    Python 3.11 and 3.12 do not notice the end of a thread that C code started.
    """
    if not isinstance(caller, threading.Thread):
        return not caller.done()
    if isinstance(caller, threading._DummyThread) and os.path.isdir(THREADS):  # pyright: ignore[reportPrivateUsage]
        return os.path.isdir(f"{THREADS}/{thread}")
    return caller.is_alive()
