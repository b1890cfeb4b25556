"""One end of a connection between simulated hosts, as its process sees it.

Invariants:

* A receiver is called from events of the network only, its ``connection_lost`` once and last.
* After a crash no callback is made to anything of that host.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from pccl.protocol.errors import LinkError
from pccl.transports.base import Address, PathMeasure, Receiver, receiver_failure
from pccl.transports.sim.events import Events
from pccl.transports.sim.pipe import Pipe
from pccl.transports.sim.receive_buffer import ReceiveBuffer
from pccl.transports.sim.routes import HostRoute
from pccl.transports.sim.run_queue import RunQueue

_RESET = "connection reset by peer"


def report_bug(what: str, error: Exception) -> None:
    """Tell the loop's exception handler of a bug above the seam."""
    asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})


class Noise(Protocol):
    """Flips bits on the way: the one thing that a faulty network shows beside what TCP does."""

    def changed(self, end: SimConnection, data: memoryview) -> memoryview:
        """What arrives at ``end`` instead of ``data``: as many bytes, or the same object."""
        ...


@dataclass(slots=True)
class Wires:
    """What all connections of a network have in common.

    Attributes:
        events: the order of everything.
        window_bytes: most bytes on the way in one direction of a connection.
        ends: the live connections' ends, oldest first.
        shared: how many of these a process has to a host: they share its rate.
        noises: whatever arrives anywhere goes through these, in order.
        off: hosts that are off, by name: nobody answers for them.
    """

    events: Events
    window_bytes: int
    ends: dict[SimConnection, None] = field(default_factory=lambda: {})
    shared: Counter[tuple[RunQueue, str]] = field(default_factory=lambda: Counter())
    noises: list[Noise] = field(default_factory=lambda: [])
    off: set[str] = field(default_factory=lambda: set())


class SimConnection:
    """One end of a connection. See :class:`pccl.transports.base.Connection`.

    Args:
        wires: of the network.
        process: whose end it is.
        local: this side.
        remote: the other side.

    Attributes:
        process: see above.
        local: see above.
        remote: see above.
        other: the other end (for fault plans).
        receiver: what reads here (for fault plans).
    """

    congestion = ""

    def __init__(self, wires: Wires, process: RunQueue, local: Address, remote: Address) -> None:
        self.process = process
        self.local = local
        self.remote = remote
        self.receiver: Receiver | None = None
        self.other: SimConnection
        self._wires = wires
        self._events = wires.events
        self._open = True
        self._error: LinkError | None = None
        self._received = ReceiveBuffer(
            wires.events, process, wires.window_bytes, self._read, self.lose
        )
        self._out: Pipe
        self._in: Pipe
        wires.ends[self] = None
        wires.shared[process, remote.host] += 1

    def __repr__(self) -> str:
        return f"{self.local}>{self.remote}"

    def join(self, other: SimConnection, there: HostRoute, back: HostRoute) -> None:
        """Connect this end with the ``other`` one. For ``network``."""
        self.other, other.other = other, self
        self._out = other._in = self._pipe(other, there, back)
        self._in = other._out = other._pipe(self, back, there)
        for end in (self, other):
            end._received.on_room = end._in.arm

    def _pipe(self, sink: SimConnection, route: HostRoute, back: HostRoute) -> Pipe:
        window, received = self._wires.window_bytes, sink._received
        on_room, on_ignored = self._tell_writable, self._ignored
        return Pipe(self._events, route, back, window, received, on_room, on_ignored)

    def measure(self) -> PathMeasure | None:
        """The true delay and rate of the path; connections between two hosts share the rate."""
        if not self._open:
            return None
        there, back = self._out.route, self._in.route
        rate = there.rate
        speed = 0 if rate is None else rate // self._wires.shared[self.process, self.remote.host]
        return PathMeasure(there.delay_ns + back.delay_ns, speed, is_lower_bound=False)

    def start(self, receiver: Receiver) -> None:
        """Begin to read, or hand the stream over to another receiver."""
        handed_over, self.receiver = self.receiver is not None, receiver
        self._received.awaits_start = False
        if handed_over:
            return
        if self._error is not None:
            self._tell_lost_soon(self._error)
        elif self._open:
            self._in.arm()

    def pause_reading(self) -> None:
        """Keep what arrives until ``resume_reading``."""
        self._received.paused = True

    def resume_reading(self) -> None:
        """Read on, in a later event."""
        self._received.resume()

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Put into the pipe what fits, or less; return the bytes taken, 0 after the end."""
        return self._out.take(buffers) if self._open else 0

    def notify_writable(self) -> None:
        """Ask the pipe for one call of ``writable`` when it has room."""
        if self._open:
            assert self.receiver is not None, "a connection is started before anything else"
            self._out.want_room()

    def close(self) -> None:
        """End in order: the other end first reads what was sent."""
        if self._open:
            self._leave()
            self._tell_lost_soon(None)
            self._out.finish(f"{self.local} closed the connection")

    def abort(self) -> None:
        """Reset: the other end may lose what was sent."""
        self._reset(None)

    # -- faults ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Something on the way forgets the connection: both ends lose it now."""
        self._events.note("reset", self)
        for end in (self, self.other):
            self._events.soon(partial(end.lose, "connection reset by the network"))

    def forget(self) -> None:
        """This end loses the connection, and the other one is not told: it is half open.

        What the other end sends from now on is answered with a reset.
        """
        self._events.note("forget", self)
        if self._open:
            self._received.vanished = True
            self._out.drop_unsent()
            self.lose("connection timed out")

    def stall(self, duration_ns: int | None) -> None:
        """Hold up what this end sends for ``duration_ns``, or until :meth:`heal` if None."""
        self._events.note("stall", self, duration_ns)
        self._out.gate.shut(duration_ns)

    def heal(self) -> None:
        """End a :meth:`stall`."""
        self._events.note("heal", self)
        self._out.gate.open()

    def die(self, *, silent: bool) -> None:
        """The process of this end is dead. For this module."""
        self._leave()
        if silent:
            self._received.vanished = True
            self._out.drop_unsent()
        elif self._events.some(2) == 1:  # a kernel closes in order,
            self._out.finish(f"{self.local} closed the connection")
        else:  # ... or not, if something was left to read
            self._out.reset(_RESET)

    # -- what the pipes have to say, from events of the network ----------------------------------

    def _ignored(self) -> None:
        """What was sent has arrived at a host that vanished, and perhaps is up again."""
        if self.other.local.host not in self._wires.off:
            self._in.route.carry(partial(self.lose, _RESET))

    def _read(self, data: memoryview) -> memoryview | None:
        """Read what has arrived, in as many portions as the receiver's memory makes."""
        if self._open:
            self._events.note("deliver", self, len(data))
            for noise in list(self._wires.noises):
                data = noise.changed(self, data)
        try:
            while data and self._open:
                if self._received.paused:
                    return data
                assert self.receiver is not None
                buffer = self.receiver.get_buffer()
                nbytes = min(len(buffer), len(data))
                assert nbytes, "memory for a read must not be empty"
                buffer[:nbytes] = data[:nbytes]
                data = data[nbytes:]
                self.receiver.buffer_updated(nbytes)
        except Exception as error:  # noqa: BLE001 - reported there
            self._receiver_failed(error)
        return None

    def _tell_writable(self) -> None:
        self.process.run(self._writable)

    def _writable(self) -> None:
        if self._open and self.receiver is not None:
            self._events.note("writable", self)
            try:
                self.receiver.writable()
            except Exception as error:  # noqa: BLE001 - reported there
                self._receiver_failed(error)

    def lose(self, reason: str) -> None:
        """The network, or the other side, ends it."""
        self.process.run(partial(self._lose, reason))

    def _lose(self, reason: str) -> None:
        if self._open:
            self._leave()
            self._error = LinkError(func="connection", reason=f"lost {self.remote}: {reason}")
            if self.receiver is not None:
                self._tell_lost(self.receiver, self._error)

    def _receiver_failed(self, error: Exception) -> None:
        failure = receiver_failure(self.remote, error)
        self._reset(failure)
        if failure is not error:
            report_bug(str(failure), error)

    def _reset(self, error: Exception | None) -> None:
        if self._open:
            self._leave()
            self._tell_lost_soon(error)
            self._out.reset(_RESET)

    def _leave(self) -> None:
        self._open = False
        self._received.awaits_start = False
        del self._wires.ends[self]
        shared, line = self._wires.shared, (self.process, self.remote.host)
        shared[line] -= 1
        if not shared[line]:
            del shared[line]

    def _tell_lost_soon(self, error: Exception | None) -> None:
        if self.receiver is not None:
            lost = partial(self._tell_lost, self.receiver, error)
            self._events.soon(partial(self.process.run, lost))

    def _tell_lost(self, receiver: Receiver, error: Exception | None) -> None:
        if self.process.alive:
            self._events.note("lost", self, error)
            receiver.connection_lost(error)
