"""Crowds at all ports while a run reduces: right results all the time, and everything given back.

``SOAK_S=600 make test ARGS=tests/integration/test_soak.py`` soaks for ten minutes.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import pccl
from pccl.protocol.checksum import SEAL_BYTES, seal
from pccl.protocol.codec import encode
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import HEADER_BYTES, FrameHeader, FrameKind
from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.opening import NO_RUN, Channel, Opening
from pccl.protocol.limits import Timing
from pccl.protocol.messages import (
    Goodbye,
    Heartbeat,
    LinkReport,
    MasterHeartbeat,
    Message,
    OperationRequest,
    Register,
    Resume,
    RoundRequest,
)
from pccl.protocol.types import Descriptor, OperationId, PeerId, ReduceOp, RoundId, RoundKind
from pccl.runtime.control.greeting import Greeting
from pccl.runtime.control.stream import ControlStream
from pccl.transports.link import Lane
from tests.integration.conftest import Run
from tests.support.claimant import greet
from tests.support.frames import encode_frame
from tests.support.insides import engine_of, master_port, port_of
from tests.support.patience import LIMIT_S, patient
from tests.support.secrets import as_sent, secrets_of
from tests.support.strangers import is_closed
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("no_errors")

SOAK_S = float(os.environ.get("SOAK_S", "4"))
SEED = 20240301
IDLE_COUNT = 2000
"""Connections at each of two ports; each takes two descriptors, as both ends are here."""
GROWTH_BYTES_MAX = 64 << 20
QUICK = Timing(
    dial_s=1.0,
    resume_s=0.5,
    tick_s=0.05,
    heartbeat_s=0.1,
    redial_min_s=0.005,
    redial_max_s=0.05,
    lane_stall_s=1.0,
)
COUNT_S = 0.05
"""Between two counts of all objects."""
Address = tuple[str, int]


# -- what is in use -------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def connections() -> int:
    """What is kept in memory of connections, in whatever stage."""
    gc.collect()
    kinds = (Greeting, ControlStream, Lane)
    # isinstance would ask objects of others, which may warn.
    return sum(type(item) in kinds for item in gc.get_objects())


def resident_bytes() -> int:
    """0 where the system does not say."""
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * resource.getpagesize()


# -- the run -------------------------------------------------------


def ports_of(run: Run) -> list[Address]:
    """The master's, then those of the peers."""
    return [master_port(run.master), *map(port_of, run.members)]


def reduce_until(run: Run, ended: threading.Event) -> int:
    """Reduce until told to stop, at least once; returns how often."""
    for count in itertools.count(1):
        arrays = [np.full(100_003, rank + count, np.int64) for rank in range(3)]
        infos = run.reduce(arrays)
        assert all((array == 3 * count + 3).all() for array in arrays)
        assert all(info.contributors == (1, 2, 3) for info in infos)
        if ended.is_set():
            return count
    raise AssertionError


@contextmanager
def reducing(run: Run) -> Generator[None]:
    """The members reduce meanwhile, with right results."""
    ended = threading.Event()
    reduces = run.start(reduce_until, run, ended)
    try:
        yield
    finally:
        ended.set()
        assert reduces.result(LIMIT_S) > 0


# -- quantity -------------------------------------------------------


@pytest.fixture
def idle_count() -> Iterator[int]:
    """So many as there are descriptors for; the limit is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * IDLE_COUNT + 500
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    count = min(IDLE_COUNT, (max(soft, allowed) - 500) // 4)
    assert count >= 100, f"no test of quantity with {hard} descriptors"
    yield count
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_thousands_of_idle_connections(new_run: Callable[..., Run], idle_count: int) -> None:
    run = new_run(3, QUICK)
    run.check()
    before = descriptors(), connections(), threading.active_count()
    resident = resident_bytes()
    master, peer, *_ = ports_of(run)
    opening = Opening(Channel.CONTROL).encode()
    with reducing(run), ExitStack() as stack:
        idle: list[socket.socket] = []
        for number in range(idle_count):
            for port in (master, peer):
                sock = stack.enter_context(closing(socket.create_connection(port, LIMIT_S)))
                idle.append(sock)
                if number % 2:
                    with suppress(ConnectionError):
                        sock.sendall(opening)  # the master takes it for a newcomer's
        assert resident_bytes() - resident < GROWTH_BYTES_MAX
        assert all(is_closed(sock) for sock in idle)
    # Fewer, if an earlier test's were among them.
    until(lambda: connections() <= before[1], pause_s=COUNT_S)
    run.until(lambda: descriptors() <= before[0])
    assert threading.active_count() <= before[2] + 4  # the pool of the test's own callers
    assert run.registered == 3


def test_fifty_connections_that_drip(new_run: Callable[..., Run]) -> None:
    run = new_run(3, QUICK)
    before = descriptors(), connections()
    master, peer, *_ = ports_of(run)
    words = {
        master: as_sent(Opening(Channel.CONTROL)),
        peer: as_sent(Opening(Channel.LANE, run.machine.run, 1, PeerId(9), PeerId(1))),
    }
    with reducing(run), ExitStack() as stack:
        dripping = [
            (stack.enter_context(closing(socket.create_connection(port, LIMIT_S))), words[port])
            for port in (master, peer) * 25
        ]
        began_s = time.monotonic()
        for turn in range(20):  # a byte each turn: none gets to the end of its word
            for sock, word in dripping:
                with suppress(ConnectionError):
                    sock.sendall(word[turn : turn + 1])
            time.sleep(0.05)
        assert all(is_closed(sock) for sock, _ in dripping)
        assert time.monotonic() - began_s < patient(10.0)
    until(lambda: (descriptors(), connections()) == before, pause_s=COUNT_S)
    assert run.registered == 3


def test_hundreds_of_newcomers_that_fall_silent(
    new_run: Callable[..., Run], idle_count: int
) -> None:
    """They are registered, in the group of the members, and then leave one by one."""
    run = new_run(3, QUICK)
    run.check()
    before = descriptors(), connections()
    (master, *_), count = ports_of(run), min(400, idle_count)
    with reducing(run), ExitStack() as stack:
        crowd: list[socket.socket] = []
        for _ in range(count):  # a connection that greets late loses its place
            crowd.append(stack.enter_context(closing(socket.create_connection(master, LIMIT_S))))
            greet(crowd[-1], Handshake.dial(Opening(Channel.CONTROL), secrets_of()))
            crowd[-1].sendall(encode(Register(0, "x", 1)))
        run.until(lambda: run.registered_ever == 3 + count)  # the first may be removed by then
        for sock in crowd[::2]:
            with suppress(ConnectionError):
                sock.sendall(encode(Goodbye()))
        run.until(lambda: run.registered <= 3 + count // 2)
    run.until(lambda: run.registered == 3)
    until(lambda: (descriptors(), connections()) == before, pause_s=COUNT_S)


# -- the soak -------------------------------------------------------


class Attacker:
    """Draws what it does, and to whom, from its own source of chance."""

    def __init__(self, run: Run, seed: int) -> None:
        self.attacks = 0
        self._run = run
        self._id = run.machine.run
        self._ports = ports_of(run)
        self._rng = random.Random(seed)
        self._deeds: list[tuple[int, Callable[[], None]]] = [
            (4, self._talk_nonsense),
            (4, self._talk_to_the_master),
            (6, self._be_somebody),
            (2, self._drop_in),
            (1, self._kill_a_lane),
        ]

    def attack_until(self, ended: threading.Event) -> int:
        weights, deeds = zip(*self._deeds, strict=True)
        while not ended.is_set():
            self._rng.choices(deeds, weights)[0]()
            self.attacks += 1
        return self.attacks

    def _visit(self, port: Address, data: bytes, opening: Opening | None = None) -> None:
        """Say it in portions, after a handshake or none; then wait for the end, or go."""
        rng = self._rng
        with closing(socket.create_connection(port, LIMIT_S)) as sock, suppress(ConnectionError):
            if opening is not None:
                with suppress(RemoteProtocolError, AssertionError):  # it was refused
                    is_lane = opening.channel is Channel.LANE
                    stranger = Handshake.dial(opening, secrets_of())
                    greet(sock, self._run.greeting(opening) if is_lane else stranger)
            while data:
                portion = rng.choice((1, 7, 100, len(data)))
                sock.sendall(data[:portion])
                data = data[portion:]
                if rng.random() < 0.02:
                    break
            if rng.random() < 0.3:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif rng.random() < 0.5:
                sock.settimeout(0.02)
                with suppress(TimeoutError):
                    is_closed(sock)

    def _spoil(self, data: bytes) -> bytes:
        """Half of the time: flip bits, cut, or insert."""
        rng, spoilt = self._rng, bytearray(data)
        while rng.random() < 0.5:
            place = rng.randrange(len(spoilt) + 1)
            match rng.randrange(3):
                case 0 if place < len(spoilt):
                    spoilt[place] ^= 1 << rng.randrange(8)
                case 1:
                    del spoilt[place:]
                case _:
                    spoilt[place:place] = rng.randbytes(rng.randrange(1, 9))
        return bytes(spoilt)

    def _talk_nonsense(self) -> None:
        rng = self._rng
        begin = rng.choice((b"", b"PCCL", b"PCCL\2\0", b"GET / HTTP/1.1\r\n", b"\x16\3\1"))
        self._visit(rng.choice(self._ports), begin + rng.randbytes(rng.randrange(3000)))

    def _drop_in(self) -> None:
        socket.create_connection(self._rng.choice(self._ports), LIMIT_S).close()

    def _talk_to_the_master(self) -> None:
        rng = self._rng
        operation = OperationId(1, 0, rng.randrange(6), rng.randrange(3), rng.randrange(3))
        round_id = RoundId(RoundKind.UPDATE_TOPOLOGY, rng.randrange(9))
        register = Register(0, rng.choice(("", "nowhere.invalid", "\0")), rng.randrange(65536))
        said: list[Message] = [
            register,
            Resume(PeerId(rng.randrange(6)), rng.randrange(6)),
            Heartbeat((), (operation,), (round_id,), blocked=True),
            LinkReport(PeerId(rng.randrange(6)), rng.random() < 0.5, "?"),
            OperationRequest(operation, Descriptor(DataType.FLOAT, ReduceOp.SUM, 1 << 63)),
            RoundRequest(round_id),
            MasterHeartbeat(),
            Goodbye(),
        ]
        words = rng.choices(said, k=rng.randrange(1, 12))
        if rng.random() < 0.5:
            words.insert(0, register)
        data = self._spoil(b"".join(encode(word) for word in words))
        self._visit(self._ports[0], data, Opening(Channel.CONTROL))

    def _be_somebody(self) -> None:
        """A lane as a member or as a newcomer; its segments never fit, for they would count."""
        rng = self._rng
        victim = rng.randrange(1, 4)
        source, run = rng.choice((1, 2, 3, 99)), rng.choice((self._id,) * 4 + (NO_RUN,))
        opening = Opening(Channel.LANE, run, 1, PeerId(source), PeerId(victim))
        data = b"".join(self._frame() for _ in range(rng.randrange(20)))
        if rng.random() < 0.2:
            self._visit(self._ports[victim], self._spoil(as_sent(opening)) + data)
        else:
            self._visit(self._ports[victim], data, opening)

    def _frame(self) -> bytes:
        rng = self._rng
        operation = OperationId(
            rng.choice((1, 2)), rng.choice((0, 7)), rng.randrange(6), 0, rng.randrange(100)
        )
        kind = rng.choice(list(FrameKind))
        length = rng.choice((0, 0, 1, 8, 1000)) if kind is not FrameKind.QUERY else 0
        step = rng.randrange(100, 1000)
        header = FrameHeader(kind, operation, step, rng.randrange(1 << 20), length)
        data = encode_frame(header, bytes(length))
        if rng.random() < 0.05:
            return seal(rng.randbytes(1) + b"\xff" + data[2 : HEADER_BYTES - SEAL_BYTES])
        return data

    def _kill_a_lane(self) -> None:
        engine = engine_of(self._rng.choice(self._run.members))
        rank = self._rng.randrange(2)

        def kill() -> None:
            links = engine.keeper._links.all()  # pyright: ignore[reportPrivateUsage]
            for lane in links[rank % len(links)].lanes if links else ():
                lane.connection.abort()

        engine._loop.call_soon_threadsafe(kill)  # pyright: ignore[reportPrivateUsage]


def test_a_soak(new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    run = new_run(0, QUICK)
    for _ in range(3):
        run.join(lanes=1)  # of a link that is found slow there would be more by and by
    run.check()
    before = descriptors(), connections()
    ended = threading.Event()
    attackers = [Attacker(run, SEED + number) for number in range(3)]
    reduces = run.start(reduce_until, run, ended)
    attacks: list[Future[int]] = [run.start(each.attack_until, ended) for each in attackers]
    time.sleep(SOAK_S / 4)
    resident = resident_bytes()
    time.sleep(SOAK_S * 3 / 4)
    ended.set()
    visits = sum(attack.result(LIMIT_S) for attack in attacks)
    assert visits > 10 * SOAK_S
    assert reduces.result(LIMIT_S) > 1
    assert resident_bytes() - resident < GROWTH_BYTES_MAX
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) <= visits
    assert [member.peer_id for member in run.members] == [1, 2, 3]
    assert all(
        member.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) == 3 for member in run.members
    )
    run.until(lambda: run.registered == 3)
    until(lambda: (descriptors(), connections()) == before, pause_s=COUNT_S)
    run.check()
