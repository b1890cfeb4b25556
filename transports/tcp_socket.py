"""TCP sockets: options, addresses, connecting, and orderly closing.

These helpers serve :mod:`pccl.transports.tcp`, which has the connections. They transfer no data of
a connection, and only discard data that arrives after its close.

Invariant: only :func:`set_options` and :func:`tune_path` set socket options; the latter sets the
options that depend on where the other side is. Comments there give the reasons. (SO_LINGER, which
turns a close into a reset, is an exception.)
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
from pccl.transports.base import SILENCE_MAX_S, Address, PathMeasure

BACKLOG = 1024
"""Dials that may wait in the kernel: after a restart of the master, all peers dial at once."""

UNSENT_MAX_BYTES = 512 << 10
"""Bytes that the kernel queues beyond those in flight. More would only delay later control frames,
and keep segments that another lane could still send."""

LOCAL_SEND_BUFFER_BYTES = 512 << 10
"""Send buffer between processes of one machine; the kernel doubles it. Measured: with a smaller
buffer, readers wait; a larger buffer is a tenth slower."""

ELSEWHERE = {socket.AF_INET6: "2001:db8::1", socket.AF_INET: "192.0.2.1"}
"""Addresses of no machine (RFC 3849, RFC 5737)."""

_PACED = "bbr"
"""Prefix of the congestion controls that pace by a clock: BBR in all its versions."""

_UNPACED = b"reno"
"""A congestion control that every kernel has, and that all users may choose by default."""

_TCP_INFO = struct.Struct("=2xBB3xB8xI4xI28xI8xI48xQQ12xI8xQQ")
"""Fields of Linux's tcp_info (linux/tcp.h): flags, tcpi_snd_mss, tcpi_rtt and tcpi_min_rtt in
microseconds, bytes acknowledged and received, tcpi_delivery_rate in bytes per second, and
tcpi_busy_time in microseconds."""

_SENDER_LIMITED = 1 if sys.byteorder == "little" else 0x80
"""The flag tcpi_delivery_rate_app_limited, the first bit field of its byte."""

_NO_RTT_US = 0xFFFFFFFF

ACCEPTED_INHERIT = sys.platform == "linux"
"""Whether accepted sockets inherit the listener's options, so that they need not be set again."""

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""The value of SO_LINGER that makes ``close`` end the connection at once, on both sides."""

_DISCARD_BYTES = 256 << 10
_DISCARDS_PER_TURN = 4


def set_options(sock: socket.socket, *, listener: bool = False) -> None:
    """Set every socket option that does not depend on the other side.

    The kernel chooses buffer sizes: setting one would stop its autotuning (but see
    :func:`tune_path`). A missing or refused option is no error, because none is essential.
    """
    options: list[tuple[int, str, int]] = []
    if listener:
        # A restarted process can bind its port again while old connections are in TIME_WAIT.
        options.append((socket.SOL_SOCKET, "SO_REUSEADDR", 1))
        if sock.family == socket.AF_INET6:
            # "::" means any address, not any IPv6 address.
            options.append((socket.IPPROTO_IPV6, "IPV6_V6ONLY", 0))
    if not listener or ACCEPTED_INHERIT:
        options += [
            # Frames are sent whole: waiting for more bytes to fill a packet only adds delay.
            (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
            # Detects on an idle connection that the other host is gone or was restarted, and keeps
            # the entries of address translators alive.
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", SILENCE_MAX_S // 3),
            (socket.IPPROTO_TCP, "TCP_KEEPALIVE", SILENCE_MAX_S // 3),  # its name on macOS
            (socket.IPPROTO_TCP, "TCP_KEEPINTVL", SILENCE_MAX_S // 6),
            (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
            # The same for a connection with bytes in flight; the default is a quarter of an hour.
            (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", SILENCE_MAX_S * 1000),
            # Writable then means "can be sent soon", not "fits into a queue of megabytes".
            (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", UNSENT_MAX_BYTES),
        ]
    for level, name, value in options:
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(level, getattr(socket, name), value)


def tune_path(sock: socket.socket, *, is_local: bool) -> None:
    """Set the options that depend on where the other side of a connected socket is.

    Between machines, the system chooses the congestion control. Inside a machine nothing can be
    congested, and pacing only delays. There BBR costs a third of the speed, so Reno replaces it if
    the kernel allows that, and a small send buffer keeps unread bytes in the CPU cache.

    A connection that began with BBR stays paced. So listeners, and sockets that dial this machine,
    have Reno from the start, and what a listener accepts from another machine gets BBR back.
    """
    if not is_local:
        if congestion_of(sock).encode() == _UNPACED and _system_congestion().startswith(_PACED):
            _set_congestion(sock, _system_congestion().encode())
        return
    _unpace(sock)
    if _grants_send_buffer():
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BUFFER_BYTES)


def _unpace(sock: socket.socket) -> None:
    """Replace a congestion control that paces."""
    if congestion_of(sock).startswith(_PACED):
        _set_congestion(sock, _UNPACED)


def _set_congestion(sock: socket.socket, name: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)


@cache
def _system_congestion() -> str:
    """Return the congestion control of new sockets."""
    with socket.socket() as sock:
        return congestion_of(sock)


def is_own(family: int, to: SocketAddress) -> bool:
    """Whether an address belongs to this machine, which then sends from the same address."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(to)
        return bool(probe.getsockname()[0] == to[0])
    return False


@cache
def _grants_send_buffer() -> bool:
    """Whether the system grants a socket the whole send buffer (Linux: net.core.wmem_max).

    A smaller buffer, which also stops autotuning, would be slower than the default.
    """
    wanted = LOCAL_SEND_BUFFER_BYTES
    with socket.socket() as sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)
        granted = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        return granted >= (2 * wanted if sys.platform == "linux" else wanted)
    return False


def congestion_of(sock: socket.socket) -> str:
    """Return the name of the socket's congestion control; empty if it is unknown."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    except OSError:
        return ""
    return name.split(b"\0")[0].decode("ascii", "replace")


def measure_path(sock: socket.socket) -> PathMeasure | None:
    """Return the kernel's measure of a connection's path; None if it is unknown.

    Older kernels report less, in a shorter structure; the speed is then unknown.
    """
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None
    info = info.ljust(_TCP_INFO.size, b"\0")
    retransmits, probes, flags, segment_bytes, unacknowledged, ack_ago_ms, *rest = _TCP_INFO.unpack(
        info
    )
    smoothed_us, acked_bytes, arrived_bytes, shortest_us, rate, busy_us = rest
    known_us = shortest_us if 0 < shortest_us < _NO_RTT_US else smoothed_us
    return PathMeasure(
        known_us * 1000,
        rate,
        bool(flags & _SENDER_LIMITED),
        unacknowledged,
        retransmits,
        probes,
        ack_ago_ms,
        segment_bytes=segment_bytes,
        acked_bytes=acked_bytes,
        arrived_bytes=arrived_bytes,
        busy_ns=busy_us * 1000,
    )


SocketAddress = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
Resolved = tuple[socket.AddressFamily, socket.SocketKind, int, str, SocketAddress]


def to_address(socket_address: SocketAddress) -> Address:
    """Convert a socket address of the system to an ``Address``."""
    host, port = str(socket_address[0]), int(socket_address[1])
    if host.startswith("::ffff:") and "." in host:
        host = host.removeprefix("::ffff:")  # IPv4, seen by an IPv6 listener
    elif len(socket_address) == 4 and socket_address[3]:
        host = f"{host.partition('%')[0]}%{socket_address[3]}"  # link-local: it needs the scope
    return Address(host, port)


def reason_of(error: Exception) -> str:
    """Return the reason of a system error, as text that can follow a colon."""
    text = error.strerror if isinstance(error, OSError) else None
    text = text or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


async def resolve(
    loop: asyncio.AbstractEventLoop, executor: Executor | None, address: Address, flags: int
) -> Sequence[Resolved]:
    """Return the socket addresses of ``address``, in the system's order of preference.

    Names are looked up on ``executor`` (None: the loop's), because the lookup blocks.

    Raises:
        OSError, ValueError, OverflowError: ``address`` has no socket address.
    """
    host, port = address.host or None, address.port
    try:  # a literal needs no thread
        numeric = flags | socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
    except socket.gaierror:
        pass
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, flags=flags)
    return await loop.run_in_executor(executor, look_up)


def bind_to_interface(sock: socket.socket, name: str) -> None:
    """Let a socket send and accept through one network interface only.

    Raises:
        OSError: there is no such interface, or the system does not allow this.
    """
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
    except PermissionError:
        text = "needs Linux 5.7 or newer, or the capability CAP_NET_RAW"
        raise OSError(f"to use the interface {name} {text}") from None
    except OSError as error:
        raise OSError(f"cannot use the interface {name}: {reason_of(error)}") from error


def share_port(sock: socket.socket) -> None:
    """Let several sockets that dial have one local port."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform != "linux" and hasattr(socket, "SO_REUSEPORT"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def listening_socket(resolved: Resolved, interface: str = "") -> socket.socket:
    """Return a non-blocking socket that listens on an address.

    ``interface``: accept what arrives through it only; empty: through any.

    Raises:
        OSError: the address cannot be used.
    """
    sock = socket.socket(resolved[0], socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        set_options(sock, listener=True)
        _unpace(sock)
        if interface:
            bind_to_interface(sock, interface)
        sock.bind(resolved[4])
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


async def connect(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    to: SocketAddress,
    timeout_s: float,
    segment_bytes: int = 0,
) -> None:
    """Connect a new socket. If this raises, the caller closes the socket.

    ``segment_bytes``: the largest segment that this side sends and asks for; 0: any.

    Raises:
        OSError: no process listens there, or none answered within ``timeout_s``.
    """
    sock.setblocking(False)
    set_options(sock)
    share_port(sock)  # a simultaneous open may need it
    if segment_bytes:  # before the handshake, which tells the other side
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
    if is_own(sock.family, to):
        _unpace(sock)
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
    """The descriptor of a closed connection, kept until the other side ends, or for LINGER_S.

    If it was closed at once, the kernel would answer later data of the other side with a reset, so
    our last bytes would be lost. It is a bare descriptor, not a socket object, so that a discarded
    loop closes it without a warning.

    Args:
        loop: the loop that watches the descriptor.
        fd: the descriptor, which this object closes.
        on_end: called when this object has closed it.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fd: int, on_end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._on_end = on_end
        self._reads_soon = False
        # Only the loop refers to this object, which keeps no handle of the loop's. So the end of
        # the loop ends it, too. Therefore the timer is never cancelled.
        loop.call_later(LINGER_S, self._end)
        loop.add_reader(fd, self._on_readable)

    def __del__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Close the descriptor, and do not use the loop."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
            self._on_end()

    def reset(self) -> None:
        """End at once with a reset, to make room for another closed connection."""
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
            # More may follow, and uvloop reports a failed stream only once.
            self._reads_soon = True
            self._loop.call_soon(self._discard)

    def _end(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self.forget()
