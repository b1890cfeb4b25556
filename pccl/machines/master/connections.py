"""The effects of one event, and the connections of the master."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.machines.master.events import Announce, CloseConnection, MasterEffect, SendTo
from pccl.machines.master.membership import RegisteredPeer
from pccl.protocol import messages as msg
from pccl.protocol.types import RemovalCause

ANSWERED, REMOVED = "the query is answered", "the peer is removed"
"""Reasons to close a connection that need no line in a log: another line says what matters."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The process at the other end of a connection.

    Attributes:
        host: the host from which it is connected.
        key: the public key that it has proven.
        token: the number of the token that it has proven.
    """

    host: str
    key: bytes
    token: int


class Outbox:
    """Collects the effects of one event from the parts of a master, in order."""

    def __init__(self, now_ns: int, effects: list[MasterEffect]) -> None:
        self.now_ns = now_ns
        """The time of the event."""
        self._effects = effects

    def add(self, effect: MasterEffect) -> None:
        """Add an effect after all effects that were added before."""
        self._effects.append(effect)

    def send(self, peer: RegisteredPeer, message: msg.MasterMessage) -> None:
        """Send a message to a peer, if the peer is connected."""
        if peer.connection is not None:
            self._effects.append(SendTo(peer.connection, message))

    def announce(
        self, what: str, peer: RegisteredPeer, text: str, cause: RemovalCause | None = None
    ) -> None:
        """Announce to operators what happened to a peer."""
        self.add(Announce(what, peer.id, peer.member.name, peer.group, text, cause))


class Connections:
    """The open connections, and the peer behind each."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.callers: dict[int, Caller] = {}
        """By open connection: the process behind it."""
        self.peers: dict[int, RegisteredPeer] = {}
        """Connection -> the registered peer behind it."""

    def opened(self, connection: int, caller: Caller) -> None:
        """Record a new connection."""
        self.callers[connection] = caller

    def bind(self, connection: int, peer: RegisteredPeer) -> None:
        """Use this connection for a registered peer from now on, and close the peer's older one."""
        assert connection in self.callers, "a peer is bound to a closed connection"
        if peer.connection not in (None, connection):
            self.close(peer.connection, "superseded")
        peer.connection, peer.token = connection, self.callers[connection].token
        self.peers[connection] = peer

    def lost(self, connection: int) -> RegisteredPeer | None:
        """Forget a closed connection; return its peer, unless the peer uses a newer one."""
        self.callers.pop(connection, None)
        peer = self.peers.pop(connection, None)
        return peer if peer is not None and peer.connection == connection else None

    def close(self, connection: int, reason: str) -> None:
        """Close a connection; its peer may connect again."""
        self._outbox.add(CloseConnection(connection, reason))
        self.callers.pop(connection, None)
        self.peers.pop(connection, None)

    def part_with(self, connection: int, message: msg.MasterMessage, reason: str) -> None:
        """Send a last message on a connection, and close it."""
        self._outbox.add(SendTo(connection, message))
        self.close(connection, reason)

    def refuse(self, connection: int, reason: str, cause: RemovalCause | None = None) -> None:
        """Send a refusal on a connection, and close it; ``cause``: no master admits the process."""
        self.part_with(connection, msg.Refused(cause, reason), reason)
