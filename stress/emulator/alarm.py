"""An event-loop timer that fires within about 10 us of its deadline.

Timers of asyncio and uvloop have a resolution of 1 ms, the one-way delay of a link with a round
trip of 2 ms. On Linux this module uses a timerfd, elsewhere the loop's timer.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys
import time
from collections.abc import Callable

from pccl.stress.emulator.shaper import NS_PER_S

_IS_LINUX = sys.platform == "linux"
_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_TIMERSPEC = struct.Struct("@qqqq")  # interval, then time; seconds and nanoseconds of each


class Alarm:
    """A timer that calls ``callback`` at one time, which can be replaced.

    Args:
        loop: the event loop. Use the alarm from the loop's thread only.
        callback: called once for each time that was set and not replaced before.
        fine: whether to use the timerfd of Linux, if available.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object], fine: bool = True
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._at_ns: int | None = None
        self._coarse: asyncio.TimerHandle | None = None
        self._system = ctypes.CDLL(None, use_errno=True) if fine and _IS_LINUX else None
        self._fd = None if self._system is None else _timer_fd(self._system)
        if self._fd is not None:
            loop.add_reader(self._fd, self._on_readable)

    @property
    def is_fine(self) -> bool:
        """Whether the alarm uses a timerfd, which is finer than the loop's timer."""
        return self._fd is not None

    def set(self, at_ns: int | None) -> None:
        """Fire at ``at_ns`` of ``time.monotonic_ns``, at once if that is past; None: never."""
        if at_ns == self._at_ns:
            return
        self._at_ns = at_ns
        if self._system is not None and self._fd is not None:
            # At least 1, because 0 would disarm the timer. Without a time, disarm it.
            seconds, nanoseconds = divmod(0 if at_ns is None else max(at_ns, 1), NS_PER_S)
            when = _TIMERSPEC.pack(0, 0, seconds, nanoseconds)
            if self._system.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, when, None):
                raise OSError(ctypes.get_errno(), "timerfd_settime")
            return
        if self._coarse is not None:
            self._coarse.cancel()
            self._coarse = None
        if at_ns is not None:
            delay_s = max(0, at_ns - time.monotonic_ns()) / NS_PER_S
            self._coarse = self._loop.call_later(delay_s, self._ring)

    def close(self) -> None:
        """Disarm the alarm, and free its descriptor."""
        self.set(None)
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _on_readable(self) -> None:
        if self._fd is None:
            return
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set again after the loop had polled
            return
        self._ring()

    def _ring(self) -> None:
        self._at_ns = None
        self._coarse = None
        self._callback()


def _timer_fd(system: ctypes.CDLL) -> int | None:
    fd = int(system.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
    return fd if fd >= 0 else None
