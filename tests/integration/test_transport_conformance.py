"""What every transport must do: one suite over TCP (on two loops) and the in-memory network.

Encrypted connections must do the same, and connections with an upload limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator
from random import Random
from typing import Any, TypeVar, cast

import pytest

from pccl.protocol.errors import LinkError, LocalProtocolError, RemoteProtocolError
from pccl.runtime.clock import Clock, LoopClock
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, Connection, Listener, Transport
from pccl.transports.pacing.transport import PacedTransport
from pccl.transports.sim.network import SimNetwork
from pccl.transports.tcp import TcpTransport
from tests.support.patience import LIMIT_S
from tests.support.sealing import SealedTransport

T = TypeVar("T")
KIB, MIB = 1 << 10, 1 << 20
UPLOAD_BYTES_PER_S = 20_000_000
"""Limit of a paced network: a few turns in the tests that send the most."""


class Net:
    """Two sides of one kind of network, and the loop that both run on."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.loop: asyncio.AbstractEventLoop
        self.client: Transport
        self.server: Transport
        self.host = "127.0.0.1"
        self.violations: list[str] = []
        self.reported: list[dict[str, Any]] = []
        if kind.endswith("sim"):
            loop = VirtualLoop()
            self.loop = loop
            network = SimNetwork(loop, Random(20))
            self.client, self.server = network.host("client"), network.host("server")
            self.host = "server"
        else:
            if kind.endswith("tcp-uvloop"):
                self.loop = pytest.importorskip("uvloop").new_event_loop()
            else:
                self.loop = asyncio.SelectorEventLoop()
            self.client = self.server = TcpTransport(self.loop)
        clock = cast("Clock", LoopClock(self.loop) if self.host == "127.0.0.1" else self.loop)
        sides: list[Transport] = [self.client, self.server]
        if "paced" in kind:
            limit = UPLOAD_BYTES_PER_S
            sides = [PacedTransport(one, clock, limit, lambda _: True) for one in sides]
        if kind.startswith("sealed"):
            sides = [cast("Transport", SealedTransport(one, clock)) for one in sides]
        self.client, self.server = sides
        self.loop.set_exception_handler(lambda _loop, context: self.reported.append(context))

    def run_test(self, main: Coroutine[Any, Any, T]) -> T:
        task = self.loop.create_task(main)
        guard = None if self.kind.endswith("sim") else self.loop.call_later(LIMIT_S, task.cancel)
        try:
            return self.loop.run_until_complete(task)
        finally:
            if guard is not None:
                guard.cancel()

    def any_port(self) -> Address:
        return Address(self.host, 0)

    async def settle(self) -> None:
        """Let everything come that is on its way."""
        for _ in range(3):
            await asyncio.sleep(0.002)

    async def link(self) -> tuple[Peer, Peer, Listener]:
        """Return both ends of a started connection (client's first) and the listener."""
        accepted: asyncio.Future[Connection] = self.loop.create_future()
        listener = await self.server.listen(self.any_port(), accepted.set_result)
        dialled = await self.client.dial(listener.address, 5.0)
        return Peer(self, dialled), Peer(self, await accepted), listener


class Peer:
    """A receiver that keeps what it is told, and notes whatever should not happen."""

    def __init__(
        self, net: Net, connection: Connection, memory: Callable[[], int] = lambda: 64 * KIB
    ) -> None:
        self.connection = connection
        self.received = bytearray()
        self.reads = 0
        self.writables = 0
        self.lost: list[Exception | None] = []
        self.on_bytes: Callable[[], None] = lambda: None
        self.on_writable: Callable[[], None] = lambda: None
        self._net = net
        self.memory = memory
        self._buffer: memoryview | None = None
        self._used: list[tuple[memoryview, bytes]] = []
        self._calling = False
        self._waiters: list[asyncio.Future[None]] = []
        with self._call():
            connection.start(self)

    # What the connection calls.

    def get_buffer(self) -> memoryview:
        self._called("get_buffer")
        self._buffer = memoryview(bytearray(self.memory()))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._called("buffer_updated")
        buffer, self._buffer = self._buffer, None
        if buffer is None or not 1 <= nbytes <= len(buffer):
            self._net.violations.append(f"read of {nbytes} into {buffer}")
            return
        self.reads += 1
        self.received += buffer[:nbytes]
        if len(self._used) < 200:
            self._used.append((buffer, bytes(buffer)))
        self.on_bytes()

    def writable(self) -> None:
        self._called("writable")
        self.writables += 1
        self.on_writable()

    def connection_lost(self, error: Exception | None) -> None:
        self._called("connection_lost")
        self.lost.append(error)
        if any(bytes(buffer) != before for buffer, before in self._used):
            self._net.violations.append("memory was written to after its read")

    def _called(self, what: str) -> None:
        if self._calling:
            self._net.violations.append(f"{what} from within a call")
        if self.lost:
            self._net.violations.append(f"{what} after connection_lost")
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # What tests call.

    @contextlib.contextmanager
    def _call(self) -> Generator[None]:
        self._calling = True
        yield
        self._calling = False

    def send(self, *buffers: bytes | bytearray | memoryview) -> int:
        with self._call():
            return self.connection.send(buffers)

    def notify_writable(self) -> None:
        with self._call():
            self.connection.notify_writable()

    def close(self) -> None:
        with self._call():
            self.connection.close()

    def abort(self) -> None:
        with self._call():
            self.connection.abort()

    async def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            waiter = self._net.loop.create_future()
            self._waiters.append(waiter)
            await waiter

    async def until_lost(self) -> Exception | None:
        await self.until(lambda: bool(self.lost))
        return self.lost[0]

    async def until_received(self, count: int) -> bytes:
        await self.until(lambda: len(self.received) >= count)
        return bytes(self.received)

    async def send_all(self, data: bytes, rng: Random | None = None) -> None:
        """Send ``data``, whole or in random portions and numbers of buffers."""
        rest = memoryview(data)
        while rest:
            size = len(rest) if rng is None else 1 + int(rng.random() ** 4 * len(rest))
            cut = size if rng is None else int(rng.random() * size)
            taken = self.send(rest[:cut], b"", bytearray(rest[cut:size]))
            rest = rest[taken:]
            if taken < size:
                await self.until_writable()

    async def until_writable(self) -> None:
        before = self.writables
        self.notify_writable()
        assert self.writables == before
        await self.until(lambda: self.writables > before)


def open_descriptors() -> set[str]:
    if sys.platform != "linux":
        return set()
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


KINDS = ["tcp-asyncio", "tcp-uvloop", "sim"]
LAYERS = ["", "paced-", "sealed-", "sealed-paced-"]


@pytest.fixture(params=[layer + kind for layer in LAYERS for kind in KINDS])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    Net(request.param).loop.close()  # the first uvloop of a process opens a pipe for good
    before = open_descriptors()
    net = Net(request.param)
    yield net
    net.loop.close()
    assert not net.violations
    assert not net.reported
    assert open_descriptors() <= before


async def done(*peers: Peer, listener: Listener | None = None) -> None:
    for peer in peers:
        peer.close()
    for peer in peers:
        await peer.until_lost()
    if listener is not None:
        listener.close()


@pytest.mark.parametrize("seed", range(4))
async def test_bytes_arrive_in_order_however_they_are_split(net: Net, seed: int) -> None:
    rng = Random(seed)
    a, b, listener = await net.link()
    there, back = rng.randbytes(300_000), rng.randbytes(200_000)
    for peer in (a, b):
        peer.memory = lambda: rng.choice([1, 3, 1000, 5000, 70_000])
    sending = [
        net.loop.create_task(a.send_all(there, rng)),
        net.loop.create_task(b.send_all(back, rng)),
    ]
    assert await b.until_received(len(there)) == there
    assert await a.until_received(len(back)) == back
    for task in sending:
        await task
    await done(a, b, listener=listener)


async def test_memory_is_asked_for_before_every_read(net: Net) -> None:
    a, b, listener = await net.link()
    sizes = iter([5, 1, 2])
    b.memory = lambda: next(sizes, 100)
    a.send(b"hello", b" ", b"you", b"!")
    assert await b.until_received(10) == b"hello you!"
    assert b.reads >= 4
    await done(a, b, listener=listener)


async def test_a_pause_holds_back_what_arrives_and_the_end(net: Net) -> None:
    a, b, listener = await net.link()
    rng = Random(5)
    data = rng.randbytes(100_000)
    b.memory = lambda: rng.choice([1, 1000, 70_000])
    b.connection.pause_reading()
    b.connection.pause_reading()
    sending = net.loop.create_task(a.send_all(data, rng))
    await net.settle()
    assert b.received == b""
    for _ in range(20):
        b.connection.resume_reading()
        b.connection.pause_reading()
        await net.settle()
        assert not b.lost
    b.connection.resume_reading()
    assert await b.until_received(len(data)) == data
    await sending
    b.connection.pause_reading()
    a.close()
    await net.settle()
    b.connection.resume_reading()
    assert isinstance(await b.until_lost(), LinkError)
    await done(a, b, listener=listener)


async def test_a_connection_is_paused_from_within_a_read(net: Net) -> None:
    a, b, listener = await net.link()
    b.memory = lambda: 10
    b.on_bytes = b.connection.pause_reading
    a.send(bytes(range(30)))
    for count in (10, 20, 30):
        await b.until_received(count)
        await net.settle()
        assert bytes(b.received) == bytes(range(count))
        b.connection.resume_reading()
    await done(a, b, listener=listener)


async def test_a_pause_in_the_middle_of_what_was_sent_at_once(net: Net) -> None:
    a, b, listener = await net.link()
    data = Random(6).randbytes(2 * MIB)
    sending = net.loop.create_task(a.send_all(data))
    while len(b.received) < len(data):
        await asyncio.sleep(0)
        b.connection.pause_reading()
        await asyncio.sleep(0)
        b.connection.resume_reading()
        await asyncio.sleep(0.0001)
        assert not b.lost
    assert bytes(b.received) == data
    await sending
    await done(a, b, listener=listener)


async def test_send_takes_what_fits_and_writable_comes_once(net: Net) -> None:
    a, b, listener = await net.link()
    block = bytes(MIB)
    sent = taken = 0
    while taken := a.send(block):  # the other side has no chance to read meanwhile
        sent += taken
        assert sent < 256 * MIB
    assert sent > 0
    a.notify_writable()
    a.notify_writable()
    await a.until(lambda: a.writables > 0)
    await b.until_received(sent)
    await net.settle()
    assert a.writables == 1
    assert len(b.received) == sent
    assert a.send(b"more") == 4
    await b.until_received(sent + 4)
    await done(a, b, listener=listener)


async def test_writable_comes_though_nothing_was_sent(net: Net) -> None:
    a, b, listener = await net.link()
    for count in range(1, 4):
        await a.until_writable()
        assert a.writables == count
    await done(a, b, listener=listener)


async def test_more_buffers_than_the_system_takes_at_once(net: Net) -> None:
    a, b, listener = await net.link()
    buffers = [bytes([i % 256]) for i in range(5000)]
    sent = 0
    while sent < len(buffers):
        sent += a.send(*buffers[sent:])
    assert await b.until_received(5000) == b"".join(buffers)
    assert a.send() == 0
    assert a.send(b"", b"") == 0
    await done(a, b, listener=listener)


async def test_close_delivers_everything_first(net: Net) -> None:
    a, b, listener = await net.link()

    # The other side is busy sending: its bytes must not destroy ours.
    def send_on() -> None:
        b.send(bytes(100 * KIB))
        b.notify_writable()

    b.on_bytes = b.on_writable = send_on
    a.send(b"go")
    await a.until_received(300 * KIB)
    data = Random(1).randbytes(8 * MIB)
    sent = 0
    while taken := a.send(data[sent:]):
        sent += taken
    a.close()
    assert not a.lost
    assert await a.until_lost() is None
    seen = len(a.received)
    assert isinstance(await b.until_lost(), LinkError)
    assert bytes(b.received[2:]) == data[:sent]
    await net.settle()
    assert len(a.received) == seen
    assert (len(a.lost), len(b.lost)) == (1, 1)
    listener.close()


async def test_both_close_at_once(net: Net) -> None:
    a, b, listener = await net.link()
    a.send(b"bye")
    b.send(b"bye")
    a.close()
    b.close()
    assert (await a.until_lost(), await b.until_lost()) == (None, None)
    await net.settle()
    assert (a.lost, b.lost) == ([None], [None])
    listener.close()


async def test_abort(net: Net) -> None:
    a, b, listener = await net.link()
    a.send(b"x" * 1000)
    await b.until_received(1000)
    a.abort()
    assert not a.lost
    assert await a.until_lost() is None
    error = await b.until_lost()
    assert isinstance(error, LinkError)
    assert "reset" in str(error)
    assert str(b.connection.remote) in str(error)
    listener.close()


async def test_what_was_sent_before_an_abort_arrives_as_a_prefix(net: Net) -> None:
    a, b, listener = await net.link()
    data = Random(2).randbytes(4 * MIB)
    a.send(data)
    a.abort()
    assert isinstance(await b.until_lost(), LinkError)
    assert data.startswith(b.received)
    listener.close()


async def test_bytes_before_the_end_are_read_though_sending_failed(net: Net) -> None:
    a, b, listener = await net.link()
    a.send(b"last words")
    a.abort()
    if not net.kind.endswith("sim"):
        await a.until_lost()
        while b.send(bytes(KIB)):  # the reset has arrived: this fails
            pass
    assert isinstance(await b.until_lost(), LinkError)
    assert net.kind.endswith("sim") or b.received == b"last words"
    assert b.send(b"x") == 0
    listener.close()


@pytest.mark.parametrize("first", ["close", "abort"])
async def test_ending_twice_is_ending_once(net: Net, first: str) -> None:
    a, b, listener = await net.link()
    getattr(a, first)()
    for _ in range(2):
        a.close()
        a.abort()
    assert a.send(b"x") == 0
    a.notify_writable()
    assert await a.until_lost() is None
    assert isinstance(await b.until_lost(), LinkError)
    for peer in (a, b):
        peer.close()
        peer.abort()
        assert peer.send(b"x") == 0
        peer.notify_writable()
    await net.settle()
    assert (len(a.lost), len(b.lost), a.writables) == (1, 1, 0)
    listener.close()
    listener.close()


async def test_ended_from_within_a_read(net: Net) -> None:
    for end in ("close", "abort"):
        a, b, listener = await net.link()
        b.memory = lambda: 10
        b.on_bytes = getattr(b, end)
        a.send(bytes(100))
        assert await b.until_lost() is None
        assert len(b.received) <= 10
        assert isinstance(await a.until_lost(), LinkError)
        listener.close()


async def test_ended_before_it_is_started(net: Net) -> None:
    accepted: list[Connection] = []
    listener = await net.server.listen(net.any_port(), accepted.append)
    for end in ("close", "abort"):
        a = Peer(net, await net.client.dial(listener.address, 5.0))
        while not accepted:
            await net.settle()
        ended = accepted.pop()
        getattr(ended, end)()
        late = Peer(net, ended)
        assert isinstance(await a.until_lost(), LinkError)
        await net.settle()
        assert late.lost == [], "nobody is called who comes after the end"
    listener.close()


async def test_a_reset_before_the_end_of_a_pause_causes_no_work(net: Net) -> None:
    """Reading tells the reset; until then, each try to send would be in vain."""
    a, b, listener = await net.link()

    def try_again() -> None:
        a.connection.send([bytes(KIB)])
        a.connection.notify_writable()

    a.connection.pause_reading()
    while a.send(bytes(MIB)):
        pass
    a.on_writable = try_again
    a.notify_writable()
    b.abort()
    for _ in range(50):
        await asyncio.sleep(0)
    await net.settle()
    before = a.writables
    for _ in range(50):
        await asyncio.sleep(0)
    assert a.writables - before <= 1
    a.connection.resume_reading()
    assert isinstance(await a.until_lost(), LinkError)
    listener.close()


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_ended_when_a_record_is_left_over_and_the_other_side_resets(
    net: Net, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, listener = await net.link()
    while a.send(bytes(200_000)):
        pass
    below: Any = getattr(a.connection, "_inner", a.connection)
    tries: list[object] = []
    kind: Any = below.__class__
    send: Callable[[Any, Any], int] = kind.send

    def counted(self: Any, buffers: Any) -> int:
        tries.append(buffers)
        return send(self, buffers)

    monkeypatch.setattr(kind, "send", counted)
    getattr(a, end)()
    b.abort()
    for _ in range(200):
        await asyncio.sleep(0)
    await net.settle()
    assert len(tries) < 20
    below.abort()
    assert await a.until_lost() is None
    listener.close()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_ended_after_its_loop(net: Net, end: str) -> None:
    if net.kind.endswith("sim"):
        return  # a simulation ends with its loop
    a, b, listener = net.run_test(net.link())
    listener.close()
    net.loop.run_until_complete(net.settle())
    net.loop.close()
    for peer in (a, b):
        getattr(peer, end)()
        assert peer.lost == []


async def test_bytes_and_the_end_wait_for_the_start(net: Net) -> None:
    accepted: list[Connection] = []
    listener = await net.server.listen(net.any_port(), accepted.append)
    a = Peer(net, await net.client.dial(listener.address, 5.0))
    a.send(b"early")
    a.close()
    await a.until_lost()
    await net.settle()
    b = Peer(net, accepted[0])
    assert isinstance(await b.until_lost(), LinkError)
    assert b.received == b"early"
    listener.close()


async def test_nobody_listens(net: Net) -> None:
    listener = await net.server.listen(net.any_port(), lambda _: None)
    listener.close()
    with pytest.raises(LinkError, match="connection refused") as caught:
        await net.client.dial(listener.address, 5.0)
    assert caught.value.func == "dial"
    assert caught.value.reason == f"cannot reach {listener.address}: connection refused"


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "x" * 300])
async def test_names_that_are_nobody(net: Net, name: str) -> None:
    with pytest.raises(LinkError, match="cannot reach"):
        await net.client.dial(Address(name, 4000), 5.0)
    with pytest.raises(LinkError, match="cannot listen"):
        await net.server.listen(Address(name, 0), lambda _: None)


async def test_a_cancelled_dial_leaves_nothing(net: Net) -> None:
    accepted: list[Connection] = []
    listener = await net.server.listen(net.any_port(), accepted.append)
    for turns in range(6):
        task = net.loop.create_task(net.client.dial(listener.address, 5.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await task).abort()
    await net.settle()
    for connection in accepted:
        peer = Peer(net, connection)
        assert isinstance(await peer.until_lost(), LinkError)
    listener.close()


async def test_ports(net: Net) -> None:
    first = await net.server.listen(net.any_port(), lambda _: None)
    second = await net.server.listen(net.any_port(), lambda _: None)
    assert first.address.host == net.host
    assert 0 < first.address.port != second.address.port > 0
    with pytest.raises(LinkError, match="address already in use"):
        await net.server.listen(first.address, lambda _: None)
    first.close()
    again = await net.server.listen(first.address, lambda _: None)
    assert again.address == first.address
    again.close()
    second.close()
    with pytest.raises(LinkError, match="cannot assign requested address"):
        await net.server.listen(Address("192.0.2.1", 0), lambda _: None)


async def test_both_sides_know_each_other(net: Net) -> None:
    a, b, listener = await net.link()
    assert a.connection.remote == b.connection.local == listener.address
    assert a.connection.local == b.connection.remote
    await done(a, b, listener=listener)


async def test_accepted_connections_outlive_the_listener(net: Net) -> None:
    a, b, listener = await net.link()
    listener.close()
    with pytest.raises(LinkError, match="refused"):
        await net.client.dial(listener.address, 5.0)
    a.send(b"still")
    b.send(b"here")
    assert await b.until_received(5) == b"still"
    assert await a.until_received(4) == b"here"
    await done(a, b)


async def test_the_other_side_breaks_the_protocol(net: Net) -> None:
    a, b, listener = await net.link()
    broken = RemoteProtocolError(func="frame", reason="nonsense")

    def judge() -> None:
        raise broken

    b.on_bytes = judge
    a.send(b"nonsense")
    assert await b.until_lost() is broken
    assert isinstance(await a.until_lost(), LinkError)
    listener.close()


@pytest.mark.parametrize("where", ["get_buffer", "empty memory", "buffer_updated", "writable"])
async def test_a_bug_in_the_receiver(net: Net, where: str) -> None:
    a, b, listener = await net.link()

    def fail() -> Any:
        raise KeyError("a bug")

    match where:
        case "get_buffer":
            b.memory = fail
        case "empty memory":
            b.memory = lambda: 0
        case "buffer_updated":
            b.on_bytes = fail
        case _:
            b.on_writable = fail
            b.notify_writable()
    a.send(b"hello")
    assert isinstance(await b.until_lost(), LocalProtocolError)
    assert isinstance(await a.until_lost(), LinkError)
    assert len(net.reported) == 1
    assert isinstance(net.reported.pop()["exception"], KeyError | AssertionError)
    listener.close()


async def test_a_stream_is_handed_over_to_another_receiver(net: Net) -> None:
    a, first, listener = await net.link()
    first.memory = lambda: 5 - len(first.received)
    seconds: list[Peer] = []

    def hand_over() -> None:
        if len(first.received) == 5:
            seconds.append(Peer(net, first.connection))

    first.on_bytes = hand_over
    a.send(b"firstsecond")
    a.close()
    await first.until_received(5)
    (second,) = seconds
    assert isinstance(await second.until_lost(), LinkError)
    assert (bytes(first.received), bytes(second.received)) == (b"first", b"second")
    assert not first.lost
    listener.close()


async def test_a_bug_while_taking_over_a_connection(net: Net) -> None:
    accepted: list[Connection] = []

    def take_over(connection: Connection) -> None:
        accepted.append(connection)
        if len(accepted) == 1:
            raise KeyError("a bug")

    listener = await net.server.listen(net.any_port(), take_over)
    try:
        a = Peer(net, await net.client.dial(listener.address, 5.0))
    except LinkError:
        pass  # the reset came before the dial returned
    else:
        assert isinstance(await a.until_lost(), LinkError)
    assert isinstance(net.reported.pop()["exception"], KeyError)
    c = Peer(net, await net.client.dial(listener.address, 5.0))
    await net.settle()
    await done(c, Peer(net, accepted[1]), listener=listener)


async def test_many_connections_at_once(net: Net) -> None:
    count = 150
    servers: list[Peer] = []
    everybody = net.loop.create_future()

    def take_over(connection: Connection) -> None:
        peer = Peer(net, connection)

        def echo() -> None:
            peer.send(peer.received)

        peer.on_bytes = echo
        servers.append(peer)
        if len(servers) == count:
            everybody.set_result(None)

    listener = await net.server.listen(net.any_port(), take_over)
    dials = [net.loop.create_task(net.client.dial(listener.address, 5.0)) for _ in range(count)]
    clients = [Peer(net, await dial) for dial in dials]
    await everybody
    for i, client in enumerate(clients):
        client.send(bytes([i]))
    for i, client in enumerate(clients):
        assert await client.until_received(1) == bytes([i])
    await done(*clients, *servers, listener=listener)
