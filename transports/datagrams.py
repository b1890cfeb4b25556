"""Datagrams to the router of this machine, and what the kernel knows of interfaces and routes.

A socket that is bound to an interface sends and accepts through this interface only, whatever the
routes of other interfaces are. Packets inside this machine count as those of the interface that
has their address.
"""

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
from pccl.transports.tcp_socket import (
    ELSEWHERE,
    SocketAddress,
    bind_to_interface,
    resolve,
    to_address,
)

ROUTES = Path("/proc/net/route")

READS_PER_TURN = 16
"""Datagrams that are read at once; further ones wait for the next turn of the loop."""

_UP, _GATEWAY = 1, 2
"""Flags of a route: it is usable, and it leads through a router."""

_SIOCGIFADDR = 0x8915
"""Request of Linux for the IPv4 address of an interface; see netdevice(7)."""

_IF_INET6 = Path("/proc/net/if_inet6")

_NAME_BYTES = 16
"""Length of the name of an interface on Linux, with the zero byte that ends it."""


def interface_names() -> list[str]:
    """Return the names of the network interfaces of this machine.

    Raises:
        OSError: no socket can be bound to an interface on this system.
    """
    if not hasattr(socket, "SO_BINDTODEVICE"):
        raise OSError("only Linux lets a process choose an interface by its name")
    return sorted(name for _, name in socket.if_nameindex())


def interface_of(host: str) -> str:
    """Return the name of the interface with a numeric address; empty: unknown."""
    if "%" in host:
        return _name_of_scope(host.partition("%")[2])
    if sys.platform != "linux":
        return ""
    return _interface_v6(host) if ":" in host else _interface_v4(host)


def interface_hosts(name: str) -> tuple[str, ...]:
    """Return the addresses that packets through an interface to other networks have."""
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        bind_to_interface(probe, name)
        probe.connect((ELSEWHERE[socket.AF_INET6], 9))  # this sends nothing
        found.append(probe.getsockname()[0])
    return (*found, *filter(None, [_address_v4(name)]))


def _name_of_scope(scope: str) -> str:
    with contextlib.suppress(OSError, ValueError, OverflowError):
        return socket.if_indextoname(int(scope))
    return scope


def _interface_v4(host: str) -> str:
    if host.startswith("127."):
        host = "127.0.0.1"
    with contextlib.suppress(OSError):  # some systems let no program list its interfaces
        return next((name for _, name in socket.if_nameindex() if _address_v4(name) == host), "")
    return ""


def _address_v4(name: str) -> str:
    """Return the first IPv4 address of an interface; empty: it has none."""
    import fcntl

    request = name.encode()[: _NAME_BYTES - 1].ljust(256, b"\0")
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker,
    ):
        return socket.inet_ntoa(fcntl.ioctl(asker, _SIOCGIFADDR, request)[20:24])
    return ""


def _interface_v6(host: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        wanted = socket.inet_pton(socket.AF_INET6, host).hex()
        for line in _IF_INET6.read_text("ascii").splitlines():
            fields = line.split()
            if fields[0] == wanted:
                return fields[-1]
    return ""


class DatagramSocket:
    """A UDP socket that sends to one address. The kernel drops what comes from elsewhere.

    Args:
        loop: calls ``take`` and ``refused``.
        remote: the address.
        take: called with each datagram.
        refused: called when the other side answers that nothing listens there.
        interface: the interface to send through; empty: the system chooses.

    Raises:
        OSError: there is no route to the address.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        remote: Address,
        take: Callable[[bytes], None],
        refused: Callable[[], None],
        interface: str = "",
    ) -> None:
        self._loop, self._take, self._refused = loop, take, refused
        self._sock = _connected((remote.host, remote.port), interface)
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
    loop: asyncio.AbstractEventLoop,
    executor: Executor | None,
    address: Address,
    interface: str = "",
) -> tuple[str, str]:
    """Return the numeric host of an address, and the own host on the way to it. Sends nothing.

    Of several hosts, the first one to which there is a route counts. The way leads through
    ``interface``, if one is named.

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
            with contextlib.closing(_connected(resolved[4], interface)) as probe:
                own, remote = probe.getsockname(), probe.getpeername()
        except OSError as error:
            failure = error
            continue
        return to_address(remote).host, to_address(own).host
    raise failure


def router_host(interface: str = "") -> tuple[str, str]:
    """Return the IPv4 address of this machine's router; if it has none, why.

    ``interface``: the interface that leads there; empty: any.
    """
    if sys.platform != "linux":
        return "", "the address of the router is known on Linux only"
    try:
        routes = ROUTES.read_text("ascii")
    except (OSError, ValueError) as error:
        return "", f"cannot read {ROUTES}: {error}"
    found, through = default_router(routes, interface), f" through {interface}" if interface else ""
    return found, "" if found else f"this machine has no default route{through}"


def default_router(routes: str, interface: str = "") -> str:
    """Return the router of the best default route; empty: there is none.

    Args:
        routes: the content of ``/proc/net/route``.
        interface: the interface of the route; empty: any.
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
        is_ours = not interface or fields[0] == interface
        if is_ours and is_default and router and (best is None or metric < best[0]):
            best = metric, host
    return "" if best is None else best[1]


def _connected(remote: SocketAddress, interface: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in str(remote[0]) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        if interface:
            bind_to_interface(sock, interface)
        sock.connect(remote)
    except BaseException:
        sock.close()
        raise
    return sock
