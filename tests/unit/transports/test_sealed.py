"""Encrypted connections when data was changed on the way: nobody sees a byte of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from random import Random
from typing import Any, cast

import pytest

from pccl.protocol.checksum import DamagedData
from pccl.protocol.handshake.records import LENGTH_BYTES, RECORD_BYTES_MAX, TAG_BYTES, RecordKeys
from pccl.protocol.limits import LINGER_S
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, Connection
from pccl.transports.sealed import DamagedThere, SealedConnection
from pccl.transports.sim.connection import SimConnection
from pccl.transports.sim.network import SimNetwork
from tests.support.sealing import ACCEPTORS, DIALLERS


class Reader:
    """Keeps all that a connection delivers, in memory that it can look at later."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.memory = bytearray(b"untouched" * 1000)
        self.count = 0
        self.lost: list[Exception | None] = []
        connection.start(self)

    @property
    def received(self) -> bytes:
        return bytes(self.memory[: self.count])

    def get_buffer(self) -> memoryview:
        return memoryview(self.memory)[self.count :]

    def buffer_updated(self, nbytes: int) -> None:
        self.count += nbytes

    def writable(self) -> None:
        pass

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)


class Meddler:
    """Stands between the two: it may change what arrives at the acceptor, piece by piece."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.flips: set[int] = set()
        """Places of bytes, counted from the first, in which a bit is flipped."""

    def changed(self, end: SimConnection, data: memoryview) -> memoryview:
        if end.local.host != "acceptor":
            return data
        start = len(self.seen)
        self.seen += data
        changed = bytearray(data)
        for place in self.flips:
            if start <= place < start + len(data):
                changed[place - start] ^= 0x10
        return memoryview(changed)


class World:
    """Two ends of an encrypted connection, and who stands between them."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(limit_ns=60 * 10**9)
        self.network = SimNetwork(self.loop, Random(1), ragged=False)
        self.meddler = Meddler()
        self.network.noises.append(self.meddler)
        self.inner: Connection
        """The connection below that of ``a``."""
        self.a: Reader
        self.b: Reader

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        try:
            self.loop.run_until_complete(self._meet(main))
        finally:
            self.loop.close()

    async def _meet(self, main: Coroutine[Any, Any, None]) -> None:
        accepted: asyncio.Future[Connection] = self.loop.create_future()
        host = self.network.host("acceptor")
        listener = await host.listen(Address("acceptor", 0), accepted.set_result)
        dialled = await self.network.host("dialler").dial(listener.address, 1.0)
        clock = cast("Any", self.loop)
        self.inner = dialled
        self.a = Reader(
            SealedConnection(dialled, RecordKeys(DIALLERS, ACCEPTORS, has_aes=True), clock)
        )
        self.b = Reader(
            SealedConnection(await accepted, RecordKeys(ACCEPTORS, DIALLERS, has_aes=True), clock)
        )
        await main
        listener.close()


RECORD = LENGTH_BYTES + 5 + TAG_BYTES


@pytest.mark.parametrize("place", range(RECORD))
def test_a_changed_byte_ends_both_sides_and_nobody_sees_it(place: int) -> None:
    world = World()

    async def main() -> None:
        world.a.connection.send([b"first"])
        world.meddler.flips = {RECORD + place}
        world.a.connection.send([b"again"])
        world.a.connection.send([b"x" * 5000])  # a length that was changed makes it wait for more
        await asyncio.sleep(LINGER_S)
        assert world.b.received == b"first"
        assert bytes(world.b.memory[5:50]) == (b"untouched" * 6)[5:50]
        (here,), (there,) = world.b.lost, world.a.lost
        assert isinstance(here, DamagedData)
        assert isinstance(there, DamagedThere)

    world.run(main())


def test_an_intact_record_behind_a_damaged_one_is_not_delivered() -> None:
    world = World()

    async def main() -> None:
        world.meddler.flips = {LENGTH_BYTES}
        for word in (b"wrong", b"right"):
            world.a.connection.send([word])
        await asyncio.sleep(1.0)
        assert world.b.received == b""
        assert [type(error) for error in world.b.lost] == [DamagedData]

    world.run(main())


def test_nothing_of_what_is_sent_is_on_the_wire() -> None:
    world = World()
    words = b"a tensor of weights " * 2000

    async def main() -> None:
        rest = memoryview(words)
        world.b.memory = bytearray(len(words) + 1)
        while rest:
            rest = rest[world.a.connection.send([rest[:10], rest[10:]]) :]
            await asyncio.sleep(0.01)
        assert world.b.received == words
        assert b"tensor" not in world.meddler.seen
        assert len(world.meddler.seen) > len(words)

    world.run(main())


def test_a_length_beyond_the_limit_is_refused_before_there_is_memory_for_it() -> None:
    world = World()

    async def main() -> None:
        world.inner.send([(RECORD_BYTES_MAX + 1).to_bytes(4, "little")])
        await asyncio.sleep(0.1)
        assert isinstance(world.b.lost[0], DamagedData)

    world.run(main())


def test_only_the_other_side_can_say_that_data_was_damaged() -> None:
    world = World()

    async def main() -> None:
        world.inner.send([bytes(LENGTH_BYTES + TAG_BYTES)])
        await asyncio.sleep(0.1)
        assert type(world.b.lost[0]) is DamagedData, "no alert, but a record that does not open"

    world.run(main())


@pytest.mark.parametrize(
    "sizes",
    [
        (60, 256 << 10),
        (60, 256 << 10, 60, 256 << 10, 60, 10),
        (32 << 10, 60, (32 << 10) - 1),
        (RECORD_BYTES_MAX + 1, 0, 3 * RECORD_BYTES_MAX),
        (16 << 10, 1, 256 << 10),
        tuple([20 << 10] * 40),
    ],
)
def test_short_and_long_parts_arrive_in_order(sizes: tuple[int, ...]) -> None:
    world = World()
    numbers = itertools.count()
    parts = [bytes(next(numbers) % 251 for _ in range(size)) for size in sizes]
    rest = [memoryview(part) for part in parts]

    async def main() -> None:
        world.b.memory = bytearray(sum(sizes) + 1)
        while rest:
            taken = world.a.connection.send(rest)
            while rest and taken >= len(rest[0]):
                taken -= len(rest.pop(0))
            if taken:
                rest[0] = rest[0][taken:]
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert world.b.received == b"".join(parts)

    world.run(main())
