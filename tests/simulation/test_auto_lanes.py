"""Lanes that nobody was told to open: peers in virtual time find how many a link needs.

A window limits each connection, a rate all of them together. Slow links, so that few bytes do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import CollectiveAborted
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, Descriptor, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.master_server import MasterServer
from pccl.runtime.requests import JoinRequest, PeerOptions, ReduceInfo, ReduceRequest
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address
from pccl.transports.lane import Lane
from pccl.transports.link import Link
from pccl.transports.sim.network import SimConnection, SimNetwork

Array = npt.NDArray[Any]
MASTER = Address("master", 48148)
MS = NS_PER_S // 1000
LOOK_NS = 50 * MS
SEGMENT_BYTES = 2048
TOTAL = 200_000
"""Bytes per second of a link."""

FLOW = TOTAL * 5 // 16
"""Of one connection, if its bytes took no time to be sent; so that it is a quarter with that."""


class World:
    """A master and peers; each link is looked at all the time.

    Args:
        peers: how many.
        rtt_ms: round trip between any two hosts.
        flow: bytes per second of one connection.
    """

    def __init__(self, peers: int, rtt_ms: int, flow: int) -> None:
        self.loop = VirtualLoop(limit_ns=3600 * NS_PER_S)
        self.events: list[tuple[int, str]] = []
        self.network = SimNetwork(
            self.loop,
            Random(1),
            lambda now_ns, what: self.events.append((now_ns, what)),
            ragged=False,
            latency_ns=rtt_ms * MS // 2,
            bytes_per_s=TOTAL,
            window_bytes=flow * rtt_ms // 1000,
        )
        self.master = MasterServer(
            self.loop, self.network.host("master"), Timing(), Random(2).randbytes
        )
        self.engines = [self._engine(n) for n in range(peers)]
        self.dead: list[int] = []
        self.seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By link: on how many lanes one end sent, and how many there were; each change once."""
        self.on_look: Callable[[], None] = lambda: None

    def _engine(self, number: int) -> PeerEngine:
        options = PeerOptions(
            listen=Address("", 0),
            random_bytes=Random(number + 3).randbytes,
            segment_bytes=SEGMENT_BYTES,
        )
        host = self.network.host(f"p{number}")
        return PeerEngine(self.loop, self.loop, host, MASTER, 0, options)

    def run(self, work: Callable[[World], Coroutine[Any, Any, None]]) -> World:
        async def main() -> None:
            await self.master.start(MASTER)
            await self.all(
                [e.connect(JoinRequest(min_peers=len(self.engines))) for e in self.engines]
            )
            self._look()
            await work(self)
            self.on_look = lambda: None
            for number, engine in enumerate(self.engines):
                if number not in self.dead:
                    await engine.close()
            self.master.close()

        try:
            self.loop.run_until_complete(main())
        finally:
            self.loop.close()
        return self

    async def all(self, works: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        return [await task for task in [self.loop.create_task(work) for work in works]]

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = self.loop.create_future()
        when_ns = self.loop.now_ns() + round(seconds * NS_PER_S)
        self.loop.call_at_ns(when_ns, woken.set_result, None)
        await woken

    def link(self, one: int, other: int) -> Link:
        return self.engines[one].links.to(self.engines[other].machine.peer)

    def _look(self) -> None:
        ends = [n for n in range(len(self.engines)) if n not in self.dead]
        for one in ends:
            for other in ends:
                if one != other:
                    link = self.link(one, other)
                    now = (len(link.used_lanes), len(link.lanes))
                    seen = self.seen.setdefault((one, other), [])
                    if not seen or seen[-1] != now:
                        seen.append(now)
        self.on_look()
        self.loop.call_at_ns(self.loop.now_ns() + LOOK_NS, self._look)

    def used(self, one: int, other: int) -> list[int]:
        """On how many lanes one end has sent, one after the other."""
        used = [used for used, _ in self.seen[one, other]]
        return [n for at, n in enumerate(used) if not at or used[at - 1] != n]

    def kill(self, number: int) -> None:
        self.dead.append(number)
        self.network.hosts[f"p{number}"].crash()

    async def reduce(self, seconds: float, *, retry: bool = False) -> list[float]:
        """All-reduce what a full link carries in so many seconds; return seconds that it took."""
        count = round(TOTAL * seconds) // 8
        living = [n for n in range(len(self.engines)) if n not in self.dead]
        sends: list[Array] = [np.arange(count, dtype=np.int64) * (n + 1) for n in living]
        results = [np.zeros(count, np.int64) for _ in living]
        descriptor = Descriptor(DataType.INT64, ReduceOp.SUM, count)
        began_ns = self.loop.now_ns()
        took: list[float] = []
        contributors: list[tuple[int, tuple[int, ...]]] = []

        async def one(n: int, at: int) -> None:
            asks = ReduceCall(0, 0, descriptor)
            what = ReduceRequest(borrow(sends[at], results[at]), asks, retry=retry)
            try:
                info: ReduceInfo = await self.engines[n].reduce(what)
            except CollectiveAborted:
                assert n in self.dead
                return
            took.append((self.loop.now_ns() - began_ns) / NS_PER_S)
            contributors.append((at, info.contributors))

        tasks = [(n, self.loop.create_task(one(n, at))) for at, n in enumerate(living)]
        for n, task in tasks:
            if n not in self.dead:
                await task
            else:
                task.cancel()
        ids: dict[int, int] = {self.engines[n].machine.peer: n + 1 for n in living}
        for at, names in contributors:
            factor = sum(ids[name] for name in names)
            assert np.array_equal(results[at], np.arange(count) * factor)
        return took


def test_growth_and_stop_on_a_long_fat_link() -> None:
    """Each connection gets a quarter of the link."""
    took: list[float] = []

    async def work(world: World) -> None:
        took.extend(await world.reduce(12))
        took.extend(await world.reduce(10))

    world = World(2, 100, FLOW).run(work)
    for ends in ((0, 1), (1, 0)):
        used = world.used(*ends)
        # New lanes come up one by one; the numbers that were measured are these.
        assert [n for n in used if n in (1, 2, 4, 8)][:4] == [1, 2, 4, 8]
        assert used[-1] in (4, 5)  # segments are a third of a window here: it is rough
    assert min(took[:2]) > 13  # the beginning was slow
    assert max(took[2:]) < 10 / 0.75


def test_one_lane_where_it_is_enough() -> None:
    async def work(world: World) -> None:
        await world.reduce(8)
        assert [world.link(*ends).used_lanes[-1].number for ends in ((0, 1), (1, 0))] == [0, 0]
        assert [len(world.link(*ends).lanes) for ends in ((0, 1), (1, 0))] == [2, 2]
        await world.sleep(11)  # the other one is spare for so long
        assert [len(world.link(*ends).lanes) for ends in ((0, 1), (1, 0))] == [1, 1]
        await world.reduce(1)

    world = World(2, 20, TOTAL * 8).run(work)
    assert world.used(0, 1) == world.used(1, 0) == [1, 2, 1]


def test_either_side_alone_gets_the_lanes_it_needs() -> None:
    """Only the elder, who does not dial, has much to send; then only the younger."""

    async def work(world: World) -> None:
        for root in (0, 1):
            data = [np.full(TOTAL * 10 // 8, n, np.int64) for n in range(2)]
            what = Descriptor.broadcast(DataType.INT64, data[0].size, root)
            await world.all(
                [
                    engine.reduce(ReduceRequest(borrow(mine), ReduceCall(0, 0, what)))
                    for engine, mine in zip(world.engines, data, strict=True)
                ]
            )
            assert all((mine == root).all() for mine in data)
            assert len(world.link(root, 1 - root).used_lanes) in (4, 5)
            if root == 0:
                assert len(world.link(1, 0).used_lanes) == 1

    World(2, 100, FLOW).run(work)


@pytest.mark.parametrize("at_s", [1.0, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0])
def test_lanes_that_are_lost_while_others_are_tried(at_s: float) -> None:
    """All but the first, again and again for a while; the reduce does not notice."""

    async def work(world: World) -> None:
        def cut() -> None:
            for lane in world.link(1, 0).lanes[1:]:
                connection = lane.connection
                assert isinstance(connection, SimConnection)
                connection.reset()

        for again in range(5):
            world.loop.call_at_ns(world.loop.now_ns() + round((at_s + again / 3) * NS_PER_S), cut)
        await world.reduce(15)
        assert max(await world.reduce(10)) < 10 / 0.8

    World(2, 100, FLOW).run(work)


@pytest.mark.parametrize("at_s", [1.5, 2.0, 2.5, 3.5, 5.0])
def test_a_peer_that_dies_while_lanes_are_tried(at_s: float) -> None:
    async def work(world: World) -> None:
        when_ns = world.loop.now_ns() + round(at_s * NS_PER_S)
        world.loop.call_at_ns(when_ns, world.kill, 1)
        await world.reduce(5, retry=True)
        assert world.dead == [1]
        await world.reduce(10)
        assert len(world.link(0, 2).used_lanes) >= 4

    World(3, 100, FLOW).run(work)


def test_the_same_again() -> None:
    async def work(world: World) -> None:
        await world.reduce(6)

    one, other = (World(2, 60, TOTAL // 5).run(work) for _ in range(2))
    assert one.events == other.events
    assert one.seen == other.seen


# -- inside one machine ----------------------------------------------------------------------------


class OneMachine(World):
    """All peers have one address, as on loopback, or behind relays that end there."""

    def _engine(self, number: int) -> PeerEngine:
        engine = super()._engine(number)
        links = engine.links
        make_link = links._make_link  # pyright: ignore[reportPrivateUsage]

        class NearLink(Link):
            def add(self, lane: Lane) -> None:
                super().add(lane)
                self.near = True

        assert make_link is Link
        links._make_link = NearLink  # pyright: ignore[reportPrivateUsage]
        return engine


@pytest.mark.parametrize(("rtt_ms", "grows"), [(4, False), (100, True)])
def test_inside_one_machine_only_a_long_way_gets_lanes(rtt_ms: int, grows: bool) -> None:
    async def work(world: World) -> None:
        await world.reduce(6)

    world = OneMachine(2, rtt_ms, FLOW).run(work)
    for ends in ((0, 1), (1, 0)):
        assert (max(world.used(*ends)) > 1) == grows
    if not grows:
        assert [lanes for _, lanes in world.seen[0, 1]] == [1]
