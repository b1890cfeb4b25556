"""An asyncio event loop in virtual time: its clock jumps to the next timer instead of waiting.

It is a plain ``asyncio.BaseEventLoop``: tasks, futures and ``call_soon`` are asyncio's own. The
loop does no I/O, runs no executors and belongs to one thread. All private methods of asyncio that
the simulation depends on are in this file (checked with Python 3.11 to 3.13).

Invariants:

* Time is an integer number of nanoseconds. It moves only when no callback is ready, and then to the
  next timer that was not cancelled. So a virtual hour costs only its callbacks.
* Timers run in order of time; timers of one instant run in the order in which they were set. No
  timer runs early: in its callback ``time()`` is at least the argument of ``call_at``.
* The loop never blocks. Where a real loop would wait for ever, it raises :class:`Deadlock`. At
  the time limit, or if callbacks spin at one instant, it raises :class:`OutOfTime`.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVarTuple

from pccl.protocol.types import NS_PER_S

TURNS_PER_INSTANT_MAX = 1_000_000
"""Maximum number of turns of the loop at one instant; more turns mean that callbacks spin."""

_Ts = TypeVarTuple("_Ts")


class Deadlock(Exception):
    """No callback is ready and no timer is set, so the remaining tasks would wait for ever."""


class OutOfTime(Exception):
    """The granted virtual time is over, or callbacks spin without a step in time."""


class LoopTimer:
    """A pending call of the loop: an ``asyncio.TimerHandle`` without context and debug mode."""

    __slots__ = ("_args", "_callback", "_cancelled", "_loop")

    def __init__(
        self, loop: VirtualLoop, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the call, unless it was made already."""
        if not self._cancelled:
            self._cancelled = True
            self._loop.timer_cancelled()

    def cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self._cancelled

    def _run(self) -> None:
        try:
            self._callback(*self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as asyncio reports it
            what = {"message": f"a timer failed: {error!r}", "exception": error}
            self._loop.call_exception_handler(what)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time that starts at 0."""

    _ready: deque[asyncio.Handle | LoopTimer]
    _stopping: bool
    _closed: bool

    def __init__(self, *, limit_ns: int | None = None) -> None:
        """Make a loop.

        Args:
            limit_ns: last instant that the clock may reach, in ns; None: no limit.
        """
        super().__init__()
        self._now_ns = 0
        self._limit_ns = limit_ns
        self._turns = 0
        # BaseEventLoop's own heap stays empty: it holds floats and orders ties at random.
        self._timers: list[tuple[int, int, asyncio.TimerHandle | LoopTimer]] = []
        self._timers_made = 0
        self._timers_cancelled = 0

    def now_ns(self) -> int:
        """Return the virtual time in nanoseconds."""
        return self._now_ns

    def busy_ns(self) -> int:
        """Return the processor time that was used: 0, because callbacks take no time here."""
        return 0

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_ns / NS_PER_S

    def call_at_ns(
        self, when_ns: int, callback: Callable[[*_Ts], object], *args: *_Ts
    ) -> LoopTimer:
        """Call ``callback`` at the virtual time ``when_ns``, or at once if that time has passed.

        Raises:
            RuntimeError: the loop is closed.
        """
        timer = LoopTimer(self, callback, args)
        self._arm(when_ns, timer)
        return timer

    def _arm(self, when_ns: int, timer: asyncio.TimerHandle | LoopTimer) -> None:
        if self._closed:
            raise RuntimeError("the virtual loop is closed")
        heapq.heappush(self._timers, (when_ns, self._timers_made, timer))
        self._timers_made += 1

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call ``callback`` at the first nanosecond at which ``time()`` is at least ``when``."""
        when_ns = round(when * NS_PER_S)
        if when_ns / NS_PER_S < when:
            when_ns += 1
        timer = asyncio.TimerHandle(when_ns / NS_PER_S, callback, args, self, context)
        self._arm(when_ns, timer)
        return timer

    def _jump(self) -> None:
        """Set the clock to the next timer that was not cancelled.

        Raises:
            Deadlock: no timer is set.
            OutOfTime: the next timer lies beyond the limit.
        """
        timers = self._timers
        while timers and timers[0][2]._cancelled:  # pyright: ignore[reportPrivateUsage]
            heapq.heappop(timers)
            self._timers_cancelled -= 1
        if not timers:
            raise Deadlock(f"no timer is left at {self._now_ns} ns; {self._waiting()}")
        when_ns = timers[0][0]
        if self._limit_ns is not None and when_ns > self._limit_ns:
            raise OutOfTime(f"the time limit is reached at {self._limit_ns} ns; {self._waiting()}")
        if when_ns > self._now_ns:
            self._now_ns = when_ns
            self._turns = 0

    def _waiting(self) -> str:
        names = sorted(
            f"{task.get_name()} in {getattr(task.get_coro(), '__qualname__', '?')}"
            for task in asyncio.all_tasks(self)
        )
        return f"waiting: {', '.join(names) or 'no task'}"

    def close(self) -> None:
        """Close the loop and drop all timers."""
        super().close()
        self._timers.clear()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self.timer_cancelled()

    def timer_cancelled(self) -> None:
        """Drop the cancelled timers once there are many of them; for timers only."""
        # Called also for a timer that is due and has left the heap. The timers that each message
        # sets and cancels must not pile up until their time comes.
        self._timers_cancelled += 1
        if self._timers_cancelled > 100 and self._timers_cancelled > len(self._timers) // 2:
            self._timers[:] = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def _run_once(self) -> None:
        """Run the ready callbacks and due timers once. Where asyncio would wait, move the clock.

        Raises:
            Deadlock: no callback is ready, and no timer is set.
            OutOfTime: the next timer lies beyond the limit, or callbacks spin at one instant.
        """
        # Nothing happens so often: nearly always one timer is due, and runs without further calls.
        ready, timers = self._ready, self._timers
        if not (ready or self._stopping):
            self._jump()
        else:
            self._turns += 1
            if self._turns > TURNS_PER_INSTANT_MAX:
                raise OutOfTime(f"callbacks never end at {self._now_ns} ns; {self._waiting()}")
        now_ns = self._now_ns
        while timers and timers[0][0] <= now_ns:
            timer = heapq.heappop(timers)[2]
            if timer._cancelled:  # pyright: ignore[reportPrivateUsage]
                self._timers_cancelled -= 1
            else:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:  # pyright: ignore[reportPrivateUsage]
                handle._run()  # pyright: ignore[reportPrivateUsage]

    def _write_to_self(self) -> None:
        """Do nothing, because no other thread has to wake the loop."""
