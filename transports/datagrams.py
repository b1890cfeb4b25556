"""Datagrams to the router of this machine, and what the kernel knows of the way there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from pccl.protocol.port_mapping.answers import DATAGRAM_BYTES_MAX
from pccl.transports.base import Address
from pccl.transports.tcp_socket import SocketAddress, resolve, to_address

ROUTES = Path("/proc/net/route")

READS_PER_TURN = 16
"""Datagrams that are read at once; further ones wait for the next turn of the loop."""

_UP, _GATEWAY = 1, 2
"""Flags of a route: it is usable, and it leads through a router."""


class DatagramSocket:
    """A UDP socket that sends to one address. The kernel drops what comes from elsewhere.

    Args:
        loop: calls ``take`` and ``refused``.
        remote: the address.
        take: called with each datagram.
        refused: called when the other side answers that nothing listens there.

    Raises:
        OSError: there is no route to the address.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        remote: Address,
        take: Callable[[bytes], None],
        refused: Callable[[], None],
    ) -> None:
        self._loop, self._take, self._refused = loop, take, refused
        self._sock = _connected((remote.host, remote.port))
        loop.add_reader(self._sock, self._on_readable)

    def send(self, data: bytes) -> None:
        """Send a datagram. It may be lost, like every datagram."""
        try:
            self._sock.send(data)
        except ConnectionRefusedError:  # the answer to an earlier one
            self._loop.call_soon(self._refuse)
        except OSError:
            pass

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def _on_readable(self) -> None:
        for _ in range(READS_PER_TURN):
            if self._sock.fileno() < 0:  # closed by a callback
                return
            try:
                data = self._sock.recv(DATAGRAM_BYTES_MAX + 1)
            except ConnectionRefusedError:
                self._refused()
            except OSError:
                return
            else:
                self._take(data)

    def _refuse(self) -> None:
        if self._sock.fileno() >= 0:
            self._refused()


async def hosts_toward(
    loop: asyncio.AbstractEventLoop, executor: Executor | None, address: Address
) -> tuple[str, str]:
    """Return the numeric host of an address, and the own host on the way to it. Sends nothing.

    Of several hosts, the first one to which there is a route counts.

    Raises:
        OSError: the address has no host, or no route leads there.
    """
    try:
        found = await resolve(loop, executor, address, 0)
    except (ValueError, OverflowError) as error:
        raise OSError(str(error)) from error
    failure = OSError(f"{address.host} has no address")
    for resolved in found:
        try:
            with contextlib.closing(_connected(resolved[4])) as probe:
                own, remote = probe.getsockname(), probe.getpeername()
        except OSError as error:
            failure = error
            continue
        return to_address(remote).host, to_address(own).host
    raise failure


def router_host() -> tuple[str, str]:
    """Return the IPv4 address of this machine's router; if it has none, why."""
    if sys.platform != "linux":
        return "", "the address of the router is known on Linux only"
    try:
        routes = ROUTES.read_text("ascii")
    except (OSError, ValueError) as error:
        return "", f"cannot read {ROUTES}: {error}"
    found = default_router(routes)
    return found, "" if found else "this machine has no default route"


def default_router(routes: str) -> str:
    """Return the router of the best default route; empty: there is none.

    Args:
        routes: the content of ``/proc/net/route``.
    """
    best: tuple[int, str] | None = None
    for line in routes.splitlines()[1:]:
        fields = line.split()
        try:
            target, router, flags, metric, mask = (
                *(int(fields[n], 16) for n in (1, 2, 3)),
                int(fields[6]),
                int(fields[7], 16),
            )
            host = socket.inet_ntoa(struct.pack("=I", router))
        except (ValueError, IndexError, struct.error):
            continue
        is_default = target == mask == 0 and flags & (_UP | _GATEWAY) == _UP | _GATEWAY
        if is_default and router and (best is None or metric < best[0]):
            best = metric, host
    return "" if best is None else best[1]


def _connected(remote: SocketAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in str(remote[0]) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.connect(remote)
    except BaseException:
        sock.close()
        raise
    return sock
