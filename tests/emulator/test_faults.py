"""Faults while bytes flow: a connection goes on with all its bytes, or it is dead."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable

import pytest

from pccl.protocol.handshake.opening import OPENING_BYTES
from pccl.stress.emulator import Direction, LinkSpec, ProxyThread, Side
from tests.emulator.conftest import BenchMaker
from tests.support.patience import LIMIT_S

Read = Callable[[socket.socket, int], bytes]
RESET = (ConnectionResetError, BrokenPipeError)
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
SILENCE_S = 0.1
"""What is said to stay away is waited for so long; the links of these tests are much quicker."""


def is_silent(sock: socket.socket) -> bool:
    """Whether nothing comes."""
    patience_s = sock.gettimeout()
    sock.settimeout(SILENCE_S)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(patience_s)
    return False


def drain(sock: socket.socket) -> int:
    """Read until nothing comes for a while; return how many bytes it was."""
    count = 0
    while not is_silent(sock):
        count += len(sock.recv(1 << 16))
    return count


def die(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    sock.close()


@pytest.mark.parametrize("fault", ["stall", "cut"])
@pytest.mark.parametrize("scope", [{}, {"flow": 1}, {"link": "shared"}])
def test_both_ways_stop_and_go_on(
    make_bench: BenchMaker, read: Read, fault: str, scope: dict[str, object]
) -> None:
    bench = make_bench("rtt=2ms")
    near, far = bench.connect(b"hello")
    getattr(bench.proxy, fault)(**scope)
    near.sendall(b"there")
    far.sendall(b"back")
    assert is_silent(far)
    assert is_silent(near)
    bench.proxy.resume(**scope)  # type: ignore[arg-type]
    assert read(far, 5) == b"there"
    assert read(near, 4) == b"back"


@pytest.mark.parametrize("fault", ["stall", "cut"])
@pytest.mark.parametrize("direction", list(Direction))
def test_one_way_stops_and_the_other_does_not(
    make_bench: BenchMaker, read: Read, fault: str, direction: Direction
) -> None:
    bench = make_bench("rtt=2ms")
    near, far = bench.connect(b"hello")
    stopped, other = (near, far) if direction is Direction.FORWARD else (far, near)
    getattr(bench.proxy, fault)(direction=direction)
    stopped.sendall(b"stuck")
    other.sendall(b"free")
    assert read(stopped, 4) == b"free"
    assert is_silent(other)
    bench.proxy.resume(direction=direction)
    assert read(other, 5) == b"stuck"


def test_a_one_way_cut_stops_the_other_way_for_want_of_acknowledgements(
    make_bench: BenchMaker, read: Read
) -> None:
    bench = make_bench("rtt=2ms,window=64kib")
    near, far = bench.connect(b"hello")
    bench.proxy.cut(direction=Direction.BACKWARD)
    sender = threading.Thread(target=near.sendall, args=(bytes(1_000_000),))
    sender.start()
    received = drain(far)
    assert 0 < received <= 64 << 10
    bench.proxy.resume(direction=Direction.BACKWARD)
    read(far, 1_000_000 - received)
    sender.join(LIMIT_S)
    assert not sender.is_alive()


def test_a_stream_survives_whatever_happens_to_the_link(make_bench: BenchMaker) -> None:
    bench = make_bench("rate=400mbit,rtt=4ms,window=256kib")
    near, far = bench.connect()
    data = random.Random(1).randbytes(4_000_000)

    def send() -> None:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    chance, received, proxy = random.Random(2), bytearray(), bench.proxy
    fault_count = 0
    while piece := far.recv(50_000):
        received += piece
        if len(received) >= (fault_count + 1) * 200_000:
            fault_count += 1
            break_and_heal(proxy, chance)
    sender.join(LIMIT_S)
    assert fault_count >= 10
    assert bytes(received) == data


def break_and_heal(proxy: ProxyThread, chance: random.Random) -> None:
    fault = chance.choice([proxy.stall, proxy.cut])
    direction = chance.choice([None, *Direction])
    fault(direction=direction)
    proxy.change(
        LinkSpec.parse(chance.choice(["rate=900mbit", "rtt=20ms,window=64kib", "rtt=1ms"]))
    )
    proxy.resume(direction=direction)


def test_scopes_add_up(make_bench: BenchMaker, read: Read) -> None:
    bench = make_bench("rtt=2ms")
    near, far = bench.connect(b"hello")
    bench.proxy.stall()
    bench.proxy.stall(flow=1)
    bench.proxy.resume()
    near.sendall(b"there")
    assert is_silent(far)
    bench.proxy.resume(flow=1)
    assert read(far, 5) == b"there"


def test_one_flow_stops_and_the_others_do_not(make_bench: BenchMaker, read: Read) -> None:
    bench = make_bench("rtt=2ms")
    (one, far_of_one), (two, far_of_two) = bench.connect(b"1"), bench.connect(b"2")
    bench.proxy.stall(flow=2)
    one.sendall(b"one")
    two.sendall(b"two")
    assert read(far_of_one, 3) == b"one"
    assert is_silent(far_of_two)
    with pytest.raises(LookupError, match="no connection 3"):
        bench.proxy.stall(flow=3)


def test_a_stalled_proxy_or_link_stalls_what_comes_later(
    make_bench: BenchMaker, read: Read
) -> None:
    for scope in ({}, {"link": "shared"}):
        bench = make_bench("rtt=2ms")
        bench.proxy.stall(**scope)  # type: ignore[arg-type]
        near = bench.dial(b"hello")
        far = bench.accept()
        assert is_silent(far)
        bench.proxy.resume(**scope)  # type: ignore[arg-type]
        assert read(far, 5) == b"hello"
        near.close()


def test_an_end_and_a_reset_wait_for_the_link(make_bench: BenchMaker, read: Read) -> None:
    bench = make_bench("rtt=2ms")
    (one, far_of_one), (two, far_of_two) = bench.connect(b"1"), bench.connect(b"2")
    bench.proxy.stall(direction=Direction.FORWARD)
    one.sendall(b"last words")
    one.shutdown(socket.SHUT_WR)
    die(two)
    assert is_silent(far_of_one)
    assert is_silent(far_of_two)
    far_of_two.sendall(b"are you there?")
    assert is_silent(far_of_two)
    bench.proxy.resume(direction=Direction.FORWARD)
    assert read(far_of_one, 10) == b"last words"
    assert far_of_one.recv(1) == b""
    with pytest.raises(RESET):
        far_of_two.recv(1)


def test_an_end_that_is_cut_off_is_sent_again(make_bench: BenchMaker, read: Read) -> None:
    bench = make_bench("rtt=600ms")
    near = bench.dial(b"hello")
    far = bench.accept()
    near.shutdown(socket.SHUT_WR)
    bench.proxy.cut()
    assert is_silent(far)
    bench.proxy.change(LinkSpec.parse("rtt=2ms"))
    bench.proxy.resume()
    assert read(far, 5) == b"hello"
    assert far.recv(1) == b""


@pytest.mark.parametrize("scope", [{}, {"flow": 1}, {"link": "shared"}])
def test_reset_reaches_both_sides(make_bench: BenchMaker, scope: dict[str, object]) -> None:
    bench = make_bench("rtt=2ms")
    ends = bench.connect(b"hello")
    bench.proxy.stall()
    bench.proxy.reset(**scope)  # type: ignore[arg-type]
    for sock in ends:
        with pytest.raises(RESET):
            sock.recv(1)
    assert bench.proxy.flows() == ()


@pytest.mark.parametrize("gone", list(Side))
def test_half_open_swallows_and_is_silent(make_bench: BenchMaker, gone: Side) -> None:
    bench = make_bench("rtt=2ms,window=64kib")
    near, far = bench.connect(b"hello")
    dead, left = (near, far) if gone is Side.DIALLER else (far, near)
    bench.proxy.stall()
    dead.sendall(b"on its way")
    bench.proxy.half_open(gone, flow=1)
    with pytest.raises(RESET):
        dead.recv(1)
    bench.proxy.resume()
    left.sendall(bytes(1_000_000))  # many windows: all of it is taken
    assert is_silent(left)
    left.shutdown(socket.SHUT_WR)
    assert is_silent(left)
    die(left)
    bench.wait_until_over()


def test_a_side_may_be_gone_after_the_other_has_died_unheard(make_bench: BenchMaker) -> None:
    bench = make_bench("rtt=2ms")
    near, far = bench.connect(b"hello")
    bench.proxy.stall()
    die(near)
    assert is_silent(far)
    bench.proxy.half_open(Side.TARGET)
    with pytest.raises(RESET):
        far.recv(1)
    assert bench.proxy.flows() == ()


def test_refused_dials_and_then_accepted_ones(make_bench: BenchMaker, read: Read) -> None:
    bench = make_bench("rtt=2ms")
    near, far = bench.connect(b"hello")
    for _ in range(2):  # the second time changes nothing
        bench.proxy.refuse_new()
        with pytest.raises(ConnectionRefusedError):
            bench.dial()
    near.sendall(b"still there")
    assert read(far, 11) == b"still there"
    bench.proxy.accept_new()
    bench.connect(b"and again")


def test_black_hole_and_then_on(make_bench: BenchMaker, read: Read) -> None:
    bench = make_bench("rtt=2ms")
    bench.proxy.refuse_new()
    bench.proxy.blackhole_new()
    near = bench.dial(b"anybody?")
    assert is_silent(near)
    bench.listener.settimeout(SILENCE_S)
    with pytest.raises(TimeoutError):
        bench.listener.accept()
    bench.listener.settimeout(LIMIT_S)
    bench.proxy.accept_new()
    far = bench.accept()
    assert read(far, 8) == b"anybody?"


def test_one_link_changes_and_the_others_do_not(make_bench: BenchMaker, read: Read) -> None:
    def link_of(first_bytes: bytes) -> bytes:
        return first_bytes[:1]

    bench = make_bench("rtt=2ms", link_of)
    bench.proxy.change(LinkSpec.parse("rtt=20s"), link=b"1")  # before anybody is there
    bench.dial(b"1" * OPENING_BYTES)
    far_of_one = bench.accept()
    two, far_of_two = bench.connect(b"2" * OPENING_BYTES)
    two.sendall(b"two")
    assert read(far_of_two, 3) == b"two"
    assert is_silent(far_of_one)
