"""Defers Ctrl-C while a model is being updated, so that it never stays half updated."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Generator[None, None, None]:
    """Return a context that defers Ctrl-C until it ends.

    Outside the main thread it does nothing, because Python calls signal handlers only there. It
    also does nothing if SIGINT has no Python handler.
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
