"""Which of several masters may move a run: the one that a majority of its members follows.

With one master there is nothing to decide. With a standby there may be two that think the other one
dead, each with some of the members. So nothing that a change of the membership brings about is told
to anybody before a majority of the members before that change has acknowledged it, and with it the
master's term: from then on they take nothing from a master of a lower one, and two majorities have
a member in common. A change that was told and not acknowledged by enough may count all the same, as
far as anybody else knows; so whoever takes over needs a majority of each of these as well.

The same holds for finals that another master could contradict while the membership stays as it is:
they are told once such a majority has also stored them (``proposals``).

With exactly half of the members the incumbent may go on, the master that told them of that
membership. So a run of two survives the loss of one member, or of its master, but not of both at
once; and a run of one ends with its member, for he may be with the other master. Goodbyes are no
loss: whoever says one follows nobody any more. (Vertical Paxos II, Lamport, Malkhi & Zhou, PODC
2009, section 4, is the general case; the term is the ballot.)

Pure state: ``Ratification`` holds back and tells.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pccl.machines.master.membership import Membership
from pccl.machines.master.succession.proposals import Proposals
from pccl.protocol import messages as msg
from pccl.protocol.types import PeerId

HELD_BACK = (msg.OperationStarted, msg.SyncStarted, msg.OperationEnded, msg.RoundClosed)
"""What moves the run. Rosters don't: callers see them when one of these comes. Nor do admissions:
a newcomer alone can decide nothing, and has to know the roster to acknowledge it."""


@dataclass(frozen=True, slots=True)
class Basis:
    """A membership whose consent counts.

    Attributes:
        members: as far as they are known.
        size: how many there are.
        is_ours: whether the master that asks has told it.
    """

    members: frozenset[PeerId]
    size: int
    is_ours: bool

    def consents(self, agreed: Collection[PeerId]) -> bool:
        """Whether those who agree are enough of them."""
        twice = 2 * len(self.members.intersection(agreed))
        return twice > self.size or (twice == self.size and self.is_ours)

    def without(self, left: Collection[PeerId]) -> Basis:
        """These members said goodbye."""
        members = self.members.difference(left)
        return Basis(members, self.size - len(self.members) + len(members), self.is_ours)


class Majority:
    """The members whose consent counts, and what waits for it.

    Args:
        bases: all of which have to consent to the next change.
    """

    def __init__(self, bases: Sequence[Basis] = (), ratified: int = 0) -> None:
        self._bases = tuple(bases)
        self._held: dict[tuple[PeerId, msg.MasterMessage], None] = {}
        """In order; what is asked for again is held once."""
        self._lacking_since_ns: int | None = None
        self.proposals = Proposals()
        """What they have to store before it is told."""
        self.ratified = ratified
        """The newest roster that had consent."""

    def consents(self, membership: Membership) -> bool:
        """Whether enough are connected, know the present membership, and have stored proposals."""
        proposed = self.proposals.last
        agreed = [
            peer.id
            for peer in membership.peers.values()
            if peer.connection is not None
            and peer.seen_version >= membership.version
            and peer.stored_place >= proposed
        ]
        return all(basis.consents(agreed) for basis in self._bases)

    def leave(self, peer: PeerId) -> None:
        """A member said goodbye: it follows nobody any more, and is not asked."""
        self._bases = tuple(basis.without({peer}) for basis in self._bases)

    def hold(self, peer: PeerId, message: msg.MasterMessage) -> None:
        """Keep a message until there is consent."""
        self._held[peer, message] = None

    def settle(self, membership: Membership) -> list[tuple[PeerId, msg.MasterMessage]]:
        """There is consent: the present members are asked from now on. Returns what was held."""
        members = frozenset(peer.id for peer in membership.members())
        self._bases = (Basis(members, len(members), is_ours=True),)
        self._lacking_since_ns = None
        self.ratified = membership.version
        held, self._held = list(self._held), {}
        return held

    def lacks_for_ns(self, now_ns: int) -> int:
        """For how long consent has been lacking, now included."""
        if self._lacking_since_ns is None:
            self._lacking_since_ns = now_ns
        return now_ns - self._lacking_since_ns

    def shift(self, gap_ns: int, now_ns: int) -> None:
        """This process slept: the others have so much more time."""
        if self._lacking_since_ns is not None:
            self._lacking_since_ns = min(self._lacking_since_ns + gap_ns, now_ns)
