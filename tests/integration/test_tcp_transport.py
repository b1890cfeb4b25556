"""What only the real network has: addresses, descriptors, time that passes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Coroutine, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

import pccl.transports.tcp as tcp_module
from pccl.protocol.errors import LinkError
from pccl.protocol.types import NS_PER_S
from pccl.transports import tcp_listener
from pccl.transports.base import Address, Connection, Listener, PathMeasure
from pccl.transports.tcp import TcpTransport
from pccl.transports.tcp_dial import in_turns
from pccl.transports.tcp_socket import Resolved, SocketAddress, measure_path, resolve

LOOPBACK = Address("127.0.0.1", 0)


class Sink:
    """A receiver of no interest."""

    def __init__(self, connection: Connection) -> None:
        self.lost = asyncio.get_running_loop().create_future()
        self.connection = connection
        connection.start(self)

    def get_buffer(self) -> memoryview:
        return memoryview(bytearray(1000))

    def buffer_updated(self, nbytes: int) -> None:
        pass

    def writable(self) -> None:
        pass

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(error)


class Tcp:
    """A transport and the loop that it runs on."""

    def __init__(self, kind: str) -> None:
        if kind == "uvloop":
            self.loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
        else:
            self.loop = asyncio.SelectorEventLoop()
        self.transport = TcpTransport(self.loop)
        self.accepted: list[Connection] = []
        self._arrival = asyncio.Event()

    def run_test(self, main: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(main)
        guard = self.loop.call_later(20.0, task.cancel)
        self.loop.run_until_complete(task)
        guard.cancel()

    async def listen(self, address: Address = LOOPBACK) -> Listener:
        return await self.transport.listen(address, self._accept)

    def _accept(self, connection: Connection) -> None:
        self.accepted.append(connection)
        self._arrival.set()

    async def dial(self, address: Address, timeout_s: float = 5.0) -> Connection:
        return await self.transport.dial(address, timeout_s)

    async def link(self) -> tuple[Sink, Sink]:
        listener = await self.listen()
        dialled = Sink(await self.dial(listener.address))
        listener_side = Sink(await self.next_accepted())
        listener.close()
        return dialled, listener_side

    async def next_accepted(self) -> Connection:
        while not self.accepted:
            self._arrival.clear()
            await self._arrival.wait()
        return self.accepted.pop()


def open_descriptors() -> set[str]:
    if sys.platform != "linux":
        return set()
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


@pytest.fixture(params=["asyncio", "uvloop"])
def tcp(request: pytest.FixtureRequest) -> Iterator[Tcp]:
    Tcp(request.param).loop.close()  # the first uvloop of a process opens a pipe for good
    before = open_descriptors()
    tcp = Tcp(request.param)
    yield tcp
    tcp.loop.close()
    assert open_descriptors() <= before


@contextlib.contextmanager
def no_descriptors_left() -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("limit", ["READ_BUDGET_BYTES", "READ_TURN_S"])
def test_a_busy_connection_leaves_room_for_others(
    tcp: Tcp, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """It has read much, or each read takes its receiver long."""
    is_slow = limit == "READ_TURN_S"
    monkeypatch.setattr(tcp_module, limit, 1e-6 if is_slow else 3000)
    per_turn: list[int] = [0]

    class Counting(Sink):
        def buffer_updated(self, nbytes: int) -> None:
            per_turn[-1] += nbytes
            if is_slow:
                time.sleep(1e-4)

    def tick() -> None:
        per_turn.append(0)
        if sum(per_turn) < 100_000:
            tcp.loop.call_soon(tick)
        else:
            over.set_result(None)

    async def main() -> None:
        listener = await tcp.listen()
        a = Sink(await tcp.dial(listener.address))
        b = Counting(await tcp.next_accepted())
        assert a.connection.send([bytes(100_000)]) == 100_000
        tick()
        await over
        for sink in (a, b):
            sink.connection.abort()
        listener.close()

    over = tcp.loop.create_future()
    tcp.run_test(main())
    assert max(per_turn) <= 3000


async def test_a_dial_that_nobody_answers(tcp: Tcp) -> None:
    if sys.platform != "linux":
        pytest.skip("how a full backlog behaves differs")
    with socket.socket() as deaf, socket.socket() as full:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        full.connect(deaf.getsockname())
        with pytest.raises(LinkError, match="no answer in time"):
            await tcp.dial(Address(*deaf.getsockname()), 0.02)


async def test_a_name_that_is_not_resolved_in_time(
    tcp: Tcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(*_: object) -> list[Resolved]:
        await asyncio.sleep(3600)
        return []

    monkeypatch.setattr(tcp_module, "resolve", resolve)
    with pytest.raises(LinkError, match="cannot reach name:1: the name lookup timed out"):
        await tcp.dial(Address("name", 1), 0.01)


def test_names_are_looked_up_on_the_given_executor(tcp: Tcp) -> None:
    class Recording(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            asked.append(fn.args[0])
            return super().submit(fn, *args, **kwargs)

    asked: list[str] = []

    async def main() -> None:
        listener = await tcp.listen()
        port = listener.address.port
        end = Sink(await tcp.dial(Address("localhost", port)))
        other = Sink(await tcp.dial(Address("127.0.0.1", port)))  # a literal needs no look-up
        for sink in (end, other):
            sink.connection.abort()
            (await tcp.next_accepted()).close()
        listener.close()

    with Recording(1) as executor:
        tcp.transport.executor = executor
        tcp.run_test(main())
    assert asked == ["localhost"]


async def test_all_addresses_of_a_name_are_tried(tcp: Tcp, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Resolved] = []

    async def resolve(*_: object) -> list[Resolved]:
        return found

    good, closed = await tcp.listen(), await tcp.listen()
    closed.close()
    for listener in (closed, good):
        to = (listener.address.host, listener.address.port)
        found.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", to))
    monkeypatch.setattr(tcp_module, "resolve", resolve)
    name = Address("name", 1)
    end = Sink(await tcp.dial(name))
    assert end.connection.remote == good.address
    end.connection.abort()
    (await tcp.next_accepted()).close()
    found.reverse()
    del found[1]
    with pytest.raises(LinkError, match="address already in use"):
        await tcp.listen(name)
    good.close()
    with pytest.raises(LinkError, match="cannot reach name:1: connection refused"):
        await tcp.dial(name)
    found.insert(0, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 1)))
    second = await tcp.listen(name)
    assert second.address == good.address
    second.close()


@pytest.mark.parametrize(
    ("listen_on", "dial_to"), [("::1", "::1"), ("::", "127.0.0.1"), ("", "localhost")]
)
async def test_families(tcp: Tcp, listen_on: str, dial_to: str) -> None:
    try:
        listener = await tcp.listen(Address(listen_on, 0))
    except LinkError as error:
        pytest.skip(str(error))
    a = await tcp.dial(Address(dial_to, listener.address.port))
    b = await tcp.next_accepted()
    assert b.remote == a.local
    assert b.local == a.remote
    a.abort()
    b.abort()
    listener.close()


async def test_no_descriptors_left_to_accept(
    tcp: Tcp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_listener, "ACCEPT_BACKOFF_S", 0.001)
    listener = await tcp.listen()
    with socket.socket() as client:
        with no_descriptors_left():
            client.connect((listener.address.host, listener.address.port))
            for _ in range(5):
                await asyncio.sleep(0.002)
            assert not tcp.accepted
        (await tcp.next_accepted()).abort()
    assert [record.name for record in caplog.records] == ["pccl.link"]
    assert "too many open files" in caplog.text
    listener.close()


async def test_a_listener_without_descriptors_can_be_closed(tcp: Tcp) -> None:
    listener = await tcp.listen()
    with socket.socket() as client, no_descriptors_left():
        client.connect((listener.address.host, listener.address.port))
        for _ in range(3):
            await asyncio.sleep(0)
        listener.close()


async def test_no_descriptors_left_to_dial(tcp: Tcp) -> None:
    listener = await tcp.listen()
    with no_descriptors_left(), pytest.raises(LinkError, match="too many open files"):
        await tcp.dial(listener.address)
    with no_descriptors_left(), pytest.raises(LinkError, match="too many open files"):
        await tcp.listen()
    listener.close()


def test_closing_the_loop_cuts_an_orderly_end_short(tcp: Tcp) -> None:
    """The fixture checks that no descriptor is left; a warning would be an error."""

    async def main() -> None:
        listener = await tcp.listen()
        client.connect((listener.address.host, listener.address.port))
        end = Sink(await tcp.next_accepted())
        end.connection.send([b"bye"])
        end.connection.close()
        assert await end.lost is None
        again = Sink(await tcp.dial(listener.address))
        ends.extend([again.connection, await tcp.next_accepted()])
        listeners.append(listener)

    ends: list[Connection] = []
    listeners: list[Listener] = []
    with socket.socket() as client:
        tcp.run_test(main())
        tcp.loop.close()
        assert client.recv(10) == b"bye"
        for end in ends:
            end.close()
        listeners[0].close()


async def test_an_end_that_the_other_side_ignores(
    tcp: Tcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.transports.tcp_socket.LINGER_S", 0.001)
    listener = await tcp.listen()
    before = open_descriptors()
    with socket.create_connection((listener.address.host, listener.address.port)) as client:
        client.sendall(b"hello")
        end = Sink(await tcp.next_accepted())
        end.connection.send([b"bye"])
        end.connection.close()
        assert await end.lost is None
        for _ in range(100):
            client.send(b"never mind")
            await asyncio.sleep(0.001)
            if len(open_descriptors()) <= len(before) + 1:
                break
        else:
            pytest.fail("the descriptor was never given back")
        assert client.recv(100) == b"bye"
    listener.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # is multi-threaded
def test_the_child_of_a_fork_lets_go_silently(tcp: Tcp) -> None:
    async def main() -> None:
        listener = await tcp.listen()
        to = (listener.address.host, listener.address.port)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(to)) for _ in range(2)]
            ends = [Sink(await tcp.next_accepted()) for _ in clients]
            ends.sort(key=lambda end: end.connection.remote != Address(*clients[0].getsockname()))
            ends[0].connection.close()  # lingers
            tell, told = socket.socketpair()
            child = os.fork()
            children.append(child)
            if not child:
                try:
                    tell.close()
                    tcp.transport.abandon()
                    for client in clients:
                        client.close()
                    told.send(b"x")
                    told.recv(1)
                finally:
                    os._exit(0)  # without a look at the loop, which belongs to the parent
            told.close()
            assert tell.recv(1) == b"x"
            assert clients[0].recv(1) == b""
            assert ends[1].connection.send([b"still here"]) == 10
            assert clients[1].recv(10) == b"still here"
            ends[1].connection.close()
            listener.close()
            for client in clients:
                client.close()
            await asyncio.sleep(0.01)
            # The child has no copy, though it lives: nothing holds the port.
            (await tcp.listen(listener.address)).close()
            tell.close()

    children: list[int] = []
    tcp.run_test(main())
    assert os.waitpid(children[0], 0)[1] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell")
async def test_a_connection_knows_what_the_kernel_has_seen_of_its_path(tcp: Tcp) -> None:
    one, other = await tcp.link()
    for _ in range(50):
        one.connection.send([bytes(100_000)])
        await asyncio.sleep(0)
    measured = one.connection.measure()
    assert measured is not None
    assert 1_000 <= measured.rtt_ns < NS_PER_S  # inside one machine
    assert measured.rtt_ns % 1000 == 0
    assert 10**6 < measured.bytes_per_s < 10**12
    one.connection.abort()
    assert one.connection.measure() is None
    await other.lost


def test_what_an_older_kernel_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Socket:
        def __init__(self, info: bytes | None) -> None:
            self.info = info

        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            if self.info is None:
                raise OSError("no such option")
            return self.info[:size]

    def told(info: bytes | None) -> PathMeasure | None:
        return measure_path(cast("socket.socket", Socket(info)))

    monkeypatch.setattr(sys, "platform", "linux")
    info = bytearray(168)
    struct.pack_into("=I", info, 68, 900)  # tcpi_rtt, in microseconds
    assert told(bytes(info[:104])) == PathMeasure(900_000, 0, False)  # of Linux 2.6
    struct.pack_into("=I", info, 148, 700)  # tcpi_min_rtt
    struct.pack_into("=Q", info, 160, 12_345)  # tcpi_delivery_rate
    assert told(bytes(info)) == PathMeasure(700_000, 12_345, False)
    info[7] = 1 if sys.byteorder == "little" else 0x80  # tcpi_delivery_rate_app_limited
    struct.pack_into("=I", info, 148, 0xFFFFFFFF)
    assert told(bytes(info)) == PathMeasure(900_000, 12_345, True)
    assert told(None) is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert told(bytes(info)) is None


# -- several addresses -----------------------------------------------------------------------------


def silent(address: str, port: int = 0) -> socket.socket:
    """A port that answers nobody: its queue of connections is full."""
    sock = socket.socket()
    sock.bind((address, port))
    sock.listen(0)
    full = [socket.socket() for _ in range(2)]
    for one in full:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            one.connect(sock.getsockname())
    _kept.setdefault(sock, full)
    return sock


_kept: dict[socket.socket, list[socket.socket]] = {}


def test_a_further_host_is_dialled_when_the_first_refuses(tcp: Tcp) -> None:
    async def main() -> None:
        listener = await tcp.listen(Address("127.0.0.2", 0))
        address = Address("127.0.0.3", listener.address.port)
        connection = await tcp.transport.dial(address, 20.0, hosts=("127.0.0.2",))
        assert connection.remote == listener.address
        connection.abort()
        (await tcp.next_accepted()).abort()
        listener.close()

    tcp.run_test(main())


def test_a_further_host_is_dialled_when_the_first_is_silent(tcp: Tcp) -> None:
    async def main() -> None:
        listener = await tcp.listen(Address("127.0.0.2", 0))
        port = listener.address.port
        quiet = silent("127.0.0.3", port)
        connection = await tcp.transport.dial(
            Address("127.0.0.3", port), 20.0, hosts=("127.0.0.2",)
        )
        assert connection.remote == listener.address
        connection.abort()
        (await tcp.next_accepted()).abort()
        listener.close()
        for one in (quiet, *_kept.pop(quiet)):
            one.close()

    tcp.run_test(main())


def test_a_dial_of_several_hosts_fails_with_all_reasons(tcp: Tcp) -> None:
    async def main() -> None:
        with pytest.raises(LinkError, match=r"127\.0\.0\.3:1: connection refused \["):
            await tcp.transport.dial(Address("127.0.0.3", 1), 20.0, hosts=("127.0.0.4",))

    tcp.run_test(main())


def test_nobody_meets_a_process_of_the_own_machine_halfway(tcp: Tcp) -> None:
    async def main() -> None:
        listener = await tcp.listen()
        with pytest.raises(LinkError, match="its address may not be dialled"):
            await tcp.transport.punch(LOOPBACK, listener.address, 20.0, lambda host: True)
        with pytest.raises(LinkError, match=r"cannot reach example\.org:1 from"):
            await tcp.transport.punch(LOOPBACK, Address("example.org", 1), 20.0, lambda host: True)
        listener.close()

    tcp.run_test(main())


async def test_a_name_with_many_addresses_is_dialled_at_a_few(
    tcp: Tcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def resolve(_: object, __: object, address: Address, flags: int) -> list[Resolved]:
        hosts = [f"127.0.1.{n}" for n in range(1, 200)] if address.host == "name" else ["127.0.2.1"]
        asked.append(f"{address.host} {flags}")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 1)) for host in hosts]

    dialled: list[SocketAddress] = []

    async def connect(_: object, __: object, to: SocketAddress, ___: float, ____: int) -> None:
        dialled.append(to)
        raise ConnectionRefusedError("connection refused")

    monkeypatch.setattr(tcp_module, "resolve", resolve)
    monkeypatch.setattr(tcp_module, "connect", connect)
    with pytest.raises(LinkError, match="connection refused"):
        await tcp.transport.dial(Address("name", 1), 20.0, hosts=("127.0.2.1",))
    assert asked == ["name 0", f"127.0.2.1 {int(socket.AI_NUMERICHOST)}"]
    assert dialled == [(f"127.0.1.{n}", 1) for n in range(1, 9)]


def test_the_families_of_addresses_take_turns() -> None:
    def one(family: socket.AddressFamily, host: str) -> Resolved:
        return family, socket.SOCK_STREAM, 0, "", (host, 1)

    six = [one(socket.AF_INET6, f"::{n}") for n in (1, 2, 3)]
    four = [one(socket.AF_INET, "10.0.0.1")]
    assert in_turns([*six, *four]) == [six[0], four[0], six[1], six[2]]
    assert in_turns([]) == []


@pytest.mark.parametrize("bound", ["127.0.0.1", "10.0.0.7", "example.org"])
def test_a_port_of_one_address_has_no_others(tcp: Tcp, bound: str) -> None:
    assert tcp.transport.hosts(Address(bound, 1)) == ()


def test_the_addresses_of_this_machine_are_its_own(tcp: Tcp) -> None:
    for host in tcp.transport.hosts(Address("::", 1)):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.bind((host, 0))


NAT_TIMEOUT_S = 60
"""The shortest time after which common address translators forget a connection without packets.
RFC 5382 (REQ-5) asks for 2 h 4 min, and many home routers have less."""


def silence_max_s(connection: Connection) -> int:
    """How long a connection without data may send no packet: then the kernel sends a probe."""
    sock = connection._sock  # type: ignore[attr-defined]  # pyright: ignore
    assert isinstance(sock, socket.socket)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    times = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
    return max(sock.getsockopt(socket.IPPROTO_TCP, one) for one in times)


def timers_between(ports: set[int]) -> list[tuple[int, int]]:
    """The kind and the rest in hundredths of a second of the timers of connections (Linux)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]]
    timers = [row[5].partition(":") for row in rows if {port_in(one) for one in row[1:3]} == ports]
    return [(int(kind, 16), int(left, 16)) for kind, _, left in timers]


def port_in(address: str) -> int:
    return int(address.partition(":")[2], 16)


@pytest.mark.skipif(sys.platform != "linux", reason="the options have the names of Linux")
def test_translators_do_not_forget_an_idle_connection(tcp: Tcp) -> None:
    """Control connections, lanes, and both halves of a relayed lane are dialled or accepted ones.

    The sockets of two processes that dial each other are made as that of a dial from a port.
    """

    async def main() -> None:
        dialled, accepted = await tcp.link()
        ports = {end.connection.local.port for end in (dialled, accepted)}
        (one, one_left), (other, other_left) = timers_between(ports)
        assert (one, other) == (2, 2), "a keep-alive timer runs; see proc_pid_net(5)"
        assert max(one_left, other_left) <= 100 * NAT_TIMEOUT_S // 2
        listener = await tcp.listen()
        origin, there = [
            (await resolve(tcp.loop, None, one, socket.AI_NUMERICHOST))[0]
            for one in (LOOPBACK, listener.address)
        ]
        connect = tcp.transport._connect  # pyright: ignore[reportPrivateUsage]
        punched = await connect(there, 5.0, origin)
        ends = (dialled.connection, accepted.connection, punched, await tcp.next_accepted())
        for end in ends:
            assert silence_max_s(end) <= NAT_TIMEOUT_S // 2
            end.abort()
        listener.close()

    tcp.run_test(main())
