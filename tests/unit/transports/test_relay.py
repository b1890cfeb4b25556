"""Relays: they copy the bytes of two connections, and hold few of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.types import NOBODY
from pccl.runtime.control.greeting import leaves_machine
from pccl.transports.base import Address
from pccl.transports.relay import (
    SPLICE_BYTES,
    Introducer,
    RelayAddress,
    RelayedConnection,
    behind,
    decode_introduction,
    relay_of,
)
from pccl.transports.sim.connection import SimConnection
from tests.support.spliced import (
    KIB,
    LATENCY,
    MS,
    ONE,
    OTHER,
    RELAY,
    WINDOW,
    S,
    Side,
    TcpWorld,
    World,
    lost_once,
)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.loop.close()


# -- bytes ---------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([700, WINDOW, 4 * SPLICE_BYTES]),
    st.integers(0, 30 * KIB),
    st.integers(0, 30 * KIB),
)
def test_both_directions_arrive_unaltered_and_in_order(
    seed: int, window_bytes: int, there: int, back: int
) -> None:
    world = World(seed, window_bytes)

    async def main() -> None:
        a, b = await world.pair()
        data, answer = world.rng.randbytes(there), world.rng.randbytes(back)
        a.send(data)
        b.send(answer)
        await asyncio.sleep(60.0)
        assert (bytes(b.received), bytes(a.received)) == (data, answer)
        assert [end.carried_bytes for end in world.ends] == [there, back]
        assert a.lost == b.lost == []

    world.run_test(main())
    world.loop.close()


async def test_more_than_the_relay_may_hold_arrives_too(world: World) -> None:
    a, b = await world.pair()
    data, answer = (world.rng.randbytes(3 * SPLICE_BYTES + 1) for _ in range(2))
    a.send(data)
    b.send(answer)
    await world.settle()
    assert (bytes(b.received), bytes(a.received)) == (data, answer)


async def test_before_the_join_the_relay_reads_nothing(world: World) -> None:
    a, end = await world.dial("a")
    a.send(b"early words")
    await world.settle()
    assert a.sent == len(b"early words")
    assert end.carried_bytes == 0
    b, other = await world.dial("b")
    b.send(b"early answer")
    await world.settle()
    assert a.received == b.received == b""
    other.join(end)
    await world.settle()
    assert (bytes(b.received), bytes(a.received)) == (b"early words", b"early answer")
    assert (end.carried_bytes, other.carried_bytes) == (11, 12)


async def test_an_introducer_tells_the_other_side_its_address_and_ends(world: World) -> None:
    listener = await world.relay.listen(Address("relay", 0), world.arrived.append)
    connection = await world.network.host("a").dial(listener.address, 60.0)
    side = Side(connection, world.rng)
    Introducer(world.arrived[0])
    await world.settle()
    assert decode_introduction(bytes(side.introduction)) == connection.local
    assert side.received == b""
    assert lost_once(side)
    listener.close()


# -- back-pressure -------------------------------------------------------------------------------


async def test_a_reader_that_stops_delays_nobody_but_its_own_sender(world: World) -> None:
    a, b = await world.pair()
    c, d = await world.pair("c", "d")
    data, answer, others = (world.rng.randbytes(size * KIB) for size in (900, 300, 300))
    b.connection.pause_reading()
    a.send(data)
    b.send(answer)
    c.send(others)
    await world.settle()
    assert a.received == answer, "the other direction"
    assert d.received == others, "another pair"
    end, other, *_ = world.ends
    assert b.received == b""
    assert 0 < end.carried_bytes - world.counted[other].accepted <= SPLICE_BYTES
    # On each way the network holds a window on the way, and one that has arrived.
    assert a.sent <= 4 * WINDOW + SPLICE_BYTES < len(data)
    stopped_at = a.sent
    await world.settle()
    assert a.sent == stopped_at
    b.connection.resume_reading()
    await world.settle()
    assert b.received == data
    assert end.carried_bytes == len(data)


async def test_the_relay_never_holds_more_than_its_memory(world: World) -> None:
    a, b = await world.pair()
    end, other = world.ends
    held: list[int] = []
    b.on_event = lambda: held.append(end.carried_bytes - world.counted[other].accepted)
    # The reader's way is slower than the sender's.
    world.network.set_link("relay", "b", latency_ns=LATENCY, bytes_per_s=1_000_000)
    data = world.rng.randbytes(700 * KIB)
    a.send(data)
    await world.settle()
    assert b.received == data
    assert 0 < max(held) <= SPLICE_BYTES
    assert min(held) >= 0


# -- ends that are stuck -------------------------------------------------------------------------


async def test_an_end_is_stuck_if_nothing_was_taken_since_the_last_look(world: World) -> None:
    a, b = await world.pair()
    end, other = world.ends
    b.connection.pause_reading()
    a.send(world.rng.randbytes(900 * KIB))
    await world.settle()
    assert [end.is_stuck() for _ in range(3)] == [False, True, True]
    assert not any(other.is_stuck() for _ in range(3)), "nothing waits for the sender"
    b.connection.resume_reading()
    await asyncio.sleep(2 * LATENCY / S)
    b.connection.pause_reading()
    await world.settle()
    assert 0 < len(b.received) < 900 * KIB
    assert [end.is_stuck() for _ in range(3)] == [False, True, True], "it has taken some"
    b.connection.resume_reading()
    await world.settle()
    assert len(b.received) == 900 * KIB
    assert not any(end.is_stuck() for _ in range(3)), "nothing waits"


async def test_an_end_for_which_nothing_waits_is_never_stuck(world: World) -> None:
    _, waiting = await world.dial("c")
    assert not any(waiting.is_stuck() for _ in range(3)), "it is not even joined"
    a, b = await world.pair()
    for _ in range(3):
        assert not any(end.is_stuck() for end in world.ends)
    a.send(b"all of this")
    await world.settle()
    assert b.received == b"all of this"
    for _ in range(3):
        assert not any(end.is_stuck() for end in world.ends)


# -- ends ----------------------------------------------------------------------------------------


async def test_what_was_sent_before_a_close_arrives_and_then_the_other_side_ends(
    world: World,
) -> None:
    a, b = await world.pair()
    data = world.rng.randbytes(180 * KIB)
    b.connection.pause_reading()
    a.send(data)
    await world.settle()
    assert a.sent == len(data)
    a.connection.close()
    await world.settle()
    assert b.lost == []
    b.connection.resume_reading()
    await world.settle()
    assert b.received == data
    assert lost_once(b)
    assert a.lost == [None]
    assert world.ended == world.ends


async def test_what_the_relay_has_read_arrives_although_the_sender_was_lost(world: World) -> None:
    a, b = await world.pair()
    end, other = world.ends
    data = world.rng.randbytes(900 * KIB)
    b.connection.pause_reading()
    a.send(data)
    await world.settle()
    assert end.carried_bytes > world.counted[other].accepted
    assert isinstance(a.connection, SimConnection)
    a.connection.reset()
    await world.settle()
    assert lost_once(a)
    assert (world.ended, b.lost) == ([], []), "the relay reads nothing, and notices nothing"
    b.connection.resume_reading()
    await world.settle()
    assert bytes(b.received) == data[: end.carried_bytes]
    assert lost_once(b)
    assert world.ended == [end, other]


async def test_what_a_side_sends_to_one_that_has_ended_is_not_read(world: World) -> None:
    a, b = await world.pair()
    end, other = world.ends
    b.connection.pause_reading()
    a.send(world.rng.randbytes(900 * KIB))
    await world.settle()
    end.close()  # the relay itself ends it, while the other side reads nothing
    await world.settle()
    b.send(b"too late")
    await world.settle()
    assert world.ended == [end]
    assert other.carried_bytes == 0
    b.connection.resume_reading()
    await world.settle()
    assert lost_once(b)


async def test_an_abort_ends_the_other_side_too(world: World) -> None:
    a, b = await world.pair()
    data = world.rng.randbytes(40 * KIB)
    a.send(data)
    await asyncio.sleep(2.5 * LATENCY / S)  # some of it has arrived
    a.connection.abort()
    await world.settle()
    assert data.startswith(b.received)
    assert lost_once(b)
    assert world.ended == world.ends


async def test_the_relay_aborts_both_sides_and_what_waits(world: World) -> None:
    a, b = await world.pair()
    end, other = world.ends
    b.connection.pause_reading()
    a.send(world.rng.randbytes(900 * KIB))
    await world.settle()
    end.abort()
    end.abort()
    other.abort()
    await world.settle()
    assert world.ended == world.ends
    assert lost_once(a)
    b.connection.resume_reading()
    await world.settle()
    assert lost_once(b)
    assert len(b.received) < end.carried_bytes


async def test_an_end_that_waits_is_aborted_alone(world: World) -> None:
    a, end = await world.dial("a")
    b, _ = await world.dial("b")
    end.abort()
    await world.settle()
    assert world.ended == [end]
    assert lost_once(a)
    assert b.lost == []


async def test_the_relay_ends_both_sides(world: World) -> None:
    a, b = await world.pair()
    a.send(b"carried")
    await world.settle()
    world.ends[1].close()
    world.ends[1].close()
    await world.settle()
    assert b.received == b"carried"
    assert lost_once(a)
    assert lost_once(b)
    assert world.ended == world.ends[::-1]


async def test_an_end_that_waits_ends_alone(world: World) -> None:
    a, end = await world.dial("a")
    b, _ = await world.dial("b")
    end.close()
    await world.settle()
    assert world.ended == [end]
    assert lost_once(a)
    assert b.lost == []


async def test_a_side_that_closes_before_the_join_ends_the_other_one_after_it(
    world: World,
) -> None:
    a, end = await world.dial("a")
    a.send(b"I have to go")
    a.connection.close()
    await world.settle()
    b, other = await world.dial("b")
    other.join(end)
    await world.settle()
    assert b.received == b"I have to go"
    assert lost_once(b)
    assert world.ended == [end, other]


# -- over TCP ------------------------------------------------------------------------------------


@pytest.fixture
def tcp() -> Iterator[TcpWorld]:
    made = TcpWorld()
    yield made
    made.loop.close()


async def test_both_directions_over_tcp_and_then_the_end(tcp: TcpWorld) -> None:
    a, b = await tcp.pair()
    data, answer = Random(1).randbytes(3 << 20), Random(2).randbytes(2 << 20)
    a.send(data)
    b.send(answer)
    await tcp.until(lambda: (len(b.received), len(a.received)) == (len(data), len(answer)))
    assert (bytes(b.received), bytes(a.received)) == (data, answer)
    assert [end.carried_bytes for end in tcp.ends] == [len(data), len(answer)]
    a.connection.close()
    await tcp.until(lambda: bool(b.lost) and len(tcp.ended) == 2)
    assert a.lost == [None]
    assert lost_once(b)
    assert tcp.ended == tcp.ends


async def test_a_late_reader_over_tcp_gets_what_was_sent_before_a_close(tcp: TcpWorld) -> None:
    a, b = await tcp.pair()
    data = Random(3).randbytes(20 * KIB)  # so little that every kernel has room for it
    b.connection.pause_reading()
    a.send(data)
    await tcp.until(lambda: a.sent == len(data))
    a.connection.close()
    await tcp.until(lambda: tcp.ends[0] in tcp.ended)
    b.connection.resume_reading()
    await tcp.until(lambda: bool(b.lost))
    assert b.received == data
    assert lost_once(b)


async def test_over_tcp_only_a_look_finds_two_sides_that_have_gone_unread(tcp: TcpWorld) -> None:
    sides = await tcp.pair()
    await tcp.fill()
    for side in sides:
        side.connection.abort()
    await tcp.until(lambda: all(side.lost for side in sides))
    await asyncio.sleep(0.05)
    assert tcp.ended == [], "neither end is read, and neither notices that its side has gone"
    assert [[end.is_stuck() for end in tcp.ends] for _ in range(2)] == [[False] * 2, [True] * 2]
    tcp.ends[0].abort()
    await tcp.until(lambda: len(tcp.ended) == 2)
    assert tcp.ended == tcp.ends


# -- the connection as a side sees it --------------------------------------------------------------


def test_an_address_behind_a_relay_names_both() -> None:
    assert str(behind(ONE, RELAY)) == "peer 3 through peer 7"
    assert str(behind(ONE, NOBODY)) == "peer 3 through the master"
    assert behind(ONE, RELAY).relay == 7
    assert behind(ONE, RELAY) == RelayAddress("peer 3 through peer 7", 0, RELAY)
    assert behind(ONE, RELAY) != Address("peer 3 through peer 7", 0)


async def test_a_relayed_connection_looks_like_any_other(world: World) -> None:
    a, end = await world.dial("a")
    b, other = await world.dial("b")
    relayed = RelayedConnection(a.connection, behind(OTHER, RELAY))
    assert relayed.remote == behind(OTHER, RELAY)
    assert (relay_of(relayed), relay_of(a.connection)) == (RELAY, None)
    assert relay_of(RelayedConnection(a.connection, behind(OTHER, NOBODY))) == NOBODY
    assert relayed.local == a.connection.local
    assert repr(relayed).startswith("<peer 5 through peer 7: ")
    assert isinstance(a.connection, SimConnection)
    a.connection.congestion = "cubic"
    assert relayed.congestion == "cubic"
    other.join(end)
    assert relayed.send([b"through ", b"it"]) == 10
    await world.settle()
    assert b.received == b"through it"
    relayed.close()
    await world.settle()
    assert lost_once(b)


async def test_the_way_is_measured_with_twice_its_round_trip(world: World) -> None:
    a, _ = await world.dial("a")
    world.network.set_link("a", "relay", latency_ns=20 * MS, bytes_per_s=5_000_000)
    relayed = RelayedConnection(a.connection, behind(OTHER, RELAY))
    a.connection.send([bytes(5_000)])
    await world.settle()
    known = [
        (path.rtt_ns, path.acked_bytes)
        for end in (a.connection, relayed)
        if (path := end.measure())
    ]
    assert known == [(40 * MS, 5_000), (80 * MS, 5_000)]
    relayed.abort()
    assert relayed.measure() is None


async def test_a_process_behind_a_relay_is_never_on_this_machine(tcp: TcpWorld) -> None:
    a, _ = await tcp.pair()
    local, remote = a.connection.local, a.connection.remote
    assert local.host == "127.0.0.1"
    assert remote.host not in ("", "localhost", "::1", local.host)
    assert leaves_machine(a.connection), "what it carries is encrypted"
