"""What a plain program takes to copy bytes to another process: one connection, one direction.

No frames, no digests, no decisions, blocking sockets: beside this stands what the library takes to
move shared state. With ``piece_bytes`` the receiver hashes each piece when it is there, as the
library has to.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator

from blake3 import blake3

from pccl.stress.emulator.loopback import CALL_BYTES, CONNECT_S, tune

_DONE = b"!"


@contextlib.contextmanager
def listening(port: int) -> Generator[socket.socket, None, None]:
    """Listen on loopback, for one who dials.

    Raises:
        OSError: the port is in use.
    """
    with socket.create_server((_HOST, port)) as listener:
        listener.settimeout(CONNECT_S)
        yield listener


@contextlib.contextmanager
def accepted(listener: socket.socket, congestion: str) -> Generator[socket.socket, None, None]:
    """The connection of who dials.

    Raises:
        TimeoutError: nobody did.
    """
    with listener.accept()[0] as sock:
        tune(sock, congestion)
        yield sock


@contextlib.contextmanager
def dialled(port: int, congestion: str) -> Generator[socket.socket, None, None]:
    """A connection to who listens.

    Raises:
        OSError: nobody does.
    """
    with socket.create_connection((_HOST, port), CONNECT_S) as sock:
        tune(sock, congestion)
        sock.settimeout(None)
        yield sock


def give(sock: socket.socket, data: memoryview) -> None:
    """Send all of it, and wait until the other side has it.

    Raises:
        OSError: the other side is gone.
    """
    sock.settimeout(None)
    for begin in range(0, len(data), CALL_BYTES):
        sock.sendall(data[begin : begin + CALL_BYTES])
    if sock.recv(len(_DONE)) != _DONE:
        raise ConnectionError("the other process is gone")


def take(sock: socket.socket, into: memoryview, piece_bytes: int = 0) -> None:
    """Fill a buffer with what comes.

    Args:
        sock: connected, blocking.
        into: for all of it.
        piece_bytes: so much is hashed at a time, in this thread; 0: nothing is.

    Raises:
        OSError: the other side is gone.
    """
    step = piece_bytes or len(into)
    for begin in range(0, len(into), step):
        piece = into[begin : begin + step]
        left = piece
        while left:
            received = sock.recv_into(left[:CALL_BYTES])
            if received == 0:
                raise ConnectionError("the other process is gone")
            left = left[received:]
        if piece_bytes:
            blake3(piece).digest()
    sock.sendall(_DONE)


_HOST = "127.0.0.1"
