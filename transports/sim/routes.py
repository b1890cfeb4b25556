"""The route from one host to another: latency, bandwidth, and a gate that can hold bytes back.

All connections of a route share its bandwidth. Bytes arrive one latency after they were sent.
"""

from __future__ import annotations

from functools import partial

from pccl.protocol.types import NS_PER_S
from pccl.transports.sim.events import Action, Events
from pccl.transports.sim.ports import SMALL_BYTES, Line

_FOR_EVER_NS = 1 << 62


class Gate:
    """A gate that holds actions back while it is shut, and then lets them happen in order.

    Attributes:
        shut_until_ns: when the gate opens, or has opened, in nanoseconds.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self.shut_until_ns = 0
        self._waiting: list[Action] = []

    def shut(self, duration_ns: int | None) -> None:
        """Shut the gate for ``duration_ns``; None: until :meth:`open`."""
        until = _FOR_EVER_NS if duration_ns is None else self._events.now_ns() + duration_ns
        self.shut_until_ns = max(self.shut_until_ns, until)

    def open(self) -> None:
        """Open the gate, and let the waiting actions happen."""
        self.shut_until_ns = self._events.now_ns()
        self._release()

    def admits(self, action: Action) -> bool:
        """Return whether the gate is open; if not, let ``action`` happen when it opens."""
        if self._events.now_ns() >= self.shut_until_ns:
            return True
        self._waiting.append(action)
        if len(self._waiting) == 1:
            self._release()
        return False

    def _release(self) -> None:
        if self._events.now_ns() >= self.shut_until_ns:
            waiting, self._waiting = self._waiting, []
            for action in waiting:
                self._events.soon(action)
        elif self._waiting and self.shut_until_ns < _FOR_EVER_NS:
            self._events.at(self.shut_until_ns, self._release)


class HostRoute:
    """The route from one host to another, in this direction only.

    Attributes:
        latency_ns: one-way latency.
        bytes_per_s: bandwidth; None: unlimited.
        extra_ns: additional latency, during a latency spike.
        caps: temporary limits on the bandwidth, in bytes per second.
        gate: can hold back all traffic of this route.
        largest_bytes: the largest segment that arrives; larger ones vanish. None: all arrive.
        up: what all routes from the source share; None: nothing.
        down: what all routes to the target share; None: nothing.
    """

    def __init__(self, events: Events, latency_ns: int, bytes_per_s: int | None) -> None:
        self.latency_ns = latency_ns
        self.bytes_per_s = bytes_per_s
        self.extra_ns = 0
        self.caps: list[int] = []
        self.gate = Gate(events)
        self.largest_bytes: int | None = None
        self.up: Line | None = None
        self.down: Line | None = None
        self._events = events
        self._busy_until_ns = 0

    def transmit(self, nbytes: int) -> int:
        """Queue ``nbytes`` behind all earlier bytes of the route; return their arrival time."""
        ready = max(self._events.now_ns(), self._busy_until_ns)
        rate = self.rate if self.caps else self.bytes_per_s
        if rate is not None:
            ready += -(-nbytes * NS_PER_S // rate)
        self._busy_until_ns = ready
        return ready + self.latency_ns + self.extra_ns

    @property
    def rate(self) -> int | None:
        """The current bandwidth, in bytes per second; None: unlimited."""
        own = self.bytes_per_s
        if not self.caps:
            return own
        cap = min(self.caps)
        return cap if own is None else min(cap, own)

    @property
    def delay_ns(self) -> int:
        """The current one-way latency."""
        return self.latency_ns + self.extra_ns

    @property
    def has_port(self) -> bool:
        """Whether its traffic passes a port."""
        return self.up is not None or self.down is not None

    @property
    def answer_ns(self) -> int:
        """How long a packet takes that is sent now, roughly: it may wait in the queues of ports."""
        waits = [line.wait_ns for line in (self.up, self.down) if line is not None]
        return self.delay_ns + sum(waits)

    def carry(self, action: Action) -> None:
        """Let ``action`` happen at the target host, after the latency."""
        if self.has_port:
            self.pass_ports(action, SMALL_BYTES, partial(self._arrive, action), lambda: None)
        else:
            self._events.at(self._events.now_ns() + self.delay_ns, partial(self._arrive, action))

    def pass_ports(self, sender: object, nbytes: int, arrive: Action, enter: Action) -> None:
        """Let bytes pass both ports and the way between them.

        Args:
            sender: its bytes stay in order.
            nbytes: number of bytes.
            arrive: called when they have arrived.
            enter: called when they enter the first queue.
        """

        def go() -> None:
            self._events.at(self.transmit(nbytes), come)

        def come() -> None:
            if self.down is None:
                arrive()
            else:
                self.down.carry(sender, nbytes, arrive)

        if self.up is None:
            enter()
            go()
        else:
            self.up.carry(sender, nbytes, go, enter)

    def _arrive(self, action: Action) -> None:
        if self.gate.admits(partial(self._arrive, action)):
            action()
