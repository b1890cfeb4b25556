"""One end of a connection in memory: what it hears while it reads nothing."""

from __future__ import annotations

import pytest

from tests.unit.transports.sim.test_network import LATENCY, Log, S, World, scenario


def lose(how: str, there: Log, here: Log) -> None:
    """End a connection, so that the end ``here`` loses it."""
    match how:
        case "reset":
            there.connection.reset()
        case "abort":
            there.connection.abort()
        case "close":
            there.connection.close()
        case _:
            here.connection.forget()


@pytest.mark.parametrize("how", ["reset", "abort", "close", "forget"])
def test_a_loss_is_told_only_when_the_process_reads_again(how: str) -> None:
    async def main(world: World) -> None:
        a, b = await world.link(world.a, world.b)
        b.connection.pause_reading()
        lose(how, a, b)
        await world.sleep_until(world.now + S)
        assert b.lost == []
        resumed_ns = world.now
        b.connection.resume_reading()
        await world.sleep_until(resumed_ns + S)
        assert resumed_ns <= b.lost_ns < resumed_ns + LATENCY
        a.connection.abort()
        await world.sleep_until(world.now + S)
        assert len(a.lost) == len(b.lost) == 1
        assert not world.network.ends

    scenario(main)


def test_what_was_sent_before_a_close_is_read_before_the_loss_is_told() -> None:
    async def main(world: World) -> None:
        a, b = await world.link(world.a, world.b)
        b.connection.pause_reading()
        a.send(b"the last words")
        a.connection.close()
        await world.sleep_until(world.now + S)
        assert b.received == b""
        assert b.lost == []
        b.connection.resume_reading()
        await world.sleep_until(world.now + S)
        ((read_ns, _),) = b.arrivals
        assert b.received == b"the last words"
        assert read_ns <= b.lost_ns

    scenario(main)


def test_a_process_that_aborts_what_it_has_lost_unread_hears_of_its_own_end_alone() -> None:
    async def main(world: World) -> None:
        a, b = await world.link(world.a, world.b)
        b.connection.pause_reading()
        a.connection.reset()
        await world.sleep_until(world.now + S)
        b.connection.abort()
        b.connection.resume_reading()
        await world.sleep_until(world.now + S)
        assert [error for _, error in b.lost] == [None]

    scenario(main)


# -- a route that loses large segments -----------------------------------------------------------


@pytest.mark.parametrize("segment_bytes", [0, 1200])
def test_nothing_arrives_after_a_segment_that_is_too_large(segment_bytes: int) -> None:
    """A connection with smaller segments passes; the other direction does, too."""

    async def main(world: World) -> None:
        a, b = await world.link(world.a, world.b, segment_bytes=segment_bytes)
        world.network.route("a", "b").largest_bytes = 1200
        stuck: list[object] = []
        world.network.wires.on_stuck = stuck.append
        a.send(bytes(1200))
        await world.sleep_until(world.now + S)
        a.send(bytes(1201))
        b.send(bytes(5000))
        await world.sleep_until(world.now + S)
        a.send(b"a small one")
        a.connection.close()
        await world.sleep_until(world.now + S)
        assert len(a.received) == 5000
        assert len(b.received) == (2412 if segment_bytes else 1200)
        assert stuck == ([] if segment_bytes else [a.connection])
        assert len(b.lost) == (1 if segment_bytes else 0)

    scenario(main)


def test_what_a_kernel_knows_of_a_lost_segment() -> None:
    async def main(world: World) -> None:
        a, b = await world.link(world.a, world.b)
        a.send(bytes(700))
        a.send(bytes(700))
        await world.sleep_until(world.now + S)
        known = a.connection.measure()
        assert known is not None
        assert (known.acked_bytes, known.unacknowledged, known.retransmits) == (1400, 0, 0)
        world.network.route("a", "b").largest_bytes = 1200
        a.send(bytes(700))
        a.send(bytes(701))  # at the same instant: one segment
        await world.sleep_until(world.now + S)
        known, there = a.connection.measure(), b.connection.measure()
        assert known is not None
        assert there is not None
        assert (known.acked_bytes, known.unacknowledged) == (2100, 1)
        assert known.retransmits == 2
        assert there.arrived_bytes == 2100
        a.send(b"a ping")
        await world.sleep_until(world.now + S // 2)
        later = a.connection.measure()
        assert later is not None
        assert (later.acked_bytes, later.unacknowledged) == (2100, 1)
        assert later.ack_ago_ms < 500 < known.ack_ago_ms, "it asks for the lost one again"

    scenario(main)
