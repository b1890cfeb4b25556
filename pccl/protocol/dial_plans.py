"""Who shall dial whom, and what of that the peers of a run were not told yet; the master's.

A peer dials its elders: all of its group that were there before it. It is told of all when it
registers, and of changes once a heartbeat, however many there are. Where an elder cannot be reached
it is asked to dial the newcomer instead: at once if it was asked nothing since the last heartbeat.

A newcomer says itself where it is dialled, so others dial it on its word only as far as somebody
has reached it there; of those whom nobody has reached an elder dials a few.

Pure state: :class:`~pccl.protocol.registrar.Registrar` sends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pccl.protocol import messages as msg
from pccl.protocol.limits import ASKED_MAX, ASKED_UNPROVEN_MAX, PEERS_MAX
from pccl.protocol.membership import Membership, RegisteredPeer
from pccl.protocol.types import Member, PeerId


@dataclass(slots=True)
class _Changes:
    """In one group, since its peers were told."""

    came: list[Member] = field(default_factory=list[Member])
    gone: set[PeerId] = field(default_factory=set[PeerId])

    def before(self, gone: Sequence[PeerId], peer: PeerId) -> msg.LinkPlan:
        """What concerns a peer: its elders. ``gone`` in order of id."""
        came = tuple(m for m in self.came if m.peer < peer and m.peer not in self.gone)
        return msg.LinkPlan(came, tuple(gone[: min(bisect_left(gone, peer), PEERS_MAX)]))


class DialPlans:
    """What a master tells its peers of whom to dial.

    Args:
        membership: of the run.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._asked: dict[PeerId, dict[PeerId, bool]] = {}
        """Elder -> the newcomers that it dials since they cannot reach it, and whether somebody has
        reached them. Also those that were admitted meanwhile: it may not have heard of that."""
        self._told: set[PeerId] = set()
        """Elders that were told whom to dial since the last heartbeat."""
        self._untold: set[PeerId] = set()
        """Elders for whom that has changed since."""
        self._changes: dict[int, _Changes] = {}
        """By group."""

    def asked(self, elder: PeerId) -> tuple[Member, ...]:
        """The newcomers that an elder dials, in order of id."""
        peers = self._membership.peers
        return tuple(peers[peer].member for peer in sorted(self._asked.get(elder, ())))

    def has_room(self, elder: PeerId, newcomer: PeerId, *, proven: bool) -> bool:
        """Whether an elder may be asked to dial a newcomer, and was not yet.

        Args:
            elder: who would dial.
            newcomer: whom.
            proven: whether somebody has reached the newcomer where it says that it is.
        """
        asked, peers = self._asked.get(elder, {}), self._membership.peers
        if newcomer in asked:
            return False
        waiting = [was_proven for peer, was_proven in asked.items() if not peers[peer].admitted]
        unproven = len(waiting) - sum(waiting)
        return len(waiting) < ASKED_MAX and (proven or unproven < ASKED_UNPROVEN_MAX)

    def ask(self, elder: PeerId, newcomer: PeerId, *, proven: bool) -> bool:
        """An elder shall dial a newcomer; return whether to tell it at once."""
        self._asked.setdefault(elder, {})[newcomer] = proven
        if elder in self._told:
            self._untold.add(elder)
            return False
        self._told.add(elder)
        return True

    def linked(self, elder: PeerId, newcomer: PeerId) -> None:
        """An elder has a link to a newcomer: it has reached it, if it was asked to."""
        if newcomer in self._asked.get(elder, ()):
            self._asked[elder][newcomer] = True

    def came_back(self, peer: RegisteredPeer) -> None:
        """Somebody is back who is not the youngest: the younger ones have to dial it."""
        self._changes.setdefault(peer.group, _Changes()).came.append(peer.member)

    def remove(self, gone: Sequence[RegisteredPeer]) -> None:
        """These peers are about to be removed from the membership."""
        lost = {peer.id for peer in gone}
        for peer in gone:
            self._asked.pop(peer.id, None)
            self._changes.setdefault(peer.group, _Changes()).gone.add(peer.id)
        for elder, asked in self._asked.items():
            for newcomer in lost & asked.keys():
                del asked[newcomer]
                self._untold.add(elder)

    def beat(self) -> Iterator[tuple[RegisteredPeer, msg.MasterMessage]]:
        """A heartbeat is due: whom to tell what has changed since the last one."""
        peers = self._membership.peers
        untold = [peer for peer in sorted(self._untold) if peer in peers]
        for elder in untold:
            yield peers[elder], msg.DialNewcomers(self.asked(elder))
        self._told, self._untold = set(untold), set()
        changes, self._changes = self._changes, {}
        gone = {group: sorted(changed.gone) for group, changed in changes.items()}
        for peer in peers.values():
            if peer.group in changes:
                told = changes[peer.group].before(gone[peer.group], peer.id)
                if told.elders or told.gone:
                    yield peer, told
