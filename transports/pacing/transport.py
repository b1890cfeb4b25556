"""A transport whose connections to other machines together keep an upload limit.

A connection first waits until the network below accepts bytes, and then for its turn. So one whose
other side does not read keeps no other one waiting. Nothing is queued here. Received bytes, and
connections inside this machine, do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pccl.transports.base import (
    Address,
    Connection,
    Listener,
    PathMeasure,
    Receiver,
    Timers,
    Transport,
    receiver_failure,
)
from pccl.transports.pacing.pacer import Pacer

GRAIN_NS = 1_000_000
"""The shortest wait for a turn. uvloop's timers are no finer, and may come early by half of it: a
shorter wait would keep the loop busy until the turn is due."""

Bytes = bytes | bytearray | memoryview


def is_upload(connection: Connection) -> bool:
    """Whether what a connection sends leaves this machine."""
    return connection.local.host != connection.remote.host


def limited(
    transport: Transport,
    clock: Timers,
    bytes_per_s: int | None,
    counts: Callable[[Connection], bool] = is_upload,
) -> Transport:
    """Return a transport that keeps a limit; without a limit, ``transport`` itself."""
    if bytes_per_s is None:
        return transport
    return PacedTransport(transport, clock, bytes_per_s, counts)


class PacedTransport:
    """Limits what the connections of another transport send. See ``Transport``.

    Args:
        transport: the network.
        clock: gives the time, and calls back.
        bytes_per_s: the limit for all connections together.
        counts: whether a connection counts, and is limited.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Timers,
        bytes_per_s: int,
        counts: Callable[[Connection], bool] = is_upload,
    ) -> None:
        self.memory = transport.memory
        self.port_limits = transport.port_limits
        self.bytes_per_s = bytes_per_s
        self.clock = clock
        self.pacer = Pacer[PacedConnection](bytes_per_s, clock.now_ns())
        self._transport = transport
        self._counts = counts
        self._is_armed = False

    async def listen(
        self, address: Address, on_connection: Callable[[Connection], None]
    ) -> Listener:
        """Listen on ``address``; see ``Transport``."""
        return await self._transport.listen(
            address, lambda connection: on_connection(self._paced(connection))
        )

    def hosts(self, address: Address) -> tuple[str, ...]:
        """Return the addresses of this machine; see ``Transport``."""
        return self._transport.hosts(address)

    async def dial(
        self,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool] = lambda _: True,
        hosts: Sequence[str] = (),
        segment_bytes: int = 0,
    ) -> Connection:
        """Connect to ``address``; see ``Transport``."""
        dial = self._transport.dial(address, timeout_s, may_dial, hosts, segment_bytes)
        return self._paced(await dial)

    async def punch(
        self,
        local: Address,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool],
        segment_bytes: int = 0,
    ) -> Connection:
        """Connect to a process that dials this one at the same time; see ``Transport``."""
        punch = self._transport.punch(local, address, timeout_s, may_dial, segment_bytes)
        return self._paced(await punch)

    def _paced(self, connection: Connection) -> Connection:
        return PacedConnection(connection, self) if self._counts(connection) else connection

    def arm(self) -> None:
        """Set the timer for the next turn, if a connection waits. For this module only."""
        due_ns = self.pacer.due_ns
        if due_ns is not None and not self._is_armed:
            self._is_armed = True
            now_ns = self.clock.now_ns()
            if due_ns > now_ns:
                due_ns = max(due_ns, now_ns + GRAIN_NS)
            self.clock.call_at_ns(due_ns, self._serve)

    def _serve(self) -> None:
        self._is_armed = False
        connection = self.pacer.begin_turn(self.clock.now_ns())
        try:
            if connection is not None:
                connection.go_on()
        finally:
            self.pacer.end_turn()
            self.arm()


class PacedConnection:
    """Sends what the pacer of its transport grants. See ``Connection``.

    Args:
        connection: the connection below.
        transport: the transport whose limit it keeps.
    """

    def __init__(self, connection: Connection, transport: PacedTransport) -> None:
        self._inner = connection
        self._transport = transport
        self._account = transport.pacer.open(self, transport.clock.now_ns())
        self._receiver: Receiver | None = None
        self._failure: Exception | None = None
        self._waits = False
        """Whether it waits for its turn."""
        self.pause_reading = connection.pause_reading
        self.resume_reading = connection.resume_reading

    def __repr__(self) -> str:
        return f"<paced {self._inner!r}>"

    @property
    def remote(self) -> Address:
        """The address of the other side."""
        return self._inner.remote

    @property
    def local(self) -> Address:
        """The address of this side."""
        return self._inner.local

    @property
    def congestion(self) -> str:
        """The congestion control of the connection below."""
        return self._inner.congestion

    def measure(self) -> PathMeasure | None:
        """Return the measure of the connection below, and the limit.

        Between two turns the network is idle, and during a turn it is faster than the limit.
        """
        path, limit = self._inner.measure(), self._transport.bytes_per_s
        if path is None:
            return None
        return replace(path, bytes_per_s=min(path.bytes_per_s, limit), limit_bytes_per_s=limit)

    def start(self, receiver: Receiver) -> None:
        """Begin to read, or replace the receiver."""
        self._receiver = receiver
        self._inner.start(self)

    # -- sending -------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Bytes]) -> int:
        """Pass on what the limit allows and the network accepts; see ``Connection``."""
        pacer, wanted = self._transport.pacer, sum(map(len, buffers))
        room = pacer.room(self._account, wanted, self._transport.clock.now_ns())
        if not room:
            return 0
        sent = self._inner.send(buffers if room == wanted else _first(buffers, room))
        pacer.spend(self._account, sent)
        return sent

    def notify_writable(self) -> None:
        """Ask for one call of ``writable``, as soon as network and limit allow to send."""
        if not self._waits:
            self._inner.notify_writable()

    def go_on(self) -> None:
        """Send, because it is this connection's turn. For this module only."""
        assert self._waits, "only a waiting connection has a turn"
        assert self._receiver is not None, "a connection is started before anything else"
        self._waits = False
        try:
            self._receiver.writable()
        except Exception as error:
            self._failure = receiver_failure(self.remote, error)
            self.abort()
            if self._failure is not error:
                raise

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End the stream; bytes that ``send`` accepted still arrive."""
        self._leave()
        self._inner.close()

    def abort(self) -> None:
        """End the stream at once."""
        self._leave()
        self._inner.abort()

    def _leave(self) -> None:
        self._waits = False
        self._transport.pacer.leave(self._account)

    # -- callbacks of the connection below -----------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return the receiver's memory."""
        assert self._receiver is not None, "a connection is started before anything else"
        return self._receiver.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on how much was read."""
        assert self._receiver is not None, "a connection is started before anything else"
        self._receiver.buffer_updated(nbytes)

    def writable(self) -> None:
        """Pass it on, or wait for a turn."""
        assert self._receiver is not None, "a connection is started before anything else"
        if self._transport.pacer.is_free(self._transport.clock.now_ns()):
            self._receiver.writable()
        else:
            self._waits = True
            self._transport.pacer.wait(self._account)
            self._transport.arm()

    def connection_lost(self, error: Exception | None) -> None:
        """Wait no more, and report why it has ended."""
        self._leave()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.connection_lost(self._failure or error)


def _first(buffers: Sequence[Bytes], nbytes: int) -> list[Bytes]:
    """Return the first ``nbytes`` of ``buffers``, which are longer."""
    first: list[Bytes] = []
    for buffer in buffers:
        if len(buffer) >= nbytes:
            return [*first, memoryview(buffer)[:nbytes]]
        first.append(buffer)
        nbytes -= len(buffer)
    return first
