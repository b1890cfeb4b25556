"""Connections that keep an upload limit together, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any
from unittest.mock import MagicMock

import pytest

from pccl.protocol.errors import LocalProtocolError
from pccl.protocol.handshake.records import RecordKeys
from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, Connection, PathMeasure
from pccl.transports.pacing.transport import PacedTransport, limited
from pccl.transports.relay import SPLICE_BYTES, SplicedEnd
from pccl.transports.sealed import SealedConnection
from pccl.transports.sim.connection import SimConnection
from pccl.transports.sim.network import SimHost, SimNetwork
from tests.support.sealing import ACCEPTORS, DIALLERS

RATE = 100_000
WINDOW = 32 << 10
PLENTY = 1 << 40


class Sender:
    """Sends whenever it may, so many bytes in all; it reads what arrives, and forgets it."""

    def __init__(self, connection: Connection, to_send: int = 0) -> None:
        self.connection = connection
        self.to_send = to_send
        self.sent = self.received = self.calls = 0
        self.lost: list[Exception | None] = []
        self._memory = memoryview(bytearray(64 << 10))
        connection.start(self)
        self.pump()

    def pump(self) -> None:
        while self.sent < self.to_send:
            size = min(len(self._memory), self.to_send - self.sent)
            head = min(size, 50)
            taken = self.connection.send([self._memory[:head], self._memory[head:size]])
            self.sent += taken
            if taken < size:
                self.connection.notify_writable()
                return

    def get_buffer(self) -> memoryview:
        assert not self.lost
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes

    def writable(self) -> None:
        assert not self.lost
        self.calls += 1
        self.pump()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)


class Home:
    """A host with an upload limit, and one elsewhere."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(limit_ns=600 * NS_PER_S)
        self.network = SimNetwork(
            self.loop, Random(1), window_bytes=WINDOW, latency_ns=10_000_000, ragged=False
        )
        self.host, self.away = self.network.host("home"), self.network.host("away")
        self.paced = PacedTransport(self.host, self.loop, RATE)
        self.once = self.paced.pacer.burst_bytes + self.paced.pacer.reserve_bytes
        self.reported: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _loop, context: self.reported.append(context))
        self._arrived: list[Connection] = []

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        try:
            self.loop.run_until_complete(main)
        finally:
            self.loop.close()

    async def dial(self, to: SimHost | None = None) -> tuple[Connection, Connection]:
        """A connection from home, and its other end."""
        far = to or self.away
        listener = await far.listen(Address(far.name, 0), self._arrived.append)
        dialled = await self.paced.dial(listener.address, 5.0)
        listener.close()
        await asyncio.sleep(0.05)
        return dialled, self._arrived.pop()

    async def pair(self) -> tuple[Sender, Sender]:
        """The same, with both ends started."""
        dialled, accepted = await self.dial()
        return Sender(dialled), Sender(accepted)

    async def send_all(self, *senders: Sender) -> None:
        """Let them send without an end, until each of them waits for its turn."""
        for sender in senders:
            sender.to_send = PLENTY
            sender.pump()
        await asyncio.sleep(1.0)


@pytest.fixture
def home() -> Home:
    return Home()


def test_without_a_limit_nothing_stands_between(home: Home) -> None:
    host = home.network.host("other")
    assert limited(host, home.loop, None) is host
    assert isinstance(limited(host, home.loop, RATE), PacedTransport)
    home.loop.close()


def test_connections_share_the_limit(home: Home) -> None:
    """Those that were dialled, and those that were accepted."""

    async def main() -> None:
        accepted: list[Connection] = []
        listener = await home.paced.listen(Address("home", 0), accepted.append)
        far = Sender(await home.away.dial(listener.address, 5.0))
        listener.close()
        await asyncio.sleep(0.05)
        dialled, other = await home.dial()
        near = [Sender(one, PLENTY) for one in (dialled, accepted[0])]
        ends = [Sender(other), far]
        await asyncio.sleep(10.0)
        sent = [one.sent for one in near]
        assert sum(sent) <= 10 * RATE + home.once
        assert sum(sent) >= 10 * RATE
        assert abs(sent[0] - sent[1]) <= home.paced.pacer.burst_bytes
        await asyncio.sleep(1.0)
        assert [end.received >= before for end, before in zip(ends, sent, strict=True)] == [
            True
        ] * 2
        for one in near:
            one.connection.close()

    home.run(main())


def test_a_heartbeat_does_not_wait_behind_a_tensor(home: Home) -> None:
    async def main() -> None:
        bulk, _far = await home.pair()
        beats, far_beats = await home.pair()
        await home.send_all(bulk)
        for count in range(1, 21):
            await asyncio.sleep(1.0)
            before = bulk.sent
            assert beats.connection.send([bytes(100), bytes(200)]) == 300
            assert bulk.sent == before
            await asyncio.sleep(0.05)
            assert far_beats.received == 300 * count
        assert bulk.sent + 300 * 20 <= 22 * RATE + home.once
        assert bulk.sent + 300 * 20 >= 22 * RATE, "and the tensor pays for it, no more"

    home.run(main())


def test_a_side_that_does_not_read_keeps_no_other_one_waiting(home: Home) -> None:
    async def main() -> None:
        stuck, far = await home.pair()
        free, _ = await home.pair()
        far.connection.pause_reading()
        await home.send_all(stuck, free)
        await asyncio.sleep(9.0)
        assert stuck.sent <= 2 * WINDOW
        assert stuck.sent + free.sent >= 10 * RATE

    home.run(main())


@pytest.mark.parametrize("how", ["close", "abort", "reset"])
def test_a_connection_that_ends_while_it_waits(home: Home, how: str) -> None:
    async def main() -> None:
        first, far = await home.pair()
        second, _ = await home.pair()
        await home.send_all(first, second)
        calls, sent = first.calls, second.sent
        if how == "reset":
            far.connection.abort()
            await asyncio.sleep(0.1)
            calls = first.calls
        else:
            getattr(first.connection, how)()
            first.connection.notify_writable()
        await asyncio.sleep(10.0)
        assert (first.calls, len(first.lost)) == (calls, 1)
        assert first.connection.send([b"more"]) == 0
        assert second.sent >= sent + 10 * RATE - home.once
        assert not home.reported

    home.run(main())


def test_a_failure_in_a_turn_ends_this_connection_alone(home: Home) -> None:
    async def main() -> None:
        broken, _ = await home.pair()
        sound, _ = await home.pair()
        await home.send_all(broken, sound)
        del broken.to_send  # a bug in pump
        await asyncio.sleep(1.0)
        (error,) = broken.lost
        assert isinstance(error, LocalProtocolError)
        assert isinstance(error.__cause__, AttributeError)
        assert [context["exception"] for context in home.reported] == [error.__cause__]
        before = sound.sent
        await asyncio.sleep(10.0)
        assert sound.sent >= before + 10 * RATE - home.once

    home.run(main())


def test_connections_inside_the_machine_are_not_limited(home: Home) -> None:
    async def main() -> None:
        inside, end = await home.dial(home.host)
        Sender(end)
        sender = Sender(inside, 10 * RATE)
        await asyncio.sleep(5.0)
        assert sender.sent == 10 * RATE
        path = inside.measure()
        assert path is not None
        assert path.limit_bytes_per_s == 0

    home.run(main())


def test_the_bytes_on_the_wire_count(home: Home) -> None:
    """Those of an encrypted connection, with all that its records add."""

    async def main() -> None:
        dialled, accepted = await home.dial()
        wire = Sender(accepted)
        keys = RecordKeys(DIALLERS, ACCEPTORS, has_aes=True)
        Sender(SealedConnection(dialled, keys, home.loop), PLENTY)
        await asyncio.sleep(10.0)
        assert 10 * RATE - WINDOW <= wire.received <= 10 * RATE + home.once

    home.run(main())


def test_what_is_forwarded_counts(home: Home) -> None:
    """The sender behind a relay is held back, and a heartbeat of the relay is not."""

    async def main() -> None:
        (one, far_one), (other, far_other) = await home.dial(), await home.dial()
        beats, _ = await home.pair()
        ends = [SplicedEnd(end, lambda _: None) for end in (one, other)]
        ends[0].join(ends[1])
        sender, receiver = Sender(far_one, PLENTY), Sender(far_other)
        for _ in range(10):
            await asyncio.sleep(1.0)
            assert beats.connection.send([bytes(300)]) == 300
        assert 10 * RATE - WINDOW - 3000 <= receiver.received <= 10 * RATE + home.once
        assert sender.sent <= receiver.received + SPLICE_BYTES + 3 * WINDOW

    home.run(main())


def test_a_path_is_no_faster_than_the_limit(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        for path_bytes_per_s, known in ((10**9, RATE), (RATE // 4, RATE // 4)):
            one, _ = await home.dial()
            below = PathMeasure(2 * 10**7, path_bytes_per_s, is_lower_bound=False)
            with monkeypatch.context() as patch:
                patch.setattr(SimConnection, "measure", MagicMock(return_value=below))
                path = one.measure()
            assert path is not None
            assert (path.rtt_ns, path.bytes_per_s, path.limit_bytes_per_s) == (
                2 * 10**7,
                known,
                RATE,
            )
            assert not path.is_lower_bound
            one.abort()
            assert one.measure() is None

    home.run(main())
