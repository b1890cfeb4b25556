"""``EventStream``: the events of one peer, kept in a ring, and passed to every listener."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from pccl.telemetry.events import PeerReport

KEPT_MAX = 1024
"""Events that a stream keeps. It forgets the oldest."""


class Stamped(NamedTuple):
    """An event, and its time by the clock of the peer."""

    at_ns: int
    event: PeerReport


Listener: TypeAlias = Callable[[Stamped], None]


class EventStream:
    """The events of one peer.

    Listeners are called at once, on the thread of the event, so they must only hand it on.
    """

    def __init__(self) -> None:
        self.kept: deque[Stamped] = deque(maxlen=KEPT_MAX)
        self._listeners: tuple[Listener, ...] = ()

    def put(self, event: PeerReport, now_ns: int) -> None:
        """Add an event that happened at ``now_ns``."""
        stamped = Stamped(now_ns, event)
        self.kept.append(stamped)
        for listener in self._listeners:
            listener(stamped)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every later event; return the function that ends that."""
        self._listeners += (listener,)

        def end() -> None:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

        return end
