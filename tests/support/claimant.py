"""Somebody who knows the token, and says to a master whatever he likes."""

from __future__ import annotations

import socket
import time
from collections import deque
from types import TracebackType
from typing import Self, TypeVar

from pccl.addresses import parse_address
from pccl.protocol import messages as msg
from pccl.protocol.codec import StreamDecoder, encode
from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.types import Member, PeerId, Roster
from tests.support.patience import LIMIT_S
from tests.support.secrets import secrets_of

Kind = TypeVar("Kind", bound=msg.Message)
MASTER = b"invented"
"""Id of the master that it says it has followed."""


def greet(sock: socket.socket, handshake: Handshake, pause_s: float = 0.0) -> Opening:
    """Do the whole handshake; what the other side has said. ``pause_s``: after each answer."""
    while handshake.remote is None:
        sock.sendall(handshake.take_output())
        data = sock.recv(handshake.awaited_bytes)
        assert data, "closed during the handshake"
        handshake.receive(data)
        if handshake.awaited_bytes and handshake.remote is None:
            time.sleep(pause_s)
    return handshake.remote


class Claimant:
    """One control connection, its handshake done.

    Args:
        address: of a master, ``"host:port"``.
        token: the run's; None: there is none.
        who: a byte; claimants with different ones have different keys.
    """

    def __init__(self, address: str, token: bytes | None = None, who: bytes = b"a") -> None:
        where = parse_address(address)
        self.sock = socket.create_connection((where.host, where.port), LIMIT_S)
        opening = Opening(Channel.CONTROL)
        secrets = secrets_of(token, who)
        self.key = secrets.signer.key
        """The public key that it proves."""
        handshake = Handshake.dial(opening, secrets)
        self.run = greet(self.sock, handshake).run
        """The run that the master says it has."""
        self._decoder = StreamDecoder()
        self._heard: deque[msg.Message] = deque()

    def say(self, *messages: msg.Message) -> None:
        """Send messages."""
        self.sock.sendall(b"".join(map(encode, messages)))

    def send(self, data: bytes) -> None:
        """Send what is encoded already."""
        self.sock.sendall(data)

    def hears(self, kind: type[Kind]) -> Kind | None:
        """The next message of a kind; None if the master closes before."""
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            while self._heard:
                if isinstance(message := self._heard.popleft(), kind):
                    return message
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._heard += self._decoder.feed(data)
        raise AssertionError(f"no {kind.__name__} in time")

    def close(self) -> None:
        """Go without a word."""
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def returning(
    run: bytes, peer: int, host: str = "", term: int = 1, masters: int = 1, group: int = 0
) -> msg.Return:
    """The first word of a peer that comes back."""
    registration = msg.Register(group, host, 4000, masters=masters)
    return msg.Return(PeerId(peer), run, term, registration, 0, (), MASTER)


def alone(peer: int, key: bytes, version: int = 7) -> msg.KnownRoster:
    """A roster with one member, which has this key."""
    member = Member(PeerId(peer), "127.0.0.1", 4000, key=key)
    return msg.KnownRoster(Roster(version, 0, 4, (member,), (4,), 1, 1, 1), MASTER)
