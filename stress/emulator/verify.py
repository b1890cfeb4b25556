"""Measures plain TCP streams through a proxy, to verify the emulator.

The proxy is a separate process, as in real use. Sender and receiver are threads of this process,
with blocking sockets, and share no code with the library or the proxy.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pccl.addresses import parse_address
from pccl.stress.emulator.spec import LinkSpec

TOLERANCE = 0.05

PING_BYTES = 64
BLOCK_BYTES = 256 << 10
_PINGS = 100
_PING_S = 4.0  # approximate time for all pings together
_WARM_UP_S = 1.0
_PATIENCE_S = 30.0

_ECHO, _SINK, _BOTH = b"e", b"s", b"b"


@dataclass(frozen=True, slots=True)
class StreamMeasured:
    """The requested and the measured figures of a link.

    Attributes:
        link: the link as text.
        flows: number of connections that sent at once.
        asked_bps: expected rate of all connections in one direction; None: no limit.
        rate_bps: rate of the payload that arrived at the proxy's target.
        rate_back_bps: rate of the payload on the way back; None: none was sent.
        asked_rtt_s: expected round trip on the idle link, with the mean jitter.
        rtt_s: median of the round trips of small messages.
        proxy_cpu_share: CPU time of the proxy's process per second of the streams; 0 on systems
            without ``/proc``.
    """

    link: str
    flows: int
    asked_bps: float | None
    rate_bps: float
    rate_back_bps: float | None
    asked_rtt_s: float
    rtt_s: float
    proxy_cpu_share: float

    @property
    def is_ok(self) -> bool:
        """Whether rates and round trip are within the tolerance."""
        pairs = [(self.asked_rtt_s, self.rtt_s), (self.asked_bps, self.rate_bps)]
        if self.rate_back_bps is not None:
            pairs.append((self.asked_bps, self.rate_back_bps))
        return all(not asked or abs(was / asked - 1) <= TOLERANCE for asked, was in pairs)


def measure(spec: LinkSpec, *, flows: int, seconds: float, both_ways: bool) -> StreamMeasured:
    """Start a proxy for a link, and measure first its round trip, then its rate.

    Raises:
        OSError: the proxy did not start, or a connection through it failed.
    """
    with _target() as (to, target), _proxy_process(to, spec) as (address, pid):
        rtt_s = _round_trip_s(address, spec)
        with _Streams() as streams:
            for _ in range(flows):
                sock = _dial(address, _BOTH if both_ways else _SINK)
                streams.serve(sock, streams.send, *([streams.receive] if both_ways else []))
            time.sleep(_WARM_UP_S + 4 * spec.rtt_s)
            started_s, cpu_s = time.monotonic(), cpu_s_of(pid)
            sunk, taken = target.received(), streams.received()
            time.sleep(seconds)
            lasted_s = time.monotonic() - started_s
            sunk, taken = target.received() - sunk, streams.received() - taken
            cpu_s = cpu_s_of(pid) - cpu_s
    return StreamMeasured(
        link=str(spec),
        flows=flows,
        asked_bps=_asked_bps(spec, flows),
        rate_bps=sunk * 8 / lasted_s,
        rate_back_bps=taken * 8 / lasted_s if both_ways else None,
        asked_rtt_s=spec.rtt_s + spec.jitter_s,
        rtt_s=rtt_s,
        proxy_cpu_share=cpu_s / lasted_s,
    )


def _asked_bps(spec: LinkSpec, flows: int) -> float | None:
    limits: list[float] = []
    if spec.rate_bps is not None:
        limits.append(spec.rate_bps)
    if spec.flow_bps is not None:
        limits.append(flows * spec.flow_bps)
    if spec.window_bytes is not None and spec.rtt_s:
        limits.append(flows * spec.window_bytes * 8 / spec.rtt_s)
    return min(limits, default=None)


@contextlib.contextmanager
def _proxy_process(to: str, spec: LinkSpec) -> Generator[tuple[tuple[str, int], int]]:
    """Run a proxy as a process; yield its address and its process id.

    The proxy ends when its stdin ends, so it does not outlive this process.
    """
    command = [sys.executable, "-m", "pccl.stress", "proxy", "--to", to, "--link", str(spec)]
    with subprocess.Popen(
        [*command, "--until-eof"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if not words:
                raise OSError("the proxy did not start")
            address = parse_address(words[-1])
            yield (address.host, address.port), process.pid
        finally:
            process.terminate()


def _round_trip_s(address: tuple[str, int], spec: LinkSpec) -> float:
    count = min(_PINGS, max(10, int(_PING_S / max(spec.rtt_s, 1e-3))))
    spans_s: list[float] = []
    with _dial(address, _ECHO) as sock:
        for _ in range(2 + count):  # the first two wait for the dial
            started_s = time.perf_counter()
            sock.sendall(bytes(PING_BYTES))
            left = PING_BYTES
            while left:
                got = len(sock.recv(left))
                if not got:
                    raise OSError("the connection through the proxy ended")
                left -= got
            spans_s.append(time.perf_counter() - started_s)
    return statistics.median(spans_s[2:])


def _dial(address: tuple[str, int], mode: bytes) -> socket.socket:
    sock = socket.create_connection(address, timeout=_PATIENCE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(mode)
    return sock


class _Streams:
    """Connections, each with threads that serve it until it is shut down."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._received: dict[socket.socket, int] = {}
        """Received bytes by connection; only the receiving thread of a connection adds to them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._received:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        for sock in self._received:
            sock.close()

    def received(self) -> int:
        """Return the bytes that all connections have received so far."""
        return sum(self._received.values())

    def serve(self, sock: socket.socket, *works: Callable[[socket.socket], None]) -> None:
        """Run each of ``works`` with a connection, in its own thread, until it is shut down."""
        self._received[sock] = 0
        self._threads += [_thread(work, sock) for work in works]

    def answer(self, sock: socket.socket) -> None:
        """Serve a connection as its first byte asks: echo, receive, or send and receive."""
        mode = sock.recv(1)
        if mode == _BOTH:
            self._threads.append(_thread(self.send, sock))
        (self.echo if mode == _ECHO else self.receive)(sock)

    def send(self, sock: socket.socket) -> None:
        """Send zeros as fast as the connection allows."""
        block = bytes(BLOCK_BYTES)
        while True:
            sock.sendall(block)

    def receive(self, sock: socket.socket) -> None:
        """Receive and count bytes until the connection ends."""
        room = bytearray(BLOCK_BYTES)
        while count := sock.recv_into(room):
            self._received[sock] += count

    def echo(self, sock: socket.socket) -> None:
        """Send all received bytes back."""
        while data := sock.recv(PING_BYTES):
            sock.sendall(data)


def _thread(work: Callable[[socket.socket], None], sock: socket.socket) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(OSError):  # the usual end of a thread
            work(sock)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def _target() -> Generator[tuple[str, _Streams]]:
    """Run a server for the proxy to dial; yield its address and its connections."""

    def accept(listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            streams.serve(sock, streams.answer)

    with _Streams() as streams, socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        accepting = _thread(accept, listener)
        host, port = listener.getsockname()
        try:
            yield f"{host}:{port}", streams
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            accepting.join(_PATIENCE_S)


def cpu_s_of(pid: int) -> float:
    """Return the CPU time of another process in seconds; 0 on systems without ``/proc``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
