"""Who may connect to a master, and register with it: the owners of tokens, and members."""

from __future__ import annotations

from pccl.machines.master.ballots.ballot import Expel
from pccl.machines.master.connections import Connections
from pccl.machines.master.membership import Membership
from pccl.machines.master.succession.vouched import Vouched
from pccl.machines.master.tokens import Tokens
from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.types import RemovalCause


class Admission:
    """Judges tokens, and spends tickets.

    Attributes:
        tokens: the tokens of the run; the shell stores them after a change.
    """

    def __init__(self, tokens: Tokens, membership: Membership, connections: Connections) -> None:
        self.tokens = tokens
        self._returning: Vouched | None = None
        """The members that may return, while the master recovers its run; else None."""
        self._membership = membership
        self._connections = connections

    def note(self, returning: Vouched | None) -> None:
        """Note which members may return to a master that recovers its run; None: it has its run."""
        self._returning = returning

    def accepts(self, number: int, key: bytes) -> bool:
        """Whether the owner of a key may connect with a token; a member always may."""
        return not self.tokens.flaw(number, fingerprint_of(key)) or self._has_member(key)

    def claim(self, connection: int, *, returns: bool = False) -> str:
        """Spend the ticket of a connection, if it has one; return why it may not join.

        Args:
            connection: the connection of a process that registers or returns.
            returns: whether it returns. A member needs no valid token for that.
        """
        key, number = self._connections.keys[connection], self._connections.tokens[connection]
        fingerprint = fingerprint_of(key)
        if fingerprint in self.tokens.expelled:
            return "this process was expelled from the run, and may not come back"
        if returns and self._has_member(key):
            return ""
        flaw = self.tokens.flaw(number, fingerprint)
        if not flaw:
            self.tokens = self.tokens.spend(number, fingerprint)
        return flaw

    def expelled(self) -> Expel | None:
        """Return the removal of the peers that a person has expelled; None: there are none."""
        listed = self.tokens.expelled
        found = [
            peer.id
            for peer in self._membership.peers.values()
            if listed and fingerprint_of(peer.member.key) in listed
        ]
        reason = "a person expelled it (pccl expel)"
        return Expel(tuple(found), RemovalCause.EXPELLED, reason) if found else None

    def needed(self, tokens: Tokens | None = None) -> Tokens:
        """Return ``tokens``, by default those of the run, without those that nobody needs."""
        tokens = tokens or self.tokens
        if self._returning is not None:
            return tokens
        return tokens.without_unneeded({peer.token for peer in self._membership.peers.values()})

    def _has_member(self, key: bytes) -> bool:
        returning = {} if self._returning is None else self._returning.keys or {}
        return key in returning.values() or any(
            peer.member.key == key for peer in self._membership.peers.values()
        )
