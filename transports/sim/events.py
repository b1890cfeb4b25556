"""Virtual time, and the order of all events in the network.

Invariants:

* Time is in integer nanoseconds. An instant has at most one event; another moves to a later one.
* There is one source of randomness, and events draw from it in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

Trace = Callable[[int, str], None]
"""A function that is called with each event: its time in nanoseconds, and its text."""

Action = Callable[[], None]


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

    def call_at_ns(self, when_ns: int, callback: Action) -> VirtualTimer:
        """Call ``callback`` at ``when_ns``."""
        ...


class Event:
    """A scheduled event of the network, the only one of its instant."""

    __slots__ = ("_action", "_events", "_timer", "when_ns")

    def __init__(self, events: Events, when_ns: int, action: Action) -> None:
        self.when_ns = when_ns
        self._events = events
        self._action = action
        self._timer = events.clock.call_at_ns(when_ns, self._happen)

    def _happen(self) -> None:
        self._events.taken.discard(self.when_ns)
        self._events.latest_ns = self.when_ns
        self._action()

    def cancel(self) -> None:
        """Cancel the event."""
        self._timer.cancel()
        self._events.taken.discard(self.when_ns)


class Events:
    """Schedules all events of the network, and draws all its random numbers.

    Args:
        clock: the virtual time.
        rng: the source of randomness.
        trace: called with each event; None: no trace.
        ragged: whether reads and writes have random sizes.

    Attributes:
        now_ns: returns the current time in nanoseconds.
        taken: instants that have an event; for ``Event`` only.
        latest_ns: instant of the latest event; for ``Event`` only.
    """

    def __init__(
        self, clock: VirtualClock, rng: Random, trace: Trace | None, *, ragged: bool
    ) -> None:
        self.clock = clock
        self.now_ns = clock.now_ns
        self.rng = rng
        self.ragged = ragged
        self._trace = trace
        self.taken: set[int] = set()  # never iterated, so its order does not matter
        self.latest_ns = -1

    def at(self, when_ns: int, action: Action) -> Event:
        """Schedule ``action`` at the first free instant that is not before ``when_ns``."""
        if when_ns < (now_ns := self.now_ns()):
            when_ns = now_ns
        if when_ns <= self.latest_ns:
            when_ns = self.latest_ns + 1
        while when_ns in self.taken:
            when_ns += 1
        self.taken.add(when_ns)
        return Event(self, when_ns, action)

    def soon(self, action: Action) -> Event:
        """Schedule ``action`` at the first free instant."""
        return self.at(0, action)

    def chance(self, probability: float) -> bool:
        """Return True with this probability; always False unless ``ragged``."""
        return self.ragged and self.rng.random() < probability

    def some(self, count: int) -> int:
        """Draw a number from 1 to ``count``."""
        return 1 + int(self.rng.random() * count)

    def note(self, *what: object) -> None:
        """Add an event to the trace: its parts as text, separated by spaces."""
        if self._trace is not None:
            self._trace(self.now_ns(), " ".join(map(str, what)))
