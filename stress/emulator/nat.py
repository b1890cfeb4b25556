"""Hosts behind NATs, on loopback and without root: the transports of several peers of one process.

All connections are real ones over TCP. Each host, and each NAT, has an address of 127.0.0.0/8. When
a transport dials, :mod:`pccl.transports.sim.nat` decides where the connection comes from and where
it arrives; the socket is bound to the one, and connected to the other.

The kernel answers each dial on loopback at once, so two SYN packets cannot cross. A simultaneous
open is the decision of the model, and then two connected sockets. A port stays free until the
socket is bound, so where another process has it, a dial fails.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from pccl.protocol.errors import LinkError
from pccl.transports.base import Address, Connection, Listener
from pccl.transports.sim.nat import Nat, NatKind
from pccl.transports.tcp import TcpTransport
from pccl.transports.tcp_dial import TcpDialler
from pccl.transports.tcp_socket import (
    Resolved,
    connect,
    resolve,
    set_options,
    share_port,
    to_address,
)

_WILDCARDS = ("", "0.0.0.0", "::")
V6_HOST = "::1"
"""The address of all hosts in IPv6: loopback has only one."""


@dataclass(eq=False)
class _Punch:
    """A dial of a simultaneous open."""

    transport: NatTransport
    local: Address
    remote: Address
    met: asyncio.Future[Connection]


@dataclass
class LoopbackNetwork:
    """The NATs between the hosts of a test, and what is on the way. Used in one event loop."""

    nats: dict[str, Nat] = field(default_factory=dict[str, Nat])
    """By the addresses of the hosts behind a NAT, and by its own."""
    homes: dict[str, str] = field(default_factory=dict[str, str])
    """Host -> its local network."""
    punches: list[_Punch] = field(default_factory=list[_Punch])

    def translate(self, kind: NatKind, outside: str, *hosts: str) -> None:
        """Put hosts behind a NAT with the address ``outside``."""
        self.nats |= dict.fromkeys((outside, *hosts), Nat(kind, outside))

    def are_inside(self, host: str, other: str) -> bool:
        """Whether two hosts are in one local network."""
        return host in self.homes and self.homes[host] == self.homes.get(other)

    def seen(self, inside: Address, remote: Address) -> Address:
        """Return the address that ``remote`` sees of a host; raises OSError if it sees nothing."""
        nat = self.nats.get(inside.host)
        if nat is None or self.are_inside(inside.host, remote.host):
            return inside
        if not nat.lets_out(remote):
            raise ConnectionRefusedError(f"the firewall lets nothing out to port {remote.port}")
        return nat.outbound(inside, remote, time.monotonic_ns())

    def target(self, host: str, remote: Address, seen: Address) -> Address | None:
        """Return the host and port that a dial of ``remote`` by ``host`` arrives at.

        None: a NAT drops it.
        """
        nat = self.nats.get(remote.host)
        if nat is None or self.are_inside(host, remote.host):
            return remote
        if nat.host != remote.host:
            raise OSError(errno.EHOSTUNREACH, "no route to host")  # inside another network
        return nat.inbound(remote.port, seen, time.monotonic_ns())


class NatTransport:
    """The network as one host of a :class:`LoopbackNetwork` uses it. See ``Transport``.

    Args:
        transport: the sockets.
        network: the NATs.
        host: the address of this host.
        version: the only version of IP that it has; 0: both. A host behind a NAT has IPv4.
    """

    memory = None

    def __init__(
        self, transport: TcpTransport, network: LoopbackNetwork, host: str, version: int = 0
    ) -> None:
        self.port_limits = transport.port_limits
        self.host = V6_HOST if version == 6 else host
        self._inner = transport
        self._network = network
        self._version = 4 if host in network.nats else version
        self._dialler = TcpDialler(transport.loop, self._resolve, self._connect)

    def through(self, interface: str) -> NatTransport:
        """Return this transport: its host has one interface."""
        del interface
        return self

    async def listen(
        self, address: Address, on_connection: Callable[[Connection], None]
    ) -> Listener:
        """Listen at the address of this host, or at all if it is not behind a NAT."""
        if address.host in _WILDCARDS:
            is_everywhere = not self._version and self.host not in self._network.nats
            address = Address("::" if is_everywhere else self.host, address.port)
        return await self._inner.listen(address, on_connection)

    def hosts(self, address: Address) -> tuple[str, ...]:
        """Return the inside address, or that of IPv6."""
        if address.host in _WILDCARDS:
            return (V6_HOST,)
        return (self.host,) if self.host in self._network.nats else ()

    async def dial(
        self,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool] = lambda _: True,
        hosts: Sequence[str] = (),
        segment_bytes: int = 0,
    ) -> Connection:
        """Connect to the first address that answers; see ``Transport``."""
        return await self._dialler.dial(address, timeout_s, may_dial, hosts, segment_bytes)

    async def punch(
        self,
        local: Address,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool],
        segment_bytes: int = 0,
    ) -> Connection:
        """Wait for a process that dials this one, too, if the NATs would let both pass.

        Raises:
            LinkError: the two have not met within ``timeout_s``.
        """
        met: asyncio.Future[Connection] = self._inner.loop.create_future()
        punch, reason = _Punch(self, local, address, met), "no answer in time"
        self._network.punches.append(punch)
        try:
            self._check_version(address.host)
            async with asyncio.timeout(timeout_s):
                if may_dial(address.host):
                    self._cross(punch)
                return await met
        except TimeoutError:
            pass
        except OSError as error:
            reason = str(error)
        finally:
            self._network.punches.remove(punch)
        raise LinkError(func="dial", reason=f"cannot reach {address} from {local}: {reason}")

    def _cross(self, mine: _Punch) -> None:
        """Connect two dials if each goes where the other seems to come from."""
        network = self._network
        seen = network.seen(mine.local, mine.remote)
        inside = network.target(mine.local.host, mine.remote, seen)
        for theirs in network.punches:
            is_other = theirs is not mine and not theirs.met.done()
            if not is_other or theirs.local != inside or theirs.remote != seen:
                continue
            if network.seen(theirs.local, theirs.remote) == mine.remote:
                for punch, sock in zip((mine, theirs), _pair(self.host), strict=True):
                    inner = punch.transport._inner
                    punch.met.set_result(inner.adopt(sock, punch.local, punch.remote))
                return

    async def _resolve(self, address: Address, flags: int) -> Sequence[Resolved]:
        numeric = flags | socket.AI_NUMERICHOST
        return await resolve(self._inner.loop, self._inner.executor, address, numeric)

    def _check_version(self, host: str) -> None:
        if self._version not in (0, ip_address(host).version):
            raise OSError(errno.ENETUNREACH, "network is unreachable")

    async def _connect(
        self,
        resolved: Resolved,
        timeout_s: float,
        origin: Resolved | None = None,
        segment_bytes: int = 0,
    ) -> Connection:
        remote = to_address(resolved[4])
        self._check_version(remote.host)
        sock = socket.socket(resolved[0], socket.SOCK_STREAM)
        try:
            inside, seen = self._bind(sock, remote)
            target = self._network.target(self.host, remote, seen)
            if target is None:
                await asyncio.sleep(timeout_s)
                raise TimeoutError("no answer in time")
            there = (target.host, target.port)
            await connect(self._inner.loop, sock, there, timeout_s, segment_bytes)
            return self._inner.adopt(sock, inside, remote)
        except BaseException:
            sock.close()
            raise

    def _bind(self, sock: socket.socket, remote: Address) -> tuple[Address, Address]:
        """Choose the ports of a dial; return where it comes from, inside and outside."""
        source = V6_HOST if sock.family == socket.AF_INET6 else self.host
        with socket.socket(sock.family) as probe:
            probe.bind((source, 0))
            inside = Address(source, int(probe.getsockname()[1]))
        seen = self._network.seen(inside, remote)
        share_port(sock)
        sock.bind((seen.host, seen.port))
        return inside, seen


def _pair(host: str) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        ends = socket.create_connection(listener.getsockname()[:2]), listener.accept()[0]
    for sock in ends:
        sock.setblocking(False)
        set_options(sock)
    return ends
