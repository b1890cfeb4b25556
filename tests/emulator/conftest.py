"""A proxy on its thread between plain sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from pccl.stress.emulator import LinkSpec, ProxyThread
from pccl.stress.emulator.sorting import LinkOf
from tests.support.patience import LIMIT_S


class Bench:
    """A target that listens, and a proxy before it. Every socket is closed in the end."""

    def __init__(self, link: str, link_of: LinkOf | None = None) -> None:
        self._stack = ExitStack()
        self.listener = self.own(socket.create_server(("127.0.0.1", 0)))
        host, port = self.listener.getsockname()
        self.proxy = self._stack.enter_context(
            ProxyThread(f"{host}:{port}", LinkSpec.parse(link), link_of=link_of)
        )

    def close(self) -> None:
        self._stack.close()

    def own(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(LIMIT_S)
        return self._stack.enter_context(sock)

    def dial(self, first: bytes = b"") -> socket.socket:
        address = self.proxy.address
        sock = self.own(socket.create_connection((address.host, address.port), LIMIT_S))
        sock.sendall(first)
        return sock

    def accept(self) -> socket.socket:
        return self.own(self.listener.accept()[0])

    def connect(self, first: bytes = b"") -> tuple[socket.socket, socket.socket]:
        """A connection through the proxy: the dialler's socket and the target's."""
        near = self.dial(first)
        far = self.accept()
        assert receive(far, len(first)) == first
        return near, far

    def wait_until_over(self) -> None:
        """Until the proxy has no connection left."""
        give_up_s = time.monotonic() + LIMIT_S
        while flows := self.proxy.flows():
            assert time.monotonic() < give_up_s, flows


def receive(sock: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes."""
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, f"ended after {len(data)} of {count} bytes"
        data += piece
    return bytes(data)


BenchMaker = Callable[..., Bench]


@pytest.fixture
def make_bench() -> Iterator[BenchMaker]:
    with ExitStack() as stack:

        def make(link: str = "", link_of: LinkOf | None = None) -> Bench:
            bench = Bench(link, link_of)
            stack.callback(bench.close)
            return bench

        yield make


@pytest.fixture
def read() -> Callable[[socket.socket, int], bytes]:
    return receive
