"""One end of a connection between simulated hosts, as its process sees it.

Invariants:

* Only events of the network call a receiver. The last callback is ``connection_lost``, once.
* After a host has crashed, no callback reaches it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from pccl.protocol.errors import LinkError
from pccl.protocol.types import NS_PER_MS, NS_PER_S
from pccl.transports.base import SILENCE_MAX_S, Address, PathMeasure, Receiver, receiver_failure
from pccl.transports.sim.events import Events
from pccl.transports.sim.pipe import Pipe
from pccl.transports.sim.receive_buffer import ReceiveBuffer
from pccl.transports.sim.routes import HostRoute
from pccl.transports.sim.run_queue import RunQueue

SEGMENT_BYTES = 1460
"""The largest segment on a usual path."""

_RESET = "connection reset by peer"


def report_bug(what: str, error: Exception) -> None:
    """Report a bug of a receiver or listener to the loop's exception handler."""
    asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})


class Noise(Protocol):
    """Changes bits of data in transit; all other behaviour of the network is that of TCP."""

    def changed(self, end: SimConnection, data: memoryview) -> memoryview:
        """Return the data that arrives at ``end``: ``data``, or other bytes of equal length."""
        ...


@dataclass(slots=True)
class Wires:
    """The state that all connections of a network share.

    Attributes:
        events: events of the network.
        window_bytes: most unacknowledged bytes in one direction of a connection.
        ends: ends of the open connections, oldest first.
        noises: applied to all arriving data, in order.
        off: names of the hosts that are switched off, and answer nothing.
        on_stuck: called with the end whose data will never arrive, because the route lost a large
            segment.
    """

    events: Events
    window_bytes: int
    ends: dict[SimConnection, None] = field(default_factory=lambda: {})
    noises: list[Noise] = field(default_factory=lambda: [])
    off: set[str] = field(default_factory=lambda: set())
    on_stuck: Callable[[SimConnection], None] = lambda end: None


class SimConnection:
    """One end of a connection. See :class:`pccl.transports.base.Connection`.

    Args:
        wires: shared state of the network.
        process: the process that owns this end.
        local: address of this side.
        remote: address of the other side.

    Attributes:
        process, local, remote: see above.
        other: the other end (for fault plans).
        receiver: the receiver of this end, None before ``start`` (for fault plans).
        is_cut: whether :meth:`cut` was called.
    """

    congestion = ""

    def __init__(self, wires: Wires, process: RunQueue, local: Address, remote: Address) -> None:
        self.process = process
        self.local = local
        self.remote = remote
        self.receiver: Receiver | None = None
        self.other: SimConnection
        self.is_cut = False
        self._wires = wires
        self._events = wires.events
        self._open = True
        self._error: LinkError | None = None
        self._received = ReceiveBuffer(
            wires.events, process, wires.window_bytes, self._read, self.lose
        )
        self._out: Pipe
        self._in: Pipe
        self._name = f"{local}>{remote}"
        wires.ends[self] = None

    def __repr__(self) -> str:
        return self._name

    def join(
        self, other: SimConnection, there: HostRoute, back: HostRoute, segment_bytes: int = 0
    ) -> None:
        """Connect this end with the ``other`` one. For ``network`` only."""
        segment_bytes = min(SEGMENT_BYTES, segment_bytes or SEGMENT_BYTES)
        self.other, other.other = other, self
        self._out = other._in = self._pipe(other, there, back, segment_bytes)
        self._in = other._out = other._pipe(self, back, there, segment_bytes)
        for end in (self, other):
            end._received.on_room = end._in.arm

    def _pipe(
        self, sink: SimConnection, route: HostRoute, back: HostRoute, segment_bytes: int
    ) -> Pipe:
        window, received = self._wires.window_bytes, sink._received
        tells = (self._tell_writable, self._ignored, self._stuck)
        return Pipe(self._events, route, back, window, received, *tells, segment_bytes)

    def measure(self) -> PathMeasure | None:
        """Return the true delay of the path, and what the kernel of this end knows."""
        if not self._open:
            return None
        there, back = self._out.route, self._in.route
        return PathMeasure(
            there.delay_ns + back.delay_ns,
            0,
            is_lower_bound=True,
            unacknowledged=self._out.unacknowledged,
            retransmits=self._out.retransmits,
            ack_ago_ms=(self._events.now_ns() - self._out.heard_ns) // NS_PER_MS,
            segment_bytes=self._out.segment_bytes,
            acked_bytes=self._out.acked_bytes,
            arrived_bytes=self._in.arrived_bytes,
            busy_ns=self._out.busy_ns,
        )

    def start(self, receiver: Receiver) -> None:
        """Begin to read, or replace the receiver."""
        handed_over, self.receiver = self.receiver is not None, receiver
        self._received.awaits_start = False
        if handed_over:
            return
        if self._error is not None:
            self._tell_lost_soon(self._error)
        elif self._open:
            self._in.arm()

    def pause_reading(self) -> None:
        """Keep arriving data unread until ``resume_reading``."""
        self._received.paused = True

    def resume_reading(self) -> None:
        """End a pause; a later event reads the data that has arrived."""
        self._received.resume()

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Send bytes that fit into the pipe, perhaps not all; return their number, 0 if closed."""
        return self._out.take(buffers) if self._open else 0

    def notify_writable(self) -> None:
        """Ask for one call of ``writable`` as soon as the pipe has room."""
        if self._open:
            assert self.receiver is not None, "a connection is started before anything else"
            self._out.want_room()

    def close(self) -> None:
        """Close; the other end can still read all bytes that were sent."""
        if self._open:
            self._leave()
            self._tell_lost_soon(None)
            self._out.finish(f"{self.local} closed the connection")

    def abort(self) -> None:
        """Reset the connection: the other end may lose bytes that were sent."""
        self._reset(None)

    # -- faults ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Make both ends lose the connection now, as if a router had forgotten it."""
        self._events.note("reset", self)
        for end in (self, self.other):
            self._events.soon(partial(end.lose, "connection reset by the network"))

    def forget(self) -> None:
        """Make only this end lose the connection, which is then half open.

        Data that the other end sends from now on is answered with a reset.
        """
        self._events.note("forget", self)
        if self._open:
            self._received.vanished = True
            self._out.drop_unsent()
            self.lose("connection timed out")

    def stall(self, duration_ns: int | None) -> None:
        """Hold back the data of this end for ``duration_ns``; None: until :meth:`heal`."""
        self._events.note("stall", self, duration_ns)
        self._out.gate.shut(duration_ns)

    def cut(self) -> None:
        """Let no more data arrive at either end. Both kernels give up after a while."""
        self.is_cut = self.other.is_cut = True
        for end in (self, self.other):
            end.stall(None)
            when_ns = self._events.now_ns() + SILENCE_MAX_S * NS_PER_S
            self._events.at(when_ns, partial(end.lose, "connection timed out"))

    def heal(self) -> None:
        """End a :meth:`stall`."""
        self._events.note("heal", self)
        self._out.gate.open()

    def die(self, *, silent: bool) -> None:
        """End the connection because the process of this end died. For this package only."""
        self._leave()
        if silent:
            self._received.vanished = True
            self._out.drop_unsent()
        elif self._events.some(2) == 1:  # a kernel lets sent bytes arrive,
            self._out.finish(f"{self.local} closed the connection")
        else:  # or resets the connection, if the process had unread data
            self._out.reset(_RESET)

    # -- callbacks of the pipes, from events of the network --------------------------------------

    def _ignored(self) -> None:
        """Lose the connection by a reset, unless the host that vanished is switched off."""
        if self.other.local.host not in self._wires.off:
            self._in.route.carry(partial(self.lose, _RESET))

    def _stuck(self) -> None:
        self._events.note("stuck", self)
        self._wires.on_stuck(self)

    def _read(self, data: memoryview) -> memoryview | None:
        """Pass ``data`` to the receiver, piece by piece; return the rest if it pauses reading."""
        if self._open:
            self._events.note(f"deliver {self._name} {len(data)}")
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
            self._events.note(f"writable {self._name}")
            try:
                self.receiver.writable()
            except Exception as error:  # noqa: BLE001 - reported there
                self._receiver_failed(error)

    def lose(self, reason: str) -> None:
        """End the connection, because the network or the other side ended it."""
        self.process.run(partial(self._lose, reason))

    def _lose(self, reason: str) -> None:
        if self._open and self._received.paused:
            self._received.put(reason)  # a socket tells it to the next read
        elif self._open:
            self._leave()
            reason = f"lost the connection to {self.remote}: {reason}"
            self._error = LinkError(func="connection", reason=reason)
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

    def _tell_lost_soon(self, error: Exception | None) -> None:
        if self.receiver is not None:
            lost = partial(self._tell_lost, self.receiver, error)
            self._events.soon(partial(self.process.run, lost))

    def _tell_lost(self, receiver: Receiver, error: Exception | None) -> None:
        if self.process.alive:
            self._events.note("lost", self, error)
            receiver.connection_lost(error)
