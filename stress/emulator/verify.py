"""A plain TCP stream through a relay, measured: does the emulator do what it says?

The relay is a process of its own, as in use; sender and receiver are threads here, with blocking
sockets, which share nothing with the library or the relay.
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

from pccl.addresses import parse_address
from pccl.stress.emulator.spec import LinkSpec

TOLERANCE = 0.05

PING_BYTES = 64
BLOCK_BYTES = 256 << 10
_PINGS = 100
_PING_S = 4.0  # about how long the pings may take together
_WARM_UP_S = 1.0
_PATIENCE_S = 30.0

_ECHO, _SINK, _BOTH = b"e", b"s", b"b"


@dataclass(frozen=True, slots=True)
class StreamMeasured:
    """What was asked of a link and what came out.

    Attributes:
        link: the link, as it is written.
        flows: how many connections sent at once.
        asked_bps: what they should reach together in one direction; None: no limit.
        rate_bps: payload that arrived, towards the relay's target.
        rate_back_bps: the same on the way back; None: nothing was sent there.
        asked_rtt_s: round trip on the idle link, the mean jitter included.
        rtt_s: median of the round trips of small messages.
        relay_cpu_share: CPU time of the relay's process per second while the streams ran; 0 where
            the system does not tell.
    """

    link: str
    flows: int
    asked_bps: float | None
    rate_bps: float
    rate_back_bps: float | None
    asked_rtt_s: float
    rtt_s: float
    relay_cpu_share: float

    @property
    def is_ok(self) -> bool:
        """Whether everything that was asked for is within the tolerance."""
        pairs = [(self.asked_rtt_s, self.rtt_s), (self.asked_bps, self.rate_bps)]
        if self.rate_back_bps is not None:
            pairs.append((self.asked_bps, self.rate_back_bps))
        return all(not asked or abs(was / asked - 1) <= TOLERANCE for asked, was in pairs)


def measure(spec: LinkSpec, *, flows: int, seconds: float, both_ways: bool) -> StreamMeasured:
    """Measure the round trip and then the rate of a link, through a relay made for it.

    Raises:
        OSError: no relay, or no connection through it.
    """
    with _Target() as target, _relay_process(target.address, spec) as (address, pid):
        rtt_s = _round_trip_s(address, spec)
        with _Streams(address, flows, both_ways) as streams:
            time.sleep(_WARM_UP_S + 4 * spec.rtt_s)
            started_s, cpu_s = time.monotonic(), _cpu_s(pid)
            sunk, taken = target.received(), streams.received()
            time.sleep(seconds)
            lasted_s = time.monotonic() - started_s
            sunk, taken = target.received() - sunk, streams.received() - taken
            cpu_s = _cpu_s(pid) - cpu_s
    return StreamMeasured(
        link=str(spec),
        flows=flows,
        asked_bps=_asked_bps(spec, flows),
        rate_bps=sunk * 8 / lasted_s,
        rate_back_bps=taken * 8 / lasted_s if both_ways else None,
        asked_rtt_s=spec.rtt_s + spec.jitter_s,
        rtt_s=rtt_s,
        relay_cpu_share=cpu_s / lasted_s,
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
def _relay_process(to: str, spec: LinkSpec) -> Generator[tuple[tuple[str, int], int]]:
    """A relay in a process of its own: its address and its process id.

    It ends at the end of its stdin, which comes even if this process is killed.
    """
    command = [sys.executable, "-m", "pccl.stress", "relay", "--to", to, "--link", str(spec)]
    with subprocess.Popen(
        [*command, "--until-eof"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if not words:
                raise OSError("the relay did not start")
            address = parse_address(words[-1])
            yield (address.host, address.port), process.pid
        finally:
            process.terminate()


def _round_trip_s(address: tuple[str, int], spec: LinkSpec) -> float:
    count = min(_PINGS, max(10, int(_PING_S / max(spec.rtt_s, 1e-3))))
    spans_s: list[float] = []
    with _dial(address, _ECHO) as sock:
        for _ in range(2 + count):  # the first wait for the dial
            started_s = time.perf_counter()
            sock.sendall(bytes(PING_BYTES))
            left = PING_BYTES
            while left:
                got = len(sock.recv(left))
                if not got:
                    raise OSError("the connection through the relay ended")
                left -= got
            spans_s.append(time.perf_counter() - started_s)
    return statistics.median(spans_s[2:])


def _dial(address: tuple[str, int], mode: bytes) -> socket.socket:
    sock = socket.create_connection(address, timeout=_PATIENCE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(mode)
    return sock


class _Counter:
    """Bytes that one thread has received; only that thread adds."""

    def __init__(self) -> None:
        self.total = 0


def _send_on(sock: socket.socket) -> None:
    block = bytes(BLOCK_BYTES)
    with contextlib.suppress(OSError):  # that is how it ends
        while True:
            sock.sendall(block)


def _receive_on(sock: socket.socket, counter: _Counter) -> None:
    room = bytearray(BLOCK_BYTES)
    with contextlib.suppress(OSError):
        while count := sock.recv_into(room):
            counter.total += count


def _echo_on(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := sock.recv(PING_BYTES):
            sock.sendall(data)


class _StreamThreads:
    """Threads that each serve a socket, until all the sockets are shut."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._counters: list[_Counter] = []

    def received(self) -> int:
        """Bytes so far, of all."""
        return sum(counter.total for counter in self._counters)

    def own(self, sock: socket.socket) -> None:
        self._sockets.append(sock)

    def send(self, sock: socket.socket) -> None:
        self._start(lambda: _send_on(sock))

    def echo(self, sock: socket.socket) -> None:
        self._start(lambda: _echo_on(sock))

    def receive(self, sock: socket.socket) -> None:
        counter = _Counter()
        self._counters.append(counter)
        self._start(lambda: _receive_on(sock, counter))

    def end(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        for sock in self._sockets:
            sock.close()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()


class _Streams:
    """Connections that send as fast as they may, and receive, if both ways."""

    def __init__(self, address: tuple[str, int], count: int, both_ways: bool) -> None:
        self._threads = _StreamThreads()
        try:
            for _ in range(count):
                sock = _dial(address, _BOTH if both_ways else _SINK)
                self._threads.own(sock)
                self._threads.send(sock)
                if both_ways:
                    self._threads.receive(sock)
        except BaseException:
            self._threads.end()
            raise

    def __enter__(self) -> _Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.end()

    def received(self) -> int:
        return self._threads.received()


class _Target:
    """What the relay dials: echoes, or takes all that comes, or sends as well."""

    def __enter__(self) -> _Target:
        self._threads = _StreamThreads()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_PATIENCE_S)
        self._listener.close()
        self._threads.end()

    def received(self) -> int:
        return self._threads.received()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._threads.own(sock)
                mode = sock.recv(1)
                if mode == _ECHO:
                    self._threads.echo(sock)
                else:
                    self._threads.receive(sock)
                if mode == _BOTH:
                    self._threads.send(sock)


def _cpu_s(pid: int) -> float:
    """CPU time that another process has used; 0 where the system has no such file."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
