"""The proxy between real sockets: order, completeness, ends, bounded buffers. No timing."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import struct
import threading
from collections.abc import Callable

import pytest

from pccl.protocol.handshake.opening import OPENING_BYTES, Channel, Opening
from pccl.protocol.types import PeerId
from pccl.stress.emulator import SHARED, LinkSpec, Proxy, ProxyThread, peer_of
from pccl.stress.emulator.tuning import BUFFER_BYTES
from tests.emulator.conftest import BenchMaker
from tests.support.patience import LIMIT_S

Read = Callable[[socket.socket, int], bytes]
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
RESET = (ConnectionResetError, BrokenPipeError)


def digest_of_all(sock: socket.socket) -> tuple[int, str]:
    """Read up to the end; return the number of bytes and their hash."""
    count, digest = 0, hashlib.sha256()
    while piece := sock.recv(1 << 16):
        count += len(piece)
        digest.update(piece)
    return count, digest.hexdigest()


def send_all(sock: socket.socket, data: bytes, seed: int) -> threading.Thread:
    """Send in pieces of any size, then the end, on a thread."""

    def work() -> None:
        chance, sent = random.Random(seed), 0
        while sent < len(data):
            size = chance.choice([1, 100, 5_000, 300_000])
            sock.sendall(data[sent : sent + size])
            sent += size
        sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "link",
    [
        "",
        "rtt=4ms",
        "rate=400mbit,rtt=10ms,jitter=3ms",
        "rate=800mbit,flow=300mbit,rtt=2ms,window=100kib",
        "rtt=2ms,window=20kib",
    ],
)
def test_both_ways_at_once_nothing_is_lost_or_changed(make_bench: BenchMaker, link: str) -> None:
    bench = make_bench(link)
    data = [random.Random(number).randbytes(2_000_000) for number in range(6)]
    pairs = [bench.connect() for _ in range(3)]
    ends = [sock for pair in pairs for sock in pair]
    senders = [send_all(sock, data[number], number) for number, sock in enumerate(ends)]
    results: dict[int, tuple[int, str]] = {}

    def take(number: int) -> None:
        results[number] = digest_of_all(ends[number])

    takers = [threading.Thread(target=take, args=(number,)) for number in range(6)]
    for thread in takers:
        thread.start()
    for thread in [*senders, *takers]:
        thread.join(LIMIT_S)
    for number in range(6):
        sent = data[number ^ 1]  # the other end of the same connection
        assert results[number] == (len(sent), hashlib.sha256(sent).hexdigest())


def test_the_other_direction_stays_open_after_an_end(make_bench: BenchMaker, read: Read) -> None:
    near, far = make_bench("rtt=2ms").connect()
    near.sendall(b"question")
    near.shutdown(socket.SHUT_WR)
    assert read(far, 8) == b"question"
    assert far.recv(1) == b""
    far.sendall(b"answer")
    assert read(near, 6) == b"answer"
    far.close()
    assert near.recv(1) == b""


def test_a_connection_that_is_over_is_forgotten(make_bench: BenchMaker) -> None:
    bench = make_bench("rtt=2ms")
    near, far = bench.connect()
    assert [status.flow for status in bench.proxy.flows()] == [1]
    near.close()
    assert far.recv(1) == b""
    far.close()
    bench.wait_until_over()
    bench.connect()
    assert [status.flow for status in bench.proxy.flows()] == [2]


def test_status_counts_what_was_passed_on(make_bench: BenchMaker, read: Read) -> None:
    bench = make_bench("rtt=2ms")
    near, far = bench.connect()
    near.sendall(bytes(1000))
    read(far, 1000)
    far.sendall(bytes(300))
    read(near, 300)
    (status,) = bench.proxy.flows()
    assert (status.link, status.forward_bytes, status.backward_bytes) == (SHARED, 1000, 300)


@pytest.mark.parametrize("side", ["dialler", "target"])
def test_a_reset_is_passed_on(make_bench: BenchMaker, side: str) -> None:
    ends = make_bench("rtt=2ms").connect()
    dying, other = ends if side == "dialler" else ends[::-1]
    dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    dying.close()
    with pytest.raises(RESET):
        other.recv(1)


def test_a_reset_is_noticed_where_the_window_is_full(make_bench: BenchMaker) -> None:
    """The proxy does not read from the dialler then, and has nothing to write to it."""
    bench = make_bench("rtt=2ms,window=64kib")
    near, far = bench.connect()
    fill(near)
    (status,) = bench.proxy.flows()
    assert status.forward_flight_bytes == 64 << 10
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    near.close()
    bench.wait_until_over()
    with pytest.raises(RESET):
        digest_of_all(far)


def fill(sock: socket.socket) -> int:
    """Send until the kernel takes no more and the proxy reads no more; return how much it was."""
    total = 0
    sock.settimeout(0.3)
    try:
        while True:
            total += sock.send(bytes(1 << 16))
    except TimeoutError:
        sock.settimeout(LIMIT_S)
        return total


def test_a_stalled_link_takes_the_window_and_small_buffers(make_bench: BenchMaker) -> None:
    window_bytes, own_bytes = 1 << 20, 64 << 10
    bench = make_bench("rate=100mbit,rtt=100ms,window=1mib")
    near, _ = bench.connect()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, own_bytes)
    bench.proxy.stall()
    taken_bytes = fill(near)
    (status,) = bench.proxy.flows()
    assert 0 < status.forward_flight_bytes <= window_bytes
    # Linux allows twice what was asked for, of the sender's buffer and of the proxy's.
    assert taken_bytes <= window_bytes + 2 * own_bytes + 2 * BUFFER_BYTES


def test_a_receiver_that_does_not_read_stops_the_sender(make_bench: BenchMaker) -> None:
    window_bytes, own_bytes = 256 << 10, 64 << 10
    bench = make_bench("rtt=2ms,window=256kib")
    near, far = bench.connect()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, own_bytes)
    taken_bytes = fill(near)
    (status,) = bench.proxy.flows()
    assert status.forward_flight_bytes == window_bytes
    near.shutdown(socket.SHUT_WR)
    assert digest_of_all(far)[0] == taken_bytes


def test_dials_to_nobody_end(make_bench: BenchMaker) -> None:
    bench = make_bench("rtt=2ms")
    bench.listener.close()
    with pytest.raises(RESET):  # it may come before the dial has returned
        bench.dial().recv(1)


def test_links_are_told_apart_by_the_first_bytes(make_bench: BenchMaker, read: Read) -> None:
    def link_of(first_bytes: bytes) -> bytes:
        return first_bytes[:1]

    bench = make_bench("rtt=2ms", link_of)
    one, far_of_one = bench.connect(b"1" * OPENING_BYTES)
    two, far_of_two = bench.connect(b"2" + b"x" * OPENING_BYTES)
    three = bench.dial(b"3")  # ends before its opening is complete
    three.shutdown(socket.SHUT_WR)
    far_of_three = bench.accept()
    assert read(far_of_three, 1) == b"3"
    assert far_of_three.recv(1) == b""
    assert [status.link for status in bench.proxy.flows()] == [b"1", b"2", b"3"]
    bench.proxy.stall(link=b"1")
    two.sendall(b"two")
    assert read(far_of_two, 3) == b"two"
    one.sendall(b"one")
    far_of_one.settimeout(0.2)
    with pytest.raises(TimeoutError):
        far_of_one.recv(1)


def test_a_dialler_that_is_reset_before_it_is_sorted(make_bench: BenchMaker) -> None:
    bench = make_bench("", peer_of)
    near = bench.dial(b"abc")
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    near.close()
    bench.dial(b"x" * OPENING_BYTES)
    bench.accept()
    assert [status.link for status in bench.proxy.flows()] == [SHARED]


def test_lanes_of_a_peer_share_a_link() -> None:
    def opening(source: int, channel: Channel) -> bytes:
        return Opening(channel, source=PeerId(source), lane=source % 3).encode()

    assert peer_of(opening(7, Channel.LANE)) == 7
    assert peer_of(opening(8, Channel.LANE) + b"more") == 8
    assert peer_of(opening(7, Channel.CONTROL)) == SHARED
    assert peer_of(b"GET / HTTP/1.1".ljust(OPENING_BYTES)) == SHARED
    assert peer_of(b"PCCL") == SHARED


def test_what_cannot_be_had_is_an_os_error(make_bench: BenchMaker) -> None:
    taken = make_bench().listener.getsockname()[1]
    proxy = ProxyThread("127.0.0.1:1", LinkSpec(), listen=f"127.0.0.1:{taken}")
    with pytest.raises(OSError, match="in use"), proxy:
        pass
    with pytest.raises(ValueError, match="HOST:PORT"):
        ProxyThread("nowhere", LinkSpec())
    with pytest.raises(ValueError, match="between 1 and 1024"):
        Proxy("127.0.0.1:1", LinkSpec(), first_byte_count=2000)


def test_closing_resets_what_is_open(make_bench: BenchMaker) -> None:
    bench = make_bench("rtt=20ms", peer_of)
    near, far = bench.connect(b"x" * OPENING_BYTES)
    unsorted = bench.dial(b"x")
    bench.proxy.close()
    bench.proxy.close()  # changes nothing
    for sock in (near, far, unsorted):
        with pytest.raises(RESET):
            sock.recv(1)


def test_it_runs_on_asyncios_own_loop() -> None:
    async def main() -> tuple[bytes, bytes]:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read())
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        proxy = Proxy(f"127.0.0.1:{port}", LinkSpec.parse("rate=400mbit,rtt=5ms"))
        proxy.start()
        reader, writer = await asyncio.open_connection(proxy.address.host, proxy.address.port)
        sent = random.Random(5).randbytes(500_000)
        writer.write(sent)
        writer.write_eof()
        received = await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()
        await writer.wait_closed()
        proxy.close()
        proxy.close()  # changes nothing
        server.close()
        await server.wait_closed()
        return sent, received

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        sent, received = runner.run(main())
    assert received == sent
