"""Sockets of strangers, which the other side may close at any time."""

from __future__ import annotations

import socket
from contextlib import suppress


def is_closed(sock: socket.socket) -> bool:
    """Read until the other side has closed; raises TimeoutError if it does not."""
    with suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def send(sock: socket.socket, data: bytes) -> None:
    """Send, as far as the other side takes it."""
    with suppress(ConnectionError):  # it may close before it has all
        sock.sendall(data)
