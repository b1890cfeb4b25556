"""Virtual time: the one order in which everything in the network happens.

Invariants:

* Time is integer nanoseconds; one event per instant (the next free one, if it is taken).
* Of randomness there is one source, drawn from in the order of events.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

Trace = Callable[[int, str], None]
"""Called with the time in nanoseconds and what happens then."""

Action = Callable[[], None]


class VirtualTimer(Protocol):
    """A pending call."""

    def cancel(self) -> object:
        """Forget the call."""
        ...


class VirtualClock(Protocol):
    """Virtual time, as the simulation's loop offers it."""

    def now_ns(self) -> int:
        """Return the present."""
        ...

    def call_at_ns(self, when_ns: int, callback: Action) -> VirtualTimer:
        """Call back at ``when_ns``."""
        ...


class Event:
    """Something that will happen in the network, alone in its instant."""

    def __init__(self, events: Events, when_ns: int, action: Action) -> None:
        self.when_ns = when_ns
        self._events = events
        self._action = action
        self._timer = events.clock.call_at_ns(when_ns, self._happen)

    def _happen(self) -> None:
        self._events.free(self.when_ns, happened=True)
        self._action()

    def cancel(self) -> None:
        """Let it not happen."""
        self._timer.cancel()
        self._events.free(self.when_ns, happened=False)


class Events:
    """The one order in which everything in the network happens, and its one source of chance.

    Args:
        clock: the virtual time.
        rng: the source of chance.
        trace: told of what happens; None for nobody.
        ragged: whether bytes are taken and delivered in random portions.
    """

    def __init__(
        self, clock: VirtualClock, rng: Random, trace: Trace | None, *, ragged: bool
    ) -> None:
        self.clock = clock
        self.rng = rng
        self.ragged = ragged
        self._trace = trace
        self._taken: set[int] = set()  # asked for members only, never iterated
        self._latest_ns = -1

    def now_ns(self) -> int:
        """Return the present."""
        return self.clock.now_ns()

    def at(self, when_ns: int, action: Action) -> Event:
        """Let ``action`` happen at the first free instant that is not before ``when_ns``."""
        when_ns = max(when_ns, self.now_ns(), self._latest_ns + 1)
        while when_ns in self._taken:
            when_ns += 1
        self._taken.add(when_ns)
        return Event(self, when_ns, action)

    def soon(self, action: Action) -> Event:
        """Let ``action`` happen at the first free instant."""
        return self.at(0, action)

    def free(self, when_ns: int, *, happened: bool) -> None:
        """Give an instant back. For events only."""
        self._taken.discard(when_ns)
        if happened:
            self._latest_ns = when_ns

    def chance(self, probability: float) -> bool:
        """Throw a loaded coin; always False unless bytes are ragged."""
        return self.ragged and self.rng.random() < probability

    def some(self, count: int) -> int:
        """Draw from 1 to ``count``."""
        return 1 + int(self.rng.random() * count)

    def note(self, *what: object) -> None:
        """Tell the trace."""
        if self._trace is not None:
            self._trace(self.now_ns(), " ".join(map(str, what)))
