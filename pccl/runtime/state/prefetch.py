"""``Prefetch``: a newcomer fetches what its group holds while the members go on working.

What it gets is advisory. The map comes from whichever member is the first to answer; a piece that
has changed since fails its digest and is left to the synchronization that follows the admission,
which verifies everything against what is elected, and moves only what is missing then.
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
    """What one newcomer fetches before it is admitted.

    Args:
        memory: its state; hashed.
        fetched: where pieces go.
        operation: by which the members show what they hold.
        links: of this peer.
        now_ns: the present.
        stall_ns: a member that sends nothing for so long is passed over.
        on_ready: called once all is here that can be had.
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
    ) -> None:
        self.on_result: Callable[[PeerId, bytearray], None] | None = None
        """Told of results that members announce; None: nobody wants to hear of any."""
        self.on_complete: Callable[[], None] = lambda: None
        """Called when all of what a member showed is here."""
        self.memory = memory
        self.fetched = fetched
        self.operation = operation
        self._on_ready = on_ready
        self._is_ready = False
        self._sender = StateSender(operation, links)
        self._target = ShownTarget(memory.piece_map)
        self._receiver = StateReceiver(
            memory, fetched, None, self._sender, now_ns, stall_ns, self._note_end
        )
        self.download = self._receiver.download
        self._receiver.begin(self._target)

    @property
    def content(self) -> bytes:
        """Digest of what is here, whole, of what a member has shown; empty: nothing is."""
        return self._target.content if self.download.complete else b""

    def watch(self, on_result: Callable[[PeerId, bytearray], None]) -> None:
        """Hear of results from now on."""
        self.on_result = on_result
        self._receiver.watches = True
        for peer, up in self._sender.links().items():
            if up:
                self._sender.send(peer, FrameKind.WATCH)

    def has_changed(self, content: bytes) -> None:
        """The tensors hold something else by now: nothing of it need be fetched."""
        self._target.here = content

    # -- what the engine does --------------------------------------------------------------------

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """The link to a peer has come up, or is down."""
        if not up:
            self._sender.drop(peer)
        self._receiver.link_changed(peer, up=up)

    def lane_lost(self, peer: PeerId) -> None:
        """A lane to a peer is gone, and perhaps questions and answers with it."""
        self._receiver.lane_lost(peer)

    def uses(self, peer: PeerId) -> bool:
        """Whether something is expected of ``peer``."""
        return self.download.uses(peer)

    def tick(self) -> None:
        """Time has passed."""
        self._receiver.tick()

    def close(self) -> None:
        """Fetch nothing more; what is here stays in ``fetched``."""
        self._receiver.close()
        self._sender.end()

    # -- frames ----------------------------------------------------------------------------------

    def frame_started(self, peer: PeerId, header: FrameHeader) -> Sink:
        """Where an answer goes.

        Raises:
            RemoteProtocolError: it is none.
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
                text = "nothing is fetched before the admission: %s"
                _log.warning(text, self._receiver.no_room)
            self._on_ready()
