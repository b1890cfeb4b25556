"""How fast two plain processes move bytes to each other: the floor under every benchmark.

No frames, no digest, no decisions: each side sends and receives the same number of bytes at the
same time on one connection, in one thread, as fast as the system calls go. A program, for whoever
may not open sockets itself. One process listens, the other is told where::

    python -m pccl.stress.emulator.loopback --bytes 67108864
    python -m pccl.stress.emulator.loopback --bytes 67108864 --to 127.0.0.1:40123

The listener's first line says where it listens. Both end with the seconds of every round and the
congestion control that was used. Every line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import sys
import time

from pccl.transports.base import Address

CALL_BYTES = 256 << 10
"""Most that one system call moves: what stays in a core's cache while it is copied."""

CONNECT_S = 10.0
"""How long the other process is waited for."""


def exchange(sock: socket.socket, outgoing: memoryview, incoming: memoryview) -> None:
    """Send all of one buffer and fill the other, at the same time.

    Args:
        sock: connected, non-blocking.
        outgoing: bytes.
        incoming: bytes.

    Raises:
        OSError: the other side is gone.
    """
    poll = select.poll()
    poll.register(sock)
    while outgoing or incoming:
        sent = _send(sock, outgoing[:CALL_BYTES]) if outgoing else 0
        received = _receive(sock, incoming[:CALL_BYTES]) if incoming else 0
        outgoing, incoming = outgoing[sent:], incoming[received:]
        if not sent and not received:
            wanted = (select.POLLOUT if outgoing else 0) | (select.POLLIN if incoming else 0)
            poll.modify(sock, wanted)
            poll.poll()


def _send(sock: socket.socket, data: memoryview) -> int:
    try:
        return sock.send(data)
    except BlockingIOError:
        return 0


def _receive(sock: socket.socket, into: memoryview) -> int:
    try:
        received = sock.recv_into(into)
    except BlockingIOError:
        return 0
    if received == 0:
        raise ConnectionError("the other process is gone")
    return received


def measure(sock: socket.socket, size_bytes: int, round_count: int) -> list[float]:
    """Seconds of every round, from the moment that both are ready.

    Args:
        sock: connected, non-blocking.
        size_bytes: how much goes each way.
        round_count: how many rounds are measured, after one that is not.
    """
    outgoing, incoming = bytearray(b"\x01" * size_bytes), bytearray(size_bytes)
    seconds: list[float] = []
    for _ in range(round_count + 1):
        exchange(sock, memoryview(b"?"), memoryview(bytearray(1)))
        started_s = time.perf_counter()
        exchange(sock, memoryview(outgoing), memoryview(incoming))
        seconds.append(time.perf_counter() - started_s)
    return seconds[1:]


def tune(sock: socket.socket, congestion: str) -> str:
    """Choose the congestion control, if the system permits; returns the one in use."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    option = getattr(socket, "TCP_CONGESTION", None)  # Linux has it
    if option is None:
        return ""
    try:
        if congestion:
            sock.setsockopt(socket.IPPROTO_TCP, option, congestion.encode())
        return sock.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode()
    except OSError:
        return ""


def say(found: object) -> None:
    """Tell whoever started this process."""
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


def accept() -> socket.socket:
    """Say where we listen; the first connection that comes.

    Raises:
        TimeoutError: nobody came.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(CONNECT_S)
        say({"address": str(Address(*listener.getsockname()))})
        return listener.accept()[0]


def main() -> None:
    """Measure with the other process."""
    parser = argparse.ArgumentParser(prog="python -m pccl.stress.emulator.loopback")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--congestion", default="", help="without it, the system's default")
    parser.add_argument("--to", metavar="HOST:PORT", help="without it, listen")
    given = parser.parse_args()
    if given.to is None:
        sock = accept()
    else:
        host, _, port = given.to.rpartition(":")
        sock = socket.create_connection((host, int(port)), CONNECT_S)
    with sock:
        congestion = tune(sock, given.congestion)
        sock.setblocking(False)
        seconds = measure(sock, given.bytes, given.rounds)
    say({"seconds": seconds, "congestion": congestion})


if __name__ == "__main__":
    main()
