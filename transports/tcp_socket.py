"""How a TCP socket begins and ends: options, addresses, the first and the last packets.

The helpers of :mod:`pccl.transports.tcp`, which has the connections. Nothing here reads or writes
what a connection carries.

Invariant: how a socket is tuned is decided in :func:`set_options` and, for what depends on where
the other side is, in :func:`tune_path` only, each option with its reason (the SO_LINGER that turns
a close into a reset is an act, not a setting).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import cache, partial

from pccl.protocol.limits import LINGER_S
from pccl.transports.base import Address, PathMeasure

SILENCE_MAX_S = 30
"""How long the other side's kernel may acknowledge nothing before the connection is given up. It
is longer than every deadline of the protocol, which act first; this one is for whoever has none.
It must not be short: an application that holds the interpreter lock keeps its windows closed."""

BACKLOG = 1024
"""Dials that wait in the kernel: a whole run may come back at once after the master restarted."""

UNSENT_MAX_BYTES = 512 << 10
"""Bytes that the kernel queues beyond those in flight. More would only delay what is sent later
(control frames) and pin what could still be sent on another lane."""

LOCAL_SEND_BUFFER_BYTES = 512 << 10
"""The kernel doubles it for its own bookkeeping. Measured: less makes readers wait, more is slower
by a tenth."""

_PACED = "bbr"
"""It, and its later versions."""

_UNPACED = b"reno"
"""In every kernel, and allowed to everybody by default."""

_TCP_INFO = struct.Struct("=7xB60xI76xI8xQ")
"""Of Linux's tcp_info (linux/tcp.h): flags, tcpi_rtt and tcpi_min_rtt in microseconds, and
tcpi_delivery_rate in bytes per second."""

_SENDER_LIMITED = 1 if sys.byteorder == "little" else 0x80
"""The flag tcpi_delivery_rate_app_limited, the first bit field of its byte."""

_NO_RTT_US = 0xFFFFFFFF

ACCEPTED_INHERIT = sys.platform == "linux"
"""Whether what a listener accepts has its options: they are set once, not for each."""

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with which a close ends the connection at once, on both sides."""

_DISCARD_BYTES = 256 << 10
_DISCARDS_PER_TURN = 4


def set_options(sock: socket.socket, *, listener: bool = False) -> None:
    """Set every socket option that does not depend on the other side.

    Buffer sizes are left to the kernel, whose autotuning stops where a size is set by hand (but see
    :func:`tune_path`). An option that is missing or refused is no error:
    each makes a connection better, none makes it work.
    """
    options: list[tuple[int, str, int]] = []
    if listener:
        # A restarted process gets its port back while old connections are in TIME_WAIT.
        options.append((socket.SOL_SOCKET, "SO_REUSEADDR", 1))
        if sock.family == socket.AF_INET6:
            # "::" means any address, not any IPv6 address.
            options.append((socket.IPPROTO_IPV6, "IPV6_V6ONLY", 0))
    if not listener or ACCEPTED_INHERIT:
        options += [
            # Frames are handed over whole: to wait for more to fill a packet only adds delay.
            (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
            # Finds out on an idle connection that the other host is gone or was restarted, and
            # keeps the entries of address translators on the way alive.
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", SILENCE_MAX_S // 3),
            (socket.IPPROTO_TCP, "TCP_KEEPALIVE", SILENCE_MAX_S // 3),  # its name on macOS
            (socket.IPPROTO_TCP, "TCP_KEEPINTVL", SILENCE_MAX_S // 6),
            (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
            # The same for a connection with bytes under way; the default is a quarter of an hour.
            (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", SILENCE_MAX_S * 1000),
            # Writable means "can be sent soon", not "fits into megabytes of queue".
            (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", UNSENT_MAX_BYTES),
        ]
    for level, name, value in options:
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(level, getattr(socket, name), value)


def tune_path(sock: socket.socket, *, is_local: bool) -> None:
    """Set what depends on where the other side of a connected socket is.

    Between machines congestion control stays the system's choice. Inside one there is nothing to
    be congested: an algorithm that paces what it sends by a clock only makes it wait, and BBR costs
    a third of the speed. A kernel that does not allow another one keeps its own. And all that is
    under way there is memory of this machine: less of it stays in the cache until it is read.
    """
    if not is_local:
        return
    if congestion_of(sock).startswith(_PACED):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
    if _grants_send_buffer():
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BUFFER_BYTES)


@cache
def _grants_send_buffer() -> bool:
    """Whether the system gives a socket the whole buffer (Linux: net.core.wmem_max).

    If it gave less, and autotuning stopped there, the link would be slower than without.
    """
    wanted = LOCAL_SEND_BUFFER_BYTES
    with socket.socket() as sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)
        granted = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        return granted >= (2 * wanted if sys.platform == "linux" else wanted)
    return False


def congestion_of(sock: socket.socket) -> str:
    """The name of the socket's congestion control; empty where the system has no names for it."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    except OSError:
        return ""
    return name.split(b"\0")[0].decode("ascii", "replace")


def measure_path(sock: socket.socket) -> PathMeasure | None:
    """What the kernel has seen of a connection's path; None where it does not tell.

    Older kernels tell less, in a shorter structure: then the speed is unknown.
    """
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None
    info = info.ljust(_TCP_INFO.size, b"\0")
    flags, smoothed_us, shortest_us, bytes_per_s = _TCP_INFO.unpack(info)
    known_us = shortest_us if 0 < shortest_us < _NO_RTT_US else smoothed_us
    return PathMeasure(known_us * 1000, bytes_per_s, bool(flags & _SENDER_LIMITED))


SocketAddress = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
Resolved = tuple[socket.AddressFamily, socket.SocketKind, int, str, SocketAddress]


def to_address(socket_address: SocketAddress) -> Address:
    """Return what the system calls ``socket_address`` as we write it."""
    host, port = str(socket_address[0]), int(socket_address[1])
    if host.startswith("::ffff:") and "." in host:
        host = host.removeprefix("::ffff:")  # IPv4, seen by an IPv6 listener
    elif len(socket_address) == 4 and socket_address[3]:
        host = f"{host.partition('%')[0]}%{socket_address[3]}"  # link-local: useless without
    return Address(host, port)


def reason_of(error: Exception) -> str:
    """Say in words, to follow a colon, why the system refused."""
    text = error.strerror if isinstance(error, OSError) else None
    text = text or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


async def resolve(
    loop: asyncio.AbstractEventLoop, executor: Executor | None, address: Address, flags: int
) -> Sequence[Resolved]:
    """Return what ``address`` stands for, in the system's order of preference.

    Names are looked up on ``executor`` (None: the loop's), because the system blocks for that.

    Raises:
        OSError, ValueError, OverflowError: it stands for nothing.
    """
    host, port = address.host or None, address.port
    try:  # a literal needs no thread
        numeric = flags | socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
    except socket.gaierror:
        pass
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, flags=flags)
    return await loop.run_in_executor(executor, look_up)


def listening_socket(resolved: Resolved) -> socket.socket:
    """Return a socket that listens on an address.

    Raises:
        OSError: the address cannot be used.
    """
    sock = socket.socket(resolved[0], socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        set_options(sock, listener=True)
        sock.bind(resolved[4])
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


async def connect(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, to: SocketAddress, timeout_s: float
) -> None:
    """Connect a new socket; the caller closes it if that fails.

    Raises:
        OSError: nobody there, no way, or no answer within ``timeout_s``.
    """
    sock.setblocking(False)
    set_options(sock)
    try:
        sock.connect(to)
    except BlockingIOError:
        pass
    else:
        return
    done: asyncio.Future[OSError | None] = loop.create_future()

    def settle(error: OSError | None) -> None:
        if not done.done():
            done.set_result(error)

    timer = loop.call_later(timeout_s, settle, TimeoutError("no answer in time"))
    loop.add_writer(sock, settle, None)
    try:
        error = await done
    finally:
        loop.remove_writer(sock)
        timer.cancel()
    if error is not None:
        raise error
    if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(code, os.strerror(code))


class Lingering:
    """What is left of a closed connection: its descriptor, until the other side has read all.

    Were it closed at once, the kernel would answer whatever the other side still sends with a
    reset, which discards our own last bytes. A bare descriptor, not a socket object, so that a
    loop which is thrown away takes it along silently.

    Args:
        loop: what watches the descriptor.
        fd: the descriptor, which is closed here.
        on_end: called when it has been.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fd: int, on_end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._on_end = on_end
        self._reads_soon = False
        # Only the loop refers to us, and we do not refer to what it holds of us: so that nothing
        # but the loop's end is needed to end us (the timer, therefore, is not cancelled).
        loop.call_later(LINGER_S, self._end)
        loop.add_reader(fd, self._on_readable)

    def __del__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Close the descriptor and touch nothing else."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
            self._on_end()

    def reset(self) -> None:
        """End at once; the other side has had its time, or its place is needed."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            with socket.socket(fileno=self._fd) as sock:
                self._fd = -1
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self._on_end()

    def _on_readable(self) -> None:
        if not self._reads_soon:
            self._discard()

    def _discard(self) -> None:
        self._reads_soon = False
        try:
            for _ in range(_DISCARDS_PER_TURN):
                if self._fd < 0:
                    return
                if not os.read(self._fd, _DISCARD_BYTES):
                    self._end()
        except BlockingIOError:
            return
        except OSError:
            self._end()
        else:
            # As with connections: there is more, and uvloop calls only once after a failure.
            self._reads_soon = True
            self._loop.call_soon(self._discard)

    def _end(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self.forget()
