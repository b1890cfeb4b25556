"""``VersionExchange``: the links to readers: what this process serves on them, and what it fetches.

Each link has one lane. A member only serves; readers also fetch from each other. All that a reader
can do to a process is to request the states that it serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from pccl.protocol.errors import PCCLError, RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.limits import READER_LINKS_MAX
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.clock import Clock
from pccl.runtime.control.stranger_log import StrangerLog
from pccl.runtime.publishing.fetch import VersionFetch
from pccl.runtime.state.exchange import refuse
from pccl.runtime.state.frames import StateSender, check_length, numbers_of
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.upload import StateUpload
from pccl.state.versions import name_of, version_operation
from pccl.transports.base import Connection
from pccl.transports.link import Lane, Link, Links
from pccl.transports.sinks import Collect, Drain, Sink

_log = logging.getLogger("pccl.link")

_ASKED = (FrameKind.MAP_ASK, FrameKind.LAYOUT_ASK, FrameKind.PIECE_ASK, FrameKind.WATCH)
"""Frames that every process with published states answers."""

_SENT = (FrameKind.MAP, FrameKind.LAYOUT, FrameKind.PIECE_LACK, FrameKind.PIECE_HAVE)
"""Frames that only a fetch accepts, besides PIECE."""


class OfferedState:
    """One complete state that this process serves. Its memory never changes.

    Args:
        memory: the state, with its digests.
        operation: id in the frames about it.
        links: the links to readers.
    """

    def __init__(self, memory: StateMemory, operation: OperationId, links: Links) -> None:
        layout = memory.layout
        sender = StateSender(operation, links)

        def read(number: int) -> memoryview:
            return memory.view(layout.piece(number))

        self.memory = memory
        self.upload = StateUpload(layout, memory.piece_map, read, lambda _: True, sender)


class VersionExchange:
    """The links to readers of one process.

    Args:
        clock: gives the time.
        group: the peer group.
        stall_ns: nanoseconds without a byte from a source, after which its link is closed.
        make_link: makes a link.
        on_link: called when a link is up or down.
    """

    def __init__(
        self,
        clock: Clock,
        group: int,
        stall_ns: int,
        make_link: Callable[[PeerId], Link] = Link,
        on_link: Callable[[PeerId, bool], None] = lambda peer, up: None,
    ) -> None:
        self.links = Links(make_link)
        self.fetch: VersionFetch | None = None
        self.log = StrangerLog(clock, _log)
        self.received_bytes = 0
        """Bytes of lanes that have ended."""
        self.sent_bytes = 0
        self._clock = clock
        self._group = group
        self._stall_ns = stall_ns
        self._on_link = on_link
        self._offers: dict[OperationId, OfferedState] = {}
        self._accepted: set[PeerId] = set()
        self._moved: dict[PeerId, tuple[int, int]] = {}
        """Source -> number of bytes that it has sent, and when that last changed."""
        self._is_closed = False

    # -- what this process serves ---------------------------------------------------------------

    def offer(self, memories: Iterable[StateMemory]) -> None:
        """Serve exactly these states from now on; refuse pending requests for others."""
        wanted = {version_operation(name_of(one.piece_map), self._group): one for one in memories}
        for operation in [one for one in self._offers if one not in wanted]:
            self._offers.pop(operation).upload.withdraw()
        for operation, memory in wanted.items():
            if operation not in self._offers:
                self._offers[operation] = OfferedState(memory, operation, self.links)
                for link in self.links.all():
                    self._offers[operation].upload.send_have(link.peer)

    # -- links -----------------------------------------------------------------------------------

    def accept(self, connection: Connection, peer: PeerId) -> None:
        """Serve a reader that has connected and proven its id; close it if there are too many."""
        is_known = peer in self._accepted or self.links.find(peer) is not None
        if self._is_closed or (not is_known and len(self._accepted) >= READER_LINKS_MAX):
            connection.abort()
            return
        self._accepted.add(peer)
        self.attach(connection, peer)

    def attach(self, connection: Connection, peer: PeerId) -> None:
        """Use a connection to another process, in place of an older one."""
        if self._is_closed:
            connection.abort()
            return
        link = self.links.to(peer)
        superseded = link.lanes
        lane = Lane(connection, 0, link, self, now_ns=self._clock.now_ns)
        for old in superseded:
            link.remove(old)
            self._count(old)
            old.abort()
        link.add(lane)
        self._moved[peer] = 0, self._clock.now_ns()
        if self.fetch is not None:
            self.fetch.link_changed(peer, up=True, is_new=not superseded)
        self._on_link(peer, True)

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """Return the sink that receives the payload of a frame.

        Raises:
            RemoteProtocolError: the other side may not send such a frame.
        """
        peer, kind = lane.link.peer, header.kind
        fetch, offered = self.fetch, self._offers.get(header.operation)
        if kind not in (*_ASKED, *_SENT, FrameKind.PIECE):
            raise RemoteProtocolError(func="lane", reason=f"unexpected {kind.name} of a reader")
        if kind is not FrameKind.PIECE:
            check_length(header)
        if offered is not None and kind in (*_ASKED, FrameKind.PIECE_HAVE):
            take = partial(answer, offered.upload, peer, kind)
            return Collect(bytearray(header.length), take)
        if fetch is not None and fetch.operation == header.operation:
            return fetch.frame_started(lane, header)
        return refuse(lane, header) if kind in _ASKED else Drain(header.length)

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        """Forget a lost lane, and the requests that wait for its link."""
        peer, link = lane.link.peer, lane.link
        if isinstance(error, RemoteProtocolError):
            text = "closed a lane from %s: %s"
            self.log.write(logging.WARNING, text, lane.connection.remote, error.reason)
        if not link.remove(lane):
            return  # superseded
        self._count(lane)
        self._accepted.discard(peer)
        self._moved.pop(peer, None)
        for offered in self._offers.values():
            offered.upload.forget(peer)
        if self.fetch is not None:
            self.fetch.link_changed(peer, up=False, is_new=False)
        self.links.drop(peer)
        reason = error.reason if isinstance(error, PCCLError) else str(error or "closed")
        _log.debug("the link to peer %d is lost: %s", peer, reason)
        self._on_link(peer, False)

    def _count(self, lane: Lane) -> None:
        self.received_bytes += lane.received_bytes
        self.sent_bytes += lane.sent_bytes

    @property
    def total_received_bytes(self) -> int:
        """Bytes received on all links, also on those that have ended."""
        lanes = (lane for link in self.links.all() for lane in link.lanes)
        return self.received_bytes + sum(lane.received_bytes for lane in lanes)

    @property
    def total_sent_bytes(self) -> int:
        """Bytes sent on all links, also on those that have ended."""
        lanes = (lane for link in self.links.all() for lane in link.lanes)
        return self.sent_bytes + sum(lane.sent_bytes for lane in lanes)

    def tick(self) -> None:
        """Let the fetch check its timeouts; close links whose sources send nothing."""
        fetch = self.fetch
        if fetch is None:
            return
        now_ns = self._clock.now_ns()
        for link in self.links.all():
            received = sum(lane.received_bytes for lane in link.lanes)
            known, since_ns = self._moved.get(link.peer, (0, now_ns))
            if received != known or not fetch.uses(link.peer):
                self._moved[link.peer] = received, now_ns
            elif now_ns - since_ns >= self._stall_ns:
                for lane in link.lanes:
                    lane.abort()
        fetch.tick()

    def close(self) -> None:
        """Close all links, and stop serving."""
        self._is_closed = True
        for offered in self._offers.values():
            offered.upload.close()
        self._offers.clear()
        if self.fetch is not None:
            self.fetch.close()
            self.fetch = None
        for link in self.links.all():
            link.close()
        self.log.close()


def answer(upload: StateUpload, peer: PeerId, kind: FrameKind, payload: bytearray) -> None:
    """Answer a question about a state.

    Raises:
        RemoteProtocolError: the question is malformed, or asks for too many pieces.
    """
    match kind:
        case FrameKind.MAP_ASK:
            upload.send_map(peer)
        case FrameKind.LAYOUT_ASK:
            upload.send_layout(peer)
        case FrameKind.WATCH:
            upload.send_have(peer)
        case FrameKind.PIECE_HAVE:
            upload.cancel(peer, numbers_of(payload))
        case _:
            upload.send_pieces(peer, numbers_of(payload))
