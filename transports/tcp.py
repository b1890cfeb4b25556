"""The TCP transport: raw non-blocking sockets, on any asyncio loop (uvloop included).

It does not use asyncio's transports or streams, because they queue and copy outgoing data. Here
``send`` is one ``sendmsg``, and a read is one ``recv_into`` the receiver's own memory. The caller
keeps the bytes that the kernel did not accept. This module does not interpret bytes or redial.

Invariants:

* Only the loop calls a receiver, never from within a method that the receiver called. The last
  callback is ``connection_lost``, exactly once.
* This module alone turns an ``OSError`` of the network into a LinkError, and always does.
* A connection, listener, or failed or cancelled dial closes its descriptor when it ends. An orderly
  close keeps it for a few seconds at most, until the other side has read all data. The number of
  these descriptors is limited, and shared fairly among the remote addresses.
* A busy connection or listener does a bounded amount of work per turn of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from pccl.protocol.errors import LinkError
from pccl.protocol.guards.source_shares import PortLimits, SourceShares
from pccl.protocol.guards.source_shares import port_limits as derive_port_limits
from pccl.transports.base import (
    Address,
    Connection,
    Listener,
    LocalMemory,
    PathMeasure,
    Receiver,
    receiver_failure,
)
from pccl.transports.open_files import claim_descriptors
from pccl.transports.tcp_dial import TcpDialler, leave_through, own_hosts
from pccl.transports.tcp_listener import TcpListener
from pccl.transports.tcp_socket import (
    RESET_ON_CLOSE,
    Lingering,
    Resolved,
    congestion_of,
    connect,
    measure_path,
    reason_of,
    resolve,
    share_port,
    to_address,
    tune_path,
)

READ_BUDGET_BYTES = 4 << 20
"""Bytes that one connection reads per turn of the loop: about 1 ms of copying. Less would waste
time in the loop, and more would make other lanes wait."""

READ_COST_BYTES = 16 << 10
"""Bytes that a shorter read counts as, so that a flood of tiny frames cannot block the loop."""

READ_TURN_S = 0.02
"""Time after which a turn of one connection ends, even if its budget does not. Of a gather, 4 MiB
are hundreds of segments that a peer decodes, each with those of all members that waited for it."""

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_MSG_NOSIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # some programs restore SIGPIPE's default

_log = logging.getLogger("pccl.link")


class _TcpConnection:
    """A connection over one non-blocking socket."""

    def __init__(
        self, transport: TcpTransport, sock: socket.socket, local: Address, remote: Address
    ) -> None:
        self._transport = transport
        self._loop = transport.loop
        self._sock = sock
        self._local = local
        self._remote = remote
        self._receiver: Receiver | None = None
        self._started = False
        self._open = True
        self._awaits_writable = False
        self._reads_soon = False
        self._paused = False
        self._send_failure: LinkError | None = None

    def __repr__(self) -> str:
        return f"<TCP {self._local} to {self._remote}{'' if self._open else ' ended'}>"

    @property
    def remote(self) -> Address:
        return self._remote

    @property
    def local(self) -> Address:
        return self._local

    @property
    def congestion(self) -> str:
        return congestion_of(self._sock) if self._open else ""

    def measure(self) -> PathMeasure | None:
        return measure_path(self._sock) if self._open else None

    def start(self, receiver: Receiver) -> None:
        if self._open:
            self._receiver = receiver
            if not self._started and not self._paused:
                self._loop.add_reader(self._sock, self._read)
        self._started = True

    def pause_reading(self) -> None:
        if self._open and not self._paused:
            self._paused = True
            if self._started:
                self._loop.remove_reader(self._sock)

    def resume_reading(self) -> None:
        if self._open and self._paused:
            self._paused = False
            if self._started:
                self._loop.add_reader(self._sock, self._read)
                self._read_soon()

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        if not self._open or self._send_failure is not None:
            return 0
        if len(buffers) > _IOV_MAX:
            buffers = buffers[:_IOV_MAX]
        try:
            return self._sock.sendmsg(buffers, (), _MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            # Data that the other side sent before is still readable; after it the connection ends.
            self._send_failure = self._lost(error)
            if self._started:
                self._read_soon()
            return 0

    def notify_writable(self) -> None:
        assert self._started, "a connection is started before anything else"
        may_write = self._open and self._send_failure is None  # else a read tells the failure
        if may_write and not self._awaits_writable:
            self._awaits_writable = True
            self._loop.add_writer(self._sock, self._on_writable)

    def close(self) -> None:
        if not self._open:
            return
        self._end(None)
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._sock.close()  # the network has already ended the connection
        else:
            self._transport.linger(self._sock, self._remote)

    def abort(self) -> None:
        self._reset(None)

    def _read_soon(self) -> None:
        """Read in the next turn of the loop, even if the loop does not report data."""
        if not self._reads_soon:
            self._reads_soon = True
            self._loop.call_soon(self._read_now)

    def _read_now(self) -> None:
        self._reads_soon = False
        self._read()

    def _read(self) -> None:
        if self._reads_soon:
            return
        budget, until = READ_BUDGET_BYTES, time.monotonic() + READ_TURN_S
        try:
            while self._open and not self._paused and budget > 0:
                assert self._receiver is not None
                buffer = self._receiver.get_buffer()
                assert len(buffer), "memory for a read must not be empty"
                try:
                    nbytes = self._sock.recv_into(buffer)
                except BlockingIOError:
                    if self._send_failure is not None:
                        self._lose(self._send_failure)
                    return
                except OSError as error:
                    self._lose(self._send_failure or self._lost(error))
                    return
                if not nbytes:
                    self._lose(self._send_failure or self._closed_by_remote())
                    return
                self._receiver.buffer_updated(nbytes)
                # Continue after a short read, because uvloop reports a failed stream only once.
                budget -= max(nbytes, READ_COST_BYTES)
                if time.monotonic() >= until:  # the time of uvloop stands still meanwhile
                    break
        except Exception as error:  # noqa: BLE001 - reported below
            self._receiver_failed(error)
        else:
            if self._open and not self._paused:
                self._read_soon()  # more may follow, after a turn for the other connections

    def _on_writable(self) -> None:
        if not self._open:
            return
        self._loop.remove_writer(self._sock)
        self._awaits_writable = False
        assert self._receiver is not None
        try:
            self._receiver.writable()
        except Exception as error:  # noqa: BLE001 - reported below
            self._receiver_failed(error)

    def _receiver_failed(self, error: Exception) -> None:
        failure = receiver_failure(self._remote, error)
        self._reset(failure)
        if failure is not error:
            self._loop.call_exception_handler({"message": str(failure), "exception": error})

    def _lost(self, error: OSError) -> LinkError:
        reason = f"lost the connection to {self._remote}: {reason_of(error)}"
        return LinkError(func="connection", reason=reason)

    def _closed_by_remote(self) -> LinkError:
        return LinkError(func="connection", reason=f"{self._remote} closed the connection")

    def _lose(self, error: LinkError) -> None:
        self._end(error)
        self._sock.close()

    def _reset(self, error: Exception | None) -> None:
        if self._open:
            self._end(error)
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self._sock.close()

    def _end(self, error: Exception | None) -> None:
        """Stop watching the socket; schedule ``connection_lost``. The caller closes the socket."""
        self._open = False
        if self._loop.is_closed():
            return
        if self._started:
            self._loop.remove_reader(self._sock)
        if self._awaits_writable:
            self._loop.remove_writer(self._sock)
        if self._receiver is not None:
            self._loop.call_soon(self._receiver.connection_lost, error)
            self._receiver = None


class TcpTransport:
    """TCP on this host. See :class:`pccl.transports.base.Transport`.

    Attributes:
        loop: the loop that runs all connections and listeners of this transport.
        executor: runs blocking name lookups; None: the default executor of the loop.
        port_limits: numbers of connections that each port may hold; None: derived from the
            system's limit on descriptors, which is raised if possible.
        memory: see ``Transport``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Executor | None = None,
        port_limits: PortLimits | None = None,
        memory: LocalMemory | None = None,
    ) -> None:
        self.loop = loop
        self.memory = memory
        self.executor = executor
        self.port_limits = port_limits or derive_port_limits(claim_descriptors())
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lingering: weakref.WeakValueDictionary[int, Lingering] = weakref.WeakValueDictionary()
        self._lingering_shares: SourceShares[int] = SourceShares(self.port_limits.lingering)
        self._numbers = itertools.count(1)
        self._dialler = TcpDialler(loop, self._resolve, self._connect)
        self._interface = ""

    def through(self, interface: str) -> TcpTransport:
        """Return a view of this transport, limited to a network interface; empty: to none."""
        if not interface:
            return self
        limited = copy.copy(self)
        limited._interface = interface
        limited._dialler = TcpDialler(self.loop, limited._resolve, limited._connect)
        return limited

    async def listen(
        self, address: Address, on_connection: Callable[[Connection], None]
    ) -> Listener:
        """Listen on ``address``; for a name with several addresses, on the first usable one.

        An empty host or ``0.0.0.0`` means every IPv4 address, ``::`` every address.

        Raises:
            LinkError: the address cannot be used; the reason says why.
        """
        reason = "no such address"
        try:
            for resolved in await resolve(self.loop, self.executor, address, socket.AI_PASSIVE):
                try:
                    return TcpListener(
                        self.loop,
                        resolved,
                        self._interface,
                        self._sockets,
                        self.adopt,
                        on_connection,
                    )
                except OSError as error:
                    reason = reason_of(error)
        except (OSError, ValueError, OverflowError) as error:
            reason = reason_of(error)
        raise LinkError(func="listen", reason=f"cannot listen on {address}: {reason}")

    def hosts(self, address: Address) -> tuple[str, ...]:
        """Return the addresses at which others may reach a port; see ``own_hosts``."""
        return own_hosts(address.host, self._interface)

    async def dial(
        self,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool] = lambda _: True,
        hosts: Sequence[str] = (),
        segment_bytes: int = 0,
    ) -> Connection:
        """Connect to the first of all addresses that answers; see ``TcpDialler``."""
        return await self._dialler.dial(address, timeout_s, may_dial, hosts, segment_bytes)

    async def punch(
        self,
        local: Address,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool],
        segment_bytes: int = 0,
    ) -> Connection:
        """Connect to a process that dials this one at the same time; see ``TcpDialler``."""
        return await self._dialler.punch(local, address, timeout_s, may_dial, segment_bytes)

    def abandon(self) -> None:
        """Close every descriptor and do nothing else; for the child process after a fork.

        The connections of the parent process stay open. This process must no longer use this
        transport, or its loop, which watches the descriptors.
        """
        for sock in list(self._sockets):
            if (fd := sock.detach()) >= 0:
                os.close(fd)
        for lingering in list(self._lingering.values()):
            lingering.forget()

    def adopt(self, sock: socket.socket, local: Address, remote: Address) -> _TcpConnection:
        """Return a connection that uses a connected socket. For this module only."""
        tune_path(sock, is_local=local.host == remote.host)
        self._sockets.add(sock)
        return _TcpConnection(self, sock, local, remote)

    def linger(self, sock: socket.socket, remote: Address) -> None:
        """Close ``sock``, after giving the other side time to read. For this module only."""
        if self.loop.is_closed():
            sock.close()
            return
        number, shares = next(self._numbers), self._lingering_shares
        goes = shares.add(number, remote.host)
        if goes is not None:
            self._lingering[goes].reset()
        on_end = partial(shares.remove, number)
        self._lingering[number] = Lingering(self.loop, sock.detach(), on_end)

    async def _resolve(self, address: Address, flags: int) -> Sequence[Resolved]:
        return await resolve(self.loop, self.executor, address, flags)

    async def _connect(
        self,
        resolved: Resolved,
        timeout_s: float,
        origin: Resolved | None = None,
        segment_bytes: int = 0,
    ) -> _TcpConnection:
        sock = socket.socket(resolved[0], socket.SOCK_STREAM)
        self._sockets.add(sock)
        try:
            source = leave_through(sock, resolved, self._interface, origin)
            if source is not None:
                share_port(sock)
                sock.bind(source)
            await connect(self.loop, sock, resolved[4], timeout_s, segment_bytes)
            local, remote = to_address(sock.getsockname()), to_address(resolved[4])
            if local == remote:
                # No process listens, and the kernel chose the dialled port: we dialled ourselves.
                raise ConnectionRefusedError("connection refused")
            return self.adopt(sock, local, remote)
        except BaseException:
            sock.close()
            raise
