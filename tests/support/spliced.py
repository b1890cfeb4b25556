"""A relay between processes, in virtual time or over TCP: what its tests begin with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from pccl.protocol.errors import LinkError
from pccl.protocol.types import PeerId
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, Connection
from pccl.transports.relay import INTRODUCTION_BYTES, RelayedConnection, SplicedEnd, behind
from pccl.transports.sim.connection import SimConnection
from pccl.transports.sim.network import SimNetwork
from pccl.transports.tcp import TcpTransport
from tests.support.patience import LIMIT_S

MS, S = 1_000_000, 1_000_000_000
LATENCY = 3 * MS
WINDOW = 64 << 10
KIB = 1 << 10
ONE, OTHER, RELAY = PeerId(3), PeerId(5), PeerId(7)
ENDLESS = bytes(64 << 20)
"""More than a kernel and a relay take for somebody that does not read."""


class Side:
    """A process behind the relay: it sends and reads in portions of random sizes."""

    def __init__(self, connection: Connection, rng: Random) -> None:
        self.connection = connection
        self.introduction = bytearray()
        """The first bytes, which are the relay's own."""
        self.received = bytearray()
        self.sent = 0
        self.lost: list[Exception | None] = []
        self.on_event: Callable[[], None] = lambda: None
        self._rng = rng
        self._unsent = memoryview(b"")
        self._memory = memoryview(b"")
        connection.start(self)

    def get_buffer(self) -> memoryview:
        self._memory = memoryview(bytearray(self._rng.randint(1, 100 * KIB)))
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        assert not self.lost
        missing = INTRODUCTION_BYTES - len(self.introduction)
        self.introduction += self._memory[: min(nbytes, missing)]
        self.received += self._memory[min(nbytes, missing) : nbytes]
        self.on_event()

    def writable(self) -> None:
        assert not self.lost
        self._pump()
        self.on_event()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)
        self.on_event()

    def send(self, data: bytes) -> None:
        self._unsent = memoryview(data)
        self._pump()

    def _pump(self) -> None:
        while self._unsent:
            size = self._rng.randint(1, len(self._unsent))
            taken = self.connection.send([self._unsent[:size]])
            self._unsent = self._unsent[taken:]
            self.sent += taken
            if taken < size:
                self.connection.notify_writable()
                return


class Dialled:
    """The connection of a peer to a relay in virtual time, as the peer sees it."""

    def __init__(self, connection: Connection) -> None:
        assert isinstance(connection, SimConnection)
        self.connection = connection
        self.introduction = bytearray()
        self.received = bytearray()
        self.losses = 0
        self._memory = memoryview(bytearray(1000))
        connection.start(self)

    def get_buffer(self) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        missing = INTRODUCTION_BYTES - len(self.introduction)
        self.introduction += self._memory[: min(nbytes, missing)]
        self.received += self._memory[min(nbytes, missing) : nbytes]

    def writable(self) -> None:
        pass

    def connection_lost(self, error: Exception | None) -> None:
        self.losses += 1

    @property
    def is_open(self) -> bool:
        assert self.losses <= 1
        return not self.losses

    def send(self, data: bytes) -> None:
        assert self.connection.send([data]) == len(data)


class Counted:
    """A connection of the relay; counts what the network accepts behind the introduction."""

    def __init__(self, inner: Connection) -> None:
        self.inner = inner
        self.accepted = -INTRODUCTION_BYTES
        self.remote, self.local, self.congestion = inner.remote, inner.local, inner.congestion
        self.start, self.measure = inner.start, inner.measure
        self.pause_reading, self.resume_reading = inner.pause_reading, inner.resume_reading
        self.notify_writable = inner.notify_writable
        self.close, self.abort = inner.close, inner.abort

    def send(self, buffers: Any) -> int:
        taken = self.inner.send(buffers)
        self.accepted += taken
        return taken


class World:
    """A relay, and the processes that dial it, in virtual time."""

    def __init__(self, seed: int = 0, window_bytes: int = WINDOW) -> None:
        self.rng = Random(seed)
        self.loop = VirtualLoop(limit_ns=600 * S)
        self.network = SimNetwork(
            self.loop, Random(seed), latency_ns=LATENCY, window_bytes=window_bytes
        )
        self.relay = self.network.host("relay")
        self.arrived: list[Connection] = []
        self.ends: list[SplicedEnd] = []
        """All ends that the relay ever had, oldest first."""
        self.ended: list[SplicedEnd] = []
        self.counted: dict[SplicedEnd, Counted] = {}

    def run_test(self, main: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(main)

    async def dial(self, name: str) -> tuple[Side, SplicedEnd]:
        """A process on a new host, and the relay's end of its connection."""
        listener = await self.relay.listen(Address("relay", 0), self.arrived.append)
        connection = await self.network.host(name).dial(listener.address, 60.0)
        listener.close()
        counted = Counted(self.arrived.pop())
        end = SplicedEnd(counted, self.ended.append)
        self.ends.append(end)
        self.counted[end] = counted
        return Side(connection, self.rng), end

    async def pair(self, one: str = "a", other: str = "b") -> tuple[Side, Side]:
        """Two processes whose connections the relay has joined."""
        first, end = await self.dial(one)
        second, other_end = await self.dial(other)
        end.join(other_end)
        return first, second

    async def settle(self) -> None:
        """Let everything arrive that is on its way."""
        await asyncio.sleep(5.0)


def lost_once(side: Side) -> bool:
    """Whether the network has told a side, once, that its connection has ended."""
    return [type(error) for error in side.lost] == [LinkError]


class TcpWorld:
    """A relay and two processes behind it, on one real loop."""

    def __init__(self) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self.transport = TcpTransport(self.loop)
        self.sides: list[Side] = []
        self.ends: list[SplicedEnd] = []
        self.ended: list[SplicedEnd] = []
        self._event = asyncio.Event()

    def run_test(self, main: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(asyncio.wait_for(self._to_the_end(main), LIMIT_S))

    async def _to_the_end(self, main: Coroutine[Any, Any, None]) -> None:
        await main
        for side in self.sides:
            side.connection.abort()
        await self.until(lambda: len(self.ended) == len(self.ends))

    async def dial(self, other: PeerId, take: Callable[[Connection], None]) -> Side:
        """A process that wants to reach another one; the relay takes its connection."""
        arrived: list[Connection] = []

        def accept(connection: Connection) -> None:
            arrived.append(connection)
            take(connection)
            self._event.set()

        listener = await self.transport.listen(Address("127.0.0.1", 0), accept)
        dialled = await self.transport.dial(listener.address, LIMIT_S)
        side = Side(RelayedConnection(dialled, behind(other, RELAY)), Random(other))
        side.on_event = self._event.set
        self.sides.append(side)
        await self.until(lambda: bool(arrived))
        listener.close()
        return side

    async def pair(self) -> tuple[Side, Side]:
        """Two processes whose connections the relay has joined."""

        def take(connection: Connection) -> None:
            self.ends.append(SplicedEnd(connection, self._on_ended))

        first, second = await self.dial(OTHER, take), await self.dial(ONE, take)
        self.ends[1].join(self.ends[0])
        return first, second

    async def fill(self) -> None:
        """Let all processes send, and none of them read, until nothing moves any more."""
        for side in self.sides:
            side.connection.pause_reading()
            side.send(ENDLESS)
        before, quiet = -1, 0
        while quiet < 10:
            await asyncio.sleep(0.005)
            sent = sum(side.sent for side in self.sides)
            before, quiet = sent, quiet + 1 if sent == before else 0
        assert all(side.sent < len(ENDLESS) for side in self.sides)

    def _on_ended(self, end: SplicedEnd) -> None:
        self.ended.append(end)
        self._event.set()

    async def until(self, happened: Callable[[], bool], every_s: float | None = None) -> None:
        """Wait for something that a side or an end hears of, or else look for it so often."""
        while not happened():
            self._event.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), every_s)
