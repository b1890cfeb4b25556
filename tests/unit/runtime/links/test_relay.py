"""What a relay does with the connections of two peers: one waits, and both are joined."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest

from pccl.protocol.limits import RELAYED_PAIRS_MAX, RELAYED_WAIT_MAX
from pccl.protocol.types import NOBODY, PeerId
from pccl.runtime.clock import LoopClock
from pccl.runtime.links.relay import Relay
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, Connection
from pccl.transports.relay import decode_introduction
from pccl.transports.sim.network import SimNetwork
from tests.support.spliced import KIB, Dialled, TcpWorld

MS, S = 1_000_000, 1_000_000_000
LATENCY = 1 * MS
WINDOW = 16 * KIB
PATIENCE_S = 5.0
STALL_S = 2.0
SETTLED_S = 0.02
ONE, TWO, THREE, FOUR, FIVE = (PeerId(n) for n in range(1, 6))

ITSELF = "a relay connects two different peers"
TOO_MANY_PAIRS = "this relay is full: it forwards for too many others"
TOO_MANY_WAIT = "too many connections wait at this relay"


class World:
    """A relay in virtual time. All peers dial it from one host."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(limit_ns=600 * S)
        network = SimNetwork(
            self.loop, Random(0), latency_ns=LATENCY, window_bytes=WINDOW, ragged=False
        )
        self.relay = Relay(self.loop, round(PATIENCE_S * S), round(STALL_S * S))
        self._relay_host, self._peers = network.host("relay"), network.host("peers")
        self._arrived: list[Connection] = []

    def run_test(self, main: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(main)

    async def dial(self, source: PeerId, target: PeerId) -> Dialled:
        """A connection of ``source``, which wants to reach ``target``."""
        listener = await self._relay_host.listen(Address("relay", 0), self._arrived.append)
        dialled = await self._peers.dial(listener.address, 60.0)
        listener.close()
        self.relay.accept(self._arrived.pop(), source, target)
        return Dialled(dialled)

    async def pair(self, one: PeerId = ONE, other: PeerId = TWO) -> tuple[Dialled, Dialled]:
        return await self.dial(one, other), await self.dial(other, one)

    async def settle(self) -> None:
        await asyncio.sleep(SETTLED_S)

    async def flood(self, dialled: Dialled) -> None:
        """Send for a peer until nothing more fits."""
        while dialled.connection.send([bytes(WINDOW)]):
            await self.settle()

    async def are_joined(self, one: Dialled, other: Dialled) -> bool:
        """Whether what each of the two sends arrives at the other."""
        before = len(one.received), len(other.received)
        one.send(b"ping")
        other.send(b"answer")
        await self.settle()
        found = bytes(one.received[before[0] :]), bytes(other.received[before[1] :])
        return found == (b"answer", b"ping")


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.loop.close()


@pytest.fixture
def tcp() -> Iterator[TcpWorld]:
    made = TcpWorld()
    yield made
    made.loop.close()


# -- two connections -----------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(ONE, TWO), (TWO, ONE)])
async def test_the_first_connection_waits_for_the_second(
    world: World, first: PeerId, second: PeerId
) -> None:
    one = await world.dial(first, second)
    one.send(b"early")
    await world.settle()
    assert (world.relay.pairs, world.relay.carried_bytes) == (0, 0)
    other = await world.dial(second, first)
    await world.settle()
    assert (world.relay.pairs, world.relay.carried_bytes) == (1, len(b"early"))
    assert other.received == b"early"
    assert await world.are_joined(one, other)


async def test_only_connections_that_name_each_other_are_joined(world: World) -> None:
    waiting = [
        await world.dial(*way) for way in ((ONE, TWO), (ONE, THREE), (TWO, THREE), (THREE, FOUR))
    ]
    assert world.relay.pairs == 0
    one = waiting[1]
    other = await world.dial(THREE, ONE)
    assert world.relay.pairs == 1
    assert await world.are_joined(one, other)
    assert all(dialled.is_open for dialled in waiting)


async def test_two_peers_have_one_connection(world: World) -> None:
    elsewhere = await world.pair(ONE, THREE)
    older = await world.pair()
    older[0].send(b"of the older one")
    await world.settle()
    newer = await world.pair(TWO, ONE)
    await world.settle()
    assert not any(one.is_open for one in older)
    assert (world.relay.pairs, world.relay.carried_bytes) == (2, len(b"of the older one"))
    assert await world.are_joined(*newer)
    assert await world.are_joined(*elsewhere)
    newer[0].connection.close()
    await world.settle()
    assert (world.relay.pairs, newer[1].is_open) == (1, False)
    assert await world.are_joined(*await world.pair())


# -- patience ------------------------------------------------------------------------------------


async def test_a_connection_waits_only_so_long(world: World) -> None:
    one = await world.dial(ONE, TWO)
    await asyncio.sleep(PATIENCE_S - SETTLED_S)
    assert one.is_open
    await asyncio.sleep(2 * SETTLED_S)
    assert not one.is_open
    other = await world.dial(TWO, ONE)
    await world.settle()
    assert other.is_open, "it waits in its turn"
    assert world.relay.pairs == 0
    assert await world.are_joined(await world.dial(ONE, TWO), other)


async def test_joined_connections_need_no_patience(world: World) -> None:
    one, other = await world.pair()
    await asyncio.sleep(3 * PATIENCE_S)
    assert await world.are_joined(one, other)


async def test_who_comes_for_a_connection_that_was_lost_unread_has_to_come_again(
    world: World,
) -> None:
    one = await world.dial(ONE, TWO)
    one.connection.reset()
    await world.settle()
    assert not one.is_open
    other = await world.dial(TWO, ONE)
    await world.settle()
    assert not other.is_open
    assert world.relay.pairs == 0
    other = await world.dial(TWO, ONE)
    await asyncio.sleep(PATIENCE_S - SETTLED_S)
    assert other.is_open, "its time begins with itself"
    assert await world.are_joined(await world.dial(ONE, TWO), other)


# -- newer connections ---------------------------------------------------------------------------


async def test_a_newer_connection_replaces_an_older_one_that_waits(world: World) -> None:
    older = await world.dial(ONE, TWO)
    elsewhere = await world.dial(ONE, THREE)
    newer = await world.dial(ONE, TWO)
    await world.settle()
    assert [one.is_open for one in (older, elsewhere, newer)] == [False, True, True]
    other = await world.dial(TWO, ONE)
    assert await world.are_joined(newer, other)
    assert world.relay.pairs == 1


async def test_a_newer_connection_has_time_of_its_own(world: World) -> None:
    await world.dial(ONE, TWO)
    await asyncio.sleep(PATIENCE_S / 2)
    newer = await world.dial(ONE, TWO)
    await asyncio.sleep(PATIENCE_S - SETTLED_S)
    assert newer.is_open
    await asyncio.sleep(2 * SETTLED_S)
    assert not newer.is_open


async def test_one_newer_connection_alone_replaces_none_that_is_joined(world: World) -> None:
    one, other = await world.pair()
    newer = await world.dial(ONE, TWO)
    await world.settle()
    assert newer.is_open
    assert await world.are_joined(one, other)
    assert await world.are_joined(newer, await world.dial(TWO, ONE))
    assert not one.is_open
    assert not other.is_open


# -- limits --------------------------------------------------------------------------------------


async def test_no_peer_is_connected_to_itself(world: World) -> None:
    assert world.relay.refusal(ONE, ONE) == ITSELF
    assert world.relay.refusal(ONE, TWO) == ""
    one = await world.dial(ONE, ONE)
    await world.settle()
    assert not one.is_open


async def test_without_a_target_a_peer_learns_its_own_address(world: World) -> None:
    asked = await world.dial(ONE, NOBODY)
    await world.settle()
    assert decode_introduction(bytes(asked.introduction)) == asked.connection.local
    assert (asked.is_open, len(asked.received), world.relay.pairs) == (False, 0, 0)


async def test_few_connections_of_one_peer_wait(world: World) -> None:
    targets = [PeerId(100 + n) for n in range(RELAYED_WAIT_MAX)]
    waiting: list[Dialled] = []
    for target in targets:
        assert world.relay.refusal(ONE, target) == ""
        waiting.append(await world.dial(ONE, target))
    assert world.relay.refusal(ONE, TWO) == TOO_MANY_WAIT
    late = await world.dial(ONE, TWO)
    await world.settle()
    assert not late.is_open
    assert all(dialled.is_open for dialled in waiting)
    assert world.relay.refusal(TWO, ONE) == "", "another peer has its own share"
    assert world.relay.refusal(ONE, targets[3]) == "", "it replaces an older one"
    assert world.relay.refusal(targets[3], ONE) == "", "it is awaited"
    assert await world.are_joined(waiting[3], await world.dial(targets[3], ONE))
    assert world.relay.refusal(ONE, TWO) == "", "one less waits"


async def test_few_connections_of_all_peers_wait(world: World) -> None:
    ways = [
        (PeerId(100 + source), PeerId(200 + target)) for source in range(16) for target in range(16)
    ]
    waiting: list[Dialled] = []
    for way in ways:
        assert world.relay.refusal(*way) == ""
        waiting.append(await world.dial(*way))
    assert len(waiting) == 16 * RELAYED_WAIT_MAX
    assert world.relay.refusal(ONE, TWO) == TOO_MANY_WAIT
    source, target = ways[-1]
    assert world.relay.refusal(source, target) == "", "it replaces an older one"
    assert world.relay.refusal(target, source) == "", "it is awaited"
    assert await world.are_joined(await world.dial(target, source), waiting[-1])
    assert world.relay.refusal(ONE, TWO) == "", "one less waits"
    assert all(dialled.is_open for dialled in waiting)


async def test_few_pairs_are_forwarded(world: World) -> None:
    pairs: list[tuple[Dialled, Dialled]] = []
    for n in range(RELAYED_PAIRS_MAX):
        assert world.relay.refusal(PeerId(100 + n), PeerId(500 + n)) == ""
        pairs.append(await world.pair(PeerId(100 + n), PeerId(500 + n)))
    assert world.relay.pairs == RELAYED_PAIRS_MAX
    assert world.relay.refusal(ONE, TWO) == TOO_MANY_PAIRS
    assert world.relay.refusal(ONE, ONE) == ITSELF
    late = await world.dial(ONE, TWO)
    await world.settle()
    assert not late.is_open
    newer = await world.pair(PeerId(507), PeerId(107))
    assert await world.are_joined(*newer), "it replaces an older one"
    assert not any(one.is_open for one in pairs[7])
    assert world.relay.pairs == RELAYED_PAIRS_MAX
    assert await world.are_joined(*pairs[5])
    pairs[0][1].connection.close()
    await world.settle()
    assert world.relay.refusal(ONE, TWO) == ""
    assert await world.are_joined(*await world.pair())


async def test_however_many_are_awaited_few_pairs_are_forwarded(world: World) -> None:
    """Each of them was told before that the relay forwards for it."""
    before, more = 100, 200
    for n in range(before):
        await world.pair(PeerId(1000 + n), PeerId(2000 + n))
    ways = [(PeerId(100 + n), PeerId(500 + n)) for n in range(more)]
    waiting = [await world.dial(*way) for way in ways]
    assert [world.relay.refusal(target, source) for source, target in ways] == [""] * more
    late = [await world.dial(target, source) for source, target in ways]
    await world.settle()
    assert world.relay.pairs == RELAYED_PAIRS_MAX
    assert all(dialled.is_open for dialled in waiting)
    room = RELAYED_PAIRS_MAX - before
    assert [dialled.is_open for dialled in late] == [n < room for n in range(more)]
    source, target = ways[-1]
    assert world.relay.refusal(target, source) == TOO_MANY_PAIRS, "although it is awaited"
    waiting[0].connection.close()
    await world.settle()
    assert world.relay.refusal(target, source) == ""
    assert await world.are_joined(waiting[-1], await world.dial(target, source))
    assert world.relay.pairs == RELAYED_PAIRS_MAX


# -- peers that leave ----------------------------------------------------------------------------


async def test_of_a_peer_that_has_left_nothing_stays(world: World) -> None:
    pairs = [await world.pair(ONE, TWO), await world.pair(THREE, ONE), await world.pair(TWO, THREE)]
    waiting = [await world.dial(*way) for way in ((ONE, FOUR), (FOUR, TWO), (FIVE, ONE))]
    world.relay.forget(ONE)
    await world.settle()
    assert [one.is_open and other.is_open for one, other in pairs] == [False, False, True]
    assert not any(one.is_open for pair in pairs[:2] for one in pair)
    assert [dialled.is_open for dialled in waiting] == [False, True, False]
    assert world.relay.pairs == 1
    assert await world.are_joined(*pairs[2])
    assert await world.are_joined(waiting[1], await world.dial(TWO, FOUR))
    world.relay.forget(ONE)
    world.relay.forget(FIVE)
    assert world.relay.pairs == 2


async def test_what_was_carried_for_a_peer_that_has_left_counts(world: World) -> None:
    one, other = await world.pair()
    one.send(b"words")
    other.send(b"more words")
    await world.settle()
    world.relay.forget(TWO)
    await world.settle()
    assert (world.relay.pairs, world.relay.carried_bytes) == (0, 15)


# -- pairs that are stuck ------------------------------------------------------------------------


@pytest.mark.parametrize("since_join_s", [0.0, 0.5, 1.9])
async def test_a_pair_of_which_one_reads_no_more_ends_after_one_or_two_periods(
    world: World, since_join_s: float
) -> None:
    idle = await world.pair(THREE, FOUR)
    await asyncio.sleep(since_join_s)
    one, other = await world.pair()
    other.connection.pause_reading()
    empty_s = world.loop.time()
    await world.flood(one)
    full_s = world.loop.time()
    while one.is_open:
        await world.settle()
    assert empty_s + STALL_S <= world.loop.time() <= full_s + 2 * STALL_S + SETTLED_S
    assert world.relay.pairs == 1
    other.connection.resume_reading()
    await world.settle()
    assert not other.is_open
    assert await world.are_joined(*idle)


async def test_pairs_are_watched_again_after_a_time_without_any(world: World) -> None:
    one, other = await world.pair()
    one.connection.close()
    await asyncio.sleep(3 * STALL_S)
    assert (other.is_open, world.relay.pairs) == (False, 0)
    one, other = await world.pair()
    one.connection.pause_reading()
    await world.flood(other)
    await asyncio.sleep(2 * STALL_S)
    assert (other.is_open, world.relay.pairs) == (False, 0)


async def test_a_pair_of_which_one_reads_slowly_does_not_end(world: World) -> None:
    one, other = await world.pair()
    other.connection.pause_reading()
    await world.flood(one)
    for _ in range(8):
        before = len(other.received)
        other.connection.resume_reading()
        await asyncio.sleep(4 * LATENCY / S)
        other.connection.pause_reading()
        await world.flood(one)  # so that bytes wait all the time
        assert len(other.received) > before
        await asyncio.sleep(STALL_S * 0.7)
    assert one.is_open
    assert other.is_open
    await asyncio.sleep(2 * STALL_S)
    assert not one.is_open, "it reads no more"


async def test_a_pair_that_sends_nothing_does_not_end(world: World) -> None:
    silent = await world.pair()
    one, other = await world.pair(THREE, FOUR)
    one.send(b"all of this")
    await asyncio.sleep(10 * STALL_S)
    assert other.received == b"all of this"
    assert world.relay.pairs == 2
    assert await world.are_joined(*silent)
    assert await world.are_joined(one, other)


async def test_the_first_of_two_need_not_read_while_it_waits(world: World) -> None:
    one = await world.dial(ONE, TWO)
    await world.flood(one)
    await asyncio.sleep(2 * STALL_S)
    assert one.is_open
    other = await world.dial(TWO, ONE)
    await world.settle()
    assert len(other.received) == 2 * WINDOW
    assert await world.are_joined(one, other)


async def test_over_tcp_two_peers_that_have_gone_unread_are_noticed(tcp: TcpWorld) -> None:
    relay = Relay(LoopClock(tcp.loop), round(PATIENCE_S * S), 50 * MS)
    for source, target in ((ONE, TWO), (TWO, ONE)):
        await tcp.dial(target, partial(relay.accept, source=source, target=target))
    assert relay.pairs == 1
    await tcp.fill()
    for side in tcp.sides:
        side.connection.abort()
    await tcp.until(lambda: relay.pairs == 0, every_s=0.01)
    relay.close()


# -- bytes and the end ---------------------------------------------------------------------------


async def test_what_was_carried_counts_after_the_end_too(world: World) -> None:
    one, other = await world.pair()
    one.send(b"a hundred" * 100)
    other.send(b"thirty" * 5)
    await world.settle()
    assert world.relay.carried_bytes == 930
    one.send(b"!")
    one.connection.close()
    await world.settle()
    assert not other.is_open
    assert (world.relay.pairs, world.relay.carried_bytes) == (0, 931)
    third, fourth = await world.pair(THREE, FOUR)
    third.send(b"more")
    await world.settle()
    assert fourth.received == b"more"
    assert world.relay.carried_bytes == 935


async def test_a_relay_that_closes_ends_all_connections(world: World) -> None:
    pairs = [await world.pair(), await world.pair(THREE, FOUR)]
    waiting = [await world.dial(ONE, FOUR), await world.dial(THREE, TWO)]
    pairs[0][0].send(b"the last words")
    await world.settle()
    world.relay.close()
    await world.settle()
    assert not any(one.is_open for one in (*pairs[0], *pairs[1], *waiting))
    assert (world.relay.pairs, world.relay.carried_bytes) == (0, len(b"the last words"))
    assert pairs[0][1].received == b"the last words"
    world.relay.close()
    await asyncio.sleep(2 * PATIENCE_S)
