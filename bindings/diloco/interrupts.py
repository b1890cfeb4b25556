"""Ctrl-C must not leave a model half updated."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Generator[None, None, None]:
    """Ctrl-C that comes in here is raised at the end.

    Only the main thread of a program hears of it. A handler that was not set by Python is left
    alone, as is none.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    seen: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen:
            before(*seen[0])
