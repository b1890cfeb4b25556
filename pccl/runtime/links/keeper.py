"""Keeps the links to other peers: of two peers the younger dials at once, the elder a little later.

The handshake that opens a lane names both peers, the run, the term and the lane. A link begins with
one lane. The side that has dialled it keeps the link: when the link is first used it dials the
others, as many as ``dialling.lanes_of`` says. A lane that is lost is redialled at once and then
with back-off for as long as the link is wanted.

While a side sees no lane at all, both sides dial: the younger at once, the elder after a grace. So
a link comes up if one of the two can be dialled, and it comes back if only one end has noticed that
it is lost. A new lane takes the place of the one with its number. When two dials cross, both sides
end with the elder's connection: the younger gives up its own dial when it accepts one, the elder
does not. The link is up while one lane is; when it comes up or goes down, that is reported, and the
master draws its conclusions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from pccl.machines.ticks import Ticks
from pccl.protocol.checksum import DamagedData
from pccl.protocol.errors import LinkError, PCCLError, RemoteProtocolError
from pccl.protocol.frame import FrameHeader
from pccl.protocol.guards.source_shares import SourceShares
from pccl.protocol.handshake import Channel, Opening
from pccl.protocol.limits import LANES_MAX, Timing
from pccl.protocol.types import Member, PeerId
from pccl.runtime.clock import Clock
from pccl.runtime.control.greeting import Credentials, Identity, Reception, introduce
from pccl.runtime.links.dialling import Redial, WantedLink, lanes_of
from pccl.topology.link_damage import LinkDamage
from pccl.transports.base import Address, Connection, Transport
from pccl.transports.lane import Lane, Sink
from pccl.transports.link import Links

_log = logging.getLogger("pccl.link")

_UNMET_FACTOR = 4
"""By how much longer the pause between dials may get if there was never a link to the peer."""


class Frames(Protocol):
    """Who understands the frames of all links; the data plane does."""

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """A header has arrived; where does the payload go?"""
        ...

    def lane_up(self, peer: PeerId) -> None:
        """There is one more lane to ``peer``."""
        ...

    def lane_failed(self, peer: PeerId) -> None:
        """A lane broke before it was up here; the other side may have used it already."""

    def lane_lost(self, lane: Lane) -> None:
        """The lane is gone, and what it carried perhaps with it."""
        ...

    def uses(self, peer: PeerId) -> bool:
        """Whether a running transfer needs the link to ``peer`` to be alive."""
        ...

    def expect_peer(self, peer: PeerId) -> None:
        """``peer`` is a member, or about to be one."""
        ...

    def forget_peer(self, peer: PeerId) -> None:
        """Nobody needs ``peer`` any more."""
        ...


@dataclass(slots=True)
class _Watch:
    """What a lane has moved."""

    since_ns: int
    """When it was last seen to move something."""
    told_ns: int
    """When the other side knew last what has arrived here."""
    moved_bytes: int = 0
    pinged: bool = False
    """Whether it was asked since then if it is alive."""
    told_bytes: int = 0
    """Of payload, that the other side has been told of."""


class LinkKeeper:
    """All links of one peer; the frame handler of all its lanes.

    Args:
        clock: time.
        transport: the network.
        timing: deadlines.
        identity: who we are.
        links: the links to keep; whoever sends frames knows them too.
        frames: who understands the frames.
        on_change: called with a peer and None when its link is up, or with the reason when it is
            down or cannot be made.
        create_task: runs a dial.
        credentials: what we greet with.
        lanes: how many a link should have; 0: whatever the other side says, or the usual number.
        may_dial: whether a peer that declares a host may be dialled at an address of that host.
    """

    def __init__(
        self,
        clock: Clock,
        transport: Transport,
        timing: Timing,
        identity: Identity,
        links: Links,
        frames: Frames,
        on_change: Callable[[PeerId, str | None], None],
        create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        credentials: Credentials,
        lanes: int,
        may_dial: Callable[[str, str], bool] = lambda host, found: True,
    ) -> None:
        self._clock = clock
        self._transport = transport
        self._timing = timing
        self._identity = identity
        self._on_change = on_change
        self._create_task = create_task
        self._credentials = credentials
        self._lanes = lanes
        self._may_dial = may_dial
        self._links = links
        self._frames = frames
        self._wanted: dict[PeerId, Member] = {}
        self._dialling: dict[PeerId, WantedLink] = {}
        patience_ns = timing.ns(timing.dial_s)
        self._newcomers: SourceShares[PeerId] = SourceShares(transport.port_limits.newcomers)
        """Links to peers that we do not know yet, each of one lane."""
        self._reception = Reception(
            clock,
            patience_ns,
            transport.port_limits.unproven,
            credentials,
            self._identify,
            self._on_proven,
        )
        self._watches: dict[Lane, _Watch] = {}
        self._damage: dict[PeerId, LinkDamage] = {}
        """Of links on which frames were damaged."""
        self._withheld: set[PeerId] = set()
        """Links of which it was not said that they are up, for that reason."""
        self._ticks = Ticks(timing.ns(timing.tick_s), clock.now_ns())
        self._closed = False

    def want(self, members: tuple[Member, ...]) -> None:
        """Keep links to these peers; close those to peers that were wanted and are no longer."""
        wanted = {member.peer: member for member in members}
        for peer in [peer for peer in self._wanted if peer not in wanted]:
            del self._wanted[peer]
            dialling = self._dialling.pop(peer, None)
            if dialling is not None:
                dialling.cancel()
            self._damage.pop(peer, None)
            self._withheld.discard(peer)
            self._links.drop(peer)
            self._frames.forget_peer(peer)
        for peer, member in wanted.items():
            self._wanted[peer] = member
            self._newcomers.remove(peer)
            self._frames.expect_peer(peer)
            if peer not in self._dialling:
                self._dialling[peer] = WantedLink(member, was_up=self._links.to(peer).up)
                if not self._links.to(peer).up:
                    self._bring_up(peer)

    def use(self, peers: Iterable[PeerId]) -> None:
        """The links to ``peers`` are about to carry a collective: they get all their lanes."""
        found = [self._dialling[peer] for peer in peers if peer in self._dialling]
        first = [dialling for dialling in found if not dialling.used]
        for dialling in first:  # all of them share the connections
            dialling.used = True
        for dialling in first:
            if dialling.keeps:
                self._widen(dialling.member.peer)

    def accept(self, connection: Connection) -> None:
        """Somebody has connected to our port."""
        if self._closed:
            connection.abort()
        else:
            self._reception.accept(connection)

    def replace_stalled_lanes(self, busy_ns: int) -> None:
        """Abort lanes that owe progress and make none; called at every tick.

        A lane owes progress while it has something to send, a frame that began to arrive, or a
        running transfer needs its link. There may be nothing to send on it, but everything may
        also have been handed to a connection that is dead: so it is asked for a sign of life first.
        On a slow line that question waits behind a long queue in the kernel; so whoever receives
        gives a sign of life unasked.

        Args:
            busy_ns: processor time of this thread since the call before.
        """
        now_ns = self._clock.now_ns()
        tick = self._ticks.note(now_ns, busy_ns)
        stall_ns = self._timing.ns(self._timing.lane_stall_s)
        for peer, dialling in self._dialling.items():
            if dialling.keeps:
                self._close_spare(peer)
        for peer, damage in list(self._damage.items()):
            self._look_at_damage(peer, damage, now_ns)
        for link in self._links.all():
            used = self._frames.uses(link.peer)
            for lane in link.lanes:
                watch = self._watches[lane]
                owes = used or lane.backlog_bytes or lane.receiving
                if tick.slept_ns or watch.moved_bytes != lane.moved_bytes or not owes:
                    watch.moved_bytes, watch.since_ns = lane.moved_bytes, now_ns
                    watch.pinged = False
                elif tick.may_judge and now_ns - watch.since_ns >= stall_ns:
                    _log.warning("lane %d to peer %d stalls; replacing it", lane.number, link.peer)
                    lane.abort()
                elif now_ns - watch.since_ns >= stall_ns // 2 and not watch.pinged:
                    watch.pinged = True
                    lane.ping()
                if lane.payload_bytes == watch.told_bytes:
                    watch.told_ns = now_ns
                elif now_ns - watch.told_ns >= stall_ns // 4:
                    watch.told_bytes, watch.told_ns = lane.payload_bytes, now_ns
                    lane.pong()

    def close(self) -> None:
        """Close every lane and stop dialling."""
        self._closed = True
        for dialling in self._dialling.values():
            dialling.cancel()
        self._dialling.clear()
        self._reception.close()
        for link in self._links.all():
            link.close()

    # -- dialling ------------------------------------------------------------------------------

    @property
    def _first_backoff_ns(self) -> int:
        return self._timing.ns(self._timing.redial_min_s)

    def _told(self, peer: PeerId) -> int:
        """How many lanes one side was told that the link should have; 0: neither was."""
        return max(self._lanes, self._links.to(peer).told)

    def _width(self, peer: PeerId) -> int:
        """How many lanes the link should have now."""
        if not self._dialling[peer].used:
            return 1
        sharers = sum(self._shares(other) for other, link in self._dialling.items() if link.used)
        return lanes_of(self._told(peer), near=self._links.to(peer).near, sharers=sharers)

    def _shares(self, peer: PeerId) -> bool:
        return not self._links.to(peer).near and not self._told(peer)

    def _bring_up(self, peer: PeerId) -> None:
        """There is no lane: the younger dials at once, the elder once that should have worked."""
        dialling = self._dialling[peer]
        dialling.keeps = peer < self._identity.peer
        if dialling.keeps:
            self._widen(peer)
        elif 0 not in dialling.lanes:
            dialling.lanes[0] = Redial(self._timing.ns(self._timing.redial_max_s))
            self._dial_later(peer, 0)

    def _yield(self, peer: PeerId) -> None:
        """The other side has dialled, so it keeps the link from now on.

        An elder's dial that is under way goes on: the younger gives up its own for that one.
        """
        dialling = self._dialling.get(peer)
        if dialling is None:
            return
        dialling.keeps = False
        for number, redial in list(dialling.lanes.items()):
            if peer < self._identity.peer or redial.task is None:
                dialling.give_up(number)

    def _widen(self, peer: PeerId) -> None:
        """Dial the lanes that the link should have and nobody has dialled yet."""
        dialling, link = self._dialling[peer], self._links.to(peer)
        width = self._width(peer) if link.up else 1  # the first one finds out
        for number in range(width):
            if number not in dialling.lanes:
                dialling.lanes[number] = Redial(self._first_backoff_ns)
                self._dial(peer, number)

    def _close_spare(self, peer: PeerId) -> None:
        """Close idle lanes of a link that shares the connections with more links than before."""
        dialling, link = self._dialling[peer], self._links.to(peer)
        width = self._width(peer)
        for number in [number for number in dialling.lanes if number >= width]:
            lane = link.lane(number)
            if lane is None or not (lane.carried or lane.backlog_bytes or lane.receiving):
                dialling.give_up(number)
                if lane is not None:
                    lane.close()

    def _dial(self, peer: PeerId, number: int) -> None:
        dialling = self._dialling.get(peer)
        if dialling is None or self._closed:
            return
        redial, up = dialling.lanes[number], self._links.to(peer).up
        redial.timer = None
        if (number and not up) or (up and not dialling.keeps):
            # The first one brings the others and is dialled already, or the other side has dialled.
            del dialling.lanes[number]
        elif redial.task is None:
            redial.task = self._create_task(self._dial_once(dialling.member, number, redial))

    async def _dial_once(self, member: Member, number: int, redial: Redial) -> None:
        peer, patience_s = member.peer, self._timing.dial_s
        connection: Connection | None = None

        def take(connection: Connection, remote: Opening) -> None:
            redial.task = None
            dialling = self._dialling.get(peer)
            if dialling is None or dialling.lanes.get(number) is not redial:
                connection.abort()  # nobody wants it any more
                return
            dialling.keeps = True
            self._attach(connection, peer, number, remote.lanes)
            redial.up_since_ns = self._clock.now_ns()
            self._widen(peer)

        try:
            address = Address(member.host, member.port)
            may_dial = partial(self._may_dial, member.host)
            connection = await self._transport.dial(address, patience_s, may_dial)
            if self._is_superfluous(peer, number, redial):
                connection.abort()  # it has said nothing yet
                return
            handshake = self._credentials.dial(
                self._credentials.opening(
                    Channel.LANE, self._identity, peer, lane=number, lanes=self._lanes
                )
            )
            deadline_ns = self._clock.now_ns() + self._timing.ns(patience_s)
            await introduce(connection, handshake, self._clock, deadline_ns, take)
        except (LinkError, RemoteProtocolError) as error:
            redial.task = None
            if connection is not None and isinstance(error, LinkError):
                self._frames.lane_failed(peer)
            if isinstance(error, RemoteProtocolError):
                _log.info("closed a connection to peer %d: %s", peer, error.reason)
            if self._is_superfluous(peer, number, redial):
                return
            if not self._links.to(peer).up:
                self._on_change(peer, error.reason)
            self._dial_later(peer, number)

    def _is_superfluous(self, peer: PeerId, number: int, redial: Redial) -> bool:
        """Whether the other side has dialled meanwhile; the dial of ours is forgotten then."""
        dialling = self._dialling.get(peer)
        if dialling is None or dialling.lanes.get(number) is not redial:
            return True
        if dialling.keeps or not self._links.to(peer).up:
            return False
        del dialling.lanes[number]
        return True

    def _dial_later(self, peer: PeerId, number: int) -> None:
        dialling = self._dialling.get(peer)
        if dialling is None or dialling.lanes[number].under_way:
            return
        redial = dialling.lanes[number]
        longest_ns = self._timing.ns(self._timing.redial_max_s)
        if not dialling.was_up:  # nobody but the peer itself says that it is there
            longest_ns *= _UNMET_FACTOR
        pause_ns = min(redial.backoff_ns, longest_ns)
        when_ns = self._clock.now_ns() + pause_ns
        redial.timer = self._clock.call_at_ns(when_ns, self._dial, peer, number)
        redial.backoff_ns = 2 * pause_ns

    # -- lanes ---------------------------------------------------------------------------------

    def _identify(self) -> Opening:
        return self._credentials.opening(Channel.LANE, self._identity, lanes=self._lanes)

    def _on_proven(self, connection: Connection, remote: Opening, deadline_ns: int) -> None:
        if remote.channel is Channel.PROBE:
            connection.close()  # it was answered, and that was all
            return
        if remote.lane and remote.source not in self._wanted:
            # The link to a newcomer has one lane. A member that we do not know yet dials again.
            connection.abort()
            return
        if remote.source not in self._wanted and remote.source not in self._newcomers:
            goes = self._newcomers.add(remote.source, connection.remote.host)
            if goes is not None:
                text = "closed the link to peer %d: too many newcomers came"
                self._reception.log.write(logging.INFO, text, goes)
                self._links.drop(goes)
        self._yield(remote.source)
        self._attach(connection, remote.source, remote.lane, remote.lanes)

    def _attach(self, connection: Connection, peer: PeerId, number: int, told: int) -> None:
        link = self._links.to(peer)
        link.told = min(told, LANES_MAX)
        superseded = link.lane(number)
        was_up = link.up
        lane = Lane(connection, number, link, self)
        now_ns = self._clock.now_ns()
        self._watches[lane] = _Watch(now_ns, now_ns)  # its time to move something begins now
        link.add(lane)
        _log.debug(
            "lane %d to peer %d is up, paced by %s", number, peer, connection.congestion or "?"
        )
        if superseded is not None:
            link.remove(superseded)
            del self._watches[superseded]
            superseded.abort()
            self._frames.lane_lost(superseded)
        if peer in self._dialling:
            self._dialling[peer].was_up = True
        self._frames.lane_up(peer)
        damage = self._damage.get(peer)
        if damage is not None and damage.is_down(now_ns):
            self._withheld.add(peer)
        elif not was_up:
            self._on_change(peer, None)

    # -- damage ------------------------------------------------------------------------------------

    def _was_damaged(self, lane: Lane) -> None:
        peer = lane.link.peer
        if peer in self._wanted:
            damage = self._damage.get(peer)
            if damage is None:
                patience_ns = self._timing.ns(self._timing.lane_stall_s)
                damage = self._damage[peer] = LinkDamage(patience_ns)
            damage.struck(lane.damaged_bytes, self._clock.now_ns())

    def _look_at_damage(self, peer: PeerId, damage: LinkDamage, now_ns: int) -> None:
        """A tick: a link that has lanes and has proven itself is up."""
        link = self._links.to(peer)
        damage.passed(max((lane.intact_bytes for lane in link.lanes), default=0))
        if peer in self._withheld and not damage.is_down(now_ns):
            self._withheld.discard(peer)
            if link.up:
                self._on_change(peer, None)

    # -- what lanes call -------------------------------------------------------------------------

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """See ``FrameHandler``."""
        return self._frames.frame_started(lane, header)

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        """See ``FrameHandler``."""
        reason = error.reason if isinstance(error, PCCLError) else str(error or "closed here")
        if isinstance(error, RemoteProtocolError):
            text = "closed a lane from %s: %s"
            self._reception.log.write(logging.WARNING, text, lane.connection.remote, reason)
        link = lane.link
        if not link.remove(lane):
            return  # superseded
        del self._watches[lane]
        if isinstance(error, DamagedData):
            self._was_damaged(lane)
        self._frames.lane_lost(lane)
        if self._closed:
            return
        peer = link.peer
        if not link.up:
            self._on_change(peer, reason)
        self._redial(peer, lane.number)
        if not link.up and peer not in self._wanted:
            self._newcomers.remove(peer)
            self._links.drop(peer)  # a newcomer that never became a member

    def _redial(self, peer: PeerId, number: int) -> None:
        dialling = self._dialling.get(peer)
        if dialling is None:
            return
        redial = dialling.lanes.get(number)
        if not self._links.to(peer).up and (redial is None or not dialling.keeps):
            self._bring_up(peer)
        if redial is None or not dialling.keeps:
            return
        lived_ns = self._clock.now_ns() - redial.up_since_ns
        if lived_ns < self._timing.ns(self._timing.redial_max_s):
            self._dial_later(peer, number)  # it ends as soon as it is made: do not spin
        else:
            redial.backoff_ns = self._first_backoff_ns
            self._dial(peer, number)
