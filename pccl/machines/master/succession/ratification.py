"""The consent of members that a master needs to move the run, and the messages that wait for it.

A sole master needs no consent. Otherwise the master holds back messages that move the run until a
majority consents (``majority``). It also holds back a final that another master could contradict,
until a majority has stored the final (``proposals``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pccl.machines.master.connections import Outbox
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.succession.majority import HELD_BACK, Basis, Majority
from pccl.machines.master.succession.vouched import Vouched
from pccl.protocol import messages as msg
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected
from pccl.protocol.types import OperationId, PeerId, RoundId


class Ratification:
    """Sends messages that move the run, once enough members consent.

    Args:
        membership: the peers of the run.
        outbox: collects the effects.
        is_sole: whether no other master can coordinate the run.
    """

    def __init__(self, membership: Membership, outbox: Outbox, *, is_sole: bool) -> None:
        self._membership = membership
        self._outbox = outbox
        self.is_sole = is_sole
        self._majority = Majority()
        self._acknowledged: dict[PeerId, bytes] = {}
        """Members of the newest roster that had consent, and their keys."""

    # -- consent -------------------------------------------------------------------------------

    @property
    def has_consent(self) -> bool:
        """Whether the master may move the run with its present membership."""
        return self.is_sole or self._majority.consents(self._membership)

    @property
    def ratified(self) -> int:
        """The version of the newest roster to which enough members have consented."""
        return self._membership.version if self.is_sole else self._majority.ratified

    def vouched(self) -> Vouched:
        """Return the members of the run, for a standby and for the next start of this master.

        Removed members are included until a majority has acknowledged their removal, because
        another master may still continue with them.
        """
        now = self._membership.keys()
        before = {} if self.is_sole else self._acknowledged
        return Vouched(self._membership.version, {**before, **now})

    def settle(self) -> None:
        """After an event, send the messages that were held back, if there is consent now.

        Not for a sole master, which holds nothing back.
        """
        assert not self.is_sole
        if not self.has_consent:
            return
        if self._majority.ratified != self._membership.version:
            self._acknowledged = self._membership.keys()
        for peer, message in self._majority.settle(self._membership):
            known = self._membership.peers.get(peer)
            if known is not None:
                self._outbox.send(known, message)

    def lacks_consent_for_ns(self) -> int | None:
        """Return for how long consent has been lacking; None if there is consent."""
        return None if self.has_consent else self._majority.lacks_for_ns(self._outbox.now_ns)

    def leave(self, peer: PeerId) -> None:
        """Stop counting a member that said goodbye, because it no longer follows a master."""
        self._majority.leave(peer)

    def note_masters(self, newcomers: Sequence[RegisteredPeer]) -> None:
        """Require consent from now on, if one of these new members knows another master."""
        if self.is_sole and any(peer.masters > 1 for peer in newcomers):
            self.is_sole = False
            self._acknowledged = self._membership.keys()
            self._majority.settle(self._membership)

    def shift(self, gap_ns: int) -> None:
        """Shift the deadline for consent by ``gap_ns``, because this process slept that long."""
        self._majority.shift(gap_ns, self._outbox.now_ns)

    def take_up(self, bases: Sequence[Basis], ratified: int, vouched: Vouched) -> None:
        """Continue a recovered run, in which ``bases`` have to consent to the next change."""
        self._acknowledged = dict(vouched.keys or {})
        self._majority = Majority(bases, ratified)

    # -- messages to members -------------------------------------------------------------------

    def tell(self, peers: Iterable[RegisteredPeer], message: msg.MasterMessage) -> None:
        """Send a message to peers; if it moves the run, hold it back until there is consent."""
        must_wait = (
            not self.is_sole
            and isinstance(message, HELD_BACK)
            and not self._majority.consents(self._membership)
        )
        for peer in peers:
            if must_wait:
                self._majority.hold(peer.id, message)
            else:
                self._outbox.send(peer, message)

    def tell_resumed(self, peer: RegisteredPeer, message: msg.Resumed) -> None:
        """Send ``message`` to a resumed peer, and all proposals that it lacks if it is a member."""
        self._outbox.send(peer, message)
        peer.sent_place = peer.stored_place
        if peer.admitted:
            self._send_proposals(peer)

    def tell_admitted(self, peer: RegisteredPeer, message: msg.Admitted) -> None:
        """Send all proposals to a new member, and then its admission, which names a roster."""
        self._send_proposals(peer)
        self._outbox.send(peer, message)

    # -- proposals -----------------------------------------------------------------------------

    def propose(
        self,
        final: msg.OperationEnded | msg.RoundClosed,
        expected: Expected = NOTHING_EXPECTED,
        *,
        sends: bool = True,
    ) -> None:
        """Propose a final that another master could contradict, so that a majority stores it first.

        A sole master proposes nothing. Without ``sends``, members get the proposal on resume.
        """
        if not self.is_sole:
            self._majority.proposals.add(final, expected)
            for peer in self._membership.members() if sends else ():
                self._send_proposals(peer)

    def tell_current(self, peer: RegisteredPeer, message: msg.StoreAnswer) -> None:
        """Send an answer once a majority has shown that it still follows this master."""
        if not self.is_sole:
            self._majority.proposals.ask()
            for member in self._membership.members():
                self._send_proposals(member)
        self.tell([peer], message)

    def _send_proposals(self, peer: RegisteredPeer) -> None:
        for proposed in self._majority.proposals.after(peer.sent_place):
            self._outbox.send(peer, proposed)
            peer.sent_place = proposed.place

    def has_proposed(self, operation: OperationId) -> bool:
        """Whether the outcome of an operation was proposed and is not settled."""
        return operation in self._majority.proposals

    def acknowledged(self, keys: Iterable[OperationId | RoundId]) -> None:
        """Drop proposals, because every member concerned has acknowledged their finals."""
        if not self.is_sole:
            self._majority.proposals.settle(keys)
