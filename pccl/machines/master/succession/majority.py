"""Which of several masters may move a run: the master that a majority of the members follows.

With one master there is nothing to decide. With a standby, two masters may think each other dead,
and each have some of the members. So a change of the membership needs acknowledgements, which name
the master's term, by a majority of the members before it. Until then the master sends no decision
that follows from the change. From then on these members ignore lower terms, and two majorities have
a member in common. A change with too few acknowledgements may still count for another master. So a
successor needs a majority of the last ratified membership, and of every later one.

The same holds for finals that another master could contradict in an unchanged membership: the
master sends them once such a majority has also stored them (``proposals``).

With exactly half of the members the *incumbent* may continue: the master that sent them this
membership. So a run of two survives the loss of one member, or of its master, but not of both at
once. A run of one ends with its member, because that member may follow the other master. A goodbye
is no loss, because its sender no longer follows a master. (Vertical Paxos II, Lamport, Malkhi &
Zhou, PODC 2009, section 4, is the general case; the term is the ballot.)

Pure state: ``Ratification`` holds messages back and sends them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pccl.machines.master.membership import Membership
from pccl.machines.master.succession.proposals import Proposals
from pccl.protocol import messages as msg
from pccl.protocol.types import PeerId

HELD_BACK = (
    msg.OperationStarted, msg.SyncStarted, msg.OperationEnded, msg.RoundClosed, msg.StoreAnswer,
)  # fmt: skip
"""Messages that move the run. Rosters do not, because callers see them only with such a message.
Admissions do not: a newcomer alone decides nothing, and acknowledges the roster that it gets."""


@dataclass(frozen=True, slots=True)
class Basis:
    """A membership whose consent counts.

    Attributes:
        members: the members that are known.
        size: how many members there are.
        is_ours: whether this master has sent this membership.
    """

    members: frozenset[PeerId]
    size: int
    is_ours: bool

    def consents(self, agreed: Collection[PeerId]) -> bool:
        """Whether the peers in ``agreed`` are enough of the members."""
        twice = 2 * len(self.members.intersection(agreed))
        return twice > self.size or (twice == self.size and self.is_ours)

    def without(self, left: Collection[PeerId]) -> Basis:
        """Return the membership without members that said goodbye."""
        members = self.members.difference(left)
        return Basis(members, self.size - len(self.members) + len(members), self.is_ours)


class Majority:
    """The members whose consent counts, and the messages that wait for it.

    Args:
        bases: the memberships that all have to consent to the next change.
    """

    def __init__(self, bases: Sequence[Basis] = (), ratified: int = 0) -> None:
        self._bases = tuple(bases)
        self._held: dict[tuple[PeerId, msg.MasterMessage], None] = {}
        """The messages that wait, in order; a repeated one is held once."""
        self._lacking_since_ns: int | None = None
        self.proposals = Proposals()
        """The finals that members have to store before the master sends them."""
        self.ratified = ratified
        """The version of the newest roster that had consent."""

    def consents(self, membership: Membership) -> bool:
        """Whether enough connected members know the present roster and store all proposals."""
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
        """Stop counting a member that said goodbye, because it no longer follows a master."""
        self._bases = tuple(basis.without({peer}) for basis in self._bases)

    def hold(self, peer: PeerId, message: msg.MasterMessage) -> None:
        """Hold a message back until there is consent."""
        self._held[peer, message] = None

    def settle(self, membership: Membership) -> list[tuple[PeerId, msg.MasterMessage]]:
        """Record consent; the present members have to give the next one. Return held messages."""
        members = frozenset(peer.id for peer in membership.members())
        self._bases = (Basis(members, len(members), is_ours=True),)
        self._lacking_since_ns = None
        self.ratified = membership.version
        self.proposals.answered()
        held, self._held = list(self._held), {}
        return held

    def lacks_for_ns(self, now_ns: int) -> int:
        """Return for how long consent has been lacking; the first call starts this clock."""
        if self._lacking_since_ns is None:
            self._lacking_since_ns = now_ns
        return now_ns - self._lacking_since_ns

    def shift(self, gap_ns: int, now_ns: int) -> None:
        """Shift the deadline for consent by ``gap_ns``, because this process slept that long."""
        if self._lacking_since_ns is not None:
            self._lacking_since_ns = min(self._lacking_since_ns + gap_ns, now_ns)
