"""An upload limit over TCP, by a clock that the test turns on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pccl.transports.base import Address, Connection
from pccl.transports.pacing.transport import PacedTransport
from pccl.transports.tcp import TcpTransport
from tests.support.patience import LIMIT_S

RATE = 1_000_000
MS = 1_000_000
LOOPBACK = Address("127.0.0.1", 0)


class HandClock:
    """A clock that goes on only when the test says so."""

    def __init__(self) -> None:
        self.time_ns = 0
        self._timers: list[tuple[int, Callable[[], None]]] = []
        self._armed = asyncio.Event()

    def now_ns(self) -> int:
        return self.time_ns

    def call_at_ns(self, when_ns: int, callback: Callable[..., None], *args: object) -> None:
        self._timers.append((when_ns, lambda: callback(*args)))
        self._armed.set()

    async def next_timer(self) -> None:
        """Go on to the next timer, once there is one."""
        self._armed.clear()
        if not self._timers:
            await asyncio.wait_for(self._armed.wait(), LIMIT_S)
        timer = min(self._timers, key=lambda timer: timer[0])
        self._timers.remove(timer)
        self.time_ns = max(self.time_ns, timer[0])
        timer[1]()


class End:
    """Sends so much whenever it may; counts what it sends and receives."""

    def __init__(self, connection: Connection, to_send: int = 0) -> None:
        self.connection = connection
        self.to_send = to_send
        self.sent = self.received = 0
        self.lost = asyncio.get_running_loop().create_future()
        self.changed = asyncio.Event()
        self._memory = memoryview(bytearray(64 << 10))
        connection.start(self)
        self.writable()

    def writable(self) -> None:
        while missing := self._memory[: self.to_send - self.sent]:
            taken = self.connection.send([missing])
            self.sent += taken
            if taken < len(missing):
                self.connection.notify_writable()
                return

    def get_buffer(self) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        self.changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(error)

    async def until_received(self, count: int) -> None:
        while self.received < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), LIMIT_S)


class Limited:
    """A transport with a limit that counts loopback, too, and connections to one without."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.plain = TcpTransport(asyncio.get_running_loop())
        self.paced = PacedTransport(self.plain, self.clock, RATE, lambda _: True)
        self.ends: list[End] = []

    async def pair(self, to_send: int = 0) -> tuple[End, End]:
        arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        listener = await self.plain.listen(LOOPBACK, arrived.set_result)
        dialled = await self.paced.dial(listener.address, LIMIT_S)
        far = End(await arrived)
        near = End(dialled, to_send)
        listener.close()
        self.ends += [near, far]
        return near, far

    async def turns(self, count: int, near: list[End], far: list[End]) -> None:
        """Let so many turns pass, and all that is sent arrive."""
        for _ in range(count):
            await self.clock.next_timer()
            for one, other in zip(near, far, strict=True):
                await other.until_received(one.sent)

    async def close(self) -> None:
        for end in self.ends:
            end.connection.abort()
        for end in self.ends:
            await end.lost


async def test_connections_share_the_limit() -> None:
    net = Limited()
    pairs = [await net.pair(1 << 40) for _ in range(3)]
    near, far = ([pair[n] for pair in pairs] for n in range(2))
    once, turn = net.paced.pacer.burst_bytes, net.paced.pacer.turn_bytes
    assert [end.sent for end in near] == [once, 0, 0]
    await net.turns(30, near, far)
    assert sorted(end.sent for end in near) == [10 * turn, 10 * turn, once + 10 * turn]
    assert net.clock.time_ns == 30 * turn * 10**9 // RATE
    await net.close()


async def test_a_short_message_waits_for_no_byte_of_another_connection() -> None:
    net = Limited()
    bulk, far_bulk = await net.pair(1 << 40)
    beats, far_beats = await net.pair()
    for count in range(1, 6):
        await net.turns(3, [bulk], [far_bulk])
        sent, time_ns = bulk.sent, net.clock.time_ns
        assert beats.connection.send([bytes(500)]) == 500
        await far_beats.until_received(500 * count)
        assert (bulk.sent, net.clock.time_ns) == (sent, time_ns)
    allowed = net.paced.pacer.burst_bytes + RATE * net.clock.time_ns // 10**9
    left = allowed - (bulk.sent + 5 * 500)
    assert -500 <= left < net.paced.pacer.turn_bytes, "it counts; the last one is an overdraft"
    await net.close()


@pytest.mark.parametrize("counted", [True, False])
async def test_loopback_counts_only_if_the_transport_is_made_so(counted: bool) -> None:
    net = Limited()
    if not counted:
        net.paced = PacedTransport(net.plain, net.clock, RATE)
    end, far = await net.pair(1 << 20)
    if not counted:
        await far.until_received(1 << 20)
    assert end.sent == (net.paced.pacer.burst_bytes if counted else 1 << 20)
    await net.close()
