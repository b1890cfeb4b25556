"""Virtual time, and the order of all events in the network.

Invariants:

* Time is in integer nanoseconds. An instant has at most one event; another moves to a later one.
* There is one source of randomness, and events draw from it in their order.
"""

from __future__ import annotations

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
        self._taken: set[int] = set()  # instants; never iterated, so its order does not matter
        self._latest_ns = -1

    def at(self, when_ns: int, action: Action) -> Event:
        """Schedule ``action`` at the first free instant that is not before ``when_ns``."""
        if when_ns < (now_ns := self.now_ns()):
            when_ns = now_ns
        if when_ns <= self._latest_ns:
            when_ns = self._latest_ns + 1
        taken = self._taken
        while when_ns in taken:
            when_ns += 1
        taken.add(when_ns)
        return self._call_at_ns(when_ns, self._happen, when_ns, action), when_ns

    def soon(self, action: Action) -> Event:
        """Schedule ``action`` at the first free instant."""
        return self.at(0, action)

    def cancel(self, event: Event) -> None:
        """Cancel an event, unless it has happened."""
        timer, when_ns = event
        timer.cancel()
        self._taken.discard(when_ns)

    def _happen(self, when_ns: int, action: Action) -> None:
        self._taken.discard(when_ns)
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
