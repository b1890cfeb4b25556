"""The seam through which the runtime knows and waits for time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None:
        """Forget the call; does nothing if it was made already."""
        ...


class Clock(Protocol):
    """Time in integer nanoseconds, from an arbitrary start."""

    def now_ns(self) -> int:
        """The present."""
        ...

    def call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> Timer:
        """Call back at ``when_ns`` (as soon as possible if that has passed)."""
        ...


class ThreadClock(Clock, Protocol):
    """A clock that also knows how much of the time a thread has computed."""

    def busy_ns(self) -> int:
        """Processor time that the calling thread has used, from an arbitrary start."""
        ...


class LoopClock:
    """The real clock on an asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        """The present."""
        return time.monotonic_ns()

    def busy_ns(self) -> int:
        """Processor time that the calling thread has used."""
        return time.thread_time_ns()

    def call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> Timer:
        """Call back at ``when_ns``."""
        delay_s = max(0, when_ns - time.monotonic_ns()) / 1e9
        return self._loop.call_later(delay_s, callback, *args)


class Ticker:
    """Calls back every ``interval_ns`` until it is stopped.

    Args:
        clock: time.
        interval_ns: from one call to the next.
        callback: called with the processor time of the thread since the call before.
    """

    def __init__(
        self, clock: ThreadClock, interval_ns: int, callback: Callable[[int], None]
    ) -> None:
        self._clock = clock
        self._interval_ns = interval_ns
        self._callback = callback
        self._timer: Timer | None = None
        self._busy_ns = 0

    def start(self) -> None:
        """Begin; the first call comes after one interval."""
        if self._timer is None:
            self._busy_ns = self._clock.busy_ns()
            self._arm()

    def stop(self) -> None:
        """End; no call is made after this."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        when_ns = self._clock.now_ns() + self._interval_ns
        self._timer = self._clock.call_at_ns(when_ns, self._fire)

    def _fire(self) -> None:
        self._arm()
        before_ns, self._busy_ns = self._busy_ns, self._clock.busy_ns()
        self._callback(self._busy_ns - before_ns)
