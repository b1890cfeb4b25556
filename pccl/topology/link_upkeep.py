"""``LinkUpkeep``: which lanes this peer dials, and when; which of others it takes; what is spare.

A link begins with one lane. The side that has dialled it keeps the link: when the link is first
used it dials the others, as many as :func:`lanes_of` says. A lane that is lost is redialled at once
and then with back-off for as long as the link is wanted.

While a side sees no lane at all, both sides dial: the younger at once, the elder after a grace. So
a link comes up if one of the two can be dialled, and it comes back if only one end has noticed that
it is lost. A new lane takes the place of the one with its number. When two dials cross, both sides
end with the elder's connection: the younger gives up its own dial when it accepts one, the elder
does not. The link is up while one lane is and nothing that comes over it is damaged.

Pure: what happened goes in, steps come out in the order of doing them.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from pccl.protocol.guards.source_shares import SourceShares
from pccl.protocol.limits import LANES_BETWEEN_MACHINES, SHARED_CONNECTIONS_MAX, Timing
from pccl.protocol.types import NOBODY, Member, PeerId
from pccl.topology.link_damage import LinkDamage

_UNMET_FACTOR = 4
"""By how much longer the pause between dials may get if there was never a link to the peer."""


@dataclass(frozen=True, slots=True)
class DialLane:
    """Dial a lane; after a pause, ask again whether it is :meth:`LinkUpkeep.due`."""

    member: Member
    number: int
    pause_ns: int = 0


@dataclass(frozen=True, slots=True)
class GiveUpLane:
    """Dial a lane no longer; close it if it is spare."""

    peer: PeerId
    number: int
    is_spare: bool = False


@dataclass(frozen=True, slots=True)
class DropLink:
    """Close a link and forget it."""

    peer: PeerId
    why: str = ""
    """What is worth a line in the log."""


@dataclass(frozen=True, slots=True)
class TellLink:
    """A link is up; or it is down, or cannot be made, for a reason."""

    peer: PeerId
    reason: str | None


LinkStep = DialLane | GiveUpLane | DropLink | TellLink


def lanes_of(told: int, *, near: bool, sharers: int) -> int:
    """How many lanes a link has once it is used.

    Args:
        told: what one of its sides was told; 0: neither was.
        near: whether both ends are on one machine, where more lanes only cost time.
        sharers: how many links share the connections, this one included.
    """
    if told:
        return told
    return 1 if near else max(1, min(LANES_BETWEEN_MACHINES, SHARED_CONNECTIONS_MAX // sharers))


@dataclass(slots=True)
class _LaneDial:
    """A lane that we keep by dialling; it is up, is being dialled, or waits to be."""

    backoff_ns: int
    up_since_ns: int = 0
    waits: bool = False
    is_dialled: bool = False


@dataclass(slots=True)
class _WantedLink:
    """A peer that we want a link to."""

    member: Member
    told: int
    """How many lanes one side was told that the link should have; 0: neither was."""
    near: bool
    up: bool
    was_up: bool
    """Whether there ever was a link to it."""
    damage: LinkDamage
    keeps: bool = False
    """Whether this side keeps the link: dials its lanes, and dials them again."""
    used: bool = False
    """Whether it has carried a collective, or is about to."""
    is_withheld: bool = False
    """Whether it was not said that it is up, since it damages what comes."""
    dials: dict[int, _LaneDial] = field(default_factory=dict[int, _LaneDial])
    """By number: those that we keep; of a link that the other side keeps, the dial in reserve."""


class LinkUpkeep:
    """All links of one peer.

    Args:
        timing: deadlines.
        lanes: how many a link should have; 0: whatever the other side says, or the usual number.
        newcomers_max: links to peers that are not wanted yet, each of one lane.
    """

    def __init__(self, timing: Timing, lanes: int, newcomers_max: int) -> None:
        self._first_ns = timing.ns(timing.redial_min_s)
        self._longest_ns = timing.ns(timing.redial_max_s)
        self._patience_ns = timing.ns(timing.lane_stall_s)
        self._lanes = lanes
        self._own = NOBODY
        self._links: dict[PeerId, _WantedLink] = {}
        self._newcomers: SourceShares[PeerId] = SourceShares(newcomers_max)

    # -- what is wanted --------------------------------------------------------------------------

    def want(
        self, own: PeerId, members: Iterable[Member], up: Mapping[PeerId, tuple[int, bool]]
    ) -> list[LinkStep]:
        """Keep links to these peers, and to no others that were wanted before.

        ``up``: the links that are up: how many lanes the other side was told, and whether it is on
        this machine.
        """
        self._own = own
        wanted = {member.peer: member for member in members}
        steps: list[LinkStep] = []
        for peer in [peer for peer in self._links if peer not in wanted]:
            steps += [*self._give_up(self._links.pop(peer)), DropLink(peer)]
        for peer, member in wanted.items():
            self._newcomers.remove(peer)
            if peer not in self._links:
                told, near = up.get(peer, (0, False))
                told, met = max(told, self._lanes), peer in up
                damage = LinkDamage(self._patience_ns)
                link = _WantedLink(member, told, near, up=met, was_up=met, damage=damage)
                self._links[peer] = link
                steps += [] if met else self._bring_up(link)
        return steps

    def use(self, peers: Iterable[PeerId]) -> list[LinkStep]:
        """The links to ``peers`` are about to carry a collective: they get all their lanes."""
        links = self._links
        first = [links[peer] for peer in peers if peer in links and not links[peer].used]
        for link in first:  # all of them share the connections
            link.used = True
        steps: list[LinkStep] = []
        for link in first:
            if link.keeps:
                steps += self._widen(link)
        return steps

    def look(
        self, peer: PeerId, busy: Container[int], intact_bytes: int, now_ns: int
    ) -> list[LinkStep]:
        """A tick: close spare lanes or dial missing ones; a link that damages no more is up.

        Lanes are spare when the link shares the connections with more links than before, and
        missing when it shares them with fewer.
        ``busy``: those that carry something; ``intact_bytes``: the most that one has brought
        without damage.
        """
        link = self._links.get(peer)
        if link is None:
            return []
        width = self._width(link) if link.keeps and len(link.dials) > 1 else len(link.dials)
        spare = [number for number in link.dials if number >= width and number not in busy]
        for number in spare:
            del link.dials[number]
        steps: list[LinkStep] = [GiveUpLane(peer, number, is_spare=True) for number in spare]
        if link.keeps and link.up:
            steps += self._widen(link)
        link.damage.passed(intact_bytes)
        if link.is_withheld and not link.damage.is_down(now_ns):
            link.is_withheld = False
            steps += [TellLink(peer, None)] if link.up else []
        return steps

    def close(self) -> list[LinkStep]:
        """Dial nothing any more."""
        steps = [step for link in self._links.values() for step in self._give_up(link)]
        self._links.clear()
        return steps

    # -- dials -----------------------------------------------------------------------------------

    def due(self, peer: PeerId, number: int) -> list[LinkStep]:
        """The pause before a dial is over."""
        return self._dial(self._links[peer], number)

    def gives_way(self, peer: PeerId, number: int) -> bool:
        """A dial of ours is forgotten if the other side has dialled meanwhile; return whether."""
        link = self._links[peer]
        if link.keeps or not link.up:
            return False
        del link.dials[number]
        return True

    def failed(self, peer: PeerId, number: int, reason: str) -> list[LinkStep]:
        """A dial has come to nothing."""
        link = self._links[peer]
        link.dials[number].is_dialled = False
        if self.gives_way(peer, number):
            return []
        return [*self._dial_later(link, number), *([] if link.up else [TellLink(peer, reason)])]

    def _bring_up(self, link: _WantedLink) -> list[LinkStep]:
        """There is no lane: the younger dials at once, the elder once that should have worked."""
        link.keeps = link.member.peer < self._own
        if link.keeps:
            return self._widen(link)
        if 0 in link.dials:
            return []
        link.dials[0] = _LaneDial(self._longest_ns)
        return self._dial_later(link, 0)

    def _width(self, link: _WantedLink) -> int:
        """How many lanes the link should have now."""
        if not link.used:
            return 1
        links = self._links.values()
        sharers = sum(other.used and not (other.near or other.told) for other in links)
        return lanes_of(link.told, near=link.near, sharers=sharers)

    def _widen(self, link: _WantedLink) -> list[LinkStep]:
        """Dial the lanes that the link should have and nobody has dialled yet."""
        steps: list[LinkStep] = []
        for number in range(self._width(link) if link.up else 1):  # the first one finds out
            if number not in link.dials:
                link.dials[number] = _LaneDial(self._first_ns)
                steps += self._dial(link, number)
        return steps

    def _dial(self, link: _WantedLink, number: int) -> list[LinkStep]:
        if (number and not link.up) or (link.up and not link.keeps):
            # The first one brings the others and is dialled already, or the other side has dialled.
            del link.dials[number]
            return []
        dial = link.dials[number]
        dial.waits, dial.is_dialled = False, True
        return [DialLane(link.member, number)]

    def _dial_later(self, link: _WantedLink, number: int) -> list[LinkStep]:
        dial = link.dials[number]
        if dial.waits or dial.is_dialled:
            return []
        # If there was never a link, nobody but the peer itself says that it is there.
        longest_ns = self._longest_ns if link.was_up else _UNMET_FACTOR * self._longest_ns
        pause_ns = min(dial.backoff_ns, longest_ns)
        dial.waits, dial.backoff_ns = True, 2 * pause_ns
        return [DialLane(link.member, number, pause_ns)]

    def _give_up(self, link: _WantedLink, *, but_under_way: bool = False) -> list[LinkStep]:
        numbers = [n for n, dial in link.dials.items() if not (but_under_way and dial.is_dialled)]
        for number in numbers:
            del link.dials[number]
        return [GiveUpLane(link.member.peer, number) for number in numbers]

    # -- lanes -----------------------------------------------------------------------------------

    def greeted(self, peer: PeerId, number: int, host: str) -> list[LinkStep] | None:
        """A peer that has dialled this one has proven itself; None: its connection is not wanted.

        The link to a newcomer has one lane. A member that is not wanted yet dials again.
        """
        link = self._links.get(peer)
        if link is not None:
            # The other side keeps the link from now on. An elder's dial that is under way goes on:
            # the younger gives up its own for that one.
            link.keeps = False
            return self._give_up(link, but_under_way=peer > self._own)
        if number:
            return None
        goes = None if peer in self._newcomers else self._newcomers.add(peer, host)
        return [] if goes is None else [DropLink(goes, "too many newcomers came")]

    def attached(
        self,
        peer: PeerId,
        number: int,
        told: int,
        now_ns: int,
        *,
        near: bool,
        ours: bool,
        more: bool,
    ) -> list[LinkStep]:
        """A link has one more lane, which this side has dialled if it is ``ours``.

        ``told``: how many lanes the other end was told that the link should have; ``near``: whether
        it is on this machine; ``more``: whether the link had a lane before.
        """
        link = self._links.get(peer)
        news: list[LinkStep] = [] if more else [TellLink(peer, None)]
        if link is None:
            return news
        link.up = link.was_up = True
        link.near, link.told = near, max(self._lanes, told)
        if link.damage.is_down(now_ns):
            link.is_withheld, news = True, []
        if ours:
            link.keeps, dial = True, link.dials[number]
            dial.is_dialled, dial.up_since_ns = False, now_ns
            return self._widen(link) + news
        return news

    def lost(
        self, peer: PeerId, number: int, reason: str, now_ns: int, *, up: bool, damaged: int | None
    ) -> list[LinkStep]:
        """A lane is gone.

        ``up``: whether the link has another one; ``damaged``: the length of the payload whose
        damage was the reason, if it was.
        """
        link = self._links.get(peer)
        news: list[LinkStep] = [] if up else [TellLink(peer, reason)]
        if link is None:
            if not up:  # a newcomer that never became a member
                self._newcomers.remove(peer)
                news.insert(0, DropLink(peer))
            return news
        link.up = up
        if damaged is not None:
            link.damage.struck(damaged, now_ns)
        dial, steps = link.dials.get(number), list[LinkStep]()
        if not up and (dial is None or not link.keeps):
            steps = self._bring_up(link)
        if dial is None or not link.keeps:
            return steps + news
        if now_ns - dial.up_since_ns < self._longest_ns:
            steps += self._dial_later(link, number)  # it ends as soon as it is made: do not spin
        elif not dial.is_dialled:
            dial.backoff_ns = self._first_ns
            steps += self._dial(link, number)
        return steps + news


class LaneStep(enum.Enum):
    """What a look at a lane leads to."""

    REPLACE = enum.auto()
    PING = enum.auto()
    PONG = enum.auto()


@dataclass(slots=True)
class LaneWatch:
    """Judges whether a lane owes progress and makes none.

    A lane owes progress while it has something to send, a frame that began to arrive, or a running
    transfer needs its link. There may be nothing to send on it, but everything may also have been
    handed to a connection that is dead: so it is asked for a sign of life first. On a slow line
    that question waits behind a long queue in the kernel; so the receiver sends one unasked.

    Attributes:
        stall_ns: how long it may make no progress.
        since_ns: when it was last seen to move something.
        told_ns: when the other side knew last what has arrived here.
    """

    stall_ns: int
    since_ns: int
    told_ns: int
    moved_bytes: int = 0
    pinged: bool = False
    """Whether it was asked since then if it is alive."""
    told_bytes: int = 0
    """Of payload, that the other side has been told of."""

    def look(
        self, moved_bytes: int, payload_bytes: int, now_ns: int, *, owes: bool, may_judge: bool
    ) -> list[LaneStep]:
        """A tick.

        ``owes``: whether it owes progress, by what this process has seen while it was awake;
        ``may_judge``: whether this process has read what came in.
        """
        steps: list[LaneStep] = []
        still_ns = now_ns - self.since_ns
        if not owes or moved_bytes != self.moved_bytes:
            self.moved_bytes, self.since_ns, self.pinged = moved_bytes, now_ns, False
        elif may_judge and still_ns >= self.stall_ns:
            steps.append(LaneStep.REPLACE)
        elif still_ns >= self.stall_ns // 2 and not self.pinged:
            self.pinged = True
            steps.append(LaneStep.PING)
        if payload_bytes == self.told_bytes:
            self.told_ns = now_ns
        elif now_ns - self.told_ns >= self.stall_ns // 4:
            self.told_bytes, self.told_ns = payload_bytes, now_ns
            steps.append(LaneStep.PONG)
        return steps
