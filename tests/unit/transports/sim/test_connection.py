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
