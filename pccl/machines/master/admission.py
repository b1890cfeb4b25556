"""Who may connect to a master, and register with it: the owners of tokens, and members."""

from __future__ import annotations

from collections.abc import Iterable

from pccl.machines.master.ballots.ballot import Expel
from pccl.machines.master.connections import Caller, Connections
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.tokens import Tokens
from pccl.protocol import messages as msg
from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.types import RemovalCause


class Admission:
    """Judges tokens, and spends tickets.

    Attributes:
        tokens: the tokens of the run; the shell stores them after a change.
    """

    def __init__(
        self, tokens: Tokens, own_key: bytes, membership: Membership, connections: Connections
    ) -> None:
        self.tokens = tokens
        self._own_key = own_key
        """The run's key; a standby has it, too."""
        self._has_run = False
        self._membership = membership
        self._connections = connections

    def note(self, *, has_run: bool) -> None:
        """Note whether this master knows all members of its run; else, members may return."""
        self._has_run = has_run

    def refuses(self, connection: int, message: msg.Message) -> bool:
        """Refuse a process that may not send its first message; return whether it did.

        Members and standbys need no valid token for anything but to register.
        """
        caller = self._connections.callers[connection]
        fingerprint = fingerprint_of(caller.key)
        if fingerprint in self.tokens.expelled:
            reason = "this process was expelled from the run, and may not come back"
            self._connections.refuse(connection, reason, RemovalCause.EXPELLED)
            return True
        flaw = self.tokens.flaw(caller.token, fingerprint)
        if not flaw or not self._needs_token(caller, message):
            return False
        self._connections.refuse(connection, flaw)
        return True

    def _needs_token(self, caller: Caller, message: msg.Message) -> bool:
        known = [peer.id for peer in self._peers if peer.member.key == caller.key]
        match message:
            case msg.Register():
                return True
            case msg.Return():
                return message.peer not in known
            case _:
                return not known and caller.key != self._own_key

    def spend(self, connection: int) -> None:
        """Spend the ticket of a connection, if it has one."""
        caller = self._connections.callers[connection]
        self.tokens = self.tokens.spend(caller.token, fingerprint_of(caller.key))

    def expelled(self) -> Expel | None:
        """Return the removal of the peers that a person has expelled; None: there are none."""
        listed = self.tokens.expelled
        found = [
            peer.id for peer in self._peers if listed and fingerprint_of(peer.member.key) in listed
        ]
        reason = "a person expelled it (pccl expel)"
        return Expel(tuple(found), RemovalCause.EXPELLED, reason) if found else None

    def needed(self, tokens: Tokens | None = None) -> Tokens:
        """Return ``tokens``, by default those of the run, as they should be stored."""
        tokens = tokens or self.tokens
        if not self._has_run:
            return tokens
        owners: dict[int, list[bytes]] = {}
        for peer in self._peers:
            owners.setdefault(peer.token, []).append(fingerprint_of(peer.member.key))
        return tokens.used_by(owners)

    @property
    def _peers(self) -> Iterable[RegisteredPeer]:
        return self._membership.peers.values()
