"""A mapping in virtual time, and with a router at a port of this machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from pccl.machines.port_mapper import AskUpnp, UpnpAnswered
from pccl.machines.router_path import ForwardedPort, MappingProtocol, RouterPath
from pccl.protocol.port_mapping.answers import PortGranted
from pccl.runtime.clock import LoopClock
from pccl.runtime.links.port_mapping import (
    PortMapping,
    RouterAccess,
    RouterReport,
    find_router,
)
from pccl.telemetry.events import PortForwarded, PortNotForwarded
from pccl.transports.base import Address
from pccl.transports.datagrams import DatagramSocket
from tests.support.home_router import HomeRouter, serving
from tests.support.virtual_home import HOME, LATENCY_NS, VirtualHome

MS, S = 1_000_000, 1_000_000_000
PORT = 48200
MASTER = Address("master.example", 48148)
PCP = ForwardedPort(MappingProtocol.PCP, "8.8.4.4", PORT)


@pytest.fixture
def home() -> Iterator[VirtualHome]:
    made = VirtualHome()
    yield made
    made.loop.close()


def forwarded(port: int = PORT, by: str = "PCP") -> PortForwarded:
    return PortForwarded(port=port, host="8.8.4.4", by=by, public=True)


# -- in virtual time -----------------------------------------------------------------------------


async def test_a_port_is_forwarded_until_the_end(home: VirtualHome) -> None:
    assert await home.mapping.start(PORT, MASTER) == PCP
    assert home.loop.now_ns() == home.find_ns + LATENCY_NS
    assert (home.take(), home.sought, home.open) == ([forwarded()], [MASTER], 0)
    assert home.mapping.report == RouterReport(PCP, "", True)
    router = home.router
    assert router is not None
    await asyncio.sleep(3100)
    assert (len(router.received), home.take(), home.open) == (6, [], 0)
    assert await home.mapping.start(PORT, MASTER) == PCP
    assert home.loop.now_ns() == 3100 * S + home.find_ns + LATENCY_NS, "it waits for nothing"
    await home.mapping.close()
    assert (router.ports, home.open) == ({}, 0)
    assert home.take() == [PortNotForwarded(port=PORT, reason="this peer is closed")]
    await home.mapping.close()


async def test_a_join_waits_a_second_for_a_silent_router(home: VirtualHome) -> None:
    home.router = None
    assert await home.mapping.start(PORT, MASTER) is None
    assert home.loop.now_ns() == S
    assert (home.take(), home.mapping.report) == ([], RouterReport())
    await asyncio.sleep(2)
    silent = "PCP: no answer; NAT-PMP: no answer; UPnP: not installed"
    assert home.take() == [PortNotForwarded(port=0, reason=silent)]
    assert await home.mapping.start(PORT, MASTER) is None
    assert home.loop.now_ns() == 3 * S, "the next join does not wait"
    assert home.mapping.report == RouterReport(None, silent, True)
    await home.mapping.close()
    assert (home.take(), home.open) == ([], 0)


async def test_a_later_join_gets_what_the_router_forwards_then(home: VirtualHome) -> None:
    assert home.router is not None
    await home.mapping.start(PORT, MASTER)
    home.router.host = "9.9.9.10"
    await asyncio.sleep(700)
    moved = replace(PCP, host="9.9.9.10")
    assert await home.mapping.start(PORT, Address("other", 1)) == moved
    assert home.take() == [forwarded(), replace(forwarded(), host="9.9.9.10")]
    await asyncio.sleep(600)
    assert home.sought == [MASTER, MASTER, Address("other", 1)]
    await home.mapping.close()


async def test_a_shorter_wait(home: VirtualHome) -> None:
    home.router = None
    assert await home.mapping.start(PORT, MASTER, wait_ns=5 * MS) is None
    assert home.loop.now_ns() == 5 * MS
    assert await home.mapping.start(PORT, MASTER, wait_ns=-S) is None
    assert home.loop.now_ns() == 5 * MS
    await home.mapping.close()


async def test_a_router_that_answers_later_still_forwards(home: VirtualHome) -> None:
    home.router = None
    home.upnp = UpnpAnswered(PortGranted("8.8.4.4", PORT, 1200, 0))
    assert await home.mapping.start(PORT, MASTER) is None
    await asyncio.sleep(1)
    assert home.take() == [forwarded(by="UPnP")]
    upnp = ForwardedPort(MappingProtocol.UPNP, "8.8.4.4", PORT)
    assert await home.mapping.start(PORT, MASTER) == upnp
    await home.mapping.close()
    assert [asked.lifetime_s for asked in home.asked] == [1200, 0]


async def test_a_router_with_nat_pmp_only(home: VirtualHome) -> None:
    home.router = HomeRouter(pcp=False)
    nat_pmp = ForwardedPort(MappingProtocol.NAT_PMP, "8.8.4.4", PORT)
    assert await home.mapping.start(PORT, MASTER) == nat_pmp
    assert home.loop.now_ns() == home.find_ns + 2 * LATENCY_NS
    await home.mapping.close()
    assert home.router.ports == {}


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (replace(HOME, own="127.0.0.1"), "the master is on this machine"),
        (OSError("no such name"), "no way to the master: no such name"),
    ],
)
async def test_nobody_is_asked(
    home: VirtualHome, path: RouterPath | OSError, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    home.path = path
    with caplog.at_level(logging.DEBUG, "pccl.peer"):
        assert await home.mapping.start(PORT, MASTER) is None
    assert home.loop.now_ns() == home.find_ns
    assert home.mapping.report == RouterReport(None, why, False)
    assert home.take() == []
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    await home.mapping.close()


async def test_a_slow_look_up_delays_a_join_by_a_second(home: VirtualHome) -> None:
    home.find_ns = 1000 * S
    assert await home.mapping.start(PORT, MASTER) is None
    assert home.loop.now_ns() == S
    await asyncio.sleep(5)
    assert home.mapping.report == RouterReport()
    assert await home.mapping.start(PORT, MASTER) is None
    assert home.mapping.report.reason.startswith("no way to the master: ")
    await home.mapping.close()


async def test_the_end_in_the_middle_of_a_join(home: VirtualHome) -> None:
    home.router = None
    join = home.loop.create_task(home.mapping.start(PORT, MASTER))
    await asyncio.sleep(0.3)
    assert home.open == 1
    await home.mapping.close()
    assert home.loop.now_ns() == 1050 * MS, "two requests to delete what may be forwarded"
    assert await join is None
    assert (home.open, home.take()) == (0, [])


async def test_a_cancelled_join_leaves_the_mapping(home: VirtualHome) -> None:
    join = home.loop.create_task(home.mapping.start(PORT, MASTER))
    await asyncio.sleep(0.002)
    join.cancel()
    with pytest.raises(asyncio.CancelledError):
        await join
    await asyncio.sleep(0.1)
    assert home.take() == [forwarded()]
    await home.mapping.close()


async def test_an_end_without_a_beginning(home: VirtualHome) -> None:
    await home.mapping.close()
    assert await home.mapping.start(PORT, MASTER, wait_ns=MS) is None
    assert (home.sought, home.take()) == ([], [])


async def test_a_way_that_vanishes(home: VirtualHome) -> None:
    def refuse(*_: object) -> DatagramSocket:
        raise OSError("network is unreachable")

    access = replace(home.access, open=refuse)
    mapping = PortMapping(home.loop, home.loop, access, bytes)
    assert await mapping.start(PORT, MASTER, wait_ns=10 * S) is None
    assert mapping.report.reason == "PCP: no answer; NAT-PMP: no answer; UPnP: not installed"
    await mapping.close()


# -- on this machine -----------------------------------------------------------------------------


async def absent(asked: AskUpnp) -> UpnpAnswered:
    return UpnpAnswered(None, "not installed")


def mapping_at(port: int, told: list[PortForwarded | PortNotForwarded]) -> PortMapping:
    """A mapping whose router is at a UDP port of this machine."""
    path = replace(HOME, router="127.0.0.1", router_port=port)

    async def find(master: Address | None) -> RouterPath:
        return path

    loop = asyncio.get_running_loop()
    access = RouterAccess(find, partial(DatagramSocket, loop), absent)
    made = PortMapping(loop, LoopClock(loop), access, bytes)
    made.on_changed = told.append
    return made


@pytest.mark.parametrize(
    ("router", "port", "by"),
    [
        (HomeRouter(), PORT, "PCP"),
        (HomeRouter(taken=(PORT,)), PORT + 1, "PCP"),
        (HomeRouter(pcp=False), PORT, "NAT-PMP"),
    ],
)
async def test_a_real_exchange(router: HomeRouter, port: int, by: str) -> None:
    told: list[PortForwarded | PortNotForwarded] = []
    with serving(router) as router_port:
        mapping = mapping_at(router_port, told)
        found = await mapping.start(PORT, MASTER)
        assert found == ForwardedPort(MappingProtocol(by), "8.8.4.4", port)
        assert router.ports == {PORT: port}
        await mapping.close()
        assert router.ports == {}
    assert told == [
        forwarded(port, by), PortNotForwarded(port=port, reason="this peer is closed")
    ]  # fmt: skip


async def test_a_port_where_nothing_listens() -> None:
    told: list[PortForwarded | PortNotForwarded] = []
    with serving(HomeRouter()) as router_port:
        pass
    mapping = mapping_at(router_port, told)
    assert await mapping.start(PORT, MASTER) is None
    unknown = "the router does not know it"
    reason = f"PCP: {unknown}; NAT-PMP: {unknown}; UPnP: not installed"
    assert told == [PortNotForwarded(port=0, reason=reason)]
    await mapping.close()


async def test_the_way_to_a_master_on_this_machine() -> None:
    loop = asyncio.get_running_loop()
    path = await find_router(loop, Address("127.0.0.1", 48148))
    assert (path.own, path.master) == ("127.0.0.1", "127.0.0.1")
    with pytest.raises(OSError, match=r"\S"):
        await find_router(loop, Address("no.such.host.invalid", 1))
