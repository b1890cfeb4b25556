"""Ports for tests that have to name one before something listens there."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from itertools import count

_UNASKED = range(10_000, 32_000)
"""Ports that a system does not choose by itself, so that only another test could take one."""

_offsets = count(os.getpid() * 613)
"""Where this process looks; processes with neighbouring ids begin far from each other."""


def free_ports(amount: int) -> range:
    """So many in a row that were free just now; each call looks at other ports."""
    while True:
        offsets = [next(_offsets) for _ in range(amount)]
        first = _UNASKED[offsets[0] % (len(_UNASKED) - amount)]
        ports = range(first, first + amount)
        with ExitStack() as sockets:
            try:
                for port in ports:
                    sockets.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return ports


def free_port() -> int:
    """One that was free just now."""
    return free_ports(1)[0]


def free_address() -> str:
    """One of this machine with such a port."""
    return f"127.0.0.1:{free_port()}"
