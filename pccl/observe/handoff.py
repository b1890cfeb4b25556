"""``Handoff``: a thread that takes items, so that the threads that put them never wait."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

KEPT_MAX = 10_000
"""Items that wait for the thread. Later ones are dropped: the program goes first."""

FLUSH_S_MAX = 1.0
"""How long ``close``, and the end of the program, wait until the last items are taken."""

_T = TypeVar("_T")


class Handoff(Generic[_T]):
    """Calls a function with each item, in order, in a thread that starts with the first item.

    Args:
        name: name of the thread.
        take: the function. If it raises, the thread ends, and later items are dropped.
    """

    def __init__(self, name: str, take: Callable[[_T], object]) -> None:
        self._name, self._take = name, take
        self._items: queue.Queue[tuple[_T] | None] = queue.Queue(KEPT_MAX)
        self._thread: threading.Thread | None = None

    def put(self, item: _T) -> None:
        """Queue an item. Returns at once; any thread may call this."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            atexit.register(self.close)
        with suppress(queue.Full):
            self._items.put_nowait((item,))

    def close(self) -> None:
        """Let the thread take what is queued, for at most ``FLUSH_S_MAX``, and end it."""
        thread, self._thread = self._thread, None
        atexit.unregister(self.close)
        if thread is None or not thread.is_alive() or thread is threading.current_thread():
            return
        with suppress(queue.Full):
            self._items.put(None, timeout=FLUSH_S_MAX)
            thread.join(FLUSH_S_MAX)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            self._take(item[0])
