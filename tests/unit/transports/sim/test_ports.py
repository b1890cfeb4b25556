"""The port of a host: one queue each way, for all its connections together."""

from __future__ import annotations

from pccl.transports.sim.network import SimHost
from tests.unit.transports.sim.test_network import LATENCY, MS, Log, S, World, scenario

RATE = 125_000
"""1 Mbit/s."""


def fill(log: Log, nbytes: int) -> None:
    log.to_send = memoryview(bytes(nbytes))
    log.pump()


def took_s(began_ns: int, log: Log) -> float:
    return (log.arrivals[-1][0] - began_ns) / S


def port(world: World, host: SimHost, up: int | None, down: int | None, buffer_bytes: int) -> None:
    world.network.set_port(host.name, up=up, down=down, buffer_bytes=buffer_bytes)


def test_a_message_waits_behind_data_to_another_host() -> None:
    async def main(world: World) -> None:
        control, master = await world.link(world.a, world.b)
        data, sink = await world.link(world.a, world.c)
        port(world, world.a, RATE, None, 1 << 20)
        began_ns = world.now
        fill(data, RATE)
        control.send(b"beat")
        await world.sleep_until(world.now + 3 * S)
        assert len(sink.received) == RATE
        assert 0.9 < took_s(began_ns, sink) < 1.1
        assert 0.9 < took_s(began_ns, master) < 1.1, "all the data was before it"

    scenario(main)


def test_a_message_to_the_host_waits_behind_what_others_send_to_it() -> None:
    async def main(world: World) -> None:
        data, sink = await world.link(world.c, world.a)
        control, peer = await world.link(world.b, world.a)
        port(world, world.a, None, RATE, 1 << 20)
        began_ns = world.now
        fill(data, RATE)
        await world.sleep_until(world.now + S // 2)
        control.send(b"beat")
        await world.sleep_until(world.now + 3 * S)
        assert took_s(began_ns, peer) > 0.9
        assert len(sink.received) == RATE

    scenario(main)


def test_what_exceeds_the_queue_waits_at_the_senders_that_take_turns() -> None:
    async def main(world: World) -> None:
        control, master = await world.link(world.a, world.b)
        data, sink = await world.link(world.a, world.c)
        port(world, world.a, RATE, None, RATE // 4)
        began_ns = world.now
        fill(data, 2 * RATE)
        await world.sleep_until(world.now + S // 10)
        control.send(b"beat")
        await world.sleep_until(world.now + 4 * S)
        assert 0.2 < took_s(began_ns, master) < 0.5, "no more than the queue was before it"
        assert took_s(began_ns, sink) > 1.9

    scenario(main)


def test_a_dial_waits_in_the_queue_and_so_do_acknowledgements() -> None:
    async def main(world: World) -> None:
        data, _ = await world.link(world.a, world.c)
        back, _ = await world.link(world.c, world.a)
        port(world, world.a, RATE, None, 1 << 20)
        began_ns = world.now
        fill(data, RATE)
        back.send(b"to be acknowledged")
        path = back.connection.measure()
        assert path is not None
        assert path.unacknowledged == 1
        await world.link(world.b, world.a)
        assert world.now - began_ns > 0.9 * S, "the answer waited"
        path = back.connection.measure()
        assert path is not None
        assert path.unacknowledged == 0

    scenario(main)


def test_a_kernel_takes_no_more_than_its_low_water_mark_beyond_what_is_on_the_way() -> None:
    async def main(world: World) -> None:
        data, _ = await world.link(world.a, world.c)
        port(world, world.a, RATE, None, 16 << 10)
        assert data.send(bytes(2 << 20)) <= (512 << 10) + (64 << 10)
        data.connection.notify_writable()
        began_ns = world.now
        await world.sleep_until(began_ns + 10 * S)
        (writable_ns,) = data.writable_ns
        assert writable_ns - began_ns > S, "half of it must have left"

    scenario(main, window_bytes=4 << 20)


def test_the_end_comes_after_the_data_and_a_reset_overtakes_what_has_not_left() -> None:
    async def main(world: World) -> None:
        closed, there = await world.link(world.a, world.b)
        port(world, world.a, RATE, None, 16 << 10)
        fill(closed, RATE)
        closed.connection.close()
        await world.sleep_until(world.now + 3 * S)
        assert len(there.received) == RATE
        assert there.lost_ns > there.arrivals[-1][0]
        aborted, there = await world.link(world.a, world.b, port=7)
        fill(aborted, RATE)
        aborted.connection.abort()
        await world.sleep_until(world.now + 3 * S)
        assert len(there.received) < RATE
        assert there.lost

    scenario(main)


def test_a_host_that_is_switched_off_sends_only_what_has_left_it() -> None:
    async def main(world: World) -> None:
        data, sink = await world.link(world.a, world.c)
        port(world, world.a, RATE, None, RATE // 4)
        fill(data, RATE)
        world.a.crash(silent=True)
        await world.sleep_until(world.now + 3 * S)
        assert 0 < len(sink.received) <= RATE // 4 + 4096

    scenario(main)


def test_a_host_without_a_port_is_as_before() -> None:
    def arrivals(*, with_port: bool) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []

        async def main(world: World) -> None:
            if with_port:
                port(world, world.b, RATE, RATE, 1 << 20)
            data, sink = await world.link(world.a, world.c)
            fill(data, 100_000)
            await world.sleep_until(world.now + S)
            found.extend(sink.arrivals)

        scenario(main, ragged=True)
        return found

    assert arrivals(with_port=True) == arrivals(with_port=False)
    assert arrivals(with_port=False)[0][0] >= 3 * LATENCY > 3 * MS
