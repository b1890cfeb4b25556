"""``WantedLink``: what ``LinkUpkeep`` knows of one link and of the lanes that this side dials.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pccl.protocol.limits import LANES_BETWEEN_MACHINES, SHARED_CONNECTIONS_MAX
from pccl.protocol.link_messages import LinkPath
from pccl.protocol.types import Member, PeerId
from pccl.topology.link_damage import LinkDamage
from pccl.topology.segment_limit import SegmentLimit

_MEMORY_FACTOR = 4
"""How many times ``lane_stall_s`` a link remembers a lane that was stuck."""


def lanes_of(told: int, *, near: bool, sharers: int) -> int:
    """Return how many lanes a link has once it is used.

    Args:
        told: the number that either side was configured with; 0 if neither was.
        near: whether both ends are on one machine, where more lanes only cost time.
        sharers: how many links share the connections, this one included.
    """
    if told:
        return told
    return 1 if near else max(1, min(LANES_BETWEEN_MACHINES, SHARED_CONNECTIONS_MAX // sharers))


def path_of(*, relayed: bool, punched: bool, mapped: bool, by_younger: bool) -> LinkPath:
    """Return the path of a link from facts about its last lane; see ``LinkUpkeep.attached``."""
    match relayed, punched, mapped:
        case True, _, _:
            return LinkPath.RELAYED
        case _, True, _:
            return LinkPath.PUNCHED
        case _, _, True:
            return LinkPath.MAPPED
        case _:
            return LinkPath.DIRECT if by_younger else LinkPath.DIALLED_BACK


class KnownLink(NamedTuple):
    """A link that is up before it is wanted.

    Attributes:
        told: the number of lanes that the other side was configured with; 0: it was not.
        near: whether the other side is on this machine.
        relay: the relay that carries it; None: it is direct.
        met_at: the relay at which the two have met, if both have dialled it.
        at: the host to which its first lane leads; empty: unknown.
    """

    told: int
    near: bool
    relay: PeerId | None
    met_at: Member | None = None
    at: str = ""


@dataclass(slots=True)
class LaneDial:
    """A lane that this side keeps up; it is up, is being dialled, or waits for a pause to end."""

    backoff_ns: int
    up_since_ns: int = 0
    waits: bool = False
    is_dialled: bool = False
    is_tried: bool = False
    """Whether it has been dialled before."""
    mistaken: int = 0
    """How often another process than the peer has answered."""
    replaces: bool = False
    """Whether the lane is up at an old address of the peer, while its new address is dialled."""

    def failed(self, longest_ns: int, *, answered: bool) -> bool:
        """Record a failed dial; return whether this side keeps the lane at the old address.

        Args:
            longest_ns: the longest pause between dials; after that, a lane is no longer replaced.
            answered: whether a process was connected.
        """
        self.is_dialled = False
        self.mistaken += answered
        if not self.replaces or self.backoff_ns <= longest_ns:
            return False
        self.replaces = False
        return True

    def where(self, member: Member) -> Member:
        """Return where to dial: at all hosts of a peer, or after mistakes at one after another."""
        if not (self.mistaken and member.hosts):
            return member
        hosts = (member.host, *member.hosts)
        return replace(member, host=hosts[self.mistaken % len(hosts)], hosts=())


@dataclass(slots=True)
class WantedLink:
    """A peer that this peer wants a link to."""

    member: Member
    told: int
    """The most lanes that a side was configured with; 0 if neither was."""
    near: bool
    up: bool
    was_up: bool
    """Whether the two peers ever had a link."""
    damage: LinkDamage
    segments: SegmentLimit
    keeps: bool = False
    """Whether this side keeps the link: dials its lanes, and redials them."""
    used: bool = False
    """Whether the link has carried a collective, or is about to."""
    relay: PeerId | None = None
    """The relay that carries the link; None: the link is down, or direct."""
    path: LinkPath | None = None
    """How its last lane has come up; None: before the link was wanted."""
    met_at: Member | None = None
    """The relay at which the two have met, if both dial each of its lanes; None: one side does."""
    missed: int = 0
    """How often in a row no further lane of such a link could be made."""
    is_withheld: bool = False
    """Whether the link has lanes but is not reported as up, because it damages data."""
    dials: dict[int, LaneDial] = field(default_factory=dict[int, LaneDial])
    """By number: lanes that this side keeps; else its own dial, in case the other side fails."""

    @classmethod
    def begin(
        cls, member: Member, known: KnownLink | None, lanes: int, patience_ns: int
    ) -> WantedLink:
        """Return a link that a peer wants from now on.

        Args:
            member: the peer at the other end.
            known: the link, if it is up already.
            lanes: the number of lanes that this side was configured with; 0: it was not.
            patience_ns: how long a lane may make no progress.
        """
        up, begun = known is not None, known or KnownLink(0, near=False, relay=None)
        damage, segments = LinkDamage(patience_ns), SegmentLimit(_MEMORY_FACTOR * patience_ns)
        link = cls(member, max(begun.told, lanes), begun.near, up, up, damage, segments)
        link.relay, link.met_at = begun.relay, begun.met_at
        return link

    def moves(self, member: Member, known: KnownLink | None, first_ns: int) -> list[int]:
        """Record the address of the peer; return the numbers of lanes to dial at a new address.

        A peer that has moved lost its lanes, but while these carry nothing, only the kernel of this
        side would find out, late. They stay until others replace them, because they may work.

        Args:
            member: the peer and its address.
            known: the link, if it is up.
            first_ns: the first pause after a failed dial.
        """
        has_moved, self.member = member != self.member, member
        if not has_moved or not self.keeps or known is None or not known.at or known.near:
            return []
        is_direct = known.relay is None and known.met_at is None
        if not is_direct or known.at in (member.host, *member.hosts):
            return []
        numbers = [n for n, dial in self.dials.items() if not (dial.waits or dial.is_dialled)]
        for number in numbers:
            self.dials[number].replaces, self.dials[number].backoff_ns = True, first_ns
        return numbers

    def is_dialling(self, but: int = -1) -> bool:
        """Whether the dial of a lane is under way or waits; ``but``: one that does not count."""
        return any(
            number != but and (dial.waits or dial.is_dialled) for number, dial in self.dials.items()
        )
