"""Who has to consent before the run moves, and what members are told no sooner.

Where nobody else can coordinate the run, that is nobody. Otherwise it is a majority
(``majority``): what moves the run is held back until it is there, and a final that
another master could contradict until a majority has stored it (``proposals``).
"""

from __future__ import annotations

from collections.abc import Sequence

from pccl.machines.master.connections import Outbox
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.succession.majority import HELD_BACK, Basis, Majority
from pccl.machines.master.succession.vouched import Vouched
from pccl.protocol import messages as msg
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected
from pccl.protocol.types import OperationId, PeerId, RoundId


class Ratification:
    """Tells members what moves the run, once enough of them agree.

    Args:
        membership: who is in the run.
        outbox: what has to be done.
        is_sole: whether nobody else can coordinate the run.
    """

    def __init__(self, membership: Membership, outbox: Outbox, *, is_sole: bool) -> None:
        self._membership = membership
        self._outbox = outbox
        self.is_sole = is_sole
        self._majority = Majority()
        self._acknowledged: dict[PeerId, bytes] = {}
        """Members of the newest roster that had consent, and the digests of their resume tokens."""

    # -- consent -------------------------------------------------------------------------------

    @property
    def has_consent(self) -> bool:
        """Whether the run may move as its membership is."""
        return self.is_sole or self._majority.consents(self._membership)

    @property
    def ratified(self) -> int:
        """The newest roster to which enough members have consented."""
        return self._membership.version if self.is_sole else self._majority.ratified

    def vouched(self) -> Vouched:
        """The members, for another master, and for this one when it is started again.

        Those that were removed are among them as long as no majority has acknowledged that: it may
        go on with them.
        """
        now = self._membership.digests()
        before = {} if self.is_sole else self._acknowledged
        return Vouched(self._membership.version, {**before, **now})

    def settle(self) -> None:
        """After each event: if there is consent now, tell what was held back."""
        if self.is_sole or not self.has_consent:
            return
        if self._majority.ratified != self._membership.version:
            self._acknowledged = self._membership.digests()
        for peer, message in self._majority.settle(self._membership):
            known = self._membership.peers.get(peer)
            if known is not None:
                self._outbox.send(known, message)

    def lacks_consent_for_ns(self) -> int | None:
        """For how long consent has been lacking, now included; None: it is there."""
        return None if self.has_consent else self._majority.lacks_for_ns(self._outbox.now_ns)

    def leave(self, peer: PeerId) -> None:
        """A member said goodbye: it follows nobody any more, and is not asked."""
        self._majority.leave(peer)

    def note_masters(self, newcomers: Sequence[RegisteredPeer]) -> None:
        """These newcomers become members now: from now on it counts if they know another master."""
        if self.is_sole and any(peer.masters > 1 for peer in newcomers):
            self.is_sole = False
            self._acknowledged = self._membership.digests()
            self._majority.settle(self._membership)

    def shift(self, gap_ns: int) -> None:
        """This process slept: the others have so much more time."""
        self._majority.shift(gap_ns, self._outbox.now_ns)

    def take_up(self, bases: Sequence[Basis], ratified: int, vouched: Vouched) -> None:
        """Go on with a run: these memberships have to consent to what comes now."""
        self._acknowledged = dict(vouched.digests or {})
        self._majority = Majority(bases, ratified)

    # -- what members are told -----------------------------------------------------------------

    def tell(self, peer: RegisteredPeer, message: msg.MasterMessage) -> None:
        """Send to a peer; what moves the run is held back until there is consent."""
        if isinstance(message, HELD_BACK) and not self.has_consent:
            self._majority.hold(peer.id, message)
        else:
            self._outbox.send(peer, message)

    def tell_resumed(self, peer: RegisteredPeer, message: msg.Resumed) -> None:
        """Send to a peer that is back; a member gets what it has not stored."""
        self._outbox.send(peer, message)
        peer.sent_place = peer.stored_place
        if peer.admitted:
            self._send_proposals(peer)

    def tell_admitted(self, peer: RegisteredPeer, message: msg.Admitted) -> None:
        """Send to a new member; before any roster it gets what is proposed, so it knows both."""
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
        """Let a majority store a final that another master could contradict, before it is told.

        A sole master tells it at once. Without ``sends``, members get it when they are resumed.
        """
        if not self.is_sole:
            self._majority.proposals.add(final, expected)
            for peer in self._membership.members() if sends else ():
                self._send_proposals(peer)

    def _send_proposals(self, peer: RegisteredPeer) -> None:
        for proposed in self._majority.proposals.after(peer.sent_place):
            self._outbox.send(peer, proposed)
            peer.sent_place = proposed.place

    def has_proposed(self, operation: OperationId) -> bool:
        """Whether the outcome of an operation was proposed, and somebody may yet ask for it."""
        return operation in self._majority.proposals

    def proposed(self) -> list[msg.Proposed]:
        """All that somebody may yet ask for."""
        return self._majority.proposals.after(0)

    def acknowledged(self, key: OperationId | RoundId) -> None:
        """Everybody concerned has acknowledged what was proposed: nobody will ask."""
        self._majority.proposals.settle(key)
