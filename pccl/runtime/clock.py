"""The interface through which the runtime reads the time and sets timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A pending call that a clock will make."""

    def cancel(self) -> None:
        """Cancel the call. This has no effect if the clock has made it already."""
        ...


class Clock(Protocol):
    """Gives the time, in integer nanoseconds from an arbitrary start, and makes timed calls."""

    def now_ns(self) -> int:
        """Return the current time."""
        ...

    def call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> Timer:
        """Call ``callback`` at ``when_ns``, or as soon as possible if that has passed."""
        ...


class ThreadClock(Clock, Protocol):
    """A clock that also measures the processor time of a thread."""

    def busy_ns(self) -> int:
        """Return the processor time of the calling thread, in ns from an arbitrary start."""
        ...


class LoopClock:
    """The real clock, with timers of an asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now_ns = time.monotonic_ns

    def busy_ns(self) -> int:
        """Return the processor time of the calling thread, in ns."""
        return time.thread_time_ns()

    def call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> Timer:
        """Call ``callback`` at ``when_ns``, or as soon as possible if that has passed."""
        delay_s = max(0, when_ns - self.now_ns()) / 1e9
        return self._loop.call_later(delay_s, callback, *args)


class Ticker:
    """Calls back every ``interval_ns`` until it is stopped.

    Args:
        clock: gives the time.
        interval_ns: time from one call to the next.
        callback: called with the thread's processor time since the previous call or the start (ns).
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
        """Start the ticker. It makes the first call after one interval."""
        if self._timer is None:
            self._busy_ns = self._clock.busy_ns()
            self._arm()

    def stop(self) -> None:
        """Stop the ticker. It makes no call after this."""
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
