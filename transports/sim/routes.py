"""The way from one host to another: latency, bandwidth, and a gate that can hold bytes up.

Bytes leave at the bandwidth of the route (shared by all that goes this way) and arrive after its
latency.
"""

from __future__ import annotations

from functools import partial

from pccl.protocol.types import NS_PER_S
from pccl.transports.sim.events import Action, Events

_FOR_EVER_NS = 1 << 62


class Gate:
    """Where bytes can be held up. What comes while it is shut waits, in order."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._shut_until_ns = 0
        self._waiting: list[Action] = []

    def shut(self, duration_ns: int | None) -> None:
        """Hold up everything for ``duration_ns``, or until it is opened."""
        until = _FOR_EVER_NS if duration_ns is None else self._events.now_ns() + duration_ns
        self._shut_until_ns = max(self._shut_until_ns, until)

    def open(self) -> None:
        """Hold up nothing any more."""
        self._shut_until_ns = self._events.now_ns()
        self._release()

    def admits(self, action: Action) -> bool:
        """Say whether the gate is open; if not, keep ``action`` and let it happen when it is."""
        if self._events.now_ns() >= self._shut_until_ns:
            return True
        self._waiting.append(action)
        if len(self._waiting) == 1:
            self._release()
        return False

    def _release(self) -> None:
        if self._events.now_ns() >= self._shut_until_ns:
            waiting, self._waiting = self._waiting, []
            for action in waiting:
                self._events.soon(action)
        elif self._waiting and self._shut_until_ns < _FOR_EVER_NS:
            self._events.at(self._shut_until_ns, self._release)


class HostRoute:
    """One direction between two hosts.

    Attributes:
        latency_ns: from leaving to arriving.
        bytes_per_s: the bandwidth, None for any.
        extra_ns: more latency, while there is a spike.
        caps: lower bandwidths that hold at present.
        gate: holds up everything that goes this way.
    """

    def __init__(self, events: Events, latency_ns: int, bytes_per_s: int | None) -> None:
        self.latency_ns = latency_ns
        self.bytes_per_s = bytes_per_s
        self.extra_ns = 0
        self.caps: list[int] = []
        self.gate = Gate(events)
        self._events = events
        self._busy_until_ns = 0

    def transmit(self, nbytes: int) -> int:
        """Queue ``nbytes`` behind everything that goes this way; return when they arrive."""
        start = max(self._events.now_ns(), self._busy_until_ns)
        rate = self.rate
        self._busy_until_ns = start + (0 if rate is None else -(-nbytes * NS_PER_S // rate))
        return self._busy_until_ns + self.delay_ns

    @property
    def rate(self) -> int | None:
        """The bandwidth at present, in bytes per second; None: any."""
        rate = min(self.caps, default=None)
        if rate is None or (self.bytes_per_s is not None and self.bytes_per_s < rate):
            rate = self.bytes_per_s
        return rate

    @property
    def delay_ns(self) -> int:
        """From leaving to arriving, at present."""
        return self.latency_ns + self.extra_ns

    def carry(self, action: Action) -> None:
        """Let ``action`` happen at the other side, after the latency."""
        self._events.at(self._events.now_ns() + self.delay_ns, partial(self._arrive, action))

    def _arrive(self, action: Action) -> None:
        if self.gate.admits(partial(self._arrive, action)):
            action()
