"""Ports that are free."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that was free just now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def free_address() -> str:
    """One of this machine with such a port."""
    return f"127.0.0.1:{free_port()}"
