"""Peers whose router forwards a port announce it, in virtual time."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from pccl.machines.router_path import RouterPath
from pccl.protocol.errors import DeadlineExceeded, NotConnected
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import JoinRequest, PeerOptions
from pccl.stress.sim.curves import QuickCurves
from pccl.stress.sim.process import MASTER_ADDRESS
from pccl.telemetry.events import Joined, PortForwarded, PortNotForwarded
from pccl.transports.base import Address
from tests.support.clear import in_the_clear
from tests.support.home_router import HomeRouter
from tests.support.virtual_home import S, VirtualHome
from tests.support.virtual_runs import VirtualRun

LATENCY_NS = 5_000_000
NETWORK = {"latency_ns": LATENCY_NS}


class HomePeer:
    """A run whose second peer is behind a router."""

    def __init__(self, router: HomeRouter | None) -> None:
        self.run = VirtualRun([0], NETWORK)
        self.home = VirtualHome(self.run.loop)
        self.home.router = router
        host = self.run.network.host("home")
        options = PeerOptions(
            listen=Address("", 0),
            random_bytes=Random(7).randbytes,
            curves=QuickCurves(),
            encrypts=in_the_clear,
        )
        self.engine = PeerEngine(
            self.run.loop, self.run.loop, host, MASTER_ADDRESS, 0, options,
            port_mapping=self.home.mapping,
        )  # fmt: skip
        self.run.engines.append(self.engine)
        self.run.hosts.append(host)

    def run_test(self, main: object) -> None:
        self.run.run_test(main)  # type: ignore[arg-type]

    def announced(self) -> tuple[str, int]:
        """Where the other peer dials the one behind the router."""
        roster = self.run.engines[0].roster
        assert roster is not None
        (member,) = (one for one in roster.members if one.peer == self.engine.machine.peer)
        return member.host, member.port

    def told(self) -> list[object]:
        kinds = (PortForwarded, PortNotForwarded, Joined)
        return [type(one.event) for one in self.engine.events.kept if isinstance(one.event, kinds)]


@pytest.fixture
def granting() -> HomePeer:
    return HomePeer(HomeRouter())


@pytest.fixture
def double() -> HomePeer:
    """The address of the router is not public."""
    return HomePeer(HomeRouter(host="100.72.0.4", taken=range(60_000)))


@pytest.fixture
def silent() -> HomePeer:
    return HomePeer(None)


async def test_the_port_and_the_address_of_the_router_are_announced(granting: HomePeer) -> None:
    router = granting.home.router
    assert router is not None
    await granting.run.start()
    ((own, outer),) = router.ports.items()
    assert granting.announced() == ("8.8.4.4", outer)
    assert own == outer
    assert granting.told() == [PortForwarded, Joined]
    await granting.run.close()
    assert granting.told() == [PortForwarded, Joined, PortNotForwarded]
    assert router.ports == {}


async def test_behind_two_routers_the_master_knows_the_address(double: HomePeer) -> None:
    await double.run.start()
    host, port = double.announced()
    assert (host, port) == ("home", 60_000)
    await double.run.close()


async def test_a_silent_router_delays_the_join_by_a_second(silent: HomePeer) -> None:
    await silent.run.start()
    joined_ns = silent.engine.events.kept[-1].at_ns
    assert S < joined_ns < 2 * S
    host, port = silent.announced()
    assert host == "home"
    assert port > 0
    await silent.run.close()
    assert silent.home.open == 0


async def test_the_delay_counts_for_the_time_limit(silent: HomePeer) -> None:
    with pytest.raises(DeadlineExceeded):
        await silent.engine.connect(JoinRequest(timeout_s=0.3))
    assert silent.run.loop.now_ns() == 0.3 * S
    await silent.run.close()


async def test_the_end_during_the_delay(silent: HomePeer) -> None:
    join = silent.run.loop.create_task(silent.engine.connect(JoinRequest()))
    await asyncio.sleep(0.1)
    await silent.engine.close()
    with pytest.raises(NotConnected, match="the communicator was closed"):
        await join
    await silent.run.close()


async def test_a_machine_without_a_private_address_asks_nobody(granting: HomePeer) -> None:
    granting.home.path = RouterPath("9.9.9.9", "8.8.8.8", "9.9.9.1", "9.9.9.9")
    await granting.run.start()
    assert granting.announced()[0] == "home"
    assert granting.told() == [Joined]
    await granting.run.close()
