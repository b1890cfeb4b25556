"""Strangers at the ports of a master and of a peer: they are sent away, and the run goes on."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

import pccl
from pccl.errors import MasterLost, NotAdmitted
from pccl.protocol.codec import encode, preamble
from pccl.protocol.frame import (
    NO_OPERATION,
    PAYLOAD_BYTES_MAX,
    FrameHeader,
    FrameKind,
    LaneHello,
    encode_header,
)
from pccl.protocol.limits import CONTROL_MESSAGE_BYTES_MAX, PROTOCOL_VERSION, Timing
from pccl.protocol.messages import Goodbye, MasterHeartbeat, Register, Resume
from pccl.protocol.types import OperationId, PeerId

if TYPE_CHECKING:
    from tests.integration.conftest import Run

LIMIT_S = 30.0
GARBAGE = random.Random(20240229).randbytes(100_000)
OPERATION = OperationId(1, 0, 1, 0, 0)


def frame(kind: FrameKind, payload: bytes, operation: OperationId = NO_OPERATION) -> bytes:
    return encode_header(FrameHeader(kind, operation, 0, 0, len(payload))) + payload


def hello(run: bytes = bytes(16), source: int = 2, target: int = 1, version: int = 1) -> bytes:
    return frame(FrameKind.HELLO, LaneHello(version, 0, 1, run, source, target).encode())


TO_A_MASTER = {
    "garbage": GARBAGE,
    "a web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a frame": hello(),
    "an oversized message": preamble() + struct.pack("<I", CONTROL_MESSAGE_BYTES_MAX + 1),
    "garbage behind a preamble": preamble() + struct.pack("<I", 1000) + GARBAGE,
    "nested lists": preamble() + struct.pack("<I", 100_000) + b"\x91" * 100_000,
    "an empty message": preamble() + struct.pack("<I", 0),
    "another version": preamble(PROTOCOL_VERSION + 1) + GARBAGE,
    "a goodbye": preamble() + encode(Goodbye()),
    "what only masters say": preamble() + encode(MasterHeartbeat()),
    "a forged token": preamble() + encode(Resume(PeerId(1), b"guess", 1)),
    "a newcomer who talks nonsense": preamble() + encode(Register(0, "", 1)) + GARBAGE,
    "a newcomer twice": preamble() + 2 * encode(Register(0, "", 1)),
}
TO_A_PEER = {
    "garbage": GARBAGE,
    "a web browser": TO_A_MASTER["a web browser"],
    "a control message": preamble() + encode(Register(0, "", 1)) + bytes(100),
    "an unknown kind": struct.pack("<BBHIIIIIQQQ", 99, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "an oversized frame": encode_header(
        FrameHeader(FrameKind.DATA, OPERATION, 0, 0, PAYLOAD_BYTES_MAX + 1)
    ),
    "data without a hello": frame(FrameKind.DATA, bytes(1000), OPERATION),
    "a query without a hello": frame(FrameKind.QUERY, b"", OPERATION),
    "a hello of the wrong size": frame(FrameKind.HELLO, bytes(1000)),
    "a hello that is none": frame(FrameKind.HELLO, bytes(len(hello()) - 48)),
    "a hello of another run": hello(),
    "a hello of another version": hello(version=PROTOCOL_VERSION + 1),
}


@pytest.fixture
def run(run_of: Callable[..., Run]) -> Iterator[Run]:
    found = run_of(3, Timing(dial_s=1.0, resume_s=1.0, tick_s=0.05))
    yield found
    found.until(lambda: found.registered == 3)
    found.check()


def dial(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, LIMIT_S)


def master_port(run: Run) -> tuple[str, int]:
    host, _, port = run.master.address.rpartition(":")
    return host, int(port)


def peer_port(run: Run) -> tuple[str, int]:
    listener = run.members[0]._session.engine._listener  # pyright: ignore[reportPrivateUsage]
    assert listener is not None
    return "127.0.0.1", listener.address.port


def is_closed(sock: socket.socket) -> bool:
    """Read until the other side has closed; raises TimeoutError if it does not."""
    with suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def send(sock: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):  # it may close before it has all
        sock.sendall(data)


@pytest.mark.parametrize("data", TO_A_MASTER.values(), ids=TO_A_MASTER)
def test_bad_bytes_to_a_master(run: Run, data: bytes) -> None:
    with closing(dial(master_port(run))) as sock:
        send(sock, data)
        assert is_closed(sock)


@pytest.mark.parametrize("data", TO_A_PEER.values(), ids=TO_A_PEER)
def test_bad_bytes_to_a_peer(run: Run, data: bytes) -> None:
    with closing(dial(peer_port(run))) as sock:
        send(sock, data)
        assert is_closed(sock)


@pytest.mark.parametrize("port", [master_port, peer_port])
def test_connections_that_end_early(run: Run, port: Callable[[Run], tuple[str, int]]) -> None:
    whole = hello() if port is peer_port else preamble() + encode(Register(0, "", 1))
    for length in (0, 1, 3, 8, 11, len(whole) - 1):
        with closing(dial(port(run))) as sock:
            sock.sendall(whole[:length])


@pytest.mark.parametrize("port", [master_port, peer_port])
def test_silent_connections_are_closed(
    new_run: Callable[..., Run], port: Callable[[Run], tuple[str, int]]
) -> None:
    run = new_run(2, Timing(dial_s=0.3))
    half = encode_header(FrameHeader(FrameKind.HELLO, NO_OPERATION, 0, 0, len(hello()) - 48))
    half = half if port is peer_port else preamble() + encode(Register(0, "", 1))[:-1]
    silent = [dial(port(run)) for _ in range(5)]
    try:
        silent[0].sendall(half)
        silent[1].sendall(half[:3])
        run.check()
        assert all(is_closed(sock) for sock in silent)
    finally:
        for sock in silent:
            sock.close()
    run.check()


def test_a_crowd_at_every_port_during_a_reduce(run: Run) -> None:
    ended = threading.Event()

    def bother(address: tuple[str, int], data: bytes) -> int:
        visits = 0
        while not ended.is_set():
            with closing(dial(address)) as sock:
                send(sock, data)
                is_closed(sock)
            visits += 1
        return visits

    crowd = [
        run.start(bother, port(run), data)
        for port, bytes_of in ((master_port, TO_A_MASTER), (peer_port, TO_A_PEER))
        for data in (bytes_of["garbage"], bytes_of["a web browser"])
    ]
    for _ in range(10):
        arrays = [np.full(1_000_003, rank + 1, np.int64) for rank in range(3)]
        run.reduce(arrays)
        assert all((array == 6).all() for array in arrays)
    ended.set()
    assert all(visits.result(LIMIT_S) > 0 for visits in crowd)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", MasterLost, "does not speak this protocol"),
        (preamble(PROTOCOL_VERSION + 1), NotAdmitted, "protocol version 2 there, 1 here"),
        (preamble() + GARBAGE, MasterLost, "after 2 attempts"),
        (b"", MasterLost, "closed the connection"),
    ],
)
def test_something_else_at_the_masters_address(
    answer: bytes, error: type[pccl.PCCLError], words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):  # it is shut down in the end
                while True:
                    with closing(server.accept()[0]) as connection:
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)
                        is_closed(connection)

        serving = threading.Thread(target=serve)
        serving.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            pccl.Communicator(address, timing=Timing(connect_retry_s=0.01)) as comm,
            pytest.raises(error, match=words),
        ):
            comm.connect(n_attempts=2)
        server.shutdown(socket.SHUT_RDWR)
        serving.join(LIMIT_S)
