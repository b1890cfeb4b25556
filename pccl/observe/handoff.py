"""``Handoff``: a thread that takes items, so that the threads that put them never wait."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

KEPT_MAX = 10_000
"""Items that wait for the thread. Later ones are dropped: the program goes first."""

FLUSH_S_MAX = 1.0
"""How long ``close``, and the end of the program, wait until the last items are taken."""

PAUSE_S = 0.01
"""How long the thread rests when it has taken all items. If it woke for each of a thousand calls a
second, it would take the interpreter lock from them as often."""

_T = TypeVar("_T")


class Handoff(Generic[_T]):
    """Calls a function with each item, in order, in a thread that starts with the first item.

    Args:
        name: name of the thread.
        take: the function. If it raises, the thread ends, and later items are dropped.
    """

    def __init__(self, name: str, take: Callable[[_T], object]) -> None:
        self._name, self._take = name, take
        self._renew()

    def _renew(self) -> None:
        # Its ``put`` may interrupt itself, when the garbage collector runs code that logs.
        self._items: SimpleQueue[tuple[_T] | threading.Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()
        self._process = os.getpid()

    def put(self, item: _T) -> None:
        """Queue an item. Returns at once; any thread may call this, and a forked process."""
        if self._process != os.getpid():
            self._renew()  # the thread runs in the parent
        if self._thread is None and not self._start():
            return
        if self._items.qsize() < KEPT_MAX:
            self._items.put((item,))

    def close(self) -> None:
        """Let the thread take what is queued, for at most ``FLUSH_S_MAX``, and end it."""
        items, thread, is_ours = self._items, self._thread, self._process == os.getpid()
        self._renew()
        atexit.unregister(self._flush)
        if thread is not None and is_ours:
            items.put(None)
            if thread is not threading.current_thread():
                thread.join(FLUSH_S_MAX)

    def _start(self) -> bool:
        """Start the thread; return False if it is too late, as the interpreter ends."""
        with self._starting:
            if self._thread is None:
                queued = (self._items,)  # not read by the thread: ``close`` may come before
                thread = threading.Thread(
                    target=self._run, args=queued, name=self._name, daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # Python 3.12 starts no threads while it ends
                    return False
                self._thread = thread
                atexit.register(self._flush)
        return True

    def _flush(self) -> None:
        """Wait, at the end of the program, until the thread has taken what is queued."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            taken = threading.Event()
            self._items.put(taken)
            taken.wait(FLUSH_S_MAX)

    def _run(self, items: SimpleQueue[tuple[_T] | threading.Event | None]) -> None:
        while (item := items.get()) is not None:
            if isinstance(item, tuple):
                self._take(item[0])
            else:
                item.set()
            if items.empty():
                time.sleep(PAUSE_S)
