"""Connections through a relay, and what a relay does with them.

A relay joins two connections that other processes have dialled, and copies the bytes of each to the
other. The two processes encrypt these bytes, so a relay that alters, drops or replays some of them
ends the connection, and can do no more. To them the connection looks like any other: a
``RelayedConnection``, whose other side has no address but the relay's. A TCP proxy in front of a
master relays, too, and knows the address of the other side.

The first bytes that a relay sends are an introduction: the address from which the other process has
dialled it. The two may try a simultaneous open with it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from pccl.protocol.errors import LinkError
from pccl.protocol.types import Member, PeerId
from pccl.transports.base import Address, Connection, PathMeasure

SPLICE_BYTES = 128 << 10
"""Bytes that a relay holds for each direction of a pair, at most."""

_NOTHING = memoryview(b"")

_INTRODUCTION = struct.Struct("<46sH")
"""An introduction: the host as text, filled up with zero bytes, and the port."""

INTRODUCTION_BYTES = _INTRODUCTION.size


@dataclass(frozen=True, slots=True)
class PunchedAddress(Address):
    """The address of a process that this one has met in a simultaneous open."""

    met_at: Member
    """The relay that has introduced the two; id 0: the master."""


@dataclass(frozen=True, slots=True)
class RelayAddress(Address):
    """The address of a process behind a relay: no host, so that no code takes it for this one."""

    relay: PeerId
    """The relay; 0: the master."""

    def __str__(self) -> str:
        return self.host


def behind(peer: PeerId, relay: PeerId) -> RelayAddress:
    """Return the address of ``peer`` behind ``relay``."""
    through = f"peer {relay}" if relay else "the master"
    return RelayAddress(f"peer {peer} through {through}", 0, relay)


def relay_of(connection: Connection) -> PeerId | None:
    """Return the relay that carries a connection, 0 for the master; None: there is none."""
    remote = connection.remote
    return remote.relay if isinstance(remote, RelayAddress) else None


def met_at(connection: Connection) -> Member | None:
    """Return the relay that has led to a simultaneous open; None: there was none."""
    remote = connection.remote
    return remote.met_at if isinstance(remote, PunchedAddress) else None


def introduction(address: Address) -> bytes:
    """Return what a relay tells a process about the other one, which has this address."""
    return _INTRODUCTION.pack(address.host.encode(), address.port)


def decode_introduction(data: bytes | memoryview) -> Address:
    """Return the address in an introduction.

    Raises:
        LinkError: it is no address that could be dialled, or shown to people.
    """
    packed, port = _INTRODUCTION.unpack(data)
    host = bytes(packed).rstrip(b"\0").decode("ascii", "replace")
    if not host or not port or not host.isascii() or not host.isprintable():
        raise LinkError(func="connection", reason="the relay named an invalid address")
    return Address(host, port)


class Introduction:
    """Reads the introduction at the beginning of a connection, which then pauses.

    Args:
        connection: a connection to a relay, paused; nothing else reads it.
        told: receives the address, or a LinkError that says why there is none.
    """

    def __init__(self, connection: Connection, told: asyncio.Future[Address]) -> None:
        self._connection = connection
        self._told = told
        self._memory = memoryview(bytearray(_INTRODUCTION.size))
        self._received = 0
        connection.start(self)
        connection.resume_reading()

    def get_buffer(self) -> memoryview:
        """Return memory for the rest."""
        return self._memory[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        """Pause and tell the address, once all of it has arrived."""
        self._received += nbytes
        if self._received == _INTRODUCTION.size:
            self._connection.pause_reading()
            try:
                address = decode_introduction(self._memory)
            except LinkError as error:
                self._fail(error)
                self._connection.abort()
            else:
                if not self._told.done():
                    self._told.set_result(address)

    def writable(self) -> None:
        """Nothing is sent before the introduction."""

    def connection_lost(self, error: Exception | None) -> None:
        """Tell that there is no introduction."""
        lost = LinkError(func="connection", reason="the other peer has not come to the relay")
        self._fail(error if isinstance(error, LinkError) else lost)

    def _fail(self, error: LinkError) -> None:
        if not self._told.done():  # otherwise nobody waits any more
            self._told.set_exception(error)


class Introducer:
    """Tells the other side of a connection its address, and then ends the connection.

    Args:
        connection: a connection after its handshake, of which nothing was read yet.
    """

    def __init__(self, connection: Connection) -> None:
        self._memory = memoryview(bytearray(1))
        connection.pause_reading()
        connection.start(self)
        connection.send([introduction(connection.remote)])
        connection.close()

    def get_buffer(self) -> memoryview:
        """Return memory for a byte, which nobody reads."""
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        """Ignore what the other side sends."""

    def writable(self) -> None:
        """A fresh connection has taken the introduction at once."""

    def connection_lost(self, error: Exception | None) -> None:
        """Ignore the end."""


class _MetConnection:
    """Another connection, to a process with an address of another kind. See ``Connection``."""

    def __init__(self, connection: Connection, remote: Address) -> None:
        self._inner = connection
        self.remote = remote
        self.send = connection.send
        self.start = connection.start
        self.pause_reading = connection.pause_reading
        self.resume_reading = connection.resume_reading
        self.notify_writable = connection.notify_writable
        self.close = connection.close
        self.abort = connection.abort

    def __repr__(self) -> str:
        return f"<{self.remote}: {self._inner!r}>"

    @property
    def local(self) -> Address:
        """The address of this side."""
        return self._inner.local

    @property
    def congestion(self) -> str:
        """The congestion control of the other connection."""
        return self._inner.congestion

    def measure(self) -> PathMeasure | None:
        """Return the measure of the other connection."""
        return self._inner.measure()


class PunchedConnection(_MetConnection):
    """A connection from a simultaneous open.

    Args:
        connection: the connection, of which nothing was read yet.
        relay: the relay that has introduced the two.
    """

    def __init__(self, connection: Connection, relay: Member) -> None:
        remote = connection.remote
        super().__init__(connection, PunchedAddress(remote.host, remote.port, relay))


class RelayedConnection(_MetConnection):
    """A connection to a relay or a proxy, which forwards it.

    Args:
        connection: the connection to the relay, after the introduction; or the one to the proxy,
            after its header.
        remote: the process at the other side: a ``RelayAddress``, or the source that a proxy names.
    """

    def measure(self) -> PathMeasure | None:
        """Return the measure of the way to the relay, with twice its round trip.

        Nobody measures the way behind the relay. The rate includes it, because a relay reads no
        faster than the other side.
        """
        path = self._inner.measure()
        return None if path is None else replace(path, rtt_ns=2 * path.rtt_ns)


class SplicedEnd:
    """One of two connections whose bytes a relay copies to each other; receiver of its connection.

    Until :meth:`join`, it reads nothing. Afterwards each end reads only while the other takes what
    it has read, so that a slow reader delays its own sender, and nobody else.

    Args:
        connection: a connection after its handshake; the end starts it.
        on_ended: called once with this end, when its connection has ended.
    """

    def __init__(self, connection: Connection, on_ended: Callable[[SplicedEnd], None]) -> None:
        self.connection = connection
        self.carried_bytes = 0
        """Bytes copied from this end to the other."""
        self._on_ended = on_ended
        self._other: SplicedEnd | None = None
        self._memory = self._unsent = _NOTHING
        self._ended = False
        self._waited_for_bytes = -1
        """Count of carried bytes at the last look, if some of them waited; otherwise -1."""
        connection.pause_reading()
        connection.start(self)

    def join(self, other: SplicedEnd) -> None:
        """Introduce the two ends, and copy all bytes of each to the other from now on."""
        for end, its_other in ((self, other), (other, self)):
            end._other = its_other
            end._memory = memoryview(bytearray(SPLICE_BYTES))
            first = introduction(end.connection.remote)
            end._memory[: len(first)] = first
            end._unsent = end._memory[: len(first)]
        for end in (self, other):
            end._pass_on()

    def close(self) -> None:
        """End this connection, and then the other."""
        self.connection.close()

    def abort(self) -> None:
        """End both connections at once; bytes that wait are lost."""
        self.connection.abort()
        if self._other is not None:
            self._other.connection.abort()

    def is_stuck(self) -> bool:
        """Whether bytes wait that already waited at the last call: the other side takes nothing.

        Both ends of a pair may be full. Then neither is read, and neither notices that its other
        side has gone.
        """
        waits = self.carried_bytes - len(self._unsent) if self._unsent else -1
        is_stuck = waits == self._waited_for_bytes != -1
        self._waited_for_bytes = waits
        return is_stuck

    # -- what the connection calls -------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return memory for the next read: nothing waits to be sent while this end reads."""
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what was read; stop reading until the other side has taken all of it."""
        self.carried_bytes += nbytes
        self._unsent = self._memory[:nbytes]
        self._pass_on()
        if self._unsent:
            self.connection.pause_reading()

    def writable(self) -> None:
        """Pass on what the other end has read."""
        if self._other is not None and self._other._unsent:
            self._other._pass_on()

    def connection_lost(self, error: Exception | None) -> None:
        """End the other connection too, once it has taken what this one has read."""
        self._ended = True
        if self._other is not None:
            self._other.connection.pause_reading()
            if not self._unsent:
                self._other.connection.close()
        self._on_ended(self)

    def _pass_on(self) -> None:
        assert self._other is not None, "only a joined end reads"
        there = self._other.connection
        while self._unsent:
            taken = there.send([self._unsent])
            if not taken:
                there.notify_writable()
                return
            self._unsent = self._unsent[taken:]
        if self._ended:
            there.close()
        elif not self._other._ended:
            self.connection.resume_reading()
