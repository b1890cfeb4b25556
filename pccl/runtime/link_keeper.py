"""Keeps the links to other peers: the younger of two peers dials, the elder accepts.

The handshake that opens a lane names both peers, the run and the term. A link that is lost is
redialled at once and then with back-off for as long as it is wanted; what happens to it is
reported, and the master draws its conclusions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from pccl.protocol.errors import LinkError, PCCLError, RemoteProtocolError
from pccl.protocol.frame import FrameHeader
from pccl.protocol.handshake import Channel, Opening
from pccl.protocol.limits import Timing
from pccl.protocol.types import Member, PeerId
from pccl.runtime.clock import Clock, Timer
from pccl.runtime.greeting import Credentials, Identity, Reception, introduce
from pccl.transports.base import Address, Connection, Transport
from pccl.transports.lane import Lane
from pccl.transports.link import Link, Links

_log = logging.getLogger("pccl.link")

STRANGERS_MAX = 256
"""Accepted connections before the end of the handshake; more are closed, the oldest first."""

NEWCOMERS_MAX = 1024
"""Links to peers that we do not know yet; the oldest are closed. So many may join together."""


class Frames(Protocol):
    """Who understands the frames of all links; the data plane does.

    The first four are those of ``FrameHandler``, with the sender where that matters.
    """

    def frame_started(self, peer: PeerId, lane: Lane, header: FrameHeader) -> None:
        """A header has arrived."""
        ...

    def frame_buffer(self, lane: Lane, header: FrameHeader, received: int) -> memoryview:
        """Memory for the payload's next bytes."""
        ...

    def frame_received(self, peer: PeerId, lane: Lane, header: FrameHeader) -> None:
        """The payload is complete."""
        ...

    def lane_lost(self, lane: Lane) -> None:
        """The lane is gone."""
        ...

    def waits_for(self, peer: PeerId) -> bool:
        """Whether a running transfer needs something from ``peer``."""
        ...

    def expect_peer(self, peer: PeerId) -> None:
        """``peer`` is a member, or about to be one."""
        ...

    def forget_peer(self, peer: PeerId) -> None:
        """Nobody needs ``peer`` any more."""
        ...


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
        clock: time.
        transport: the network.
        timing: deadlines.
        identity: who we are.
        links: the links to keep; whoever sends frames knows them too.
        frames: who understands the frames.
        on_change: called with a peer and None when its link is up (also when it was made anew),
            or with the reason when it is down or cannot be made.
        create_task: runs a dial.
        credentials: what we greet with.
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
    ) -> None:
        self._clock = clock
        self._transport = transport
        self._timing = timing
        self._identity = identity
        self._on_change = on_change
        self._create_task = create_task
        self._credentials = credentials
        self._links = links
        self._frames = frames
        self._wanted: dict[PeerId, Member] = {}
        self._dialling: dict[PeerId, _Dialling] = {}
        patience_ns = timing.ns(timing.dial_s)
        self._reception = Reception(
            clock, patience_ns, STRANGERS_MAX, credentials, self._identify, self._on_proven
        )
        self._looked_ns = clock.now_ns()
        self._closed = False

    def want(self, members: tuple[Member, ...]) -> None:
        """Keep links to these peers; close those to peers that were wanted and are no longer."""
        wanted = {member.peer: member for member in members}
        for peer in [peer for peer in self._wanted if peer not in wanted]:
            del self._wanted[peer]
            dialling = self._dialling.pop(peer, None)
            if dialling is not None:
                dialling.cancel()
            self._links.drop(peer)
            self._frames.forget_peer(peer)
        for peer, member in wanted.items():
            self._wanted[peer] = member
            self._frames.expect_peer(peer)
            if peer < self._identity.peer and peer not in self._dialling:
                self._dialling[peer] = _Dialling(member, self._first_backoff_ns)
                if not self._links.to(peer).up:
                    self._dial(peer)

    def accept(self, connection: Connection) -> None:
        """Somebody has connected to our port."""
        if self._closed:
            connection.abort()
        else:
            self._reception.accept(connection)

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
        for link in self._links.all():
            awaited = self._frames.waits_for(link.peer)
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
        self._reception.close()
        for link in self._links.all():
            link.close()

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
        member, patience_s = dialling.member, self._timing.dial_s

        def take(connection: Connection) -> None:
            dialling.task = None
            self._attach(connection, peer)

        try:
            address = Address(member.host, member.port)
            connection = await self._transport.dial(address, patience_s)
            handshake = self._credentials.dial(
                self._credentials.opening(Channel.LANE, self._identity, peer)
            )
            deadline_ns = self._clock.now_ns() + self._timing.ns(patience_s)
            await introduce(connection, handshake, self._clock, deadline_ns, take)
        except (LinkError, RemoteProtocolError) as error:
            dialling.task = None
            if isinstance(error, RemoteProtocolError):
                _log.info("closed a connection to peer %d: %s", peer, error.reason)
            self._on_change(peer, error.reason)
            self._dial_later(peer)

    def _dial_later(self, peer: PeerId) -> None:
        dialling = self._dialling.get(peer)
        if dialling is None or dialling.timer is not None or dialling.task is not None:
            return
        when_ns = self._clock.now_ns() + dialling.backoff_ns
        dialling.timer = self._clock.call_at_ns(when_ns, self._dial, peer)
        dialling.backoff_ns = min(
            2 * dialling.backoff_ns, self._timing.ns(self._timing.redial_max_s)
        )

    # -- lanes ---------------------------------------------------------------------------------

    def _identify(self) -> Opening:
        return self._credentials.opening(Channel.LANE, self._identity)

    def _on_proven(self, connection: Connection, remote: Opening, deadline_ns: int) -> None:
        newcomers = [link for link in self._links.all() if link.peer not in self._wanted]
        if len(newcomers) >= NEWCOMERS_MAX and remote.source not in self._wanted:
            _log.info("closed the link to peer %d: too many newcomers came", newcomers[0].peer)
            self._links.drop(newcomers[0].peer)
        self._attach(connection, remote.source)

    def _attach(self, connection: Connection, peer: PeerId) -> None:
        link = self._links.to(peer)
        lane = Lane(connection, self)
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
        if not isinstance(link, Link):
            raise RemoteProtocolError(func="lane", reason="superseded")
        self._frames.frame_started(link.peer, lane, header)

    def frame_buffer(self, lane: Lane, header: FrameHeader, received: int) -> memoryview:
        """See ``FrameHandler``."""
        return self._frames.frame_buffer(lane, header, received)

    def frame_received(self, lane: Lane, header: FrameHeader) -> None:
        """See ``FrameHandler``."""
        link = lane.owner
        if isinstance(link, Link):
            self._frames.frame_received(link.peer, lane, header)

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        """See ``FrameHandler``."""
        reason = error.reason if isinstance(error, PCCLError) else str(error or "closed here")
        if isinstance(error, RemoteProtocolError):
            _log.warning("closed a lane from %s: %s", lane.connection.remote, reason)
        self._frames.lane_lost(lane)
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
            self._links.drop(link.peer)  # a newcomer that never became a member
