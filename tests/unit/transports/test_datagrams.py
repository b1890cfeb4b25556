"""Datagrams between two sockets of this machine, and routes in the form of Linux."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator

import pytest

from pccl.protocol.errors import LinkError
from pccl.transports.base import Address
from pccl.transports.datagrams import (
    DatagramSocket,
    default_router,
    hosts_toward,
    interface_hosts,
    interface_names,
    interface_of,
    router_host,
)
from pccl.transports.tcp import TcpTransport
from pccl.transports.tcp_dial import own_hosts
from tests.support.patience import LIMIT_S

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
DEFAULT = "wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
WIRED = "eth0\t00000000\t0201A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
LOCAL = "eth0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
DOWN = "eth1\t00000000\t0301A8C0\t0002\t0\t0\t0\t00000000\t0\t0\t0\n"
HALF = "tun0\t00000000\t0408000A\t0003\t0\t0\t0\t00000080\t0\t0\t0\n"
LINK = "ppp0\t00000000\t00000000\t0001\t0\t0\t0\t00000000\t0\t0\t0\n"


@pytest.mark.parametrize(
    ("routes", "router"),
    [
        ("", ""),
        (HEAD, ""),
        (HEAD + LOCAL, ""),
        (HEAD + LOCAL + DEFAULT, "192.168.1.1"),
        (HEAD + DEFAULT + WIRED + LOCAL, "192.168.1.2"),  # the lowest metric
        (HEAD + DOWN + DEFAULT, "192.168.1.1"),
        (HEAD + HALF + DEFAULT, "192.168.1.1"),  # a route for half of the internet, of a VPN
        (HEAD + LINK, ""),  # a line without a router
        (HEAD + "short\tline\n" + "a\tb\tc\td\te\tf\tg\th\n" + DEFAULT, "192.168.1.1"),
        (HEAD + DEFAULT.replace("0101A8C0", "0101A8C0FF"), ""),
    ],
)
def test_the_router_of_a_table_of_routes(routes: str, router: str) -> None:
    assert default_router(routes) == router


def test_the_router_of_an_interface() -> None:
    routes = HEAD + DEFAULT + WIRED + LOCAL
    assert default_router(routes, "wlan0") == "192.168.1.1"
    assert default_router(routes, "eth0") == "192.168.1.2"
    assert default_router(routes, "wlan") == ""
    assert router_host("wlan99")[0] == ""


def test_this_machine_has_a_router_or_a_reason_why_not() -> None:
    host, why = router_host()
    assert bool(host) != bool(why)


class Peer:
    """A UDP socket of the other side, and what has happened at ours."""

    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.bind(("127.0.0.1", 0))
        self.sock.settimeout(LIMIT_S)
        self.happened: list[bytes] = []
        self._changed = asyncio.Event()

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.sock.getsockname()[1])

    def note(self, data: bytes = b"refused") -> None:
        self.happened.append(data)
        self._changed.set()

    async def hear(self, count: int) -> list[bytes]:
        while len(self.happened) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), LIMIT_S)
        return self.happened


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.sock.close()


async def test_only_the_other_side_is_heard(peer: Peer) -> None:
    ours = DatagramSocket(asyncio.get_running_loop(), peer.address, peer.note, peer.note)
    ours.send(b"question")
    data, source = peer.sock.recvfrom(100)
    assert data == b"question"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"foreign", source)
    peer.sock.sendto(b"answer", source)
    peer.sock.sendto(b"x" * 2000, source)
    assert await peer.hear(2) == [b"answer", b"x" * 1101]
    ours.close()
    ours.close()


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="needs a system that reports it")
async def test_nothing_listens_there(peer: Peer) -> None:
    address = peer.address
    peer.sock.close()
    ours = DatagramSocket(asyncio.get_running_loop(), address, peer.note, peer.note)
    ours.send(b"question")
    assert await peer.hear(1) == [b"refused"]
    ours.send(b"question")
    ours.send(b"question")  # the answer to the first one may have come already
    assert (await peer.hear(2))[:2] == [b"refused"] * 2
    ours.close()


async def test_a_socket_that_its_callback_closes(peer: Peer) -> None:
    def take(data: bytes) -> None:
        peer.note(data)
        ours.close()

    ours = DatagramSocket(asyncio.get_running_loop(), peer.address, take, peer.note)
    ours.send(b"question")
    _, source = peer.sock.recvfrom(100)
    peer.sock.sendto(b"one", source)
    peer.sock.sendto(b"two", source)
    assert await peer.hear(1) == [b"one"]


async def test_hosts() -> None:
    loop = asyncio.get_running_loop()
    assert await hosts_toward(loop, None, Address("127.0.0.1", 1)) == ("127.0.0.1", "127.0.0.1")
    with pytest.raises(OSError, match=r"\S"):
        await hosts_toward(loop, None, Address("no.such.host.invalid", 1))
    with pytest.raises(OSError, match=r"\S"):
        await hosts_toward(loop, None, Address("h" * 64 + ".invalid", 1))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_interfaces_and_their_addresses() -> None:
    assert [interface_of(host) for host in ("127.0.0.1", "127.0.1.1", "::1")] == ["lo"] * 3
    assert [interface_of(host) for host in ("192.0.2.77", "2001:db8::77", "n0", "a:b")] == [""] * 4
    assert interface_of("fe80::1%eth7") == "eth7"
    assert interface_of(f"fe80::1%{socket.if_nametoindex('lo')}") == "lo"
    assert "lo" in interface_names()
    assert interface_hosts("lo")[-1] == "127.0.0.1"
    assert interface_hosts("no-such-one") == interface_hosts("x" * 99) == ()
    assert own_hosts("0.0.0.0", "lo") == ("127.0.0.1",)
    assert own_hosts("::", "lo")[-1] == "127.0.0.1"
    assert own_hosts("127.0.0.1", "lo") == ()


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces have names on Linux")
async def test_an_interface_that_does_not_exist() -> None:
    transport = TcpTransport(asyncio.get_running_loop()).through("no-such-one")
    reason = "cannot use the interface no-such-one: no such device"
    with pytest.raises(LinkError, match=f"cannot listen on 127.0.0.1:0: {reason}"):
        await transport.listen(Address("127.0.0.1", 0), lambda one: one.abort())
    with pytest.raises(LinkError, match=f"cannot reach 192.0.2.1:9: {reason}"):
        await transport.dial(Address("192.0.2.1", 9), LIMIT_S)


def test_a_system_that_lets_nobody_list_its_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[tuple[int, str]]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "if_nameindex", refuse)
    assert interface_of("127.0.0.1") == ""
