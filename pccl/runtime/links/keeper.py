"""Keeps the links to other peers: carries out what ``LinkUpkeep`` decides about their lanes.

The handshake that opens a lane names both peers, the run, the term and the lane. It proves the keys
of both peers, which each has from the master. The keeper reports when a link comes up or goes down,
and the master decides what follows from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from pccl.machines.router_path import is_outside
from pccl.protocol.checksum import DamagedData
from pccl.protocol.errors import LinkError, PCCLError, RemoteProtocolError
from pccl.protocol.frame import NO_OPERATION, FrameHeader, FrameKind, Moved
from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.handshake.opening import ASKS_ADDRESS, READS, Channel, Opening
from pccl.protocol.limits import LANES_MAX, Timing
from pccl.protocol.types import Member, PeerId
from pccl.runtime.clock import Clock, Timer
from pccl.runtime.control.greeting import Credentials, Identity, Reception, introduce, opening_of
from pccl.runtime.links.frame_router import FrameRouter
from pccl.runtime.links.introductions import Introductions
from pccl.runtime.links.lane_checks import LaneChecks
from pccl.runtime.links.relay import Relay
from pccl.topology.link_steps import (
    DialLane,
    DropLink,
    GiveUpLane,
    LeaveRelay,
    LinkStep,
    NarrowLink,
    TellLink,
)
from pccl.topology.link_upkeep import LinkUpkeep
from pccl.topology.wanted_link import KnownLink
from pccl.transports.base import Address, Connection, Transport
from pccl.transports.link import Lane, Links
from pccl.transports.relay import (
    Introducer,
    PunchedConnection,
    behind,
    met_at,
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
        on_reader: takes the connection of a reader, and its id.
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
        on_reader: Callable[[Connection, PeerId], None] = lambda connection, _: connection.abort(),
    ) -> None:
        self._clock = clock
        self._transport = transport
        self._timing = timing
        self._identity = identity
        self._on_change = on_change
        self._on_narrow = on_narrow
        self._on_reader = on_reader
        self._create_task = create_task
        self._credentials = credentials
        self._lanes = lanes
        self._moved = moved
        self._has_mapped_port = has_mapped_port
        self._has_left = has_left
        self._may_dial = may_dial
        self._explain = explain
        self._links = links
        self._frames = frames
        self.frame_started = frames.frame_started
        """What lanes call when a header has arrived."""
        limits = transport.port_limits
        self._introductions = Introductions(
            clock, transport, timing, identity, credentials, master, may_dial
        )
        frames.on_meet = self._asked
        self._upkeep = LinkUpkeep(timing, lanes, limits.newcomers, has_left)
        self._dials: dict[tuple[PeerId, int], Timer | asyncio.Task[None]] = {}
        """Running dials, and timers of later ones, by peer and number of the lane."""
        self._meetings: dict[tuple[PeerId, int], asyncio.Task[None]] = {}
        """Meetings by peer and number: those that wait, and those whose peers dial each other."""
        self._punches: dict[tuple[PeerId, int], asyncio.Task[None]] = {}
        """Lanes that both dial because the other side has asked, by peer and number of the lane."""
        self.relay = Relay(
            clock, timing.ns(timing.dial_s), timing.ns(timing.lane_stall_s), has_left
        )
        """What this peer forwards for others."""
        self._reception = Reception(
            clock, timing.ns(timing.dial_s), limits.unproven, credentials,
            self._identify, self._on_proven, self._judge,
        )  # fmt: skip
        self._checks = LaneChecks(
            clock, timing, links, frames, self._upkeep, self._carry_out, explain
        )
        self.look = self._checks.look
        """Check all lanes at a tick; see ``LaneChecks.look``."""
        self._closed = False

    def want(self, members: tuple[Member, ...]) -> None:
        """Keep links to ``members``; close links to peers that are no longer among them."""
        if self._closed:
            return
        links = [self._links.to(member.peer) for member in members]
        up = {
            link.peer: KnownLink(
                link.told, link.near, relay_of(first), met_at(first), first.remote.host
            )
            for link in links
            if link.up and (first := link.lanes[0].connection)
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

    def close(self) -> None:
        """Close every lane and stop dialling."""
        self._closed = True
        self._carry_out(self._upkeep.close())
        self._leave_meetings(*[peer for peer, _ in (*self._meetings, *self._punches)])
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
                case DialLane(member, number):
                    self._dials[member.peer, number] = self._create_task(self._dial(step))
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
                    self._leave_meetings(peer)
                    self.relay.forget(peer)
                    self._links.drop(peer)
                    self._frames.forget_peer(peer)
                case LeaveRelay(peer, relay):
                    for lane in self._links.to(peer).lanes:
                        if relay_of(lane.connection) == relay:
                            self._checks.end(lane, f"its relay, peer {relay}, has left the run")
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

    async def _dial(self, step: DialLane) -> None:
        member, number, peer = step.member, step.number, step.member.peer
        connection: Connection | None = None

        def take(connection: Connection, remote: Opening) -> None:
            del self._dials[peer, number]
            self._attach(connection, peer, number, remote.lanes, ours=True)

        try:
            connection = await self._connect(step)
            if self._upkeep.gives_way(peer, number):
                del self._dials[peer, number]
                connection.abort()  # nothing was sent on it yet
                return
            handshake = self._credentials.dial(
                connection,
                opening_of(Channel.LANE, self._identity, peer, lane=number, lanes=self._lanes),
                fingerprint_of(member.key),
            )
            deadline_ns = self._clock.now_ns() + self._timing.ns(self._timing.dial_s)
            await introduce(connection, handshake, self._clock, deadline_ns, take)
        except (LinkError, RemoteProtocolError) as error:
            del self._dials[peer, number]
            if connection is not None and isinstance(error, LinkError):
                self._frames.lane_failed(self._links.to(peer), number)
            if isinstance(error, RemoteProtocolError):
                _log.info("closed a connection to peer %d: %s", peer, error.reason)
            steps = self._upkeep.failed(peer, number, error.reason, answered=connection is not None)
            self._carry_out(steps)

    async def _connect(self, step: DialLane) -> Connection:
        """Dial a peer, at the same time as it dials this one if both have met so before."""
        member, segment_bytes = step.member, step.segment_bytes
        if step.met_at is None:
            address, may_dial = (
                Address(member.host, member.port),
                partial(self._may_dial, member.host),
            )
            patience_s = self._timing.dial_s / (3 if step.is_brief else 1)
            return await self._transport.dial(
                address, patience_s, may_dial, member.hosts, segment_bytes
            )
        probe, seen = await self._introductions.seen_by(step.met_at)
        try:
            met = (one for one in self._links.to(member.peer).lanes if met_at(one.connection))
            if (lane := next(met, None)) is None:
                raise LinkError(func="dial", reason="the lanes that both have dialled are lost")
            asks_for = replace(NO_OPERATION, n=step.number)  # several may wait on one lane
            lane.say(FrameHeader(FrameKind.MEET, asks_for, 0, 0, 0, what=seen.port))
            there = lane.connection.remote
            return await self._punch(probe.local, there, step.met_at, segment_bytes)
        finally:
            probe.abort()

    async def _punch(
        self, local: Address, there: Address, relay: Member, segment_bytes: int
    ) -> Connection:
        """Connect to a peer that dials this one at the same time."""
        patience_s, may_dial = self._timing.dial_s, partial(self._may_dial, "")
        address = Address(there.host, there.port)
        met = await self._transport.punch(local, address, patience_s, may_dial, segment_bytes)
        return PunchedConnection(met, relay)

    # -- relays --------------------------------------------------------------------------------

    def meet(self, member: Member, relay: Member) -> None:
        """Dial a relay, to make the link to ``member`` there; see ``messages.Meet``.

        It replaces a meeting that waits elsewhere. After an earlier meeting, which the other side
        may have lost, both may be dialling each other: those dials continue.
        """
        peer, waits = member.peer, self._upkeep.waits_in(member.peer)
        number = 0 if self._closed else self._upkeep.begins_meeting(peer, relay.peer)
        if not number:
            return
        if waits:
            self._meetings.pop((peer, waits)).cancel()
        self._meetings[peer, number] = self._create_task(self._meet(member, relay, number))

    def _leave_meetings(self, *peers: PeerId) -> None:
        for peer, number in [key for key in self._meetings if key[0] in peers]:
            self._meetings.pop((peer, number)).cancel()
            self._upkeep.leaves_meeting(peer, number)  # it may not have begun
        for key in [key for key in self._punches if key[0] in peers]:
            self._punches.pop(key).cancel()

    async def _meet(self, member: Member, relay: Member, number: int) -> None:
        """Meet a peer at a relay; then try to reach it without the relay.

        The elder tries at once, which makes its translator let the younger one in.
        """
        where: object = behind(member.peer, relay.peer)
        try:
            try:
                relayed, there = await self._introductions.through(relay, member.peer)
                await self._greet_met(relayed, member)
            finally:
                self._upkeep.leaves_meeting(member.peer, number)
            if self._upkeep.meets(member.peer, punches=True):
                where, segment_bytes = there, self._upkeep.segment_bytes(member.peer)
                met = await self._punch(relayed.local, there, relay, segment_bytes)
                if self._upkeep.meets(member.peer, punches=True):
                    await self._greet_met(met, member)
                else:
                    met.abort()  # a direct dial has succeeded meanwhile
        except (LinkError, RemoteProtocolError) as error:
            _log.info("cannot reach peer %d (%s): %s", member.peer, where, error.reason)
        finally:
            self._meetings.pop((member.peer, number), None)

    async def _greet_met(self, connection: Connection, member: Member) -> None:
        """Do the handshake of a lane that both sides have dialled: the younger one begins it."""
        peer = member.peer

        def take(connection: Connection, remote: Opening) -> None:
            if self._upkeep.meets(peer, punches=met_at(connection) is not None):
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

    def _asked(self, lane: Lane, header: FrameHeader) -> None:
        """Dial a peer that dials this one, for a further lane, from the port that it knows."""
        peer, relay, port = lane.link.peer, met_at(lane.connection), header.what
        key = peer, header.operation.n
        if relay is None or key in self._punches or not self._upkeep.punches(*key):
            return
        there = Address(lane.connection.remote.host, port & 0xFFFF)
        ends = lane.connection.local, there, relay, self._upkeep.segment_bytes(peer)
        self._punches[key] = self._create_task(self._follow(key, *ends))

    async def _follow(
        self,
        key: tuple[PeerId, int],
        local: Address,
        there: Address,
        relay: Member,
        segment_bytes: int,
    ) -> None:
        try:
            self._reception.accept(await self._punch(local, there, relay, segment_bytes))
        except LinkError as error:
            _log.info("cannot reach peer %d (%s): %s", key[0], there, error.reason)
        finally:
            self._punches.pop(key, None)

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
        reads = remote.flags & READS
        key = None if reads else self._upkeep.key_of(remote.source)
        if key is not None:
            is_sound = key == remote.key
            return "" if is_sound else f"it does not have the key of peer {remote.source}"
        if not reads and self._has_left(remote.source):
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
        if remote.flags & READS:
            self._on_reader(connection, remote.source)
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
        self._checks.opened(lane, now_ns)
        link.add(lane)
        _log.debug(
            "lane %d to peer %d is up, congestion: %s", number, peer, connection.congestion or "?"
        )
        if (relay := relay_of(connection)) is not None:
            _log.info("%s", self._explain(f"reached {behind(peer, relay)}"))
        host = connection.remote.host
        mapped = not ours and self._has_mapped_port() and is_outside(host)
        if (meeting := met_at(connection)) is not None and not number:
            _log.info("%s", self._explain(f"reached peer {peer}: both dialled at the same time"))
        if superseded is not None:
            link.remove(superseded)
            self._checks.ended(superseded)
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
            met_at=meeting,
            mapped=mapped,
        )
        self._carry_out(steps)

    # -- what lanes call -------------------------------------------------------------------------

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        """Log a protocol error, remove the lane, and do the steps that follow from its loss."""
        why = self._checks.why_ended(lane) or "this peer closed it"
        reason = error.reason if isinstance(error, PCCLError) else str(error or why)
        if isinstance(error, RemoteProtocolError):
            text = "closed a lane from %s: %s"
            self._reception.log.write(logging.WARNING, text, lane.connection.remote, reason)
        link = lane.link
        self._links.ended.sent_bytes += lane.sent_bytes
        self._links.ended.received_bytes += lane.received_bytes
        if not link.remove(lane):
            return  # superseded
        stuck = self._checks.ended(lane)
        self._frames.lane_lost(lane)
        if not self._closed:
            now_ns = self._clock.now_ns()
            damaged = lane.damaged_bytes if isinstance(error, DamagedData) else None
            steps = self._upkeep.lost(
                link.peer, lane.number, reason, now_ns, up=link.up, damaged=damaged, stuck=stuck
            )
            self._carry_out(steps)
