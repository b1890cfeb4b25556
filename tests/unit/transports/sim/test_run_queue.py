"""Processes that do not run for a while, and connections that one end has forgotten."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from random import Random
from typing import Any

import pytest

from pccl.protocol.errors import LinkError
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.process import ProcessClock
from pccl.transports.base import Address, Connection
from pccl.transports.sim.connection import SimConnection
from pccl.transports.sim.network import SimHost, SimNetwork

MS, S = 1_000_000, 1_000_000_000
LATENCY = 5 * MS
WINDOW = 1000


class Log:
    """A receiver that knows what came when."""

    def __init__(self, loop: VirtualLoop, connection: Connection) -> None:
        assert isinstance(connection, SimConnection)
        self.connection = connection
        self.received = bytearray()
        self.arrivals_ns: list[int] = []
        self.lost_ns: list[int] = []
        self._loop = loop
        self._buffer = memoryview(bytearray(100))
        connection.start(self)

    def get_buffer(self) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._buffer[:nbytes]
        self.arrivals_ns.append(self._loop.now_ns())

    def writable(self) -> None:
        pass

    def connection_lost(self, error: Exception | None) -> None:
        self.lost_ns.append(self._loop.now_ns())


class World:
    """Two hosts."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.network = SimNetwork(
            self.loop,
            Random(1),
            latency_ns=LATENCY,
            bytes_per_s=None,
            window_bytes=WINDOW,
            ragged=False,
        )
        self.a, self.b = self.network.host("a"), self.network.host("b")
        self.accepted: list[Log] = []

    def run_test(self, main: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(main)

    async def link(self) -> tuple[Log, Log]:
        dialled = await self.dial(await self.listen(self.b))
        return dialled, self.accepted[-1]

    async def listen(self, host: SimHost) -> Address:
        listener = await host.listen(
            Address(host.name, 0), lambda c: self.accepted.append(Log(self.loop, c))
        )
        return listener.address

    async def dial(self, address: Address) -> Log:
        return Log(self.loop, await self.a.dial(address, 60.0))

    async def sleep(self, duration_ns: int) -> None:
        future = self.loop.create_future()
        self.loop.call_at_ns(self.loop.now_ns() + duration_ns, future.set_result, None)
        await future


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.loop.close()


async def test_a_frozen_process_reads_nothing_and_its_kernel_takes_one_window(world: World) -> None:
    a, b = await world.link()
    sent = bytes(range(250)) * 12
    world.b.freeze()
    taken = a.connection.send([sent])
    await world.sleep(S)
    taken += a.connection.send([sent[taken:]])
    await world.sleep(S)
    # One window lies acknowledged in the kernel there, another one is on its way for ever.
    assert taken == 2 * WINDOW
    assert a.connection.send([sent[taken:]]) == 0
    assert not b.received
    thawed_ns = world.loop.now_ns()
    world.b.thaw()
    await world.sleep(S)
    assert bytes(b.received) == sent[:taken]
    assert all(thawed_ns <= when < thawed_ns + MS for when in b.arrivals_ns)


async def test_who_dials_a_frozen_process_is_connected_and_not_answered(world: World) -> None:
    address = await world.listen(world.b)
    world.b.freeze()
    a = await world.dial(address)
    assert world.loop.now_ns() == 2 * LATENCY
    a.connection.send([b"hello"])
    await world.sleep(S)
    assert not world.accepted
    world.b.thaw()
    await world.sleep(S)
    assert bytes(world.accepted[0].received) == b"hello"


async def test_what_a_dead_process_sent_is_read_before_its_end_is_seen(world: World) -> None:
    a, b = await world.link()
    world.b.freeze()
    a.connection.send([b"last words"])
    await world.sleep(LATENCY)
    a.connection.close()
    await world.sleep(S)
    assert not b.lost_ns
    world.b.thaw()
    await world.sleep(S)
    assert bytes(b.received) == b"last words"
    assert b.lost_ns[0] > b.arrivals_ns[-1]


async def test_freezes_add_up(world: World) -> None:
    a, b = await world.link()
    world.b.freeze()
    world.b.freeze()
    a.connection.send([b"x"])
    world.b.thaw()
    await world.sleep(S)
    assert not b.received
    world.b.thaw()
    await world.sleep(S)
    assert b.received


async def test_a_slow_process_does_everything_late_and_in_order(world: World) -> None:
    a, b = await world.link()
    start_ns = world.loop.now_ns()
    world.b.run_queue.set_lag(100 * MS)
    for number in range(20):
        a.connection.send([bytes([number])])
        await world.sleep(10 * MS)
    await world.sleep(S)
    assert bytes(b.received) == bytes(range(20))
    late = [when - start_ns - LATENCY - n * 10 * MS for n, when in enumerate(b.arrivals_ns)]
    assert all(0 <= each <= 101 * MS for each in late)
    assert max(late) > 20 * MS


async def test_a_forgotten_connection_is_half_open_until_the_other_end_sends(world: World) -> None:
    a, b = await world.link()
    b.connection.forget()
    await world.sleep(60 * S)
    assert b.lost_ns
    assert not a.lost_ns
    sent_ns = world.loop.now_ns()
    a.connection.send([b"are you there?"])
    await world.sleep(S)
    assert sent_ns + 2 * LATENCY <= a.lost_ns[0] < sent_ns + 2 * LATENCY + 10
    assert not b.received


async def test_the_kernel_of_a_dead_process_resets_what_comes_on_a_forgotten_connection(
    world: World,
) -> None:
    a, b = await world.link()
    b.connection.forget()
    await world.sleep(S)
    world.b.crash()
    await world.sleep(S)
    assert not a.lost_ns, "neither the one nor the other was told to it"
    sent_ns = world.loop.now_ns()
    a.connection.send([b"are you there?"])
    await world.sleep(S)
    assert sent_ns + 2 * LATENCY <= a.lost_ns[0] < sent_ns + 2 * LATENCY + 10


async def test_a_spike_and_a_cap_slow_a_route_down_and_keep_order(world: World) -> None:
    a, b = await world.link()
    start_ns = world.loop.now_ns()
    route = world.network.route("a", "b")
    route.extra_ns += 50 * MS
    a.connection.send([b"1"])
    route.extra_ns -= 50 * MS
    a.connection.send([b"2"])
    route.caps.append(1000)
    a.connection.send([bytes(100)])
    await world.sleep(S)
    assert b.received[:2] == b"12"
    first, second, *_ = b.arrivals_ns
    assert start_ns + 55 * MS <= first < second < start_ns + 55 * MS + 10
    assert b.arrivals_ns[-1] >= start_ns + LATENCY + 100 * MS


@pytest.mark.parametrize("stands", [True, False])
async def test_a_clock_that_stood_still_makes_no_timer_late(world: World, stands: bool) -> None:
    clock = ProcessClock(world.loop, world.b)
    fired_ns: list[int] = []
    clock.call_at_ns(2 * S, lambda: fired_ns.append(world.loop.now_ns()))
    cancelled = clock.call_at_ns(3 * S, fired_ns.clear)
    await world.sleep(S)
    world.b.freeze()
    await world.sleep(10 * S)
    if stands:
        clock.missed_ns += 10 * S
    world.b.thaw()
    cancelled.cancel()
    await world.sleep(20 * S)
    (when_ns,) = fired_ns
    expected_ns = 12 * S if stands else 11 * S
    assert expected_ns <= when_ns < expected_ns + MS
    assert clock.now_ns() == world.loop.now_ns() - (10 * S if stands else 0)


async def test_a_dead_process_is_never_called_back(world: World) -> None:
    clock = ProcessClock(world.loop, world.b)
    clock.call_at_ns(S, lambda: pytest.fail("it is dead"))
    world.b.freeze()
    await world.sleep(2 * S)
    world.b.crash()
    world.b.thaw()
    await world.sleep(S)
    with pytest.raises(LinkError, match="the host is down"):
        await world.listen(world.b)
