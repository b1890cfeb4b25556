"""``Prefetch``: a newcomer fetches what its group holds while the members go on working.

What it gets is advisory. The map comes from whichever member is the first to answer; a piece that
has changed since fails its digest and is left to the synchronization that follows the admission,
which verifies everything against what is elected, and moves only what is missing then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import NS_PER_S, OperationId, PeerId
from pccl.runtime.state.intake import PieceIntake, Whole, check_length
from pccl.runtime.state.maps import MapRequest
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.memory.stock import Stock
from pccl.runtime.state.post import StatePost, numbers_of, pack_numbers
from pccl.state.digests import PieceMap
from pccl.state.fetch.machine import Ask, Fetch
from pccl.transports.lane import Sink
from pccl.transports.link import Links
from pccl.transports.sinks import Drain

_log = logging.getLogger("pccl.peer")

HOPE_STALLS = 2
"""After so many times the stall in which nothing came, nothing is waited for any more: others were
asked after the first, or a link came back."""

REFRESH_NS = 2 * NS_PER_S
"""Once all is here, the members are asked so often whether they hold something else by now."""


class Prefetch:
    """What one newcomer fetches before it is admitted.

    Args:
        memory: its state; hashed.
        stock: where pieces go.
        operation: by which the members show what they hold.
        links: of this peer.
        now_ns: the present.
        stall_ns: a member that sends nothing for so long is passed over.
        on_ready: called once all is here that can be had.
    """

    def __init__(
        self,
        memory: StateMemory,
        stock: Stock,
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
        self.stock = stock
        self.fetch: Fetch | None = None
        self.wanted: list[int] = []
        """Pieces that the members hold otherwise than this peer did at first, in order."""
        self.wanted_bytes = 0
        self.is_held = False
        """Whether the stock is read, or the tensors are written: nothing else is begun then."""
        self.operation = operation
        self._links = links
        self._post = StatePost(operation, links)
        self._now_ns = now_ns
        self._stall_ns = stall_ns
        self._on_ready = on_ready
        self._is_ready = False
        self._has_room = True
        self._began_ns = now_ns()
        self._looked_ns = now_ns()
        self._moved_ns = now_ns()
        """The last time that something came, or nothing was missing."""
        self._without: dict[PeerId, None] = {}
        """Those who have nothing to show."""
        self._maps: dict[PeerId, MapRequest] = {}
        """Maps that were asked for and are not complete."""
        self._map: PieceMap | None = None
        self._content = b""
        """Digest of what is fetched."""
        self._here = b""
        """Of what the tensors hold, if the program has changed them."""
        self._intake = PieceIntake(
            memory.layout,
            self._expects,
            self._wants,
            stock.slot,
            self._progressed,
            self._arrived,
        )
        for link in links.all():
            if link.up:
                self._ask_map(link.peer)

    @property
    def content(self) -> bytes:
        """Digest of what is here, whole, of what a member has shown; empty: nothing is."""
        return self._content if self.fetch is not None and self.fetch.complete else b""

    def watch(self, on_result: Callable[[PeerId, bytearray], None]) -> None:
        """Hear of results from now on."""
        self.on_result = on_result
        for link in self._links.all():
            if link.up:
                self._post.send(link.peer, FrameKind.WATCH)

    def has_changed(self, content: bytes) -> None:
        """The tensors hold something else by now: nothing of it need be fetched."""
        self._here = content

    # -- what the engine does --------------------------------------------------------------------

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """The link to a peer has come up, or is down."""
        self._without.pop(peer, None)
        if up:
            self._ask_map(peer)
            return
        self._post.drop(peer)
        self._maps.pop(peer, None)
        if self.fetch is not None:
            self._carry_out(self.fetch.lose_source(peer, self._now_ns()))

    def lost_lane(self, peer: PeerId) -> None:
        """A lane to a peer is gone, and perhaps questions and answers with it."""
        if peer in self._maps:
            self._maps[peer].ask(self._now_ns())
        if self.fetch is not None:
            self._carry_out(self.fetch.ask_again(peer, self._now_ns()))

    def uses(self, peer: PeerId) -> bool:
        """Whether something is expected of ``peer``."""
        fetching = self.fetch is not None and bool(self.fetch.outstanding(peer))
        return fetching or peer in self._maps

    def tick(self) -> None:
        """Time has passed."""
        now_ns = self._now_ns()
        if self.fetch is not None:
            self._carry_out(self.fetch.tick(now_ns))
        for request in self._maps.values():
            request.look(now_ns, self._stall_ns)
        is_late = now_ns - self._began_ns >= self._stall_ns
        if self._map is None and not self._awaits_maps and is_late:
            self._be_ready()  # nobody has anything, or nobody can be reached
        if self.fetch is None or self.fetch.complete:
            self._moved_ns = now_ns
        if self.fetch is not None and self.fetch.complete and not self._is_ready:
            self._look_if_ready()  # who was to answer may be gone, or silent
        if now_ns - self._moved_ns >= HOPE_STALLS * self._stall_ns:
            self._be_ready()  # nobody has what is missing, or who has it sends nothing
        if self._is_ready and now_ns - self._looked_ns >= REFRESH_NS:
            self._looked_ns = now_ns
            for link in self._links.all():
                if link.up:
                    self._ask_map(link.peer)

    def close(self) -> None:
        """Fetch nothing more; what is here stays in the stock."""
        self.fetch = None
        self._maps.clear()
        self._intake.clear()
        self._post.end()

    # -- frames ----------------------------------------------------------------------------------

    def frame_started(self, peer: PeerId, header: FrameHeader) -> Sink:
        """Where an answer goes.

        Raises:
            RemoteProtocolError: it is none.
        """
        if header.kind is FrameKind.PIECE:
            return self._intake.place(peer, header)
        check_length(header)
        if header.kind is FrameKind.MAP and peer not in self._maps:
            return Drain(header.length)  # not asked for, or not any more
        payload = bytearray(header.length)
        if header.kind is not FrameKind.MAP:
            return Whole(self._take, peer, header, payload)
        self._map_progressed(peer, header, 0)
        return Whole(self._take, peer, header, payload, self._map_progressed)

    def _take(self, peer: PeerId, header: FrameHeader, payload: bytearray) -> None:
        match header.kind:
            case FrameKind.MAP:
                self._take_map(peer, header, payload)
            case FrameKind.PIECE_LACK:
                self._take_refusal(peer, numbers_of(payload))
            case FrameKind.RESULT:
                if self.on_result is not None:
                    self.on_result(peer, payload)
            case _:
                raise RemoteProtocolError(func="lane", reason=f"unexpected {header.kind.name}")

    # -- maps ------------------------------------------------------------------------------------

    def _ask_map(self, peer: PeerId) -> None:
        if self.on_result is not None:
            self._post.send(peer, FrameKind.WATCH)  # again: it may have been lost
        if peer not in self._maps:
            layout, now_ns = self.memory.layout, self._now_ns()
            self._maps[peer] = MapRequest(layout, self._post, peer, now_ns)

    def _map_progressed(self, peer: PeerId, header: FrameHeader, received: int) -> None:
        if peer in self._maps:
            self._maps[peer].progressed(self._now_ns())

    def _take_map(self, peer: PeerId, header: FrameHeader, payload: bytearray) -> None:
        request = self._maps.get(peer)
        theirs = request.take(header, payload) if request is not None else None
        if theirs is None:
            return
        del self._maps[peer]
        content = theirs.digest(may_differ=False)
        if self._map is None or (self._is_idle and content not in (self._content, self._here)):
            self._begin(theirs, content)
        if self.fetch is not None and content == self._content:
            self._carry_out(self.fetch.add_source(peer, self._now_ns()))
        self._look_if_ready()

    @property
    def _awaits_maps(self) -> bool:
        """Whether one is on its way, as far as can be seen."""
        return any(not request.is_overdue for request in self._maps.values())

    @property
    def _is_idle(self) -> bool:
        is_over = self.fetch is None or self.fetch.complete or self.fetch.starved
        return is_over and not self.is_held

    def _begin(self, theirs: PieceMap, content: bytes) -> None:
        """Fetch what this map says, and is not here; tensors that may differ don't count."""
        layout, own = self.memory.layout, self.memory.piece_map
        self._map, self._content = theirs, content
        numbers = layout.numbers(may_differ=False)
        self.wanted = [number for number in numbers if theirs[number] != own[number]]
        self.wanted_bytes = layout.bytes_of(self.wanted)
        self._intake.clear()
        try:
            self.stock.prepare(self.wanted, theirs)
        except (OSError, MemoryError) as error:  # the synchronization after the admission raises it
            _log.warning("nothing is fetched before the admission: %s", error)
            self.fetch, self._has_room = None, False
            self.wanted, self.wanted_bytes = [], 0
            return
        self._has_room = True
        missing = [number for number in self.wanted if number not in self.stock.verified]
        self.fetch = Fetch(
            {number: layout.piece(number).length for number in missing},
            0,
            1,
            self._now_ns(),
            stall_ns=self._stall_ns,
        )

    # -- fetching --------------------------------------------------------------------------------

    def _expects(self, source: PeerId, number: int) -> bool:
        return self.fetch is not None and self.fetch.expects(source, number)

    def _wants(self, number: int) -> bool:
        return self.fetch is not None and self.fetch.wants(number)

    def _progressed(self, source: PeerId, nbytes: int) -> None:
        self._moved_ns = self._now_ns()
        if self.fetch is not None:
            self.fetch.progressed(source, nbytes, self._now_ns())

    def _arrived(self, source: PeerId, number: int, digest: bytes) -> None:
        fetch, now_ns = self.fetch, self._now_ns()
        assert fetch is not None
        assert self._map is not None
        if digest == self._map[number]:
            self.stock.put(number, digest)
            self._carry_out(fetch.arrived(source, number, now_ns, sound=True))
        else:  # it is changing there: no blame
            self._carry_out(fetch.refuse(source, [number], now_ns))
        self._look_if_ready()

    def _take_refusal(self, peer: PeerId, numbers: list[int]) -> None:
        if not numbers:
            self._maps.pop(peer, None)
            self._without[peer] = None
        if self.fetch is not None:
            now_ns = self._now_ns()
            if numbers:
                self._carry_out(self.fetch.refuse(peer, numbers, now_ns))
            else:
                self._carry_out(self.fetch.lose_source(peer, now_ns))
        self._look_if_ready()

    def _carry_out(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            self._post.send(ask.source, FrameKind.PIECE_ASK, pack_numbers(ask.pieces))

    def _look_if_ready(self) -> None:
        fetch = self.fetch
        if fetch is None:
            nobody = all(link.peer in self._without for link in self._links.all())
            if nobody or not self._has_room:
                self._be_ready()
            return
        if fetch.complete:
            self.on_complete()
        if not self._awaits_maps and (fetch.complete or fetch.starved):
            self._be_ready()

    def _be_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._looked_ns = self._now_ns()
            self._on_ready()
