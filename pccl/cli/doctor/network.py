"""What the kernel knows of routes and connections, and how fast the loopback is. Sends little."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

IP_MTU, IPV6_MTU = 14, 24
"""Socket options of Linux for the packet size of a connected socket's path; see ip(7), ipv6(7)."""

SOMEWHERE = (("192.0.2.1", 9), ("2001:db8::1", 9))
"""Addresses for documentation: the default route leads there, and no packet is sent."""

LOOPBACK_BYTES_MAX = 16 << 20
LOOPBACK_S_MAX = 2.0
READ_BYTES = 1 << 18

CONNECTS = 5
"""Number of connects whose durations are measured."""


class NoNameServer(TimeoutError):
    """A look-up took too long."""


@dataclass(frozen=True, slots=True)
class Connected:
    """What the kernel knows of a connection; empty or None: unknown.

    Attributes:
        host: numeric host of the other side.
        local: host of this side.
        path_mtu: largest packet of the path, in bytes.
        segment_bytes: largest TCP segment.
        congestion: congestion control.
        round_trips_s: durations of some connects, in seconds.
    """

    host: str
    local: str
    path_mtu: int | None
    segment_bytes: int | None
    congestion: str
    round_trips_s: tuple[float, ...]


def resolve(host: str, port: int, timeout_s: float) -> list[str]:
    """Return the numeric addresses of a host.

    Raises:
        OSError: the host has no address, or no name server answered in time.
    """
    found: list[list[str] | OSError] = []

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            found.append(error)
        else:
            found.append(list(dict.fromkeys(str(info[4][0]) for info in infos)))

    # A thread, because nothing can interrupt a look-up, and Ctrl-C shall end the command.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise NoNameServer("no name server answered in time")
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def check_own(host: str) -> None:
    """Check that a process can listen on a numeric address.

    Raises:
        OSError: it is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))


def connect(host: str, port: int, timeout_s: float, interface: str = "") -> Connected:
    """Connect several times to a numeric address, send nothing, and return what the kernel knows.

    ``interface``: the network interface to connect through; empty: the system chooses.

    Raises:
        OSError: the connection failed.
    """
    durations_s: list[float] = []
    while True:
        began_s = time.perf_counter()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            _bind(connection, interface, host)
            connection.connect((host, port))
            durations_s.append(time.perf_counter() - began_s)
            if len(durations_s) == CONNECTS:
                is_v6 = connection.family == socket.AF_INET6
                level = socket.IPPROTO_IPV6 if is_v6 else socket.IPPROTO_IP
                mtu = _option(connection, level, IPV6_MTU if is_v6 else IP_MTU)
                return Connected(
                    host,
                    str(connection.getsockname()[0]),
                    mtu if sys.platform == "linux" else None,
                    _option(connection, socket.IPPROTO_TCP, socket.TCP_MAXSEG),
                    _congestion(connection),
                    tuple(durations_s),
                )


def outward(interface: str = "") -> str:
    """Return the address of this machine on its default route; empty: it has none.

    ``interface``: the network interface of the route; empty: any.
    """
    for address in SOMEWHERE:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with (
            contextlib.suppress(OSError),
            socket.socket(family, socket.SOCK_DGRAM) as probe,
        ):
            _bind(probe, interface)
            probe.connect(address)  # of a datagram socket: only looks up the route
            return str(probe.getsockname()[0])
    return ""


def _bind(sock: socket.socket, interface: str, host: str = "") -> None:
    """Bind a socket to an interface, unless ``host`` is this machine, where none leads to."""
    if not interface:
        return
    with socket.socket(sock.family, socket.SOCK_DGRAM) as probe:
        if host:
            probe.connect((host, 9))  # this sends nothing
        if not host or probe.getsockname()[0] != host:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())


def mtu_of(interface: str) -> int | None:
    """Return the largest packet of an interface in bytes; None: unknown."""
    if not interface or "/" in interface:
        return None
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/sys/class/net", interface, "mtu").read_text("ascii"))
    return None


def loopback_bytes_per_s() -> float | None:
    """Measure one connection between two threads; None: this machine cannot connect to itself.

    Sends at most ``LOOPBACK_BYTES_MAX``, for at most ``LOOPBACK_S_MAX``.
    """
    deadline_s = time.perf_counter() + LOOPBACK_S_MAX
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LOOPBACK_S_MAX)
            with (
                socket.create_connection(server.getsockname(), LOOPBACK_S_MAX) as sender,
                server.accept()[0] as receiver,
            ):
                receiver.settimeout(LOOPBACK_S_MAX)
                thread = threading.Thread(target=_send, args=(sender, deadline_s), daemon=True)
                began_s = time.perf_counter()
                thread.start()
                received = _receive_all(receiver)
                took_s = time.perf_counter() - began_s
                thread.join()
    except OSError:
        return None
    return received / took_s if received else None


def _send(sender: socket.socket, deadline_s: float) -> None:
    data = bytes(READ_BYTES)
    with contextlib.suppress(OSError):
        for _ in range(LOOPBACK_BYTES_MAX // READ_BYTES):
            if time.perf_counter() >= deadline_s:
                break
            sender.sendall(data)
        sender.shutdown(socket.SHUT_WR)


def _receive_all(receiver: socket.socket) -> int:
    buffer = memoryview(bytearray(READ_BYTES))
    received = 0
    while count := receiver.recv_into(buffer):
        received += count
    return received


def _option(connection: socket.socket, level: int, option: int) -> int | None:
    try:
        return connection.getsockopt(level, option)
    except OSError:
        return None


def _congestion(connection: socket.socket) -> str:
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    with contextlib.suppress(OSError):
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        return name.rstrip(b"\0").decode("ascii", "replace")
    return ""
