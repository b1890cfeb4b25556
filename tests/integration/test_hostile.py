"""Strangers at the ports of a master and of a peer: they are sent away, and the run goes on."""

from __future__ import annotations

import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import msgpack
import numpy as np
import pytest

import pccl
from pccl.errors import MasterLost, NotAdmitted
from pccl.protocol.checksum import SEAL_BYTES, payload_hash, seal
from pccl.protocol.codec import encode
from pccl.protocol.data_type import DataType
from pccl.protocol.frame import PAYLOAD_BYTES_MAX, FrameHeader, FrameKind, encode_header
from pccl.protocol.guards.source_shares import port_limits
from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.opening import NO_RUN, OPENING_BYTES, Channel, Opening
from pccl.protocol.limits import CONTROL_MESSAGE_BYTES_MAX, PROTOCOL_VERSION, Timing
from pccl.protocol.messages import (
    BlockedReply,
    Goodbye,
    Heartbeat,
    LinkReport,
    MasterHeartbeat,
    Message,
    OperationDone,
    OperationRequest,
    OutcomeQuery,
    Progress,
    Register,
    Resume,
    RoundRequest,
    Withdraw,
)
from pccl.protocol.types import Descriptor, OperationId, PeerId, ReduceOp, RoundId, RoundKind
from tests.integration.conftest import Run
from tests.support import insides
from tests.support.claimant import greet
from tests.support.frames import encode_frame
from tests.support.insides import engine_of, port_of
from tests.support.patience import LIMIT_S
from tests.support.proxy_headers import proxied
from tests.support.secrets import as_sent, secrets_of
from tests.support.strangers import is_closed, send

pytestmark = pytest.mark.usefixtures("no_errors", "all_log_lines")

GARBAGE = random.Random(20240229).randbytes(100_000)
OPERATION = OperationId(1, 0, 1, 0, 0)
ROUND = RoundId(RoundKind.UPDATE_TOPOLOGY, 0)
DESCRIPTOR = Descriptor(DataType.FLOAT, ReduceOp.SUM, 10)


def frame(kind: FrameKind, payload: bytes, operation: OperationId = OPERATION) -> bytes:
    return encode_frame(FrameHeader(kind, operation, 0, 0, len(payload)), payload)


def control(version: int = PROTOCOL_VERSION, security: int = 0) -> bytes:
    """What a newcomer says first to a master."""
    return as_sent(Opening(Channel.CONTROL, version=version, security=security))


def lane(
    run: bytes = NO_RUN, source: int = 99, target: int = 1, version: int = PROTOCOL_VERSION
) -> bytes:
    """What a younger peer says first to an elder one."""
    return as_sent(Opening(Channel.LANE, run, 1, PeerId(source), PeerId(target), version=version))


def message(body: bytes, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return seal(struct.pack("<IQ", length, payload_hash(body))) + body


def changed(data: bytes, position: int, value: int, *, sealed: bool = True) -> bytes:
    """An opening, or a header, with another byte; ``sealed``: and a checksum that fits."""
    data = data[:position] + bytes([value]) + data[position + 1 :]
    return seal(data[:-SEAL_BYTES]) if sealed else data


def newcomer(*then: Message) -> bytes:
    """What a newcomer says to a master, and goes on with."""
    return b"".join(map(encode, (Register(0, "", 1), *then)))


TO_A_MASTER = {
    "garbage": GARBAGE,
    "a web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a lane": lane(),
    "a source that it claims": proxied("192.0.2.7") + control(),
    "a source in text": b"PROXY TCP4 192.0.2.7 198.51.100.1 1 2\r\n" + control(),
    "half an opening and an end": control()[:40] + GARBAGE,
    "an opening of an unknown kind": changed(control(), 9, 0x63),
    "a version that was damaged": changed(control(), 4, PROTOCOL_VERSION + 1, sealed=False),
    "an opening that was damaged": changed(control(), 50, 1, sealed=False),
    "security that nobody has": control(security=200),
    "another version": control(PROTOCOL_VERSION + 1) + GARBAGE,
    "version 1": b"PCCL\1\0\0\0" + encode(Goodbye()),
    "TLS": bytes.fromhex("160301020001000001fc0303") + GARBAGE[:500],
    "zeros": bytes(5000),
    "an opening with a reserved flag": changed(control(), 14, 4) + GARBAGE,
}
AFTER_THE_HANDSHAKE = {
    "a message that was damaged": encode(Register(0, "", 1))[:-1] + b"\7",
    "a length that was damaged": b"\1" + encode(Register(0, "", 1))[1:],
    "an oversized message": message(b"", CONTROL_MESSAGE_BYTES_MAX + 1),
    "garbage behind an opening": message(GARBAGE, 1000),
    "nested lists": message(b"\x91" * 100_000),
    "an empty message": message(b""),
    "a goodbye": encode(Goodbye()),
    "what only masters say": encode(MasterHeartbeat()),
    "a member's id without its key": encode(Resume(PeerId(1), 1)),
    "a newcomer who talks nonsense": encode(Register(0, "", 1)) + GARBAGE,
    "a newcomer twice": 2 * encode(Register(0, "", 1)),
    "the longest length": b"\xff" * 1000,
    "no lengths but zero": bytes(40_000),
    "deep lists that claim to be long": message(b"\xdc\xff\xff" * 1000 + bytes(100_000)),
    "very many empty lists": message(b"\x9f" + (b"\xdc\xff\xff" + b"\x90" * 65535) * 15),
    "a member's request at once": encode(RoundRequest(ROUND)),
    "a number too large": message(msgpack.packb([1, 1 << 32, "", 1, 1])),
    "a number below zero": message(msgpack.packb([1, -1, "", 1, 1])),
    "a text that is none": message(b"\x95\1\0\xa2\xff\xfe\1\1"),
    "a host that is too long": message(msgpack.packb([1, 0, "\U0001f600" * 200, 1, 1])),
    "a host that breaks lines": encode(Register(0, "a\nb", 1)),
    "a stranger who comes back": encode(Resume(PeerId(1 << 60), 0)),
    "thousands of messages": 20_000 * encode(MasterHeartbeat()),
    "a newcomer who requests a round": newcomer(RoundRequest(ROUND)),
    "a newcomer who reduces": newcomer(OperationRequest(OPERATION, DESCRIPTOR)),
    "a newcomer who is done": newcomer(OperationDone(OPERATION, b"digest")),
    "a newcomer who withdraws": newcomer(Withdraw(OPERATION, "x" * 4000)),
    "a newcomer who asks": newcomer(OutcomeQuery(OPERATION)),
    "a newcomer who comes back": newcomer(Resume(PeerId(1), 1)),
    "a newcomer who leaves": newcomer(Goodbye(), Goodbye(), RoundRequest(ROUND)),
    "a newcomer who says a lot": newcomer(
        *[LinkReport(PeerId(peer), peer % 2 == 0, "\0\n") for peer in range(3000)],
        Heartbeat(tuple(Progress(OPERATION, 1, 1, 1) for _ in range(1000)), (OPERATION,), (ROUND,)),
        BlockedReply(7, True),
        MasterHeartbeat(),
    ),
}
TO_A_PEER = {
    "garbage": GARBAGE,
    "a web browser": TO_A_MASTER["a web browser"],
    "a control connection": control() + encode(Register(0, "", 1)) + bytes(100),
    "frames without an opening": frame(FrameKind.DATA, bytes(1000)),
    "an opening that is none": b"PCCL" + bytes(OPENING_BYTES),
    "another run": lane(),
    "zeros": bytes(5000),
    "TLS": TO_A_MASTER["TLS"],
    "a lane of another number": changed(lane(), 10, 7),
    "an opening with a reserved flag": changed(lane(), 14, 4) + GARBAGE,
    "security that nobody has": changed(lane(), 8, 7),
    "an opening that was damaged": changed(lane(), 50, 1, sealed=False),
    "another version": lane(version=PROTOCOL_VERSION + 1),
}
IN_A_LANE = {
    "garbage": GARBAGE,
    "an unknown kind": changed(frame(FrameKind.DATA, b""), 0, 99),
    "a second opening": lane(),
    "an oversized frame": encode_header(
        FrameHeader(FrameKind.DATA, OPERATION, 0, 0, PAYLOAD_BYTES_MAX + 1)
    ),
    "a query with payload": frame(FrameKind.QUERY, bytes(10)),
    "an oversized bitmap": encode_header(
        FrameHeader(FrameKind.HAVE, OPERATION, 0, 1, PAYLOAD_BYTES_MAX + 1)
    ),
    "flags": changed(frame(FrameKind.DATA, b""), 1, 1),
    "a header that was damaged": frame(FrameKind.DATA, b"")[:-1] + b"\1",
    "a good frame, then garbage": frame(FrameKind.QUERY, b"") + GARBAGE,
}


@pytest.fixture
def run(run_of: Callable[..., Run]) -> Iterator[Run]:
    found = run_of(3, Timing(dial_s=1.0, resume_s=0.2, tick_s=0.05, heartbeat_s=0.1))
    yield found
    found.until(lambda: found.registered == 3)
    found.check()
    assert [member.peer_id for member in found.members] == [1, 2, 3]


def dial(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, LIMIT_S)


def open_lane(sock: socket.socket, run: Run) -> None:
    """In the name of a peer that does not exist."""
    opening = Opening(Channel.LANE, run.machine.run, 1, PeerId(99), PeerId(1))
    greet(sock, run.greeting(opening))


Port = Callable[["Run"], tuple[str, int]]


def master_port(run: Run) -> tuple[str, int]:
    return insides.master_port(run.master)


def peer_port(run: Run) -> tuple[str, int]:
    return port_of(run.members[0])


@pytest.mark.parametrize("data", TO_A_MASTER.values(), ids=TO_A_MASTER)
def test_bad_bytes_to_a_master(run: Run, data: bytes) -> None:
    with closing(dial(master_port(run))) as sock:
        send(sock, data)
        assert is_closed(sock)


@pytest.mark.parametrize("data", AFTER_THE_HANDSHAKE.values(), ids=AFTER_THE_HANDSHAKE)
def test_bad_messages_to_a_master(run: Run, data: bytes) -> None:
    with closing(dial(master_port(run))) as sock:
        greet(sock, Handshake.dial(Opening(Channel.CONTROL), secrets_of()))
        send(sock, data)
        assert is_closed(sock)


@pytest.mark.parametrize("data", TO_A_PEER.values(), ids=TO_A_PEER)
def test_bad_bytes_to_a_peer(run: Run, data: bytes) -> None:
    with closing(dial(peer_port(run))) as sock:
        send(sock, data)
        assert is_closed(sock)


@pytest.mark.parametrize("data", IN_A_LANE.values(), ids=IN_A_LANE)
def test_bad_frames_of_somebody_who_knows_the_run(run: Run, data: bytes) -> None:
    with closing(dial(peer_port(run))) as sock:
        open_lane(sock, run)
        send(sock, data)
        assert is_closed(sock)


@pytest.mark.parametrize(("source", "target"), [(99, 2), (1, 1), (0, 1)])
def test_lanes_to_nobody_here(run: Run, source: int, target: int) -> None:
    with closing(dial(peer_port(run))) as sock:
        send(sock, lane(run.machine.run, source, target))
        assert is_closed(sock)


def test_early_frames_of_a_stranger(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    roster = engine_of(run.members[0]).roster
    assert roster is not None
    to_come = OperationId(1, 0, roster.view, 12345, 0)
    with closing(dial(peer_port(run))) as sock:
        open_lane(sock, run)
        send(sock, frame(FrameKind.DATA, bytes(8), to_come))
        assert is_closed(sock)
    run.until(lambda: "is not a member" in caplog.text)


@pytest.mark.parametrize("port", [master_port, peer_port])
def test_one_line_in_the_log_for_each(
    run: Run, port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("garbage", "a web browser", "another version"):
        data = TO_A_MASTER[name] if port is master_port else TO_A_PEER[name]
        with closing(dial(port(run))) as sock:
            send(sock, data)
            assert is_closed(sock)
    run.until(lambda: len(caplog.messages) >= 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert all("closed a connection from 127.0.0.1:" in text for text in caplog.messages)


@pytest.mark.parametrize("port", [master_port, peer_port])
def test_connections_that_end_early(run: Run, port: Port) -> None:
    whole = lane() if port is peer_port else control() + encode(Register(0, "", 1))
    for length in (0, 1, 3, 8, 11, 79, len(whole) - 1):
        with closing(dial(port(run))) as sock:
            sock.sendall(whole[:length])


@pytest.mark.parametrize("port", [master_port, peer_port])
def test_silent_connections_are_closed(new_run: Callable[..., Run], port: Port) -> None:
    run = new_run(2, Timing(dial_s=0.3))
    half = lane()[:-1] if port is peer_port else control() + encode(Register(0, "", 1))[:-1]
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


@pytest.mark.parametrize(
    ("port", "begun", "drips"),
    [
        (master_port, b"", control()),
        (peer_port, b"", lane()),
        (master_port, control(), encode(Register(0, "x" * 200, 1))),
    ],
    ids=["an opening to a master", "an opening to a peer", "a first message"],
)
def test_a_byte_now_and_then_wins_no_time(
    new_run: Callable[..., Run], port: Port, begun: bytes, drips: bytes
) -> None:
    run = new_run(2, Timing(dial_s=0.5))
    with closing(dial(port(run))) as sock:
        sock.sendall(begun)
        sock.settimeout(0.02)
        began_s = time.monotonic()
        sent = 0
        while sent < len(drips):
            try:
                sock.sendall(drips[sent : sent + 1])
                sent += 1
                if not sock.recv(1 << 10):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert 0 < sent < len(drips)
        assert 0.4 < time.monotonic() - began_s < LIMIT_S
    run.check()
    assert run.registered == 2


@pytest.mark.parametrize("port", [master_port, peer_port])
def test_a_thousand_idle_connections(new_run: Callable[..., Run], port: Port) -> None:
    """The oldest go as others come, long before their time is up; members and newcomers stay."""
    run = new_run(2, Timing(dial_s=600.0, tick_s=0.05))
    kept = port_limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0]).unproven
    with ExitStack() as stack:
        idle = [stack.enter_context(closing(dial(port(run)))) for _ in range(kept + 76)]
        for sock in idle[: len(idle) - kept]:
            assert is_closed(sock)
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)
        run.check()
        run.join()
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
        (control(PROTOCOL_VERSION + 1), NotAdmitted, f"version {PROTOCOL_VERSION + 1}, this one"),
        (lane(), NotAdmitted, "a peer, not the master, listens at this address: is the"),
        (control(security=1), NotAdmitted, "requires a token: set PCCL_TOKEN, or token="),
        (control() + GARBAGE, MasterLost, "after 2 attempts"),
        (control()[:79], MasterLost, "closed the connection"),
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
