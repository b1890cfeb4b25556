"""Waiting for what other threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.support.patience import LIMIT_S


def until(
    condition: Callable[[], object], limit_s: float = LIMIT_S, pause_s: float = 0.001
) -> None:
    """Wait for a condition, which is looked at after every pause."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(pause_s)


def wait_for_threads(kind: type[threading.Thread]) -> None:
    """Wait for the ends of all threads of a kind, however busy the machine is."""
    for thread in threading.enumerate():
        if isinstance(thread, kind):
            thread.join(LIMIT_S)
            assert not thread.is_alive()
