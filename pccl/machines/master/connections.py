"""What goes out because of one event, and the connections on which it goes."""

from __future__ import annotations

from pccl.machines.master.events import Announce, CloseConnection, MasterEffect, SendTo
from pccl.machines.master.membership import RegisteredPeer
from pccl.protocol import messages as msg
from pccl.protocol.guards.allowance import Trust


class Outbox:
    """Where the parts of a master say what has to be done, in order."""

    def __init__(self, now_ns: int, effects: list[MasterEffect]) -> None:
        self.now_ns = now_ns
        """When the event came."""
        self._effects = effects

    def add(self, effect: MasterEffect) -> None:
        """This has to be done, after all that was added before."""
        self._effects.append(effect)

    def send(self, peer: RegisteredPeer, message: msg.MasterMessage) -> None:
        """Send to a peer, if it is connected."""
        if peer.connection is not None:
            self.add(SendTo(peer.connection, message))

    def announce(self, what: str, peer: RegisteredPeer, text: str) -> None:
        """Operators want to know this of a peer."""
        self.add(Announce(what, peer.id, peer.group, text))


class Connections:
    """Which connections are open, and who is behind each."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.hosts: dict[int, str] = {}
        """Connection -> where it comes from, of all that are open."""
        self.peers: dict[int, RegisteredPeer] = {}
        """Connection -> the registered peer behind it."""

    def bind(self, connection: int, peer: RegisteredPeer) -> None:
        """A registered peer is reached by this connection from now on, and by no other one."""
        assert connection in self.hosts, "a peer comes on a connection that is closed"
        if peer.connection not in (None, connection):  # the old one's end means nothing any more
            self.close(peer.connection, "superseded")
        peer.connection = connection
        self.peers[connection] = peer

    def trust_in(self, connection: int) -> Trust:
        """What is known of a connection."""
        peer = self.peers.get(connection)
        if peer is None:
            return Trust.STRANGER
        return Trust.MEMBER if peer.admitted else Trust.NEWCOMER

    def lost(self, connection: int) -> RegisteredPeer | None:
        """A connection is gone; return the peer that was reached by it until now."""
        self.hosts.pop(connection, None)
        peer = self.peers.pop(connection, None)
        return peer if peer is not None and peer.connection == connection else None

    def close(self, connection: int, reason: str) -> None:
        """Close a connection; its peer may come again."""
        self._outbox.add(CloseConnection(connection, reason))
        self.hosts.pop(connection, None)
        self.peers.pop(connection, None)

    def part_with(self, connection: int, message: msg.MasterMessage, reason: str) -> None:
        """Say a last word on a connection, and close it."""
        self._outbox.add(SendTo(connection, message))
        self.close(connection, reason)

    def refuse(self, connection: int, reason: str) -> None:
        """Somebody has asked for something that is not for it."""
        self.part_with(connection, msg.Refused(None, reason), reason)
