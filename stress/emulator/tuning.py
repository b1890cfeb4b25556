"""Creates, configures and resets the sockets of the proxy.

The kernel's buffers on both sides of the proxy are outside the emulated window. They are small, so
that the link, not the buffers, limits a sender, but large enough for a busy proxy process.
"""

from __future__ import annotations

import contextlib
import socket
import struct

BUFFER_BYTES = 128 << 10
"""Requested buffer in each direction of each socket; Linux doubles it, for its bookkeeping."""

BACKLOG = 1024
"""Largest number of connections that wait in the kernel to be accepted."""

SocketAddress = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
Place = tuple[socket.AddressFamily, SocketAddress]

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def resolve(host: str, port: int) -> Place:
    """Return the first address that the system finds for a host and port.

    Raises:
        OSError: the system finds no address.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, address


def listener(place: Place) -> socket.socket:
    """Return a bound socket that does not listen yet, so the kernel refuses dials.

    Raises:
        OSError: the address cannot be bound.
    """
    family, address = place
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        # Old connections of the port may be in TIME_WAIT, for example after ``refuse_new``.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tune(sock)  # accepted sockets inherit these settings
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def dialler(place: Place) -> socket.socket:
    """Return an unconnected socket for a connection to ``place``."""
    sock = socket.socket(place[0], socket.SOCK_STREAM)
    sock.setblocking(False)
    tune(sock)
    return sock


def tune(sock: socket.socket) -> None:
    """Set the options of a socket of the proxy."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    # Send at once, because a wait for more data would add a delay that is not of the link.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_CONGESTION"):
        # Avoid the pacing and probing of a default such as bbr, which would disturb the emulation.
        # Every kernel has reno; if this process may not choose it, the default remains.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def reset(sock: socket.socket) -> None:
    """Close a connection with a reset."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    sock.close()


def failure_of(sock: socket.socket) -> int:
    """Return and clear the pending error of a socket, as an errno; 0: none."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
