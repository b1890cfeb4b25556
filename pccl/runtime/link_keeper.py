"""Keeps the links to other peers: the younger of two peers dials, the elder accepts.

A lane is opened by a hello in each direction that names both peers, the run and the term. A link
that is lost is redialled at once and then with back-off for as long as it is wanted; what happens
to it is reported, and the master draws its conclusions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from pccl.protocol.errors import LinkError, PCCLError, RemoteProtocolError
from pccl.protocol.frame import HELLO_BYTES, NO_OPERATION, FrameHeader, FrameKind, LaneHello
from pccl.protocol.limits import PROTOCOL_VERSION, Timing
from pccl.protocol.types import Member, PeerId
from pccl.runtime.clock import Clock, Timer
from pccl.runtime.data_plane import DataPlane
from pccl.transports.base import Address, Connection, Transport
from pccl.transports.lane import Lane
from pccl.transports.link import Link

_log = logging.getLogger("pccl.link")

GREETINGS_MAX = 256
"""Accepted connections that have not said hello; more are closed, the oldest first."""


class Identity(Protocol):
    """Who we are; the peer machine knows."""

    @property
    def peer(self) -> PeerId:
        """The own id; 0 before registration."""
        ...

    @property
    def run(self) -> bytes:
        """The run's id."""
        ...

    @property
    def term(self) -> int:
        """The term that we follow."""
        ...


@dataclass(slots=True)
class _Greeting:
    """A lane whose other side has not said hello yet."""

    expected: PeerId | None
    """Whom we dialled; None for an accepted lane."""
    timer: Timer
    payload: bytearray


@dataclass(slots=True)
class _Dialling:
    """A peer that we keep a link to by dialling."""

    member: Member
    backoff_ns: int
    up_since_ns: int = 0
    """When the link last came up."""
    task: asyncio.Task[None] | None = None
    timer: Timer | None = None

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
        if self.timer is not None:
            self.timer.cancel()


class LinkKeeper:
    """All links of one peer; the frame handler of all its lanes.

    Args:
        identity: who we are.
        data_plane: who understands the frames.
        on_change: called with a peer and None when its link is up (also when it was made anew),
            or with the reason when it is down or cannot be made.
        create_task: runs a dial.
        make_link: makes the link to a peer.
    """

    def __init__(
        self,
        clock: Clock,
        transport: Transport,
        timing: Timing,
        identity: Identity,
        on_change: Callable[[PeerId, str | None], None],
        create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        make_link: Callable[[PeerId], Link] = Link,
    ) -> None:
        self.data_plane: DataPlane | None = None
        self._clock = clock
        self._transport = transport
        self._timing = timing
        self._identity = identity
        self._on_change = on_change
        self._create_task = create_task
        self._make_link = make_link
        self._links: dict[PeerId, Link] = {}
        self._wanted: dict[PeerId, Member] = {}
        self._dialling: dict[PeerId, _Dialling] = {}
        self._greetings: dict[Lane, _Greeting] = {}
        self._looked_ns = clock.now_ns()
        self._closed = False

    def link_to(self, peer: PeerId) -> Link:
        """The link to ``peer``, which may be down."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = self._make_link(peer)
        return link

    def links(self) -> list[Link]:
        """All links, also those that are down."""
        return list(self._links.values())

    def want(self, members: tuple[Member, ...]) -> None:
        """Keep links to these peers; close those to peers that were wanted and are no longer."""
        wanted = {member.peer: member for member in members}
        for peer in [peer for peer in self._wanted if peer not in wanted]:
            del self._wanted[peer]
            dialling = self._dialling.pop(peer, None)
            if dialling is not None:
                dialling.cancel()
            link = self._links.pop(peer, None)
            if link is not None:
                link.close()
            if self.data_plane is not None:
                self.data_plane.forget_peer(peer)
        for peer, member in wanted.items():
            self._wanted[peer] = member
            if peer < self._identity.peer and peer not in self._dialling:
                self._dialling[peer] = _Dialling(member, self._first_backoff_ns)
                if not self.link_to(peer).up:
                    self._dial(peer)

    def accept(self, connection: Connection) -> None:
        """Somebody has connected to our port."""
        strangers = [lane for lane, greeting in self._greetings.items() if not greeting.expected]
        if len(strangers) >= GREETINGS_MAX:
            self._greetings.pop(strangers[0]).timer.cancel()
            strangers[0].abort()
        self._greet(connection, None)

    def replace_stalled_lanes(self) -> None:
        """Abort lanes that owe progress and make none; called at every tick.

        A lane owes progress while it has something to send, a frame that began to arrive, or a
        running transfer that lacks segments from the other side. That side may have nothing to
        send, but it may also have handed everything to a connection that is dead: a replacement
        costs one question and its answer, and finds out.
        """
        now_ns = self._clock.now_ns()
        late = now_ns - self._looked_ns >= 2 * self._timing.ns(self._timing.tick_s)
        self._looked_ns = now_ns
        for link in self._links.values():
            awaited = self.data_plane is not None and self.data_plane.waits_for(link.peer)
            for lane in list(link.lanes):
                sent, received, since_ns = lane.watched
                owes = awaited or lane.backlog_bytes or lane.receiving is not None
                moved = (sent, received) != (lane.sent_bytes, lane.received_bytes)
                if late or moved or not owes:
                    lane.watched = (lane.sent_bytes, lane.received_bytes, now_ns)
                elif now_ns - since_ns >= self._timing.ns(self._timing.lane_stall_s):
                    _log.warning("lane to peer %d stalls; replacing it", link.peer)
                    lane.abort()

    def close(self) -> None:
        """Close every lane and stop dialling."""
        self._closed = True
        for dialling in self._dialling.values():
            dialling.cancel()
        self._dialling.clear()
        for link in self._links.values():
            link.close()
        for lane, greeting in list(self._greetings.items()):
            greeting.timer.cancel()
            lane.abort()

    # -- dialling ------------------------------------------------------------------------------

    @property
    def _first_backoff_ns(self) -> int:
        return self._timing.ns(self._timing.redial_min_s)

    def _dial(self, peer: PeerId) -> None:
        dialling = self._dialling.get(peer)
        if dialling is not None and dialling.task is None and not self._closed:
            dialling.timer = None
            dialling.task = self._create_task(self._dial_once(peer, dialling))

    async def _dial_once(self, peer: PeerId, dialling: _Dialling) -> None:
        member = dialling.member
        try:
            connection = await self._transport.dial(
                Address(member.host, member.port), self._timing.dial_s
            )
        except LinkError as error:
            dialling.task = None
            self._on_change(peer, error.reason)
            self._dial_later(peer)
            return
        dialling.task = None
        lane = self._greet(connection, peer)
        self._say_hello(lane, peer)

    def _dial_later(self, peer: PeerId) -> None:
        dialling = self._dialling.get(peer)
        if dialling is None or dialling.timer is not None or dialling.task is not None:
            return
        when_ns = self._clock.now_ns() + dialling.backoff_ns
        dialling.timer = self._clock.call_at_ns(when_ns, self._dial, peer)
        dialling.backoff_ns = min(
            2 * dialling.backoff_ns, self._timing.ns(self._timing.redial_max_s)
        )

    # -- hello ---------------------------------------------------------------------------------

    def _greet(self, connection: Connection, expected: PeerId | None) -> Lane:
        lane = Lane(connection, self)
        when_ns = self._clock.now_ns() + self._timing.ns(self._timing.dial_s)
        timer = self._clock.call_at_ns(when_ns, self._greeting_overdue, lane)
        self._greetings[lane] = _Greeting(expected, timer, bytearray(HELLO_BYTES))
        return lane

    def _greeting_overdue(self, lane: Lane) -> None:
        _log.info("%s said no hello in time", lane.connection.remote)
        lane.abort()

    def _say_hello(self, lane: Lane, peer: PeerId) -> None:
        own = self._identity
        hello = LaneHello(PROTOCOL_VERSION, 0, own.term, own.run, own.peer, peer).encode()
        lane.send(FrameHeader(FrameKind.HELLO, NO_OPERATION, 0, 0, len(hello)), hello)

    def _on_hello(self, lane: Lane, greeting: _Greeting) -> None:
        hello = LaneHello.decode(greeting.payload)
        own, source = self._identity, PeerId(hello.source)
        known = (hello.version, hello.run, hello.term, hello.target)
        if known != (PROTOCOL_VERSION, own.run, own.term, own.peer):
            raise RemoteProtocolError(
                func="lane", reason="a hello of another run, or for another peer"
            )
        if greeting.expected is None:
            if source <= own.peer:
                raise RemoteProtocolError(func="lane", reason=f"peer {source} should be dialled")
            self._say_hello(lane, source)
        elif source != greeting.expected:
            reason = f"peer {source} answered instead of peer {greeting.expected}"
            raise RemoteProtocolError(func="lane", reason=reason)
        greeting.timer.cancel()
        del self._greetings[lane]
        self._attach(lane, source)

    def _attach(self, lane: Lane, peer: PeerId) -> None:
        link = self.link_to(peer)
        superseded, link.lanes = link.lanes, [lane]
        lane.owner = link
        for old in superseded:
            old.owner = None
            old.abort()
        dialling = self._dialling.get(peer)
        if dialling is not None:
            dialling.up_since_ns = self._clock.now_ns()
        self._on_change(peer, None)

    # -- what lanes call -------------------------------------------------------------------------

    def frame_started(self, lane: Lane, header: FrameHeader) -> None:
        """See ``FrameHandler``."""
        link = lane.owner
        if isinstance(link, Link):
            assert self.data_plane is not None
            self.data_plane.frame_started(link.peer, lane, header)
        elif lane in self._greetings:
            if header.kind is not FrameKind.HELLO or header.length != HELLO_BYTES:
                raise RemoteProtocolError(func="lane", reason="a lane must begin with a hello")
        else:
            raise RemoteProtocolError(func="lane", reason="superseded")

    def frame_buffer(self, lane: Lane, header: FrameHeader, received: int) -> memoryview:
        """See ``FrameHandler``."""
        greeting = self._greetings.get(lane)
        if greeting is not None:
            return memoryview(greeting.payload)[received:]
        assert self.data_plane is not None
        return self.data_plane.frame_buffer(lane, header, received)

    def frame_received(self, lane: Lane, header: FrameHeader) -> None:
        """See ``FrameHandler``."""
        link = lane.owner
        if isinstance(link, Link):
            assert self.data_plane is not None
            self.data_plane.frame_received(link.peer, lane, header)
        else:
            greeting = self._greetings.get(lane)
            if greeting is not None:
                self._on_hello(lane, greeting)

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        """See ``FrameHandler``."""
        reason = error.reason if isinstance(error, PCCLError) else str(error or "closed here")
        if isinstance(error, RemoteProtocolError):
            _log.warning("closed a lane from %s: %s", lane.connection.remote, reason)
        greeting = self._greetings.pop(lane, None)
        if greeting is not None:
            greeting.timer.cancel()
            if greeting.expected is not None and not self._closed:
                self._on_change(greeting.expected, reason)
                self._dial_later(greeting.expected)
            return
        if self.data_plane is not None:
            self.data_plane.lane_lost(lane)
        link = lane.owner
        if isinstance(link, Link) and lane in link.lanes:
            link.lanes.remove(lane)
            if not link.up and not self._closed:
                self._on_link_down(link, reason)

    def _on_link_down(self, link: Link, reason: str) -> None:
        self._on_change(link.peer, reason)
        dialling = self._dialling.get(link.peer)
        if dialling is not None:
            lived_ns = self._clock.now_ns() - dialling.up_since_ns
            if lived_ns < self._timing.ns(self._timing.redial_max_s):
                self._dial_later(link.peer)  # it ends as soon as it is made: do not spin
            else:
                dialling.backoff_ns = self._first_backoff_ns
                self._dial(link.peer)
        elif link.peer not in self._wanted:
            self._links.pop(link.peer, None)  # a newcomer that never became a member
