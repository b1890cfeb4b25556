"""``Prefetch``: a newcomer's download of its group's state before the admission.

The download is advisory. Its map comes from the first member that answers. A piece that a member
has changed since then fails its digest. The synchronization after the admission fetches such
pieces, and verifies everything against the elected contents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.state.frames import StateSender
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.receiver import StateReceiver
from pccl.state.fetch.download import DownloadDone, DownloadFailed, PiecesComplete
from pccl.state.fetch.target import ShownTarget
from pccl.transports.link import Links
from pccl.transports.sinks import Sink

_log = logging.getLogger("pccl.peer")


class Prefetch:
    """One download of a newcomer before its admission: of its state, or of a result.

    Args:
        memory: memory to fetch for; its digests are up to date.
        fetched: stores the pieces.
        operation: id under which the members offer their snapshots.
        links: links of this peer.
        now_ns: returns the current time in nanoseconds.
        stall_ns: nanoseconds without a byte after which a member counts as stalled.
        on_ready: called once, when the download is done or has failed.
        only: digest of the contents to fetch; empty: any that a member offers.
    """

    def __init__(
        self,
        memory: StateMemory,
        fetched: FetchedPieces,
        operation: OperationId,
        links: Links,
        now_ns: Callable[[], int],
        stall_ns: int,
        on_ready: Callable[[], None],
        only: bytes = b"",
    ) -> None:
        self.on_result: Callable[[PeerId, bytearray], None] | None = None
        """Receives the results that members announce; None: they are ignored."""
        self.on_complete: Callable[[], None] = lambda: None
        """Called when all pieces of a member's snapshot are here."""
        self.memory = memory
        self.fetched = fetched
        self.operation = operation
        self._on_ready = on_ready
        self._is_ready = False
        self._sender = StateSender(operation, links)
        self._target = ShownTarget(memory.piece_map, only)
        self._receiver = StateReceiver(
            memory, fetched, None, self._sender, now_ns, stall_ns, self._note_end
        )
        self.download = self._receiver.download
        self._receiver.begin(self._target)

    @property
    def content(self) -> bytes:
        """Digest of the completely fetched snapshot; empty if there is none."""
        return self._target.content if self.download.complete else b""

    @property
    def completes(self) -> bool:
        """Whether the fetched pieces, written over the tensors, give the snapshot.

        They do, unless the tensors have changed since the download compared its map with them.
        """
        mine, theirs = self.memory.piece_map, self.download.map
        numbers = set(mine.layout.numbers(may_differ=False)).difference(self.download.wanted)
        return theirs is not None and all(theirs[number] == mine[number] for number in numbers)

    def watch(self, on_result: Callable[[PeerId, bytearray], None]) -> None:
        """Ask the members to announce results; call ``on_result`` with each announcement."""
        self.on_result = on_result
        self._receiver.watches = True
        for peer, up in self._sender.links().items():
            if up:
                self._sender.send(peer, FrameKind.WATCH)

    def has_changed(self, content: bytes) -> None:
        """Record that the tensors now hold ``content``, so that the prefetch does not fetch it."""
        self._target.here = content

    # -- what the engine does --------------------------------------------------------------------

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """Adapt the download to a link that came up or broke."""
        if not up:
            self._sender.drop(peer)
        self._receiver.link_changed(peer, up=up)

    def lane_lost(self, peer: PeerId) -> None:
        """Repeat requests to ``peer``, because a lost lane may have lost them or their answers."""
        self._receiver.lane_lost(peer)

    def uses(self, peer: PeerId) -> bool:
        """Whether this prefetch expects a map or a piece from ``peer``."""
        return self.download.uses(peer)

    def tick(self) -> None:
        """Let the download check its timeouts."""
        self._receiver.tick()

    def close(self) -> None:
        """Stop the download. Its pieces stay in ``fetched``."""
        self._receiver.close()
        self._sender.end()

    # -- frames ----------------------------------------------------------------------------------

    def frame_started(self, peer: PeerId, header: FrameHeader) -> Sink:
        """Return the sink that receives the payload of a frame.

        Raises:
            RemoteProtocolError: the frame has a wrong length, or names a piece that does not exist.
        """
        awaited = header.kind is not FrameKind.MAP or self.download.awaits_map(peer)
        return self._receiver.frame_started(peer, header, self._take, awaited=awaited)

    def _take(self, peer: PeerId, header: FrameHeader, payload: bytearray) -> None:
        match header.kind:
            case FrameKind.RESULT:
                if self.on_result is not None:
                    self.on_result(peer, payload)
            case FrameKind.MAP | FrameKind.PIECE_LACK:
                self._receiver.take(peer, header, payload)
            case _:
                raise RemoteProtocolError(func="lane", reason=f"unexpected {header.kind.name}")

    def _note_end(self, how: PiecesComplete | DownloadDone | DownloadFailed) -> None:
        if isinstance(how, PiecesComplete):
            self.on_complete()
        elif not self._is_ready:
            self._is_ready = True
            if self._receiver.no_room is not None:  # the synchronization raises it
                text = "this peer fetches no shared state before its admission: %s"
                _log.warning(text, self._receiver.no_room)
            self._on_ready()
