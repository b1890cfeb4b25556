"""The master's plan of which peer dials which, and the changes that peers have yet to receive.

A peer dials its elders: all older peers of its group. The master sends a peer the whole list after
its registration, and the changes at each heartbeat. If a newcomer cannot reach an elder, the master
asks the elder to dial the newcomer instead. The master asks at once, or at the next heartbeat if
it has asked this elder since the last heartbeat.

A newcomer declares its own address, which may be that of another host. The newcomer is *proven*
once a test, or the elder itself, has reached it there. An elder dials only a few unproven
newcomers. A newcomer dials only a few elders that are unproven newcomers themselves.

Pure state: ``PeerLinks`` sends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.protocol import messages as msg
from pccl.protocol.limits import (
    ASKED_BEATS_MAX,
    ASKED_MAX,
    ASKED_UNPROVEN_MAX,
    ELDERS_UNPROVEN_MAX,
    PEERS_MAX,
)
from pccl.protocol.types import Member, PeerId


@dataclass(slots=True)
class _Changes:
    """The changes in one group since its peers last received a plan."""

    came: dict[PeerId, Member] = field(default_factory=dict[PeerId, Member])
    gone: set[PeerId] = field(default_factory=set[PeerId])

    def before(self, gone: Sequence[PeerId], peer: PeerId) -> msg.LinkPlan:
        """Return the changes among the elders of ``peer``. ``gone`` is in order of id."""
        came = tuple(
            one for elder, one in self.came.items() if elder < peer and elder not in self.gone
        )
        return msg.LinkPlan(came, tuple(gone[: min(bisect_left(gone, peer), PEERS_MAX)]))


@dataclass(slots=True)
class _Asked:
    """The newcomers that one elder dials because they cannot reach the elder."""

    all: set[PeerId] = field(default_factory=set[PeerId])
    """All of these newcomers, admitted ones too: the elder may not know of an admission yet."""
    proven: set[PeerId] = field(default_factory=set[PeerId])
    """Newcomers that wait for a link to the elder, after a test has reached them."""
    unproven: dict[PeerId, int] = field(default_factory=dict[PeerId, int])
    """Waiting newcomers that no test has reached -> the heartbeat when the elder was asked."""

    def linked(self, newcomer: PeerId) -> None:
        """Record that the newcomer no longer waits for a link to the elder."""
        self.proven.discard(newcomer)
        self.unproven.pop(newcomer, None)

    def drop(self, newcomer: PeerId) -> None:
        """Record that the elder shall no longer dial the newcomer."""
        self.linked(newcomer)
        self.all.discard(newcomer)


class DialPlans:
    """Which peers each peer shall dial, and the changes that the master has yet to send.

    Args:
        membership: the peers of the run.
        was_reached: returns whether a test has reached a peer at its declared address.
    """

    def __init__(self, membership: Membership, was_reached: Callable[[PeerId], bool]) -> None:
        self._membership = membership
        self._was_reached = was_reached
        self._asked: dict[PeerId, _Asked] = {}
        """Elder -> the newcomers that it dials."""
        self._beats = 0
        self._told: set[PeerId] = set()
        """Elders to which a list was sent since the last heartbeat."""
        self._untold: set[PeerId] = set()
        """Elders whose list has changed since it was sent."""
        self._changes: dict[int, _Changes] = {}
        """Group -> its changes since the last heartbeat."""

    def elders(self, peer: RegisteredPeer) -> tuple[Member, ...]:
        """Return the older peers of its group that ``peer`` dials, in order of id."""
        peers = self._membership.peers.values()
        elders = [one for one in peers if one.group == peer.group and one.id < peer.id]
        unproven = [one.id for one in elders if not (one.admitted or self._was_reached(one.id))]
        left_out = set(unproven[:-ELDERS_UNPROVEN_MAX])
        return tuple(one.member for one in elders if one.id not in left_out)

    @property
    def leaves_out(self) -> bool:
        """Whether so many newcomers are pending that some do not dial all their elders."""
        return len(self._membership.pending()) > ELDERS_UNPROVEN_MAX

    def asked(self, elder: PeerId) -> tuple[Member, ...]:
        """Return the newcomers that an elder dials, in order of id."""
        peers = self._membership.peers
        asked = self._asked.get(elder)
        return tuple(peers[peer].member for peer in sorted(asked.all)) if asked else ()

    def is_asked(self, elder: PeerId, newcomer: PeerId) -> bool:
        """Whether an elder dials a newcomer."""
        return elder in self._asked and newcomer in self._asked[elder].all

    def has_room(self, elder: PeerId, *, proven: bool) -> bool:
        """Whether the master may ask an elder to dial one more newcomer.

        Args:
            elder: the peer that would dial.
            proven: whether a test has reached the newcomer at its declared address.
        """
        asked = self._asked.get(elder)
        if asked is None:
            return True
        waiting = len(asked.proven) + len(asked.unproven)
        return waiting < ASKED_MAX and (proven or len(asked.unproven) < ASKED_UNPROVEN_MAX)

    def ask(self, elder: PeerId, newcomer: PeerId, *, proven: bool) -> bool:
        """Record that an elder shall dial a newcomer; return whether to send its list at once."""
        asked = self._asked.setdefault(elder, _Asked())
        asked.all.add(newcomer)
        if proven:
            asked.proven.add(newcomer)
        else:
            asked.unproven[newcomer] = self._beats
        if elder in self._told:
            self._untold.add(elder)
            return False
        self._told.add(elder)
        return True

    def linked(self, elder: PeerId, newcomer: PeerId) -> None:
        """Record that an elder has a link to a newcomer, which makes room for another newcomer."""
        if elder in self._asked:
            self._asked[elder].linked(newcomer)

    def comes(self, peer: RegisteredPeer) -> None:
        """Make all younger peers of the group dial ``peer``, which returned or became proven."""
        self._changes.setdefault(peer.group, _Changes()).came[peer.id] = peer.member

    def moves(self, peer: RegisteredPeer) -> None:
        """Make the elders that dial ``peer`` dial it at its new address."""
        self._untold.update(elder for elder, asked in self._asked.items() if peer.id in asked.all)

    def remove(self, gone: Sequence[RegisteredPeer]) -> None:
        """Forget peers before they are removed from the membership."""
        lost = {peer.id for peer in gone}
        for peer in gone:
            self._asked.pop(peer.id, None)
            self._changes.setdefault(peer.group, _Changes()).gone.add(peer.id)
        for elder, asked in self._asked.items():
            for newcomer in lost & asked.all:
                asked.drop(newcomer)
                self._untold.add(elder)

    def beat(self) -> Iterator[tuple[RegisteredPeer, msg.MasterMessage]]:
        """Yield messages about the changes since the last heartbeat, each with its recipient."""
        peers = self._membership.peers
        self._beats += 1
        self._forget_waiting()
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

    def _forget_waiting(self) -> None:
        """Forget waiting newcomers that are admitted, or unproven for too many heartbeats."""
        peers, since = self._membership.peers, self._beats - ASKED_BEATS_MAX
        for elder, asked in self._asked.items():
            for newcomer in [peer for peer in asked.proven if peers[peer].admitted]:
                asked.linked(newcomer)
            for newcomer, beat in list(asked.unproven.items()):
                if peers[newcomer].admitted:
                    asked.linked(newcomer)
                elif beat < since:
                    asked.drop(newcomer)
                    self._untold.add(elder)
