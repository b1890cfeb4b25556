"""Virtual time, and the order of all events in the network.

Invariants:

* Time is in integer nanoseconds. An instant has at most one event; another moves to a later one.
* There is one source of randomness, and events draw from it in their order.
"""

from __future__ import annotations

from bisect import bisect, bisect_left, insort
from collections.abc import Callable
from random import Random
from typing import Protocol, TypeVarTuple

Trace = Callable[[int, str], None]
"""A function that is called with each event: its time in nanoseconds, and its text."""

Action = Callable[[], None]
_Ts = TypeVarTuple("_Ts")


class VirtualTimer(Protocol):
    """A pending call."""

    def cancel(self) -> object:
        """Cancel the call."""
        ...


class VirtualClock(Protocol):
    """The virtual time of the simulation's loop."""

    def now_ns(self) -> int:
        """Return the current time in nanoseconds."""
        ...

    def call_at_ns(
        self, when_ns: int, callback: Callable[[*_Ts], object], *args: *_Ts
    ) -> VirtualTimer:
        """Call ``callback`` at ``when_ns``."""
        ...


Event = tuple[VirtualTimer, int]
"""A scheduled event of the network, and its instant, in which no other event happens."""


class Events:
    """Schedules all events of the network, and draws all its random numbers.

    Args:
        clock: the virtual time.
        rng: the source of randomness.
        trace: called with each event; None: no trace.
        ragged: whether reads and writes have random sizes.

    Attributes:
        now_ns: returns the current time in nanoseconds.
    """

    def __init__(
        self, clock: VirtualClock, rng: Random, trace: Trace | None, *, ragged: bool
    ) -> None:
        self.now_ns = clock.now_ns
        self._call_at_ns = clock.call_at_ns
        self.rng = rng
        self.ragged = ragged
        self._trace = trace
        self._next_ns: dict[int, int] = {}
        """Taken instant -> a later one, before which no instant is free, except those freed."""
        self._freed: list[int] = []
        """Those of the taken instants whose events were cancelled, in order."""
        self._latest_ns = -1

    def at(self, when_ns: int, action: Action) -> Event:
        """Schedule ``action`` at the first free instant that is not before ``when_ns``."""
        if when_ns < (now_ns := self.now_ns()):
            when_ns = now_ns
        if when_ns <= self._latest_ns:
            when_ns = self._latest_ns + 1
        when_ns = self._take(when_ns)
        return self._call_at_ns(when_ns, self._happen, when_ns, action), when_ns

    def _take(self, when_ns: int) -> int:
        """Take the first free instant from ``when_ns`` on; shorten the way there for others."""
        next_ns, free_ns = self._next_ns, when_ns
        while (later_ns := next_ns.get(free_ns)) is not None:
            next_ns[free_ns] = next_ns.get(later_ns, later_ns)
            free_ns = later_ns
        place = bisect_left(self._freed, when_ns)
        if place < len(self._freed) and self._freed[place] < free_ns:
            return self._freed.pop(place)
        next_ns[free_ns] = free_ns + 1
        return free_ns

    def soon(self, action: Action) -> Event:
        """Schedule ``action`` at the first free instant."""
        return self.at(0, action)

    def cancel(self, event: Event) -> None:
        """Cancel an event, unless it has happened."""
        timer, when_ns = event
        timer.cancel()
        if when_ns <= self._latest_ns:
            return
        insort(self._freed, when_ns)
        past = bisect(self._freed, self._latest_ns)
        for past_ns in self._freed[:past]:
            del self._next_ns[past_ns]
        del self._freed[:past]

    def _happen(self, when_ns: int, action: Action) -> None:
        del self._next_ns[when_ns]
        self._latest_ns = when_ns
        action()

    def chance(self, probability: float) -> bool:
        """Return True with this probability; always False unless ``ragged``."""
        return self.ragged and self.rng.random() < probability

    def some(self, count: int) -> int:
        """Draw a number from 1 to ``count``."""
        return 1 + int(self.rng.random() * count)

    def note(self, what: str, *more: object) -> None:
        """Add an event to the trace: its parts as text, separated by spaces."""
        if self._trace is not None:
            self._trace(self.now_ns(), " ".join([what, *map(str, more)]) if more else what)
