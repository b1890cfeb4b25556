"""Keeps the links to other peers: carries out what ``LinkUpkeep`` decides about their lanes.

The handshake that opens a lane names both peers, the run, the term and the lane, and proves the
keys of both peers, which their master has told to the other. The keeper reports
when a link comes up or goes down, and the master decides what follows from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from pccl.machines.router_path import is_outside
from pccl.machines.ticks import Ticks
from pccl.protocol.checksum import DamagedData
from pccl.protocol.errors import LinkError, PCCLError, RemoteProtocolError
from pccl.protocol.frame import Moved
from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.handshake.opening import ASKS_ADDRESS, Channel, Opening
from pccl.protocol.limits import LANES_MAX, Timing
from pccl.protocol.types import Member, PeerId
from pccl.runtime.clock import Clock, Timer
from pccl.runtime.control.greeting import Credentials, Identity, Reception, introduce, opening_of
from pccl.runtime.links.frame_router import FrameRouter
from pccl.runtime.links.meter import facts_of
from pccl.runtime.links.relay import Relay
from pccl.topology.lane_watch import LaneStep, LaneWatch
from pccl.topology.link_steps import (
    DialLane,
    DropLink,
    GiveUpLane,
    LinkStep,
    NarrowLink,
    TellLink,
)
from pccl.topology.link_upkeep import LinkUpkeep
from pccl.transports.base import Address, Connection, Transport
from pccl.transports.link import Lane, Links
from pccl.transports.relay import (
    Introducer,
    Introduction,
    PunchedConnection,
    RelayedConnection,
    behind,
    is_punched,
    relay_of,
)

_log = logging.getLogger("pccl.link")


class LinkKeeper:
    """Keeps all links of one peer, and handles the frames of all its lanes.

    Args:
        clock: gives the time.
        transport: the network.
        timing: deadlines.
        identity: identity of this peer.
        links: links to keep; the collectives and the exchange of shared state send on them.
        frames: handler of received frames.
        on_change: called when a link is up, or with the reason when it is down or cannot be made.
        create_task: runs a dial as a task.
        credentials: makes the handshakes of this peer.
        lanes: lanes per link; 0: the setting of the other side, or else the default.
        has_left: whether a peer of the run was removed from it.
        may_dial: whether a peer that advertises a host may be dialled at an address of that host.
        master: returns the address of the master, which may be a relay.
        explain: puts the names of peers into a text for people.
        moved: takes the segments that lanes send and receive; None: they are not recorded.
        has_mapped_port: whether the router of this machine forwards the port of this peer.
        on_narrow: called with a peer to which large packets vanish, and the size that passes.
    """

    def __init__(
        self,
        clock: Clock,
        transport: Transport,
        timing: Timing,
        identity: Identity,
        links: Links,
        frames: FrameRouter,
        on_change: Callable[[TellLink], None],
        create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        credentials: Credentials,
        lanes: int,
        has_left: Callable[[PeerId], bool] = lambda peer: False,
        may_dial: Callable[[str, str], bool] = lambda host, found: True,
        master: Callable[[], Address] = lambda: Address("", 0),
        explain: Callable[[str], str] = str,
        moved: deque[Moved] | None = None,
        has_mapped_port: Callable[[], bool] = bool,
        on_narrow: Callable[[PeerId, int], None] = lambda peer, segment_bytes: None,
    ) -> None:
        self._clock = clock
        self._transport = transport
        self._timing = timing
        self._identity = identity
        self._on_change = on_change
        self._on_narrow = on_narrow
        self._create_task = create_task
        self._credentials = credentials
        self._lanes = lanes
        self._moved = moved
        self._has_mapped_port = has_mapped_port
        self._has_left = has_left
        self._may_dial = may_dial
        self._master = master
        self._explain = explain
        self._links = links
        self._frames = frames
        self.frame_started = frames.frame_started
        """What lanes call when a header has arrived."""
        limits = transport.port_limits
        self._upkeep = LinkUpkeep(timing, lanes, limits.newcomers, has_left)
        self._dials: dict[tuple[PeerId, int], Timer | asyncio.Task[None]] = {}
        """Running dials, and timers of later ones, by peer and number of the lane."""
        self._meetings: dict[PeerId, tuple[PeerId, asyncio.Task[None]]] = {}
        """The last meeting with each peer: its relay, and the task, which then does without it."""
        self.relay = Relay(
            clock, timing.ns(timing.dial_s), timing.ns(timing.lane_stall_s), has_left
        )
        """What this peer forwards for others."""
        self._reception = Reception(
            clock, timing.ns(timing.dial_s), limits.unproven, credentials,
            self._identify, self._on_proven, self._judge,
        )  # fmt: skip
        self._watches: dict[Lane, LaneWatch] = {}
        self._stalled: set[Lane] = set()
        """Lanes that end because they make no progress."""
        self._stall = f"nothing moved for {timing.lane_stall_s:g} s"
        self._ticks = Ticks(timing.ns(timing.tick_s), clock.now_ns())
        self._closed = False

    def want(self, members: tuple[Member, ...]) -> None:
        """Keep links to ``members``; close links to peers that are no longer among them."""
        if self._closed:
            return
        links = [self._links.to(member.peer) for member in members]
        up = {
            link.peer: (link.told, link.near, relay_of(link.lanes[0].connection))
            for link in links
            if link.up
        }
        for member in members:
            self._frames.expect_peer(member.peer)
        self._carry_out(self._upkeep.want(self._identity.peer, members, up))

    def use(self, peers: Iterable[PeerId]) -> None:
        """Open all lanes to ``peers``, because an operation is about to use these links."""
        if steps := self._upkeep.use(peers):
            self._carry_out(steps)

    def accept(self, connection: Connection) -> None:
        """Begin the handshake of a connection to the port of this peer."""
        if self._closed:
            connection.abort()
        else:
            self._reception.accept(connection)

    def look(self, busy_ns: int) -> None:
        """Check all lanes at a tick, and replace lanes that owe progress but make none.

        Args:
            busy_ns: processor time of this thread since the previous call.
        """
        now_ns = self._clock.now_ns()
        tick = self._ticks.note(now_ns, busy_ns)
        for link in self._links.all():
            used = self._frames.uses(link.peer)
            working = {one.number for one in link.lanes if one.receiving or one.backlog_bytes}
            busy = working.union(lane.number for lane in link.lanes if lane.carried)
            intact_bytes = max((lane.intact_bytes for lane in link.lanes), default=0)
            self._carry_out(self._upkeep.look(link.peer, busy, intact_bytes, now_ns))
            suspects = self._upkeep.is_suspect(link.peer, now_ns)
            dials = self._upkeep.redials(link.peer)
            for lane in link.lanes:
                owes = not tick.slept_ns and (used or lane.number in working)
                steps = self._watches[lane].look(
                    lane.moved_bytes, lane.payload_bytes, now_ns,
                    owes=owes, may_judge=tick.may_judge, suspects=suspects, dials=dials,
                )  # fmt: skip
                if suspects or self._watches[lane].pinged:
                    self._look_at_path(lane, now_ns)
                for step in steps:
                    match step:
                        case LaneStep.REPLACE:
                            text = f"connection {lane.number} to peer {link.peer} makes no progress"
                            text = f"{text}: {self._stall}; replacing it"
                            _log.warning("%s", self._explain(text))
                            self._stalled.add(lane)
                            lane.abort()
                        case LaneStep.PING:
                            lane.ping()
                        case LaneStep.PONG:
                            lane.pong()

    def _look_at_path(self, lane: Lane, now_ns: int) -> None:
        """Find out whether only large packets vanish, if a lane is silent or others were stuck."""
        watch = self._watches[lane]
        if relay_of(lane.connection) is not None or lane.link.near:
            return  # the kernel knows the way to the relay only; nothing lies inside a machine
        if (facts := facts_of(lane.connection)) is not None:
            moved_ns = max(self._watches[one].since_ns for one in lane.link.lanes)
            watch.judge(facts, now_ns, is_alive=moved_ns > watch.asked_ns)
            self._carry_out(self._upkeep.carried(lane.link.peer, facts, watch.opened_ns))

    def close(self) -> None:
        """Close every lane and stop dialling."""
        self._closed = True
        self._carry_out(self._upkeep.close())
        for peer in tuple(self._meetings):
            self._leave_meeting(peer)
        self._reception.close()
        self.relay.close()
        for link in self._links.all():
            link.close()

    def _carry_out(self, steps: Iterable[LinkStep]) -> None:
        for step in steps:
            match step:
                case DialLane(member, number, pause_ns) if pause_ns:
                    due, key = self._clock.now_ns() + pause_ns, (member.peer, number)
                    self._dials[key] = self._clock.call_at_ns(due, self._due, *key)
                case DialLane(member, number, _, segment_bytes):
                    dial = self._create_task(self._dial(member, number, segment_bytes))
                    self._dials[member.peer, number] = dial
                case GiveUpLane(peer, number, is_spare):
                    given_up = self._dials.pop((peer, number), None)
                    if given_up is not None:
                        given_up.cancel()
                    lane = self._links.to(peer).lane(number) if is_spare else None
                    if lane is not None:
                        lane.close()
                case DropLink(peer, why):
                    if why:
                        text = "closed the link to peer %d: %s"
                        self._reception.log.write(logging.INFO, text, peer, why)
                    self._leave_meeting(peer)
                    self.relay.forget(peer)
                    self._links.drop(peer)
                    self._frames.forget_peer(peer)
                case TellLink():
                    self._on_change(step)
                case NarrowLink(peer, segment_bytes, is_proven=True):
                    self._on_narrow(peer, segment_bytes)
                case NarrowLink(peer, segment_bytes):
                    text = f"large packets seem to vanish on the way to peer {peer}"
                    text = f"{text}: the next connections try segments of {segment_bytes} bytes"
                    _log.info("%s", self._explain(text))
                    for lane in self._links.to(peer).lanes if self._upkeep.redials(peer) else ():
                        lane.abort()

    # -- dialling ------------------------------------------------------------------------------

    def _due(self, peer: PeerId, number: int) -> None:
        del self._dials[peer, number]
        self._carry_out(self._upkeep.due(peer, number))

    async def _dial(self, member: Member, number: int, segment_bytes: int) -> None:
        peer, patience_s = member.peer, self._timing.dial_s
        connection: Connection | None = None

        def take(connection: Connection, remote: Opening) -> None:
            del self._dials[peer, number]
            self._attach(connection, peer, number, remote.lanes, ours=True)

        try:
            address = Address(member.host, member.port)
            may_dial = partial(self._may_dial, member.host)
            connection = await self._transport.dial(
                address, patience_s, may_dial, member.hosts, segment_bytes
            )
            if self._upkeep.gives_way(peer, number):
                del self._dials[peer, number]
                connection.abort()  # nothing was sent on it yet
                return
            handshake = self._credentials.dial(
                connection,
                opening_of(Channel.LANE, self._identity, peer, lane=number, lanes=self._lanes),
                fingerprint_of(member.key),
            )
            deadline_ns = self._clock.now_ns() + self._timing.ns(patience_s)
            await introduce(connection, handshake, self._clock, deadline_ns, take)
        except (LinkError, RemoteProtocolError) as error:
            del self._dials[peer, number]
            if connection is not None and isinstance(error, LinkError):
                self._frames.lane_failed(peer)
            if isinstance(error, RemoteProtocolError):
                _log.info("closed a connection to peer %d: %s", peer, error.reason)
            steps = self._upkeep.failed(peer, number, error.reason, answered=connection is not None)
            self._carry_out(steps)

    # -- relays --------------------------------------------------------------------------------

    def meet(self, member: Member, relay: Member) -> None:
        """Dial a relay, to make the link to ``member`` there; see ``messages.Meet``."""
        if self._closed or not self._upkeep.begins_meeting(member.peer, relay.peer):
            return
        if member.peer in self._meetings:  # at another relay, or after it: see _meet
            self._meetings[member.peer][1].cancel()
        meeting = self._create_task(self._meet(member, relay))
        self._meetings[member.peer] = relay.peer, meeting

    def _leave_meeting(self, peer: PeerId) -> None:
        if peer in self._meetings:
            relay, meeting = self._meetings.pop(peer)
            meeting.cancel()
            self._upkeep.leaves_meeting(peer, relay)  # it may not have begun

    async def _meet(self, member: Member, relay: Member) -> None:
        """Meet a peer at a relay; then try to reach it without the relay.

        The elder tries at once, which makes its translator let the younger one in.
        """
        where: object = behind(member.peer, relay.peer)
        try:
            try:
                relayed, there = await self._through(relay, member.peer)
                await self._greet_met(relayed, member)
            finally:
                self._upkeep.leaves_meeting(member.peer, relay.peer)
            if self._upkeep.meets(member.peer, punches=True):
                where, may_dial = there, partial(self._may_dial, "")
                patience_s, segment = self._timing.dial_s, self._upkeep.segment_bytes(member.peer)
                ends = relayed.local, there
                met = await self._transport.punch(*ends, patience_s, may_dial, segment)
                if self._upkeep.meets(member.peer, punches=True):
                    await self._greet_met(PunchedConnection(met), member)
                else:
                    met.abort()  # a direct dial has succeeded meanwhile
        except (LinkError, RemoteProtocolError) as error:
            _log.info("cannot reach peer %d (%s): %s", member.peer, where, error.reason)

    async def _greet_met(self, connection: Connection, member: Member) -> None:
        """Do the handshake of a lane that both sides have dialled: the younger one begins it."""
        peer = member.peer

        def take(connection: Connection, remote: Opening) -> None:
            if self._upkeep.meets(peer, punches=is_punched(connection)):
                self._attach(connection, peer, 0, remote.lanes, ours=True)
            else:
                connection.abort()  # the other side has dialled meanwhile

        connection.resume_reading()
        if peer > self._identity.peer:
            self._reception.accept(connection)
            return
        opening = opening_of(Channel.LANE, self._identity, peer, lanes=self._lanes)
        handshake = self._credentials.dial(connection, opening, fingerprint_of(member.key))
        deadline_ns = self._clock.now_ns() + self._timing.ns(self._timing.dial_s)
        await introduce(connection, handshake, self._clock, deadline_ns, take)

    async def _through(self, relay: Member, peer: PeerId) -> tuple[RelayedConnection, Address]:
        """Dial a relay; return a connection to ``peer``, and the address that it has there."""
        patience_s, at_relay = self._timing.dial_s, list[Connection]()
        introduced: asyncio.Future[Address] = asyncio.get_running_loop().create_future()

        def take(connection: Connection, remote: Opening) -> None:
            at_relay.append(connection)
            Introduction(connection, introduced)

        dial = partial(self._transport.dial, segment_bytes=self._upkeep.segment_bytes(peer))
        if relay.peer:
            may_dial = partial(self._may_dial, relay.host)
            address = Address(relay.host, relay.port)
            connection = await dial(address, patience_s, may_dial, relay.hosts)
        else:
            connection = await dial(self._master(), patience_s)
        opening = opening_of(Channel.RELAY, self._identity, peer)
        key = relay.key if relay.peer else self._identity.certificate.authority
        expects = fingerprint_of(key) if key else b""
        handshake = self._credentials.dial(connection, opening, expects)
        deadline_ns = self._clock.now_ns() + self._timing.ns(patience_s)
        await introduce(connection, handshake, self._clock, deadline_ns, take)
        timer = self._clock.call_at_ns(deadline_ns, at_relay[0].abort)
        try:
            there = await introduced
        except asyncio.CancelledError:
            at_relay[0].abort()
            raise
        finally:
            timer.cancel()
        return RelayedConnection(at_relay[0], behind(peer, relay.peer)), there

    # -- lanes ---------------------------------------------------------------------------------

    def _identify(self) -> Opening:
        return opening_of(Channel.LANE, self._identity, lanes=self._lanes)

    def _judge(self, remote: Opening) -> str:
        """Return why the sender of an opening may not connect; empty: it may.

        Members are known by the keys in the roster, newcomers by a certificate. Any process may
        test whether this peer can be dialled, because that gives it nothing.
        """
        if remote.channel is Channel.PROBE:
            return ""
        if remote.channel is Channel.RELAY and (
            refusal := self.relay.refusal(remote.source, remote.target)
        ):
            return refusal
        key = self._upkeep.key_of(remote.source)
        if key is not None:
            is_sound = key == remote.key
            return "" if is_sound else f"it does not have the key of peer {remote.source}"
        if self._has_left(remote.source):
            return f"peer {remote.source} has left the run"
        authority = self._identity.certificate.authority
        if not self._credentials.is_registered(authority, remote):
            return "the master of this peer has not registered it"
        return ""

    def _on_proven(self, connection: Connection, remote: Opening, deadline_ns: int) -> None:
        if remote.channel is Channel.PROBE:
            if remote.flags & ASKS_ADDRESS:
                Introducer(connection)
            else:
                connection.close()  # a probe ends after the handshake
            return
        if remote.channel is Channel.RELAY:
            self.relay.accept(connection, remote.source, remote.target)
            return
        peer, number = remote.source, remote.lane
        steps = self._upkeep.greeted(peer, remote.key, number, connection.remote.host)
        if steps is None:
            connection.abort()
            return
        self._carry_out(steps)
        self._attach(connection, peer, number, remote.lanes, ours=False)

    def _attach(
        self, connection: Connection, peer: PeerId, number: int, told: int, *, ours: bool
    ) -> None:
        link = self._links.to(peer)
        link.told = min(told, LANES_MAX)
        superseded, more = link.lane(number), link.up
        clock = self._clock
        lane = Lane(connection, number, link, self, self._moved, clock.now_ns)
        now_ns = clock.now_ns()
        stall_ns = self._timing.ns(self._timing.lane_stall_s)
        self._watches[lane] = LaneWatch(stall_ns, now_ns, now_ns, opened_ns=now_ns)
        link.add(lane)
        _log.debug(
            "lane %d to peer %d is up, congestion: %s", number, peer, connection.congestion or "?"
        )
        if (relay := relay_of(connection)) is not None:
            _log.info("%s", self._explain(f"reached {behind(peer, relay)}"))
        host = connection.remote.host
        mapped = not ours and self._has_mapped_port() and is_outside(host)
        if punched := is_punched(connection):
            _log.info("%s", self._explain(f"reached peer {peer}: both dialled at the same time"))
        if superseded is not None:
            link.remove(superseded)
            del self._watches[superseded]
            superseded.abort()
            self._frames.lane_lost(superseded)
        self._frames.lane_up(lane)
        steps = self._upkeep.attached(
            peer,
            number,
            link.told,
            now_ns,
            near=link.near,
            ours=ours,
            more=more,
            relay=relay,
            punched=punched,
            mapped=mapped,
        )
        self._carry_out(steps)

    # -- what lanes call -------------------------------------------------------------------------

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        """Log a protocol error, remove the lane, and do the steps that follow from its loss."""
        why = self._stall if lane in self._stalled else "this peer closed it"
        self._stalled.discard(lane)
        reason = error.reason if isinstance(error, PCCLError) else str(error or why)
        if isinstance(error, RemoteProtocolError):
            text = "closed a lane from %s: %s"
            self._reception.log.write(logging.WARNING, text, lane.connection.remote, reason)
        link = lane.link
        self._links.ended.sent_bytes += lane.sent_bytes
        self._links.ended.received_bytes += lane.received_bytes
        if not link.remove(lane):
            return  # superseded
        stuck = self._watches.pop(lane).stuck
        self._frames.lane_lost(lane)
        if not self._closed:
            now_ns = self._clock.now_ns()
            damaged = lane.damaged_bytes if isinstance(error, DamagedData) else None
            steps = self._upkeep.lost(
                link.peer, lane.number, reason, now_ns, up=link.up, damaged=damaged, stuck=stuck
            )
            self._carry_out(steps)
