"""``LinkUpkeep``: which lanes this peer dials, and when; which lanes it accepts, which are spare.

A link begins with one lane. The side that dialled it keeps the link: when the link is first used,
this side dials the further lanes, as many as :func:`lanes_of` says. It redials a lost lane at once,
and then with growing pauses, for as long as the link is wanted.

While a side sees no lane at all, both sides dial: the younger at once, the elder after a pause. So
a link comes up if either side can be dialled, even if only one side has noticed the loss. A new
lane replaces the lane with its number. If two dials cross, both sides keep the elder's connection:
the younger gives up its own dial when it accepts one, the elder does not. A link is up while it has
a lane and does not damage data.

If neither side can be dialled, the master lets both meet at a relay. A relayed link has one lane,
and either side may have begun it. Both then dial each other at the same time, which may pass their
address translators, and later try direct dials, with growing pauses; the first connection that
succeeds replaces the relayed lane. A lane that both have dialled is the only one of its link.

Pure: events go in, and steps come out in the order of execution.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pccl.protocol.guards.source_shares import SourceShares
from pccl.protocol.limits import LANES_BETWEEN_MACHINES, SHARED_CONNECTIONS_MAX, Timing
from pccl.protocol.link_messages import LinkPath
from pccl.protocol.types import NOBODY, Member, PeerId
from pccl.topology.link_damage import LinkDamage
from pccl.topology.link_steps import (
    DialLane,
    DropLink,
    GiveUpLane,
    LinkStep,
    NarrowLink,
    TellLink,
)
from pccl.topology.segment_limit import LaneFacts, SegmentLimit, StuckLane

_UNMET_FACTOR = 4
"""Factor for the longest pause between dials, if the peers never had a link."""

_MEMORY_FACTOR = 4
"""How many times ``lane_stall_s`` a link remembers a lane that was stuck."""

_DIRECT_FIRST_FACTOR, _DIRECT_LONGEST_FACTOR = 10, 600
"""Factors for the first and the longest pause before a relayed link tries a direct connection."""


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


def _path(*, relayed: bool, punched: bool, mapped: bool, by_younger: bool) -> LinkPath:
    match relayed, punched, mapped:
        case True, _, _:
            return LinkPath.RELAYED
        case _, True, _:
            return LinkPath.PUNCHED
        case _, _, True:
            return LinkPath.MAPPED
        case _:
            return LinkPath.DIRECT if by_younger else LinkPath.DIALLED_BACK


def _where(member: Member, mistaken: int) -> Member:
    """Return where to dial a peer: at all of its hosts, or after mistakes at one after another."""
    if not (mistaken and member.hosts):
        return member
    hosts = (member.host, *member.hosts)
    return replace(member, host=hosts[mistaken % len(hosts)], hosts=())


@dataclass(slots=True)
class _LaneDial:
    """A lane that this side keeps up; it is up, is being dialled, or waits for a pause to end."""

    backoff_ns: int
    up_since_ns: int = 0
    waits: bool = False
    is_dialled: bool = False
    mistaken: int = 0
    """How often another process than the peer has answered."""


@dataclass(slots=True)
class _WantedLink:
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
    """How its last lane has come up; None: before the link was wanted. Punched: it has one lane."""
    is_withheld: bool = False
    """Whether the link has lanes but is not reported as up, because it damages data."""
    dials: dict[int, _LaneDial] = field(default_factory=dict[int, _LaneDial])
    """By number: lanes that this side keeps; else its own dial, in case the other side fails."""


class LinkUpkeep:
    """Decides about all links of one peer.

    Args:
        timing: deadlines.
        lanes: lanes per link; 0: the other side's number, or the usual one.
        newcomers_max: limit of links to peers that are not wanted yet, each of one lane.
        has_left: whether a peer that is not wanted was removed from the run.
    """

    def __init__(
        self,
        timing: Timing,
        lanes: int,
        newcomers_max: int,
        has_left: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._first_ns = timing.ns(timing.redial_min_s)
        self._longest_ns = timing.ns(timing.redial_max_s)
        self._patience_ns = timing.ns(timing.lane_stall_s)
        self._lanes = lanes
        self._has_left = has_left
        self._own = NOBODY
        self._links: dict[PeerId, _WantedLink] = {}
        self._newcomers: SourceShares[PeerId] = SourceShares(newcomers_max)
        self._meetings: dict[PeerId, PeerId] = {}
        """Peer -> the relay at which this peer waits for it."""

    # -- wanted links ----------------------------------------------------------------------------

    def want(
        self,
        own: PeerId,
        members: Iterable[Member],
        up: Mapping[PeerId, tuple[int, bool, PeerId | None]],
    ) -> list[LinkStep]:
        """Keep links to these peers, and drop links to all other peers that were wanted before.

        ``up``: the links that are up, with the number of lanes that the other side was configured
        with, whether it is on this machine, and the relay.
        """
        self._own = own
        wanted = {member.peer: member for member in members}
        steps: list[LinkStep] = []
        for peer in [peer for peer in self._links if peer not in wanted]:
            steps += [*self._give_up(self._links.pop(peer)), DropLink(peer)]
        for peer in filter(self._has_left, tuple(self._newcomers)):
            self._newcomers.remove(peer)
            steps.append(DropLink(peer, "it has left the run"))
        for peer, member in wanted.items():
            self._newcomers.remove(peer)
            if peer in self._links:
                self._links[peer].member = member  # its address may have changed
            else:
                told, near, relay = up.get(peer, (0, False, None))
                told, met = max(told, self._lanes), peer in up
                damage = LinkDamage(self._patience_ns)
                segments = SegmentLimit(_MEMORY_FACTOR * self._patience_ns)
                link = _WantedLink(member, told, near, met, met, damage, segments, relay=relay)
                self._links[peer] = link
                if relay is not None:
                    steps += self._try_direct(link, ours=False)
                elif not met:
                    steps += self._bring_up(link)
        return steps

    def use(self, peers: Iterable[PeerId]) -> list[LinkStep]:
        """Dial all lanes of the links to ``peers``, as these are about to carry a collective."""
        first: list[_WantedLink] = []
        for peer in peers:
            link = self._links.get(peer)
            if link is not None and not link.used:
                link.used = True  # all of them before the first dials: links share the connections
                first.append(link)
        steps: list[LinkStep] = []
        for link in first:
            if link.keeps:
                steps += self._widen(link)
        return steps

    def look(
        self, peer: PeerId, busy: Container[int], intact_bytes: int, now_ns: int
    ) -> list[LinkStep]:
        """Check a link on a tick: close spare lanes, dial missing ones, report the end of damage.

        Lanes are spare when the link shares the connections with more links than before, and
        missing when it shares them with fewer.
        ``busy``: lanes that carry data; ``intact_bytes``: the most that one lane has delivered
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
            path = link.path or LinkPath.DIRECT
            steps += [TellLink(peer, None, link.relay, path)] if link.up else []
        return steps

    def close(self) -> list[LinkStep]:
        """Give up all dials."""
        steps = [step for link in self._links.values() for step in self._give_up(link)]
        self._links.clear()
        return steps

    # -- dials -----------------------------------------------------------------------------------

    def due(self, peer: PeerId, number: int) -> list[LinkStep]:
        """Dial a lane, because the pause before it is over."""
        return self._dial(self._links[peer], number)

    def gives_way(self, peer: PeerId, number: int) -> bool:
        """Drop a dial if the other side has dialled meanwhile; return whether it was dropped."""
        link = self._links[peer]
        if link.keeps or not link.up or link.relay is not None:
            return False
        del link.dials[number]
        return True

    def begins_meeting(self, peer: PeerId, relay: PeerId) -> bool:
        """Whether this peer shall dial a relay, as its master asks, to link itself to ``peer``.

        If it does so already, it goes on: the other peer may be slow.
        """
        if not self.meets(peer) or self._meetings.get(peer) == relay:
            return False
        self._meetings[peer] = relay
        return True

    def leaves_meeting(self, peer: PeerId, relay: PeerId) -> None:
        """Record that this peer waits no more at this relay: it has met ``peer``, or has failed."""
        if self._meetings.get(peer) == relay:
            del self._meetings[peer]

    def meets(self, peer: PeerId, *, punches: bool = False) -> bool:
        """Whether this peer needs the lane that it gets through a relay to link itself to ``peer``.

        Only the younger of the two can tell that it needs no new lane: it begins the handshake.
        ``punches``: whether the two shall dial each other at the same time instead, which makes a
        better link than a relay.
        """
        link = self._links.get(peer)
        if peer >= self._own:
            return peer != self._own
        return link is not None and (not link.up or (punches and link.relay is not None))

    def failed(
        self, peer: PeerId, number: int, reason: str, *, answered: bool = False
    ) -> list[LinkStep]:
        """Record a failed dial: dial again later, unless the other side has dialled meanwhile.

        ``answered``: whether a process was connected, which may be another one than the peer: a
        private address means another machine in each network.
        """
        link = self._links[peer]
        link.dials[number].is_dialled = False
        link.dials[number].mistaken += answered
        if self.gives_way(peer, number):
            return []
        return [*self._dial_later(link, number), *([] if link.up else [TellLink(peer, reason)])]

    def _bring_up(self, link: _WantedLink) -> list[LinkStep]:
        """Bring up a link without lanes: the younger dials at once, the elder after a pause."""
        link.keeps = link.member.peer < self._own
        if link.keeps:
            return self._widen(link)
        if 0 in link.dials:
            return []
        link.dials[0] = _LaneDial(self._longest_ns)
        return self._dial_later(link, 0)

    def _width(self, link: _WantedLink) -> int:
        """Return how many lanes the link should have now."""
        if not link.used or link.path is LinkPath.PUNCHED or link.relay is not None:
            return 1
        links = self._links.values()
        sharers = sum(other.used and not (other.near or other.told) for other in links)
        return lanes_of(link.told, near=link.near, sharers=sharers)

    def _widen(self, link: _WantedLink) -> list[LinkStep]:
        """Dial the lanes that the link should have and that this side does not keep yet."""
        steps: list[LinkStep] = []
        for number in range(self._width(link) if link.up else 1):  # one, until it is up
            if number not in link.dials:
                link.dials[number] = _LaneDial(self._first_ns)
                steps += self._dial(link, number)
        return steps

    def _dial(self, link: _WantedLink, number: int) -> list[LinkStep]:
        if (number and not link.up) or (link.up and not link.keeps and link.relay is None):
            # The first lane brings the others, or the other side has dialled.
            del link.dials[number]
            return []
        dial = link.dials[number]
        dial.waits, dial.is_dialled = False, True
        where, segment_bytes = _where(link.member, dial.mistaken), link.segments.segment_bytes
        return [DialLane(where, number, segment_bytes=segment_bytes)]

    def _dial_later(self, link: _WantedLink, number: int) -> list[LinkStep]:
        dial = link.dials[number]
        if dial.waits or dial.is_dialled:
            return []
        # Without an earlier link, only the peer itself claims to be at this address.
        longest_ns = self._longest_ns if link.was_up else _UNMET_FACTOR * self._longest_ns
        if link.relay is not None:
            longest_ns = _DIRECT_LONGEST_FACTOR * self._longest_ns
        pause_ns = min(dial.backoff_ns, longest_ns)
        dial.waits, dial.backoff_ns = True, 2 * pause_ns
        return [DialLane(link.member, number, pause_ns)]

    def _try_direct(self, link: _WantedLink, *, ours: bool) -> list[LinkStep]:
        """Begin to try direct dials of a relayed link; the elder does so a little later."""
        steps = self._give_up(link)
        link.keeps, is_elder = ours, link.member.peer > self._own
        pause_ns = _DIRECT_FIRST_FACTOR * self._longest_ns * (3 if is_elder else 2) // 2
        link.dials[0] = _LaneDial(pause_ns)
        return steps + self._dial_later(link, 0)

    def _give_up(self, link: _WantedLink, *, but_under_way: bool = False) -> list[LinkStep]:
        numbers = [n for n, dial in link.dials.items() if not (but_under_way and dial.is_dialled)]
        for number in numbers:
            del link.dials[number]
        return [GiveUpLane(link.member.peer, number) for number in numbers]

    # -- lanes -----------------------------------------------------------------------------------

    def key_of(self, peer: PeerId) -> bytes | None:
        """Return the key of a peer whose link is wanted; None: the link is not wanted."""
        link = self._links.get(peer)
        return link.member.key if link is not None else None

    def greeted(self, peer: PeerId, key: bytes, number: int, host: str) -> list[LinkStep] | None:
        """Record that a peer has dialled this one and proven ``key``; None: reject its connection.

        A link to a newcomer has one lane. A member that this peer does not want yet dials again.
        """
        link = self._links.get(peer)
        if link is not None:
            if link.member.key != key:
                return None
            # The other side keeps the link from now on. An elder continues a dial under way,
            # because the younger gives up its own for it.
            link.keeps = False
            return self._give_up(link, but_under_way=peer > self._own)
        if number:
            return None
        goes = None if peer in self._newcomers else self._newcomers.add(peer, host)
        return [] if goes is None else [DropLink(goes, "too many newcomers dialled")]

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
        relay: PeerId | None = None,
        punched: bool = False,
        mapped: bool = False,
    ) -> list[LinkStep]:
        """Record that a link has one more lane, which this side has dialled if it is ``ours``.

        ``told``: how many lanes the other side was configured with; ``near``: whether it is on
        this machine; ``more``: whether the link had a lane before; ``relay``: what carries it;
        ``punched``: whether both sides have dialled it at the same time; ``mapped``: whether it has
        come through a port that the router of this peer forwards.
        """
        link = self._links.get(peer)
        by_younger = ours == (self._own > peer)
        path = _path(
            relayed=relay is not None, punched=punched, mapped=mapped, by_younger=by_younger
        )
        is_news = (
            not more
            or link is None  # a newcomer has one lane: another one has replaced it
            or link.relay != relay
            or link.path not in (None, path)
        )
        news: list[LinkStep] = [TellLink(peer, None, relay, path)] if is_news else []
        if link is None:
            return news
        link.up = link.was_up = True
        link.near, link.told, link.relay = near, max(self._lanes, told), relay
        link.path = path
        if link.damage.is_down(now_ns):
            link.is_withheld, news = True, []
        if punched:
            link.keeps = False  # neither side can dial further lanes
            return self._give_up(link) + news
        if relay is not None:
            return self._try_direct(link, ours=ours) + news
        if ours:
            link.keeps, dial = True, link.dials[number]
            dial.is_dialled, dial.up_since_ns = False, now_ns
            return self._widen(link) + news
        return news

    def segment_bytes(self, peer: PeerId) -> int:
        """Return the largest segment of new connections that carry a link; 0: any."""
        link = self._links.get(peer)
        return link.segments.segment_bytes if link is not None else 0

    def redials(self, peer: PeerId) -> bool:
        """Whether this side dials the lanes of a link, and chooses their segments."""
        link = self._links.get(peer)
        return link is not None and link.keeps

    def is_suspect(self, peer: PeerId, now_ns: int) -> bool:
        """Whether lanes of a link were stuck, and no large packet has passed since."""
        link = self._links.get(peer)
        return link is not None and link.segments.is_open(now_ns)

    def carried(self, peer: PeerId, facts: LaneFacts, opened_ns: int) -> list[LinkStep]:
        """Record what a lane of a suspect link has carried."""
        link = self._links.get(peer)
        if link is None or not link.segments.carried(facts, opened_ns):
            return []
        return [NarrowLink(peer, link.segments.segment_bytes, is_proven=True)]

    def lost(
        self,
        peer: PeerId,
        number: int,
        reason: str,
        now_ns: int,
        *,
        up: bool,
        damaged: int | None,
        stuck: StuckLane | None = None,
    ) -> list[LinkStep]:
        """Record that a lane was lost; redial it, or bring the link up again.

        ``up``: whether the link has another lane; ``damaged``: length of the damaged payload that
        closed the lane; None: no damage; ``stuck``: the lane, if large packets vanished on it.
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
        if stuck is not None and link.segments.stuck(stuck, now_ns):
            news.append(NarrowLink(peer, link.segments.segment_bytes, is_proven=False))
        if link.relay is not None and (number == 0 or not up):
            link.relay = None
            if not up:
                steps = self._give_up(link, but_under_way=True)
                return [*steps, *self._bring_up(link), *news]
        dial, steps = link.dials.get(number), list[LinkStep]()
        if not up and (dial is None or not link.keeps):
            steps = self._bring_up(link)
        if dial is None or not link.keeps:
            return steps + news
        if now_ns - dial.up_since_ns < self._longest_ns:
            steps += self._dial_later(link, number)  # no immediate redial of a short-lived lane
        elif not dial.is_dialled:
            dial.backoff_ns = self._first_ns
            steps += self._dial(link, number)
        return steps + news
