"""The master's plan of which peer dials which, and the changes that peers have yet to receive.

A peer dials its elders: all older peers of its group. The master sends it the whole list when it
registers, and the changes once a heartbeat, however many there are. If a newcomer cannot reach an
elder, the master asks the elder to dial the newcomer instead: at once, unless it has asked this
elder since the last heartbeat.

A newcomer declares its own address, which may be somebody else's. A newcomer is *proven* once
a test, or the elder itself, has reached it there. An elder dials only a few unproven newcomers.

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
    """Of one group, since its peers last received a plan."""

    came: list[Member] = field(default_factory=list[Member])
    gone: set[PeerId] = field(default_factory=set[PeerId])

    def before(self, gone: Sequence[PeerId], peer: PeerId) -> msg.LinkPlan:
        """The changes among the elders of a peer. ``gone`` is in order of id."""
        came = tuple(m for m in self.came if m.peer < peer and m.peer not in self.gone)
        return msg.LinkPlan(came, tuple(gone[: min(bisect_left(gone, peer), PEERS_MAX)]))


class DialPlans:
    """Which peers each peer shall dial, and what the master has yet to send of that.

    Args:
        membership: of the run.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._asked: dict[PeerId, dict[PeerId, bool]] = {}
        """Elder -> newcomers that it dials because they cannot reach it -> whether they are proven.

        Newcomers stay in here after their admission: the elder may not know of it yet.
        """
        self._told: set[PeerId] = set()
        """Elders to which a list was sent since the last heartbeat."""
        self._untold: set[PeerId] = set()
        """Elders whose list has changed since it was sent."""
        self._changes: dict[int, _Changes] = {}
        """By group."""

    def asked(self, elder: PeerId) -> tuple[Member, ...]:
        """The newcomers that an elder dials, in order of id."""
        peers = self._membership.peers
        return tuple(peers[peer].member for peer in sorted(self._asked.get(elder, ())))

    def has_room(self, elder: PeerId, newcomer: PeerId, *, proven: bool) -> bool:
        """Whether the master may ask an elder to dial a newcomer; False if it has done so.

        Args:
            elder: the peer that would dial.
            newcomer: the peer to dial.
            proven: whether a test has reached the newcomer at its declared address.
        """
        asked, peers = self._asked.get(elder, {}), self._membership.peers
        if newcomer in asked:
            return False
        waiting = [was_proven for peer, was_proven in asked.items() if not peers[peer].admitted]
        unproven = len(waiting) - sum(waiting)
        return len(waiting) < ASKED_MAX and (proven or unproven < ASKED_UNPROVEN_MAX)

    def ask(self, elder: PeerId, newcomer: PeerId, *, proven: bool) -> bool:
        """An elder shall dial a newcomer; return whether to send its list at once."""
        self._asked.setdefault(elder, {})[newcomer] = proven
        if elder in self._told:
            self._untold.add(elder)
            return False
        self._told.add(elder)
        return True

    def linked(self, elder: PeerId, newcomer: PeerId) -> None:
        """An elder has a link to a newcomer: if it was asked to dial it, the newcomer is proven."""
        if newcomer in self._asked.get(elder, ()):
            self._asked[elder][newcomer] = True

    def came_back(self, peer: RegisteredPeer) -> None:
        """A peer has returned: all younger peers of its group have to dial it."""
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
        """A heartbeat is due: the changes since the last one, with the peer to send each to."""
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
