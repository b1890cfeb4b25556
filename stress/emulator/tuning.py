"""What the relay's sockets are given, and how they end.

The kernel's buffers on both sides of the relay lie outside the emulated window. They are kept
small, so that a sender feels the link and not them, but hold what a busy process needs to find
when it wakes.
"""

from __future__ import annotations

import contextlib
import socket
import struct

BUFFER_BYTES = 128 << 10
"""Asked for in each direction of each socket; Linux doubles it, for its own bookkeeping."""

BACKLOG = 1024
"""Dials that wait in the kernel; while new connections vanish, all of them."""

SocketAddress = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
Place = tuple[socket.AddressFamily, SocketAddress]

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def resolve(host: str, port: int) -> Place:
    """Return what the system's first choice for an address is.

    Raises:
        OSError: it stands for nothing.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, address


def listener(place: Place) -> socket.socket:
    """Return a socket that is bound and does not listen yet: dials are refused.

    Raises:
        OSError: the address cannot be had.
    """
    family, address = place
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        # A port that refuses for a while, or is used again at once, has connections in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tune(sock)  # what it accepts inherits that
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def dialler(place: Place) -> socket.socket:
    """Return a socket for a connection to a place; it has not been dialled."""
    sock = socket.socket(place[0], socket.SOCK_STREAM)
    sock.setblocking(False)
    tune(sock)
    return sock


def tune(sock: socket.socket) -> None:
    """Set what every socket of the relay has, before it is connected."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    # What has arrived is passed on whole; to wait for more would be a delay nobody asked for.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_CONGESTION"):
        # The link is ours alone to emulate: without the pacing and probing of a system's default
        # such as bbr. This one is always there; where it may not be chosen, the default remains.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def reset(sock: socket.socket) -> None:
    """Close a connection so that the other side sees a reset."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    sock.close()


def failure_of(sock: socket.socket) -> int:
    """What has befallen a socket since it was last asked or used, as an errno; 0: nothing."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
