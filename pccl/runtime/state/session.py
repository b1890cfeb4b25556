"""``StateSession``: one shared state that is lent to an operation: served, compared, fetched.

Whoever asks for pieces gets them straight from the memory that is lent, or from what was fetched
and verified here. What is elected is fetched into memory of its own, from all who have it at once
(``machine`` decides what from whom), and each piece is verified as it comes. Nothing of
the caller's is overwritten before the outcome is known, unless he wanted it so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.messages import Progress
from pccl.protocol.shared_state import Difference, Elected
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.state.giver import QUEUED_PIECES_MAX, StateGiver
from pccl.runtime.state.intake import PieceIntake, Whole, check_length
from pccl.runtime.state.maps import MapMeter, MapRequest, StateComparison
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.memory.stock import Stock
from pccl.runtime.state.post import StatePost, numbers_of, pack_numbers
from pccl.state.digests import PieceMap
from pccl.state.fetch.machine import Ask, Fetch
from pccl.state.fetch.source import STRIKES_MAX
from pccl.transports.lane import Sink
from pccl.transports.link import Links
from pccl.transports.sinks import Drain

_HAVE_PIECES_MAX = 64
"""Others hear of so many new pieces at once, or at the next tick."""


class StateSession:
    """One operation's part in shared state on this peer.

    Args:
        operation: its id.
        memory: what is lent; hashed.
        stock: where fetched pieces go, with those that attempts before this one have left.
        ring: all members of the operation, in ring order.
        own: this peer.
        links: of this peer.
        now_ns: the present.
        stall_ns: a source that sends nothing for so long is passed over.
        on_done: called with the digest once everything that is elected is here.
        on_starved: called with a reason when nobody gives what is missing.
        on_compared: called with the answer of ``compare``.
    """

    def __init__(
        self,
        operation: OperationId,
        memory: StateMemory,
        stock: Stock,
        ring: tuple[PeerId, ...],
        own: PeerId,
        links: Links,
        now_ns: Callable[[], int],
        stall_ns: int,
        on_done: Callable[[OperationId, bytes], None],
        on_starved: Callable[[OperationId, str], None],
        on_compared: Callable[[OperationId, Difference], None],
    ) -> None:
        self.operation = operation
        self.memory = memory
        self.stock = stock
        self.ring = ring
        self.fetch: Fetch | None = None
        self.elected: Elected | None = None
        self.wanted: list[int] = []
        """Pieces that are to be other ones than they were, in order."""
        self.wanted_bytes = 0
        self.rx_bytes = 0
        self.wrong_pieces = 0
        self.is_starved = False
        """Whether it was given up, because nobody gives what is missing."""
        self.is_deserted = False
        """Whether somebody has withdrawn who could be asked: he may give it the next time."""
        self.no_room: OSError | MemoryError | None = None
        """Why it was given up: there is nowhere to put what is missing."""
        self._own = own
        self._post = StatePost(operation, links)
        self._giver = StateGiver(
            memory.layout, memory.piece_map, self._read, self._holds, self._post
        )
        self._intake = PieceIntake(
            memory.layout,
            self._expects,
            self._wants,
            stock.slot,
            self._progressed,
            self._arrived,
        )
        self._now_ns = now_ns
        self._stall_ns = stall_ns
        self._on_done = on_done
        self._on_starved = on_starved
        self._on_compared = on_compared
        self._is_done = False
        self._is_stock_elected = False
        """Whether the stock has nothing but pieces of what is elected."""
        self._starving_since_ns: int | None = None
        self._haves: dict[PeerId, list[int]] = {}
        """What other fetchers have."""
        self._news: list[int] = []
        """Pieces that came since the others heard of any."""
        self._maps: dict[PeerId, MapRequest] = {}
        """Maps that were asked for and are not complete."""
        self._map_meter = MapMeter(memory.layout)
        self._wrong_maps: Counter[PeerId] = Counter()
        """Who has refused one, or given another one than that of what is elected, how often."""
        self._passed: dict[PeerId, None] = {}
        """Who is not asked for a map again before the next tick."""
        self._map: PieceMap | None = None
        """Of what is elected."""
        self._lacks = {False: False, True: False}
        """Whether the shared contents (False) are needed, and the extra ones (True)."""
        self._lacks_map = dict(self._lacks)
        """Likewise whether it is not yet known what they are made of."""
        self._comparison: StateComparison | None = None

    # -- what the engine does --------------------------------------------------------------------

    def begin(self, elected: Elected) -> None:
        """This is elected, or has become so meanwhile."""
        self.elected = elected
        own = self._own
        self._lacks = {
            False: own in elected.behind,
            True: own in elected.outdated
            and bool(elected.extra_sources)
            and self.memory.piece_map.digest(may_differ=True) != elected.extra,
        }
        self._lacks_map = dict(self._lacks)
        if self._is_done:
            return
        self.fetch = None
        self._is_stock_elected = False
        self.wanted = []
        self._intake.clear()
        self._map = None
        self._maps.clear()
        self._map_meter.begin()
        self._wrong_maps.clear()
        self._passed.clear()
        if not any(self._lacks.values()):
            self._finish()
            return
        self._map = PieceMap(self.memory.layout)
        self._ask_maps()

    def compare(self, reference: PeerId) -> None:
        """Find out how the own state differs from that of ``reference``."""
        now_ns = self._now_ns()
        self._comparison = StateComparison(
            self.memory, self._post, reference, now_ns, self._answer_comparison
        )

    def _answer_comparison(self, found: Difference) -> None:
        self._comparison = None
        self._on_compared(self.operation, found)

    def detach(self) -> None:
        """The caller leaves: his memory is not read any more, and whoever waits for it is told."""
        asked = self._giver.close()
        self._post.end()
        for peer in asked:
            self._post.send(peer, FrameKind.PIECE_LACK)

    def end(self) -> None:
        """The operation is over: the memory is neither read nor written after this."""
        self.fetch = None
        self._intake.clear()
        self._giver.close()
        self._post.end()

    @property
    def tx_bytes(self) -> int:
        """Bytes of pieces given to others."""
        return self._giver.tx_bytes

    @property
    def progress(self) -> Progress:
        """How far it is, in pieces; the bytes are also those of maps."""
        received = len(self.wanted) - self.missing_pieces
        moved_bytes = self._map_meter.bytes + self.rx_bytes + self._intake.arriving_bytes
        return Progress(self.operation, received, 0, moved_bytes)

    @property
    def missing_pieces(self) -> int:
        """How many pieces are still to come, as far as is known."""
        return self.fetch.missing if self.fetch is not None else 0

    def uses(self, peer: PeerId) -> bool:
        """Whether something is expected of ``peer``, or goes to it."""
        fetching = self.fetch is not None and bool(self.fetch.outstanding(peer))
        return fetching or peer in self._maps or self._giver.owes(peer)

    def lost_lane(self, peer: PeerId) -> None:
        """A lane to a peer is gone, and perhaps questions, answers and news with it."""
        if peer in self._maps:
            self._maps[peer].ask(self._now_ns())
        if self._comparison is not None and self._comparison.reference == peer:
            self._comparison.ask()
        if self.fetch is not None:
            self._carry_out(self.fetch.ask_again(peer, self._now_ns()))
            self._announce([peer], list(self.stock.verified))

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """The link to a peer has come up, or is down."""
        if not up:
            self._post.drop(peer)
            self._giver.forget(peer)
            self._maps.pop(peer, None)
            if self._comparison is not None and self._comparison.reference == peer:
                self._comparison.fail("the link to it broke")
        if self.elected is None or self._is_done:
            return
        if self.fetch is None:
            self._ask_maps()
        elif up:
            self._carry_out(self._add_source(self.fetch, peer))
            self._announce([peer], list(self.stock.verified))
        else:
            self._carry_out(self.fetch.lose_source(peer, self._now_ns()))

    def tick(self) -> None:
        """Time has passed."""
        if self.fetch is not None and not self._is_done:
            self._carry_out(self.fetch.tick(self._now_ns()))
        elif self.elected is not None and not self._is_done:
            self._tick_maps()
        self._announce_news()

    # -- frames ----------------------------------------------------------------------------------

    def frame_started(self, peer: PeerId, header: FrameHeader) -> Sink:
        """Where the frame goes.

        Raises:
            RemoteProtocolError: the sender may not send this.
        """
        if header.kind is FrameKind.PIECE:
            return self._intake.place(peer, header)
        check_length(header)
        if not self._awaits(peer, header.kind):
            return Drain(header.length)
        payload = bytearray(header.length)
        if header.kind is not FrameKind.MAP:
            return Whole(self.take, peer, header, payload)
        self._map_progressed(peer, header, 0)
        return Whole(self.take, peer, header, payload, self._map_progressed)

    def _awaits(self, peer: PeerId, kind: FrameKind) -> bool:
        """Whether a frame that is an answer has been asked for."""
        compares = self._comparison is not None and self._comparison.reference == peer
        match kind:
            case FrameKind.MAP:
                return compares or peer in self._maps
            case FrameKind.LAYOUT:
                return compares
            case _:
                return True

    def take(self, peer: PeerId, header: FrameHeader, payload: bytearray) -> None:
        """A frame is here that is no piece.

        Raises:
            RemoteProtocolError: it makes no sense.
        """
        match header.kind:
            case FrameKind.MAP_ASK:
                self._giver.give_map(peer)
            case FrameKind.PIECE_ASK:
                self._giver.give_pieces(peer, numbers_of(payload))
            case FrameKind.LAYOUT_ASK:
                self._giver.give_layout(peer)
            case FrameKind.MAP:
                self._take_map(peer, header, payload)
            case FrameKind.LAYOUT:
                if self._comparison is not None and self._comparison.reference == peer:
                    self._comparison.take_layout(payload)
            case FrameKind.PIECE_LACK:
                self._take_refusal(peer, numbers_of(payload))
            case FrameKind.PIECE_HAVE:
                self._take_news(peer, numbers_of(payload))
            case _:
                raise RemoteProtocolError(func="lane", reason=f"unexpected {header.kind.name}")

    def _holds(self, number: int) -> bool:
        """Whether a piece of the memory is the one that is elected, as far as is known."""
        if self._stocks(number):
            return True
        piece = self.memory.layout.piece(number)
        if not self._lacks[self.memory.layout.entries[piece.entry].may_differ]:
            return True
        if self.fetch is None or self._map is None:
            return False
        return self._map[number] == self.memory.piece_map[number]

    def _read(self, number: int) -> memoryview:
        if self._stocks(number):
            return self.stock.slot(number)
        return self.memory.view(self.memory.layout.piece(number))

    def _stocks(self, number: int) -> bool:
        """Whether the stock has the piece that is elected, as far as is known."""
        return self._is_stock_elected and number in self.stock.verified

    # -- maps ------------------------------------------------------------------------------------

    def _ask_maps(self) -> None:
        """Ask for each map that is still needed: a source, or who may have been done by now."""
        if self.elected is None or self.fetch is not None or self._is_done or self.no_room:
            return
        holders = {False: self.elected.sources, True: self.elected.extra_sources}
        awaited = [peer for peer, request in self._maps.items() if not request.is_overdue]
        for may_differ, lacks in self._lacks_map.items():
            candidates = dict.fromkeys((*holders[may_differ], *self._fetchers))
            if not lacks or not candidates.keys().isdisjoint(awaited):
                continue
            up = [peer for peer in candidates if self._may_ask_map(peer)]
            up = [peer for peer in up if peer in holders[may_differ]] or up
            if up:
                peer = up[self.ring.index(self._own) % len(up)]  # not all from the same
                layout, now_ns = self.memory.layout, self._now_ns()
                self._maps[peer] = MapRequest(layout, self._post, peer, now_ns)
                awaited.append(peer)
        self._note_starving()

    def _may_ask_map(self, peer: PeerId) -> bool:
        is_passed = peer in self._passed or self._wrong_maps[peer] >= STRIKES_MAX
        is_asked = peer in self._maps
        return peer != self._own and not (is_passed or is_asked) and self._post.is_up(peer)

    def _tick_maps(self) -> None:
        """Whoever was passed over is asked again, beside those that send nothing."""
        self._passed.clear()
        now_ns = self._now_ns()
        for request in self._maps.values():
            request.look(now_ns, self._stall_ns)
        self._ask_maps()

    def _map_progressed(self, peer: PeerId, header: FrameHeader, received: int) -> None:
        if peer in self._maps:
            self._maps[peer].progressed(self._now_ns())
            self._map_meter.progressed(peer, header, received)

    def _take_map(self, peer: PeerId, header: FrameHeader, payload: bytearray) -> None:
        if self._comparison is not None and self._comparison.reference == peer:
            self._comparison.take_map(header, payload)
        request = self._maps.get(peer)
        if request is None:
            return
        theirs = request.take(header, payload)
        if theirs is None:
            return
        del self._maps[peer]
        if not self._adopt(theirs):
            self._passed[peer] = None
            self._wrong_maps[peer] += self.elected is not None and peer in self.elected.sources
        self._ask_maps()
        if self.fetch is None and not any(self._lacks_map.values()):
            self._maps.clear()
            self._begin_fetch()

    def _adopt(self, theirs: PieceMap) -> bool:
        """Take from a map what belongs to what is elected; whether there is anything."""
        assert self.elected is not None
        assert self._map is not None
        adopts = False
        wanted = {False: self.elected.content, True: self.elected.extra}
        for may_differ, digest in wanted.items():
            if self._lacks_map[may_differ] and theirs.digest(may_differ=may_differ) == digest:
                self._lacks_map[may_differ] = False
                adopts = True
                for number in self.memory.layout.numbers(may_differ=may_differ):
                    self._map[number] = theirs[number]
        return adopts

    # -- fetching --------------------------------------------------------------------------------

    def _begin_fetch(self) -> None:
        assert self.elected is not None
        assert self._map is not None
        layout, own = self.memory.layout, self.memory.piece_map
        wanted: list[int] = []
        self.wanted = wanted
        for may_differ, lacks in self._lacks.items():
            numbers = layout.numbers(may_differ=may_differ)
            if lacks:
                wanted += [number for number in numbers if self._map[number] != own[number]]
            else:
                for number in numbers:
                    self._map[number] = own[number]
        wanted.sort()
        self.wanted_bytes = layout.bytes_of(wanted)
        try:
            self.stock.prepare(wanted, self._map)
        except (OSError, MemoryError) as error:
            self._map = None
            if self.no_room is None:
                self.no_room = error
                self._on_starved(self.operation, f"no room for what it lacks: {error}")
            return
        self._is_stock_elected = True
        fetchers = sorted({*self.elected.behind, *self.elected.outdated})
        missing = [number for number in wanted if number not in self.stock.verified]
        now_ns = self._now_ns()
        self.fetch = Fetch(
            {number: layout.piece(number).length for number in missing},
            fetchers.index(self._own),
            len(fetchers),
            now_ns,
            stall_ns=self._stall_ns,
        )
        if self.fetch.complete:
            self._finish()
            return
        asks: list[Ask] = []
        rank = self.ring.index(self._own)
        for peer in self.ring[rank + 1 :] + self.ring[:rank]:  # not all of the same one first
            if self._post.is_up(peer):
                asks += self._add_source(self.fetch, peer)
        self._carry_out(asks)
        self._announce(fetchers, list(self.stock.verified))

    def _add_source(self, fetch: Fetch, peer: PeerId) -> list[Ask]:
        """A member can be asked for what it has of all that is missing."""
        assert self.elected is not None
        layout = self.memory.layout
        gives = {
            False: peer in self.elected.sources,
            True: peer in self.elected.extra_sources,
        }
        lacked = [kind for kind, lacks in self._lacks.items() if lacks]
        if all(gives[kind] for kind in lacked):
            return fetch.add_source(peer, self._now_ns())
        pieces = [n for n in self._haves.get(peer, ()) if fetch.wants(n)]
        for kind in lacked:
            if gives[kind]:
                pieces += [n for n in layout.numbers(may_differ=kind) if fetch.wants(n)]
        return fetch.add_source(peer, self._now_ns(), pieces) if pieces else []

    def _expects(self, source: PeerId, number: int) -> bool:
        return self.fetch is not None and self.fetch.expects(source, number)

    def _wants(self, number: int) -> bool:
        return self.fetch is not None and self.fetch.wants(number)

    def _progressed(self, source: PeerId, nbytes: int) -> None:
        if self.fetch is not None:
            self.fetch.progressed(source, nbytes, self._now_ns())

    def _arrived(self, source: PeerId, number: int, digest: bytes) -> None:
        fetch = self.fetch
        assert fetch is not None
        assert self._map is not None
        sound = digest == self._map[number]
        asks = fetch.arrived(source, number, self._now_ns(), sound=sound)
        if not sound:
            self.wrong_pieces += 1
        elif not fetch.wants(number):
            self.rx_bytes += self.memory.layout.piece(number).length
            self.stock.put(number, digest)
            self._news.append(number)
        self._carry_out(asks)
        if len(self._news) >= _HAVE_PIECES_MAX:
            self._announce_news()
        if fetch.complete:
            self._finish()

    def _carry_out(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            self._post.send(ask.source, FrameKind.PIECE_ASK, pack_numbers(ask.pieces))
        self._note_starving()

    def _note_starving(self) -> None:
        """If nobody gives what is missing: give up, or wait a while for somebody who may."""
        now_ns = self._now_ns()
        if not self._starves:
            if self.fetch is not None or self._is_done:
                self._starving_since_ns = None
            return  # a map that was asked for is none yet: who asks each other in turn gets none
        if self._starving_since_ns is None:
            self._starving_since_ns = now_ns
        if self._has_hope and now_ns - self._starving_since_ns < self._stall_ns:
            return
        lack = f"{self.fetch.missing} pieces" if self.fetch is not None else "a right map"
        reason = (
            f"nobody gives {lack} of the shared state that it lacks; "
            f"{self.wrong_pieces} pieces came with wrong bytes"
        )
        if not self.is_starved:
            self.is_starved = True
            self._on_starved(self.operation, reason)

    @property
    def _starves(self) -> bool:
        if self.elected is None or self._is_done:
            return False
        if self.fetch is None:
            return not self._maps and any(self._lacks_map.values())
        return not self.fetch.complete and self.fetch.starved

    @property
    def _has_hope(self) -> bool:
        """Whether another fetcher may get it, a link may come back, a source may find the truth."""
        assert self.elected is not None
        if any(self._post.is_up(peer) for peer in self._fetchers):
            return True
        sources = [
            p for p in (*self.elected.sources, *self.elected.extra_sources) if p != self._own
        ]
        return any(not self._post.is_up(peer) or peer in self._passed for peer in sources)

    @property
    def _fetchers(self) -> list[PeerId]:
        """Other members that fetch, or have done so."""
        assert self.elected is not None
        fetchers = {*self.elected.behind, *self.elected.outdated}
        return [peer for peer in self.ring if peer in fetchers and peer != self._own]

    def _finish(self) -> None:
        assert self.elected is not None
        self._announce_news()
        self._is_done = True
        if self._map is not None:
            self._giver.piece_map = self._map
        self._on_done(self.operation, self.elected.content)

    def _take_refusal(self, peer: PeerId, numbers: list[int]) -> None:
        if not numbers:
            self.is_deserted = True
            self._maps.pop(peer, None)
            if self._comparison is not None and self._comparison.reference == peer:
                self._comparison.fail("it does not answer any more")
        if self.fetch is None:
            self._passed[peer] = None
            self._wrong_maps[peer] += 1
            self._ask_maps()
        elif numbers:
            self._carry_out(self.fetch.refuse(peer, numbers, self._now_ns()))
        else:
            self._carry_out(self.fetch.lose_source(peer, self._now_ns()))

    # -- other fetchers --------------------------------------------------------------------------

    def _announce_news(self) -> None:
        news, self._news = self._news, []
        if news and self.elected is not None:
            self._announce(sorted({*self.elected.behind, *self.elected.outdated}), news)

    def _announce(self, peers: Iterable[PeerId], numbers: list[int]) -> None:
        if not numbers:
            return
        for peer in peers:
            if peer != self._own and peer in self.ring and self._post.is_up(peer):
                for first in range(0, len(numbers), QUEUED_PIECES_MAX):
                    part = numbers[first : first + QUEUED_PIECES_MAX]
                    self._post.send(peer, FrameKind.PIECE_HAVE, pack_numbers(part))

    def _take_news(self, peer: PeerId, numbers: list[int]) -> None:
        count = self.memory.layout.piece_count
        if any(number >= count for number in numbers):
            raise RemoteProtocolError(func="lane", reason="has pieces that nobody has")
        if self._is_done:
            return
        known = self._haves.setdefault(peer, [])
        known += numbers
        if len(known) > 2 * count:
            self._haves[peer] = list(dict.fromkeys(known))
        if self.fetch is not None:
            wanted = [number for number in numbers if self.fetch.wants(number)]
            if wanted:
                self._carry_out(self.fetch.add_source(peer, self._now_ns(), wanted))
