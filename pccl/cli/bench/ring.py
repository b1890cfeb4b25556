"""A bare ring all-reduce for comparison: blocking sockets and NumPy, without this library.

It shows what the bytes and additions of a ring cost by themselves: no membership, no joint
decision, no checksum, no recovery. All peers are processes of one machine.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

HOST = "127.0.0.1"

SEGMENT_BYTES = 1 << 20
"""Unit of the pipeline: a segment is sent on as soon as it is received and added. Measured: smaller
ones are up to a tenth slower."""

SEND_BUFFER_BYTES = 512 << 10
"""Send buffer, as between local peers of this library."""


class Ring:
    """One peer of a ring, with a connection from its left and a connection to its right neighbour.

    Attributes:
        port: TCP port where the peer waits for its left neighbour.
        congestion: congestion control of the sockets; empty: unknown on this system.

    Args:
        congestion: congestion control to choose; empty: the system's default.

    Raises:
        OSError: the system refuses the congestion control, or has no free port.
    """

    def __init__(self, congestion: str = "") -> None:
        self._wanted = congestion
        self._rank, self._peers = 0, 1
        self._left = self._new_socket()  # it listens until the left neighbour has connected
        self._right = self._new_socket()
        self._left.bind((HOST, 0))
        self._left.listen()
        self.port: int = self._left.getsockname()[1]
        self.congestion = ""
        if hasattr(socket, "TCP_CONGESTION"):
            name = self._right.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            self.congestion = name.split(b"\0")[0].decode()
        self._ready = select.poll()
        self._scratch = np.empty(SEGMENT_BYTES, np.uint8)
        self._outgoing = deque[memoryview]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()
        self._right.close()

    def connect(self, rank: int, ports: Sequence[int]) -> None:
        """Connect to the neighbours. ``ports`` are those of all peers, by rank."""
        self._rank, self._peers = rank, len(ports)
        self._right.connect((HOST, ports[(rank + 1) % len(ports)]))
        listener, (self._left, _) = self._left, self._left.accept()
        listener.close()
        self._ready.register(self._left, select.POLLIN)
        self._ready.register(self._right, select.POLLOUT)
        for sock in (self._left, self._right):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def barrier(self) -> None:
        """Wait for all peers: after N-1 steps of one byte, every peer has heard of every other."""
        for _ in range(self._peers - 1):
            self._right.sendall(b"-")
            self._receive(self._scratch[:1].data)

    def reduce(self, send: npt.NDArray[Any], recv: npt.NDArray[Any]) -> None:
        """Sum the inputs of all peers.

        Args:
            send: input of this peer, shape (n,).
            recv: receives the sum, shape (n,); it may be ``send`` itself.

        Raises:
            OSError: a neighbour was lost.
        """
        last = 2 * self._peers - 2
        self._outgoing += (_bytes_of(send[part]) for part in self._segments(len(send), 0, send))
        self._send_some()
        for step in range(1, last + 1):
            for part in self._segments(len(send), step, send):
                result = recv[part]
                if step < self._peers:
                    held = self._scratch[: result.nbytes]
                    self._receive(held.data)
                    np.add(send[part], held.view(send.dtype), out=result)
                else:
                    self._receive(_bytes_of(result))
                if step < last:
                    self._outgoing.append(_bytes_of(result))
                    self._send_some()
        while self._outgoing:
            self._right.sendall(self._outgoing.popleft())

    def _segments(self, count: int, step: int, tensor: npt.NDArray[Any]) -> Iterator[slice]:
        """Yield the segments of the chunk that this peer receives in ``step``; 0: sends first."""
        chunk = (self._rank - step) % self._peers
        begin, end = (count * edge // self._peers for edge in (chunk, chunk + 1))
        stride = SEGMENT_BYTES // tensor.itemsize
        for at in range(begin, end, stride):
            yield slice(at, min(at + stride, end))

    def _receive(self, into: memoryview) -> None:
        """Receive ``into`` whole. Meanwhile send, or a ring of full buffers would wait for ever."""
        while into:
            if self._outgoing:
                ready = {descriptor for descriptor, _ in self._ready.poll()}
                if self._right.fileno() in ready:
                    self._send_some()
                if self._left.fileno() not in ready:
                    continue
            count = self._left.recv_into(into)
            if count == 0:
                raise ConnectionResetError("the left neighbour of the ring is gone")
            into = into[count:]

    def _send_some(self) -> None:
        """Send what the socket takes without waiting."""
        while self._outgoing:
            part = self._outgoing[0]
            with contextlib.suppress(BlockingIOError):
                part = part[self._right.send(part, socket.MSG_DONTWAIT) :]
            if part:
                self._outgoing[0] = part
                return
            self._outgoing.popleft()

    def _new_socket(self) -> socket.socket:
        sock = socket.socket()
        if self._wanted and hasattr(socket, "TCP_CONGESTION"):
            name = self._wanted.encode()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        return sock


class RingReduce:
    """The reduce of one tensor in a ring; for the arguments see :meth:`Ring.reduce`."""

    def __init__(self, ring: Ring, send: npt.NDArray[Any], recv: npt.NDArray[Any]) -> None:
        self._ring = ring
        self._send = send
        self.result = recv
        self.barrier = ring.barrier

    def reduce(self) -> str:
        """Sum the inputs of all peers; return the algorithm."""
        self._ring.reduce(self._send, self.result)
        return "ring"

    def figures(self) -> dict[str, Any]:
        """Return the algorithm and the congestion control of the connections."""
        return {"algorithm": "ring", "congestion": self._ring.congestion}


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return array.view(np.uint8).data
