"""The in-memory network: its arithmetic, its faults, and that a seed says it all."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pccl.protocol.errors import LinkError
from pccl.stress.sim.loop import Deadlock, VirtualLoop
from pccl.transports.base import Address, Connection, PathMeasure
from pccl.transports.sim.connection import SimConnection
from pccl.transports.sim.nat import SYMMETRIC, NatKind
from pccl.transports.sim.network import SimHost, SimNetwork
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S

US, MS, S = 1_000, 1_000_000, 1_000_000_000
LATENCY = 5 * MS
RATE = 1_000_000  # bytes a second: a byte takes a microsecond


class Log:
    """A receiver that knows when what came."""

    def __init__(self, world: World, connection: Connection) -> None:
        assert isinstance(connection, SimConnection)
        self.connection = connection
        self.received = bytearray()
        self.arrivals: list[tuple[int, int]] = []
        self.writable_ns: list[int] = []
        self.lost: list[tuple[int, Exception | None]] = []
        self.to_send: memoryview = memoryview(b"")
        self.sent = 0
        self._world = world
        self._buffer = memoryview(bytearray(1 << 20))
        connection.start(self)

    def get_buffer(self) -> memoryview:
        assert not self.lost
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        assert not self.lost
        self.received += self._buffer[:nbytes]
        self.arrivals.append((self._world.now, nbytes))

    def writable(self) -> None:
        assert not self.lost
        self.writable_ns.append(self._world.now)
        self.pump()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append((self._world.now, error))

    def send(self, data: bytes) -> int:
        return self.connection.send([data])

    def pump(self) -> None:
        while self.to_send:
            taken = self.connection.send([self.to_send[:1000], self.to_send[1000:]])
            self.to_send = self.to_send[taken:]
            self.sent += taken
            if self.to_send:
                self.connection.notify_writable()
                return

    @property
    def lost_ns(self) -> int:
        ((when, error),) = self.lost
        assert isinstance(error, LinkError)
        return when


class World:
    """Hosts a, b and c, and no chance in how bytes are cut, unless asked for."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        self.loop = VirtualLoop()
        self.trace: list[str] = []
        options = {"latency_ns": LATENCY, "bytes_per_s": RATE, "ragged": False} | options
        self.network = SimNetwork(
            self.loop, Random(seed), lambda now, what: self.trace.append(f"{now} {what}"), **options
        )
        self.a, self.b, self.c = (self.network.host(name) for name in "abc")

    @property
    def now(self) -> int:
        return self.loop.now_ns()

    def run_test(self, main: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(main)

    async def sleep_until(self, when_ns: int) -> None:
        future = self.loop.create_future()
        self.loop.call_at_ns(when_ns, future.set_result, None)
        await future

    async def link(
        self, a: SimHost, b: SimHost, port: int = 0, segment_bytes: int = 0
    ) -> tuple[Log, Log]:
        accepted: list[Log] = []
        listener = await b.listen(
            Address(b.name, port), lambda connection: accepted.append(Log(self, connection))
        )
        dial = a.dial(listener.address, 60.0, segment_bytes=segment_bytes)
        dialled = Log(self, await dial)
        listener.close()
        return dialled, accepted[0]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.loop.close()


def scenario(main: Callable[[World], Coroutine[Any, Any, None]], **options: Any) -> World:
    world = World(**options)
    world.run_test(main(world))
    world.loop.close()
    return world


# -- arithmetic --------------------------------------------------------------------------------


async def test_a_dial_takes_a_round_trip(world: World) -> None:
    await world.link(world.a, world.b)
    assert world.now == 2 * LATENCY
    with pytest.raises(LinkError, match="cannot reach b:9: connection refused"):
        await world.a.dial(Address("b", 9), 60.0)
    assert world.now == 4 * LATENCY


async def test_bytes_leave_at_the_bandwidth_and_arrive_after_the_latency(world: World) -> None:
    a, b = await world.link(world.a, world.b)
    start = world.now
    assert a.send(bytes(500)) == 500
    assert a.send(bytes(250)) == 250  # queues behind
    assert b.send(bytes(100)) == 100  # the other way is free
    await world.sleep_until(start + 2 * LATENCY)
    a.send(bytes(10))  # the way is free again
    await world.sleep_until(start + 4 * LATENCY)
    first = start + 500 * US + LATENCY
    assert b.arrivals == [
        (first, 500),
        (first + 250 * US, 250),
        (start + 3 * LATENCY + 10 * US, 10),
    ]
    assert a.arrivals == [(start + 100 * US + LATENCY, 100)]


async def test_connections_of_a_pair_share_its_bandwidth(world: World) -> None:
    a1, b1 = await world.link(world.a, world.b)
    a2, b2 = await world.link(world.a, world.b)
    a3, c3 = await world.link(world.a, world.c)
    start = world.now
    for log in (a1, a2, a3):
        log.send(bytes(1000))
    await world.sleep_until(start + S)
    alone = start + 1000 * US + LATENCY
    assert b1.arrivals == [(alone, 1000)]
    assert c3.arrivals == [(alone + 1, 1000)]  # one event an instant
    assert b2.arrivals == [(alone + 1000 * US, 1000)]


def test_large_writes_arrive_in_pieces() -> None:
    async def main(world: World) -> None:
        a, b = await world.link(world.a, world.b)
        start = world.now
        assert a.send(bytes(150 << 10)) == 150 << 10
        await world.sleep_until(start + S)
        full = 64 << 10
        assert b.arrivals == [
            (start + full * US + LATENCY, full),
            (start + 2 * full * US + LATENCY, full),
            (start + (150 << 10) * US + LATENCY, 22 << 10),
        ]

    scenario(main)


@pytest.mark.parametrize(("rate", "piece"), [(4000, 4000), (500, 1460)])
def test_on_a_slow_route_something_arrives_each_second_or_packet(rate: int, piece: int) -> None:
    async def main(world: World) -> None:
        a, b = await world.link(world.a, world.b)
        start = world.now
        assert a.send(bytes(3 * piece)) == 3 * piece
        await world.sleep_until(start + 10 * S)
        took = piece * S // rate
        assert b.arrivals == [(start + n * took + LATENCY, piece) for n in (1, 2, 3)]

    scenario(main, bytes_per_s=rate)


def test_the_window_bounds_what_is_on_the_way() -> None:
    async def main(world: World) -> None:
        a, b = await world.link(world.a, world.b)
        start = world.now
        assert a.send(bytes(800)) == 800
        assert a.send(bytes(800)) == 200
        assert a.send(bytes(800)) == 0
        a.connection.notify_writable()
        await world.sleep_until(start + S)
        # Both are there after 1 ms and the latency; the acknowledgement of the first 800 is the
        # one that frees a third of the window.
        assert a.writable_ns == [start + 800 * US + 2 * LATENCY]
        assert len(b.received) == 1000
        assert a.send(bytes(5000)) == 1000

    scenario(main, window_bytes=1000)


async def test_links_can_be_changed_at_any_time(world: World) -> None:
    a, b = await world.link(world.a, world.b)
    world.network.set_link("a", "b", latency_ns=20 * MS, bytes_per_s=None)
    start = world.now
    a.send(bytes(100))
    world.network.route("a", "b").latency_ns = 1 * MS
    a.send(bytes(50))  # does not overtake
    await world.sleep_until(start + S)
    assert b.arrivals == [(start + 20 * MS, 100), (start + 20 * MS + 1, 50)]
    start = world.now
    b.send(b"x")
    a.send(b"x")
    await world.sleep_until(start + S)
    assert b.arrivals[-1] == (start + 1 * MS, 1)
    assert a.arrivals == [(start + 20 * MS, 1)]


async def test_the_end_comes_behind_the_bytes(world: World) -> None:
    a, b = await world.link(world.a, world.b)
    start = world.now
    a.send(bytes(1000))
    a.connection.close()
    await world.sleep_until(start + S)
    assert a.lost == [(start + 1, None)]  # the dial's answer has taken this instant
    assert b.arrivals == [(start + 1000 * US + LATENCY, 1000)]
    assert b.lost_ns == start + 1000 * US + LATENCY + 1


async def test_an_abort_overtakes_bytes_that_have_not_left(world: World) -> None:
    a, b = await world.link(world.a, world.b)
    a.send(bytes(100))
    a.send(bytes(1000))
    await world.sleep_until(2 * LATENCY + 500 * US)
    a.connection.abort()
    await world.sleep_until(S)
    assert b.arrivals == [(3 * LATENCY + 100 * US, 100)]
    assert b.lost_ns == 3 * LATENCY + 500 * US


# -- faults ------------------------------------------------------------------------------------


async def test_a_crash_is_noticed_after_the_latency(world: World) -> None:
    a, b = await world.link(world.a, world.b, port=7)
    c, d = await world.link(world.b, world.c)
    await world.b.listen(Address("b", 8), lambda _: pytest.fail("accepted by the dead"))
    start = world.now
    a.send(b"never read")
    world.b.crash()
    world.b.crash()
    await world.sleep_until(start + S)
    assert a.lost_ns in (start + LATENCY, start + LATENCY + 1)
    assert d.lost_ns in (start + LATENCY, start + LATENCY + 1)
    assert not b.lost
    assert not b.received
    assert not c.lost
    assert (b.send(b"x"), world.b.ends, world.network.ends) == (0, [], {})
    with pytest.raises(LinkError, match="refused"):
        await world.a.dial(Address("b", 8), 60.0)
    again = world.network.host("b")
    assert world.network.hosts["b"] is again
    await world.link(world.a, again, port=8)


def test_what_was_sent_before_a_crash_arrives_as_a_prefix() -> None:
    outcomes: set[int] = set()

    for seed in range(10):

        async def main(world: World) -> None:
            a, b = await world.link(world.a, world.b)
            a.send(b"0123456789")
            a.send(bytes(1000))
            await world.sleep_until(world.now + 20 * US)
            world.a.crash()
            await world.sleep_until(S)
            assert b.lost
            assert b.received[:10] == b"0123456789"
            outcomes.add(len(b.received))

        scenario(main, seed=seed)
    assert outcomes == {10, 1010}  # a reset, or all of it and the end


async def test_a_dial_of_a_crashed_process_never_returns(world: World) -> None:
    listener = await world.b.listen(Address("b", 0), lambda _: None)
    before = world.loop.create_task(world.a.dial(listener.address, 1.0))
    await asyncio.sleep(0)
    world.a.crash()
    after = world.loop.create_task(world.a.dial(listener.address, 1.0))
    await world.sleep_until(100 * S)
    for task in (before, after):
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(LinkError):
        await world.a.listen(Address("a", 0), lambda _: None)


async def test_a_silent_crash_leaves_connections_half_open(world: World) -> None:
    a, b = await world.link(world.a, world.b)
    b.send(b"out of the door")
    b.send(bytes(10_000))
    await world.sleep_until(world.now + 100 * US)
    world.b.crash(silent=True)
    start = world.now
    a.send(b"hello?")
    with pytest.raises(LinkError, match="no answer in time"):
        await world.a.dial(Address("b", 7), 3.0)
    assert world.now == start + 3 * S
    assert not a.lost
    assert a.received == b"out of the door"
    world.network.host("b")
    assert not a.lost
    start = world.now
    a.send(b"x")
    await world.sleep_until(start + S)
    assert a.lost_ns == start + 2 * LATENCY + 1 * US


async def test_a_reset_takes_both_ends_at_once(world: World) -> None:
    a, b = await world.link(world.a, world.b)
    start = world.now
    a.send(bytes(100))
    a.send(bytes(100))
    await world.sleep_until(start + LATENCY + 150 * US)
    next(iter(world.network.ends)).reset()
    await world.sleep_until(start + S)
    assert {a.lost_ns, b.lost_ns} == {start + LATENCY + 150 * US, start + LATENCY + 150 * US + 1}
    assert len(b.received) == 100
    assert not world.network.ends


@pytest.mark.parametrize("which", ["pair", "one way", "connection"])
async def test_a_stall_holds_bytes_up_and_loses_none(world: World, which: str) -> None:
    a, b = await world.link(world.a, world.b)
    start = world.now
    match which:
        case "connection":
            a.connection.stall(100 * MS)
        case _:
            world.network.stall("a", "b", 100 * MS, one_way=which == "one way")
    a.send(bytes(10))
    b.send(bytes(20))
    await world.sleep_until(start + 50 * MS)
    a.send(bytes(30))
    a.connection.close()
    await world.sleep_until(start + S)
    # What waits is released at the end of the stall, and goes on one event an instant.
    end = start + 100 * MS
    assert [n for _, n in b.arrivals] == [10, 30]
    assert all(end < when < end + 10 for when, _ in b.arrivals)
    assert end < b.lost_ns < end + 10
    if which == "pair":
        assert not a.arrivals  # closed meanwhile
    else:
        assert a.arrivals == [(start + LATENCY + 20 * US, 20)]


async def test_a_partition_lasts_until_it_is_healed(world: World) -> None:
    a, b = await world.link(world.a, world.b)
    world.network.stall("a", "b", None)
    world.network.stall("a", "b", 1)
    a.connection.stall(None)
    a.send(b"hello")
    with pytest.raises(LinkError, match="no answer in time"):
        await world.a.dial(Address("b", 7), 10.0)
    world.b.crash()
    await world.sleep_until(100 * S)
    assert not b.arrivals
    assert not a.lost
    world.network.heal("a", "b")
    a.connection.heal()
    await world.sleep_until(101 * S)
    assert a.lost_ns < 100 * S + 10


def test_acknowledgements_are_held_up_too() -> None:
    async def main(world: World) -> None:
        a, b = await world.link(world.a, world.b)
        start = world.now
        world.network.stall("b", "a", 100 * MS, one_way=True)
        assert a.send(bytes(2000)) == 1000
        a.connection.notify_writable()
        await world.sleep_until(start + S)
        assert len(b.received) == 1000
        (when,) = a.writable_ns
        assert start + 100 * MS + LATENCY < when < start + 100 * MS + LATENCY + 10

    scenario(main, window_bytes=1000)


# -- chance ------------------------------------------------------------------------------------


def test_reads_and_writes_are_cut_and_merged() -> None:
    async def main(world: World) -> None:
        a, b = await world.link(world.a, world.b)
        takes = [a.send(bytes(500)) for _ in range(200)]
        await world.sleep_until(10 * S)
        assert sum(takes) == len(b.received)
        assert 20 < sum(taken < 500 for taken in takes) < 90
        sizes = [n for _, n in b.arrivals]
        assert min(sizes) < 50
        assert max(sizes) > 500
        assert len(set(sizes)) > 40

    scenario(main, ragged=True)


def chaos(seed: int) -> World:
    """Six hosts, everybody sends to everybody, faults of every kind."""
    world = World(seed, ragged=True, latency_ns=2 * MS, bytes_per_s=50_000_000, window_bytes=8192)
    network, rng = world.network, Random(f"plan {seed}")
    pairs: list[tuple[bytes, Log, Log]] = []

    async def talk(a: SimHost, b: SimHost) -> None:
        try:
            there, back = await world.link(a, b)
        except LinkError as error:
            world.trace.append(str(error))
            return
        for source, sink in ((there, back), (back, there)):
            data = rng.randbytes(rng.randrange(60_000))
            source.to_send = memoryview(data)
            source.pump()
            pairs.append((data, source, sink))

    def fault() -> None:
        names = sorted(network.hosts)
        x, y = rng.sample(names, 2)
        ends = list(network.ends)
        match rng.randrange(6):
            case 0:
                network.stall(x, y, rng.randrange(20 * MS), one_way=rng.random() < 0.5)
            case 1:
                network.set_link(x, y, latency_ns=rng.randrange(9 * MS), bytes_per_s=10_000_000)
            case 2 if ends:
                rng.choice(ends).reset()
            case 3 if ends:
                rng.choice(ends).stall(rng.randrange(10 * MS))
            case 4 if ends:
                rng.choice(ends).close()
            case _:
                if rng.random() < 0.3:
                    network.hosts[x].crash(silent=rng.random() < 0.5)
                    network.host(x)

    async def main() -> None:
        tasks = [
            world.loop.create_task(talk(network.hosts[x], network.hosts[y]))
            for x in sorted(network.hosts)
            for y in sorted(network.hosts)
        ]
        for _ in range(12):
            await world.sleep_until(world.now + rng.randrange(5 * MS))
            fault()
        await world.sleep_until(60 * S)
        for task in tasks:
            if not task.done():
                task.cancel()

    for name in "def":
        network.host(name)
    world.run_test(main())
    with pytest.raises(Deadlock):
        world.loop.run_forever()
    for data, source, sink in pairs:
        assert data[: source.sent].startswith(sink.received)
        assert len(source.lost) <= 1
        if source.connection in network.ends and sink.connection in network.ends:
            assert sink.received == data
    world.loop.close()
    return world


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_what_arrives_is_a_prefix(seed: int) -> None:
    world = chaos(seed)
    assert any("deliver" in line for line in world.trace)


def digest(seed: int) -> str:
    return hashlib.sha256("\n".join(chaos(seed).trace).encode()).hexdigest()


def test_a_seed_gives_one_trace_whatever_the_hash_seed() -> None:
    here = str(Path(__file__).resolve())
    root = str(ROOT)
    children: list[subprocess.Popen[str]] = []
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": root}
        children.append(
            subprocess.Popen(
                [sys.executable, here], stdout=subprocess.PIPE, text=True, env=environment
            )
        )
    results = {child.communicate(timeout=LIMIT_S)[0] for child in children}
    expected = f"{digest(3)} {digest(4)}\n"
    assert results == {expected}
    assert digest(3) != digest(4)


if __name__ == "__main__":
    sys.stdout.write(f"{digest(3)} {digest(4)}\n")


# -- what a connection knows of its path -------------------------------------------------------


def path_of(end: Log) -> PathMeasure:
    measure = end.connection.measure()
    assert measure is not None
    return measure


async def test_a_connection_knows_its_round_trip_and_how_long_it_was_busy(world: World) -> None:
    world.network.set_link("a", "b", latency_ns=3_000_000, bytes_per_s=900)
    one, _ = await world.link(world.a, world.b)
    assert (path_of(one).rtt_ns, path_of(one).busy_ns) == (6_000_000, 0)
    one.send(bytes(900))
    await world.sleep_until(world.now + S // 2)
    assert path_of(one).busy_ns == S // 2
    await world.sleep_until(world.now + 3 * S)
    assert (path_of(one).acked_bytes, path_of(one).busy_ns) == (900, S + 6_000_000)
    one.send(bytes(450))  # idle time does not count
    await world.sleep_until(world.now + S)
    assert (path_of(one).acked_bytes, path_of(one).busy_ns) == (1350, 3 * S // 2 + 12_000_000)
    one.connection.abort()
    assert one.connection.measure() is None


# -- address translators ---------------------------------------------------------------------------


async def met(world: World, there: Address) -> tuple[Address, Address]:
    """a and b dial each other: b the port 1 of a, and a what it takes for the port 2 of b.

    Returns what each sees of the other.
    """
    one = world.a.punch(Address("a", 1), there, 60.0, lambda host: True)
    other = world.b.punch(Address("b", 2), Address("a", 1), 60.0, lambda host: True)
    first, second = await asyncio.gather(one, other)
    logs = Log(world, first), Log(world, second)
    for log in logs:
        log.to_send = memoryview(b"hello")
        log.pump()
    await world.sleep_until(world.now + S)
    assert [bytes(log.received) for log in logs] == [b"hello"] * 2
    return first.remote, second.remote


@pytest.mark.parametrize("refuses", [True, False])
def test_two_that_dial_each_other_meet_behind_translators(world: World, refuses: bool) -> None:
    for name in "ab":
        world.network.addresses.translate(NatKind(refuses=refuses), name)

    async def main() -> None:
        assert await met(world, Address("b", 2)) == (Address("b", 2), Address("a", 1))

    world.run_test(main())


def test_who_dials_the_wrong_port_meets_nobody(world: World) -> None:

    async def main() -> None:
        with pytest.raises(LinkError, match="no answer in time"):
            await met(world, Address("b", 3))

    world.run_test(main())


def test_a_translator_that_changes_ports_keeps_two_apart(world: World) -> None:
    world.network.addresses.translate(SYMMETRIC, "b")
    seen_by_c = world.network.addresses.seen(Address("b", 2), Address("c", 80))
    assert seen_by_c != Address("b", 2)

    async def main() -> None:
        with pytest.raises(LinkError, match="no answer in time"):
            await met(world, seen_by_c)

    world.run_test(main())


def test_hosts_of_one_network_reach_each_other_inside(world: World) -> None:
    for name in "ab":
        world.network.addresses.translate(NatKind(refuses=True), name)
    world.network.addresses.local = {"a": 1, "b": 1}
    (inside,) = world.b.hosts(Address("::", 0))
    assert world.c.hosts(Address("::", 0)) == ()

    async def main() -> None:
        listener = await world.b.listen(Address("b", 0), lambda connection: connection.close())
        there = listener.address
        connection = await world.a.dial(there, 1.0, hosts=(inside,))
        assert connection.remote == Address(inside, there.port)
        with pytest.raises(LinkError, match="connection refused"):
            await world.c.dial(there, 1.0, hosts=(inside,))
        with pytest.raises(LinkError, match="connection refused"):
            await world.a.dial(there, 1.0)

    world.run_test(main())


def test_two_behind_one_translator_meet_if_it_hairpins(world: World) -> None:
    world.network.addresses.translate(NatKind(hairpins=True), "a", "b", outside="home")

    async def main() -> None:
        addresses = [Address("home", port) for port in (1, 2)]
        one = world.a.punch(Address("a", 1), addresses[1], 9.0, lambda host: True)
        other = world.b.punch(Address("b", 2), addresses[0], 9.0, lambda host: True)
        met = await asyncio.gather(one, other)
        assert [connection.remote for connection in met] == addresses[::-1]

    world.run_test(main())


def test_two_behind_one_translator_that_does_not_hairpin_meet_not(world: World) -> None:
    world.network.addresses.translate(NatKind(), "a", "b", outside="home")

    async def main() -> None:
        one = world.a.punch(Address("a", 1), Address("home", 2), 9.0, lambda host: True)
        other = world.b.punch(Address("b", 2), Address("home", 1), 9.0, lambda host: True)
        for met in await asyncio.gather(one, other, return_exceptions=True):
            assert isinstance(met, LinkError)

    world.run_test(main())


def test_what_a_firewall_does_not_let_out(world: World) -> None:
    world.network.addresses.translate(NatKind(ports=(443,), refuses=True), "a")

    async def main() -> None:
        for port in (443, 444):
            await world.b.listen(Address("b", port), lambda connection: connection.close())
        connection = await world.a.dial(Address("b", 443), 1.0)
        assert connection.remote == Address("b", 443)
        with pytest.raises(LinkError, match="connection refused"):
            await world.a.dial(Address("b", 444), 1.0)

    world.run_test(main())


def test_hosts_with_different_versions_of_ip(world: World) -> None:
    world.network.addresses.versions = {"a": 4, "b": 6}

    async def main() -> None:
        listener = await world.b.listen(Address("b", 0), lambda connection: connection.close())
        with pytest.raises(LinkError, match="network is unreachable"):
            await world.a.dial(listener.address, 1.0)
        await world.c.dial(listener.address, 1.0)

    world.run_test(main())
