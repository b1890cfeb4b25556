"""Decides when a simulated process runs: at once, late, or not before it is resumed.

Every call into a process (arriving bytes, timers, accepted connections) goes through its
:class:`RunQueue`. A stopped or slow process makes the calls later, one per event. The calls keep
their order, or timers go first, as in some event loops.
"""

from __future__ import annotations

from collections import deque

from pccl.transports.sim.events import Action, Events


class RunQueue:
    """The calls that one process has to make.

    Args:
        events: events of the network.

    Attributes:
        alive: False once the process is dead.
    """

    def __init__(self, events: Events) -> None:
        self.alive = True
        self._events = events
        self._stops = 0
        self._lag_ns = 0
        self._computes = False
        self._computed_ns = 0
        self._computed_until_ns = 0
        self._waking = False
        self._draining = False
        self._waiting: deque[tuple[bool, Action]] = deque()  # (whether it is a timer, the call)

    @property
    def is_late(self) -> bool:
        """Whether a new call has to wait."""
        return bool(self._stops or self._lag_ns or self._draining)

    def run(self, action: Action, *, timer: bool = False) -> None:
        """Do ``action``, now or when the process runs again."""
        if not (self._stops or self._lag_ns or self._draining):  # `is_late`, which is asked often
            action()
            return
        self._waiting.append((timer, action))
        if not self._stops and not self._waking and not self._draining:
            self._waking = True
            delay_ns = self._events.some(self._lag_ns)
            self._events.at(self._events.now_ns() + delay_ns, self._wake)

    @property
    def busy_ns(self) -> int:
        """How long the process has been computing because of :meth:`set_lag`, in nanoseconds."""
        now_ns = self._events.now_ns()
        if self._computes and not self._stops:
            self._computed_ns += now_ns - self._computed_until_ns
        self._computed_until_ns = now_ns
        return self._computed_ns

    @property
    def is_starved(self) -> bool:
        """Whether the process is stopped, or runs late for lack of a processor."""
        return bool(self._stops) or (bool(self._lag_ns) and not self._computes)

    def stop(self) -> None:
        """Stop the process. It runs again after an equal number of :meth:`resume` calls."""
        self._computed_ns = self.busy_ns
        self._stops += 1

    def resume(self) -> None:
        """Undo one :meth:`stop`."""
        self._computed_ns = self.busy_ns
        self._stops -= 1
        if not self._stops and not self._waking:
            self._drain()

    def set_lag(self, lag_ns: int, *, computes: bool = False) -> None:
        """Delay calls by up to ``lag_ns``, and then make all waiting calls.

        Args:
            lag_ns: largest delay, in nanoseconds; 0: no delay.
            computes: whether the process is late because it computes all the time; otherwise
                because it gets no processor.
        """
        self._computed_ns = self.busy_ns
        self._lag_ns = lag_ns
        self._computes = computes

    def kill(self) -> None:
        """Mark the process as dead, and drop all waiting calls."""
        self.alive = False
        self._waiting.clear()

    def _wake(self) -> None:
        self._waking = False
        if not self._stops:
            self._drain()

    def _drain(self) -> None:
        if self._draining or not self._waiting:
            return
        if self._events.chance(0.5):  # libuv's order; asyncio's selector loop keeps the other
            self._waiting = deque(sorted(self._waiting, key=lambda entry: not entry[0]))
        self._draining = True
        self._events.soon(self._step)

    def _step(self) -> None:
        if self._stops:
            self._draining = False
            return
        if self._waiting:
            _, action = self._waiting.popleft()
            action()
        if self._waiting and not self._stops:
            self._events.soon(self._step)
        else:
            self._draining = False
