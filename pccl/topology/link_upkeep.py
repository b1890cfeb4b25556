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
succeeds replaces the relayed lane. Each side drops that lane when its relay has left the run. If
both have dialled it, further lanes need both, too: the younger keeps the link, and for each lane
lets a relay tell it how others see a new port. Whenever that fails for all lanes under way, a
longer pause follows; after a few it does with those it has.

Pure: events go in, and steps come out in the order of execution.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from pccl.protocol.guards.source_shares import SourceShares
from pccl.protocol.limits import Timing
from pccl.protocol.link_messages import LinkPath
from pccl.protocol.types import NOBODY, Member, PeerId
from pccl.topology.link_steps import (
    DialLane,
    DropLink,
    GiveUpLane,
    LeaveRelay,
    LinkStep,
    NarrowLink,
    TellLink,
)
from pccl.topology.segment_limit import LaneFacts, Proof, StuckLane
from pccl.topology.wanted_link import KnownLink, LaneDial, WantedLink, lanes_of, path_of

_UNMET_FACTOR = 4
"""Factor for the longest pause between dials, if the peers never had a link."""

_DIRECT_FIRST_FACTOR, _DIRECT_LONGEST_FACTOR = 10, 600
"""Factors for the first and the longest pause before a relayed link tries a direct connection."""

_MISSES_MAX = 5
"""Failures in a row after which a link that both sides dial keeps the lanes that it has."""


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
        self._links: dict[PeerId, WantedLink] = {}
        self._newcomers: SourceShares[PeerId] = SourceShares(newcomers_max)
        self._meetings: dict[PeerId, tuple[PeerId, int]] = {}
        """Peer -> the relay at which this peer waits for it, and the number of the meeting."""
        self._last_meeting = 0
        self._sharers: int | None = None
        """How many links share the connections; None: it may have changed."""

    # -- wanted links ----------------------------------------------------------------------------

    def want(
        self, own: PeerId, members: Iterable[Member], up: Mapping[PeerId, KnownLink]
    ) -> list[LinkStep]:
        """Keep links to these peers, and drop links to all other peers that were wanted before.

        ``up``: the links that are up.
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
                for number in self._links[peer].moves(member, up.get(peer), self._first_ns):
                    steps += self._dial(self._links[peer], number)
            else:
                link = WantedLink.begin(member, up.get(peer), self._lanes, self._patience_ns)
                self._links[peer] = link
                if link.relay is not None:
                    steps += self._try_direct(link, ours=False)
                elif not link.up:
                    steps += self._bring_up(link)
                elif link.met_at is not None and peer < own:
                    link.keeps, link.dials[0] = True, LaneDial(self._first_ns)
        for peer, link in self._links.items():
            if link.relay and self._has_left(link.relay):  # a frozen one closes nothing
                steps.append(LeaveRelay(peer, link.relay))
        self._sharers = None
        return steps

    def use(self, peers: Iterable[PeerId]) -> list[LinkStep]:
        """Dial all lanes of the links to ``peers``, as these are about to carry a collective."""
        first: list[WantedLink] = []
        for peer in peers:
            link = self._links.get(peer)
            if link is not None and not link.used:
                link.used = True  # all of them before the first dials: links share the connections
                first.append(link)
                self._sharers = None
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

        Args:
            peer: the peer at the other end.
            busy: numbers of the lanes that carry data.
            intact_bytes: the most bytes that one lane has delivered without damage.
            now_ns: current time.
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

    def waits_in(self, peer: PeerId) -> int:
        """Return the number of the meeting in which this peer waits for another one; 0: of none."""
        return self._meetings.get(peer, (None, 0))[1]

    def begins_meeting(self, peer: PeerId, relay: PeerId) -> int:
        """Return the number of a meeting if this peer shall dial a relay, as its master asks.

        Returns 0 if this peer needs no link to ``peer``, or waits for it there already: it keeps
        waiting, because the other peer may be slow.
        """
        if not self.meets(peer) or self._meetings.get(peer, (None,))[0] == relay:
            return 0
        self._last_meeting += 1
        self._meetings[peer] = relay, self._last_meeting
        return self._last_meeting

    def leaves_meeting(self, peer: PeerId, meeting: int) -> None:
        """Record that this peer has met ``peer`` in this meeting, or has failed to.

        A later meeting with ``peer`` continues.
        """
        if self.waits_in(peer) == meeting:
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

    def punches(self, peer: PeerId, number: int) -> bool:
        """Whether to dial a further lane, because a younger peer asks for it and dials it, too."""
        link = self._links.get(peer)
        if link is None or link.met_at is None or peer < self._own:
            return False
        return number < lanes_of(link.told, near=False, sharers=1)

    def failed(
        self, peer: PeerId, number: int, reason: str, *, answered: bool = False
    ) -> list[LinkStep]:
        """Record a failed dial: dial again later, unless the other side has dialled meanwhile.

        ``answered``: whether a process was connected, which may be another one than the peer: a
        private address means another machine in each network.
        """
        link = self._links[peer]
        is_over = link.dials[number].failed(self._longest_ns, answered=answered)
        if is_over or self.gives_way(peer, number):
            return []
        if link.met_at is not None:
            return self._missed(link, number)
        return [*self._dial_later(link, number), *([] if link.up else [TellLink(peer, reason)])]

    def _missed(self, link: WantedLink, number: int) -> list[LinkStep]:
        """Give up a lane that both sides dial, except the last one under way, for some times."""
        is_last = not link.is_dialling(but=number)
        link.missed = max(1, link.missed + is_last)
        if not is_last or link.missed > _MISSES_MAX:
            del link.dials[number]
            return []
        link.dials[number].backoff_ns = self._longest_ns << link.missed
        return self._dial_later(link, number)

    def _bring_up(self, link: WantedLink) -> list[LinkStep]:
        """Bring up a link without lanes: the younger dials at once, the elder after a pause."""
        link.keeps = link.member.peer < self._own
        if link.keeps:
            return self._widen(link)
        if 0 in link.dials:
            return []
        link.dials[0] = LaneDial(self._longest_ns)
        return self._dial_later(link, 0)

    def _width(self, link: WantedLink) -> int:
        """Return how many lanes the link should have now."""
        if not link.used or link.relay is not None or link.is_withheld:
            return 1
        if self._sharers is None:  # each tick asks for each link
            links = self._links.values()
            self._sharers = sum(other.used and not (other.near or other.told) for other in links)
        return lanes_of(link.told, near=link.near, sharers=self._sharers)

    def _widen(self, link: WantedLink) -> list[LinkStep]:
        """Dial the lanes that the link should have and that this side does not keep yet."""
        steps: list[LinkStep] = []
        if link.met_at is not None and link.missed:
            return steps  # until one succeeds
        for number in range(self._width(link) if link.up else 1):  # one, until it is up
            if number not in link.dials:
                link.dials[number] = LaneDial(self._first_ns)
                steps += self._dial(link, number)
        return steps

    def _dial(self, link: WantedLink, number: int) -> list[LinkStep]:
        if (number and not link.up) or (link.up and not link.keeps and link.relay is None):
            # The first lane brings the others, or the other side has dialled.
            del link.dials[number]
            return []
        dial = link.dials[number]
        dial.waits, dial.is_dialled = False, True
        where, segment_bytes = dial.where(link.member), link.segments.segment_bytes
        # If a firewall swallows the first dial, the two shall soon try another way.
        is_brief, dial.is_tried = not (link.was_up or dial.is_tried), True
        return [
            DialLane(
                where, number, segment_bytes=segment_bytes, met_at=link.met_at, is_brief=is_brief
            )
        ]

    def _dial_later(self, link: WantedLink, number: int) -> list[LinkStep]:
        dial = link.dials[number]
        if dial.waits or dial.is_dialled:
            return []
        # Without an earlier link, only the peer itself claims to be at this address.
        longest_ns = self._longest_ns if link.was_up else _UNMET_FACTOR * self._longest_ns
        if link.relay is not None or link.met_at is not None:
            longest_ns = _DIRECT_LONGEST_FACTOR * self._longest_ns
        pause_ns = min(dial.backoff_ns, longest_ns)
        dial.waits, dial.backoff_ns = True, 2 * pause_ns
        return [DialLane(link.member, number, pause_ns)]

    def _try_direct(self, link: WantedLink, *, ours: bool) -> list[LinkStep]:
        """Begin to try direct dials of a relayed link; the elder does so a little later."""
        steps = self._give_up(link)
        link.keeps, is_elder = ours, link.member.peer > self._own
        pause_ns = _DIRECT_FIRST_FACTOR * self._longest_ns * (3 if is_elder else 2) // 2
        link.dials[0] = LaneDial(pause_ns)
        return steps + self._dial_later(link, 0)

    def _give_up(self, link: WantedLink, *, but_under_way: bool = False) -> list[LinkStep]:
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
        met_at: Member | None = None,
        mapped: bool = False,
    ) -> list[LinkStep]:
        """Record that a link has one more lane.

        Args:
            peer: the peer at the other end.
            number: number of the lane.
            told: how many lanes the other side was configured with; 0: it was not.
            now_ns: current time.
            near: whether the other side is on this machine.
            ours: whether this side has dialled the lane.
            more: whether the link had a lane before.
            relay: the process that forwards the lane; None: it is direct.
            met_at: the relay at which both have met, if both have dialled at the same time.
            mapped: whether the lane came through a port that this peer's router forwards.
        """
        link, punched = self._links.get(peer), met_at is not None
        by_younger = ours == (self._own > peer)
        path = path_of(
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
        self._sharers = None
        link.path = path
        if link.damage.is_down(now_ns):
            link.is_withheld, news = True, []
        steps = self._give_up(link) if punched and link.met_at is None else []
        link.met_at = met_at
        if relay is not None:
            return self._try_direct(link, ours=ours) + news
        if ours:
            link.keeps, link.missed = True, 0
            dial = link.dials.setdefault(number, LaneDial(self._first_ns))
            dial.is_dialled, dial.replaces, dial.up_since_ns = False, False, now_ns
            steps += self._widen(link)
        return steps + news

    def segment_bytes(self, peer: PeerId) -> int:
        """Return the largest segment of new connections that carry a link; 0: any."""
        link = self._links.get(peer)
        return link.segments.segment_bytes if link is not None else 0

    def redials(self, peer: PeerId) -> bool:
        """Whether this side dials the lanes of a link, and chooses their segments."""
        link = self._links.get(peer)
        return link is not None and link.keeps

    def may_narrow(self, peer: PeerId) -> bool:
        """Whether large packets may vanish on the way of a link, as far as the kernel knows it.

        It knows the way to a relay only, and nothing lies inside a machine.
        """
        link = self._links.get(peer)
        return link is not None and link.relay is None and not link.near

    def suspects(self, peer: PeerId, now_ns: int) -> Proof | None:
        """Return with what proof a stuck lane of a link is replaced before the usual time."""
        link = self._links.get(peer)
        return None if link is None else link.segments.suspects(now_ns)

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

        Args:
            peer: the peer at the other end.
            number: number of the lane.
            reason: why the lane was lost.
            now_ns: current time.
            up: whether the link has another lane.
            damaged: length of the damaged payload that closed the lane; None: no damage.
            stuck: the lane, if large packets vanished on it.
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
            link.is_withheld = link.damage.is_down(now_ns)
        if stuck is not None and link.segments.stuck(stuck, now_ns) and link.keeps:
            news.append(NarrowLink(peer, link.segments.segment_bytes, is_proven=False))
        punched = link.met_at is not None
        if (link.relay is not None and (number == 0 or not up)) or (punched and not up):
            link.relay = link.met_at = None
            if not up:
                steps = self._give_up(link, but_under_way=not punched)
                return [*steps, *self._bring_up(link), *news]
        dial, steps = link.dials.get(number), list[LinkStep]()
        if dial is not None:
            dial.replaces = False
        if not up and (dial is None or not link.keeps):
            steps = self._bring_up(link)
        if dial is None or not link.keeps:
            return steps + news
        if now_ns - dial.up_since_ns < self._longest_ns:
            if link.is_withheld:
                dial.backoff_ns = self._longest_ns
            steps += self._dial_later(link, number)  # no immediate redial of a short-lived lane
        elif not (dial.is_dialled or dial.waits):
            dial.backoff_ns, link.missed = self._first_ns, 0
            steps += self._dial(link, number)
        return steps + news
