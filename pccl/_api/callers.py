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
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from pccl.runtime.calls import JointWork

THREADS = "/proc/self/task"

Caller = threading.Thread | asyncio.Task[Any]


class _Record:
    """One caller: a weak reference, its thread's id, and the joint calls that it is inside of."""

    __slots__ = ("caller", "thread", "works")

    def __init__(self, caller: weakref.ref[Caller]) -> None:
        self.caller = caller
        self.works: list[JointWork] = []
        self.thread = 0


class Callers:
    """The callers of one communicator."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def note(self, caller: Caller) -> None:
        """Record ``caller``, which is not inside a joint call."""
        self._record_of(caller)

    @contextmanager
    def inside(self, caller: Caller, work: JointWork) -> Generator[JointWork]:
        """Record that ``caller`` waits until ``work`` has ended, and cannot make another call."""
        works = self._record_of(caller).works
        works.append(work)
        try:
            yield work
        finally:
            works.remove(work)

    def waiting(self, caller: Caller, work: JointWork) -> AbstractContextManager[object]:
        """Record that a caller waits for a handle.

        A thread or task that never made a call is ignored. If a caller awaits a handle in a task of
        that task, the caller counts as free.
        """
        record = self._records.get(id(caller))
        is_known = record is not None and record.caller() is caller
        return self.inside(caller, work) if is_known else nullcontext()

    def all_blocked(self) -> bool:
        """Whether every living caller waits for what the members decide. I/O thread.

        A caller whose call has an outcome does not, although it may not have woken up yet.
        """
        inside = 0
        for record in list(self._records.values()):
            caller = record.caller()
            if caller is None or not _lives(caller, record.thread):
                continue
            works = record.works.copy()
            if not works or not all(work.is_undecided for work in works):
                return False
            inside += 1
        return inside > 0

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
