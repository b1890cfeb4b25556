"""Spreads the requests for missing pieces over several sources.

It is pure: callers report what sources have and what arrives, and get the next requests.

* Each source has a window of bytes that are requested from it and not received. The window follows
  its rate. A source with room in its window gets the next request, so fast sources send more.
* Members that fetch the same contents begin at different pieces, and send each other their pieces
  (*partial* sources). A full source is first asked for pieces that no partial source has.
  This is rarest first, as in B. Cohen, "Incentives Build Robustness in BitTorrent" (2003), but
  with only two degrees of rareness.
* At the end, a slow source gets no request if the other sources finish sooner. One faster source
  gets a second request for the slow source's pieces (the *end game* of the same paper).
* If a source *stalls*, its outstanding pieces may be requested from other sources. A source that
  sent a wrong piece is *distrusted*. Stalled and distrusted sources are asked only for pieces that
  no good source has. So no piece waits forever while a usable source has it.

Inside, a piece is a *slot*: its number in the order in which this member requests pieces.

Costs: a piece takes a few operations on integers of 1024 bits, for any number of pieces up to a
million. The loss, distrust or stall of a source takes time in proportion to its window. For a
partial source, each block of 1024 pieces adds to this time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pccl.protocol.types import PeerId
from pccl.state.fetch.slots import Board, SlotSet, block_of, first_of, ones, union
from pccl.state.fetch.source import ASK_PIECES_MAX, WINDOW_MAX_BYTES, Source


@dataclass(frozen=True, slots=True)
class Ask:
    """Request these pieces from this source, at most ``ASK_PIECES_MAX``."""

    source: PeerId
    pieces: tuple[int, ...]


class PieceFetch:
    """Spreads wanted pieces over sources. Each event returns the next requests.

    Events about an unknown source or piece change nothing.

    Args:
        sizes: number of each wanted piece -> its bytes, 1 to ``PIECE_BYTES``.
        rank: index of this member among the members that fetch these contents. This member
            begins at the fraction rank / fetchers of the wanted pieces, and wraps around.
        fetchers: number of these members, this one included.
        now_ns: the current time in nanoseconds; it never goes back.
        stall_ns: nanoseconds without a byte after which a source with outstanding pieces stalls.
        most: the longest window of a source in bytes. If it is shorter than ``WINDOW_MAX_BYTES``,
            this member asks a full source first for its own share of the pieces, 1 / fetchers, and
            then for little at a time: other fetchers send it the rest.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        rank: int,
        fetchers: int,
        now_ns: int,
        *,
        stall_ns: int,
        most: int = WINDOW_MAX_BYTES,
    ) -> None:
        self._most = most
        self._now_ns = now_ns
        self._stall_ns = stall_ns
        ordered = sorted(sizes)
        begin = len(ordered) * rank // fetchers
        self._share = len(ordered)
        """Slots below this one are requested from a full source without hesitation."""
        if most < WINDOW_MAX_BYTES:
            self._share = len(ordered) * (rank + 1) // fetchers - begin
        self._pieces = ordered[begin:] + ordered[:begin]
        """Number of the piece of each slot."""
        self._board = Board([sizes[piece] for piece in self._pieces])
        self._slots = {piece: slot for slot, piece in enumerate(self._pieces)}
        self._asked: dict[int, tuple[Source, ...]] = {}
        """Slot -> the one or two sources from which it is requested."""
        self._sources: dict[PeerId, Source] = {}
        self._rates = 0.0
        """Sum of the rates of all good sources at the last tick."""
        self._starved: bool | None = None
        """Cached value of ``starved``; None: it must be computed."""

    # -- what is left -------------------------------------------------------------------------

    def wants(self, piece: int) -> bool:
        """Whether ``piece`` is still missing."""
        slot = self._slots.get(piece)
        return slot is not None and slot in self._board.wanted

    @property
    def complete(self) -> bool:
        """Whether no piece is missing."""
        return not self._board.missing

    @property
    def missing(self) -> int:
        """Number of pieces that are missing."""
        return self._board.missing

    @property
    def starved(self) -> bool:
        """Whether a missing piece has no usable source."""
        if self._starved is None:
            held = [source.held for source in self._sources.values() if source.askable]
            self._starved = None not in held and any(
                self._board.wanted.blocks[block] & ~union(held, block)
                for block in ones(self._board.wanted.summary)
            )
        return self._starved

    def expects(self, source: PeerId, piece: int) -> bool:
        """Whether ``piece`` is missing, was requested from ``source``, and may still arrive."""
        known, slot = self._sources.get(source), self._slots.get(piece)
        if known is None or not known.live or slot is None or slot not in self._board.wanted:
            return False
        return slot in known.outstanding or slot in known.late

    def outstanding(self, source: PeerId) -> tuple[int, ...]:
        """Return the pieces that are expected from ``source``, in the order of the requests."""
        known = self._sources.get(source)
        return () if known is None else tuple(self._pieces[slot] for slot in known.outstanding)

    def others_asked(self, piece: int, source: PeerId) -> tuple[PeerId, ...]:
        """Return the sources that may still send ``piece``, apart from ``source``."""
        slot = self._slots.get(piece)
        others = (one for one in self._sources.values() if one.peer != source)
        return tuple(
            one.peer for one in others if one.live and (slot in one.outstanding or slot in one.late)
        )

    def sources(self) -> tuple[Source, ...]:
        """Return all sources ever added, in that order. Callers must not change them."""
        return tuple(self._sources.values())

    # -- what happens to sources --------------------------------------------------------------

    def add_source(
        self, source: PeerId, now_ns: int, pieces: Iterable[int] | None = None
    ) -> list[Ask]:
        """Add a source, or more pieces of a known source.

        Args:
            source: peer to ask.
            now_ns: the current time in nanoseconds.
            pieces: its first or additional pieces; None: all.
        """
        self._now_ns = now_ns
        known = self._sources.get(source)
        if known is None:
            known = self._sources[source] = Source(source, self._most)
        if not known.live:
            known.revive(now_ns, None if pieces is None else SlotSet(len(self._pieces)))
        if pieces is None:
            before, known.held = known.held, None
            if before is not None:
                known.partial = False
                self._weigh(ones(before.summary))
        elif known.held is not None:
            self._gained(known, known.held, pieces)
        self._starved = None
        return self._fill((known,))

    def _gained(self, source: Source, held: SlotSet, pieces: Iterable[int]) -> None:
        spreads = source.partial and source.good
        for piece in pieces:
            slot = self._slots.get(piece)
            if slot is None or slot not in self._board.wanted:
                continue
            held.add(slot)
            if spreads:
                self._board.spread(slot)

    def lose_source(self, source: PeerId, now_ns: int) -> list[Ask]:
        """Drop a source that is gone or has withdrawn; ``add_source`` brings it back."""
        self._now_ns = now_ns
        known = self._sources.get(source)
        if known is None or not known.live:
            return []
        known.live = False
        known.rate = None
        self._release(known)
        self._reconsider(known)
        return self._fill(self._ranked())

    def refuse(self, source: PeerId, pieces: Iterable[int], now_ns: int) -> list[Ask]:
        """Stop asking ``source`` for these pieces, until ``add_source`` names them again."""
        self._now_ns = now_ns
        known = self._sources.get(source)
        if known is None or not known.live:
            return []
        self._heard_from(known)
        if known.held is None:
            known.held = SlotSet(len(self._pieces), full=True)
        blocks: dict[int, None] = {}
        for piece in pieces:
            slot = self._slots.get(piece)
            if slot is None:
                continue
            known.held.discard(slot)
            blocks[block_of(slot)] = None
            if slot in known.outstanding:
                self._drop(known, slot)
            known.late.pop(slot, None)
        if known.partial:
            self._weigh(blocks)
        self._starved = None
        return self._fill(self._ranked())

    def ask_again(self, source: PeerId, now_ns: int) -> list[Ask]:
        """Request the outstanding pieces of ``source`` again, from any source: they may be lost."""
        self._now_ns = now_ns
        known = self._sources.get(source)
        if known is None or not known.live:
            return []
        self._heard_from(known)
        self._release(known)
        known.late.clear()
        return self._fill(self._ranked())

    def tick(self, now_ns: int) -> list[Ask]:
        """Handle stalls, and play the end game. Call this a few times a second."""
        self._now_ns = now_ns
        late: list[Source] = []
        for source in self._sources.values():
            if not source.outstanding:
                continue
            source.measure(now_ns)
            if now_ns - source.silent_since_ns >= self._stall_ns and not source.overdue:
                late.append(source)
        for source in late:
            source.overdue = source.stalled = source.probing = True
            self._reconsider(source)
        for source in late:
            for slot in source.outstanding:
                self._settle(slot)
        self._rates = sum(
            source.rate for source in self._sources.values() if source.good and source.rate
        )
        return self._fill(self._ranked()) + self._ask_twice()

    # -- what comes ---------------------------------------------------------------------------

    def progressed(self, source: PeerId, nbytes: int, now_ns: int) -> None:
        """Record bytes of pieces from ``source``, also of incomplete pieces."""
        self._now_ns = now_ns
        known = self._sources.get(source)
        if known is not None and known.live:
            self._heard_from(known)
            known.sent(nbytes, now_ns)

    def arrived(self, source: PeerId, piece: int, now_ns: int, *, sound: bool) -> list[Ask]:
        """Record that a requested piece arrived.

        A piece that was not requested, or is no longer missing, changes nothing.

        Args:
            source: the sender.
            piece: number of the piece.
            now_ns: the current time in nanoseconds.
            sound: whether the piece has the right digest. If not, the source is distrusted.
        """
        self._now_ns = now_ns
        known = self._sources.get(source)
        slot = self._slots.get(piece)
        if known is None or not known.live or slot is None:
            return []
        nbytes = self._board.sizes[slot]
        known.completed(nbytes)
        if slot not in self._board.wanted or not (slot in known.outstanding or slot in known.late):
            return []
        self._heard_from(known)
        if not sound:
            return self._distrust(known, slot)
        known.got_bytes += nbytes
        known.late.pop(slot, None)
        self._board.done(slot)
        if self._starved:
            self._starved = None
        sources = self._asked.pop(slot, ())
        for other in sources:
            other.drop(slot, now_ns)
        if known not in sources:
            return self._fill((known, *sources))
        if not known.outstanding:
            known.probing = False
        return self._fill(sources)

    def _distrust(self, source: Source, wrong: int) -> list[Ask]:
        """Distrust ``source``, and move its outstanding pieces to good sources that have them."""
        source.strikes += 1
        others = [other for other in self._sources.values() if other.good and other is not source]
        for slot in list(source.outstanding):
            if slot == wrong or not source.askable or any(other.has(slot) for other in others):
                self._drop(source, slot)
        source.late.pop(wrong, None)
        self._reconsider(source)
        return self._fill(self._ranked())

    def _heard_from(self, source: Source) -> None:
        """Record that ``source`` is alive. After a stall, its outstanding slots are not free."""
        source.silent_since_ns = self._now_ns
        if source.stalled:
            source.stalled = source.overdue = False
            for slot in source.outstanding:
                self._board.occupy(slot)
            self._reconsider(source)

    # -- who is asked for what ----------------------------------------------------------------

    def _ranked(self) -> list[Source]:
        """Return the sources that may be asked, the better sources first."""
        sources = [source for source in self._sources.values() if source.askable]
        return sorted(sources, key=lambda source: (source.strikes, source.stalled))

    def _fill(self, sources: Iterable[Source]) -> list[Ask]:
        """Fill the windows of these sources, then of stalled sources that lost pieces to them."""
        asks: list[Ask] = []
        queue = list(sources)
        for source in queue:
            pieces: list[int] = []
            room = self._board.free.summary and source.has_room
            while room:
                slot = self._next(source)
                if slot is None or (slot >= self._share and not source.may_exceed):
                    break
                room = source.fits(self._board.sizes[slot])
                if room and not self._left_to_others(source, slot):
                    queue += self._assign(source, slot)
                    pieces.append(self._pieces[slot])
                else:
                    break
            if pieces:
                asks += _requests(source, pieces)
        return asks

    def _next(self, source: Source) -> int | None:
        """Return the slot to request next from ``source``; None: there is none."""
        if not source.good:
            return self._last_resort(source)
        held = source.held
        if held is None:
            slot = self._board.rare.first()
            return self._board.free.first() if slot is None else slot
        slot = None
        if not source.partial:
            slot = self._board.rare.first_shared(held, self._board.wanted)
        return self._board.free.first_shared(held, self._board.wanted) if slot is None else slot

    def _last_resort(self, source: Source) -> int | None:
        """Return the first free slot that ``source`` has and no good source has."""
        good = [other.held for other in self._sources.values() if other.good]
        if None not in good:
            for block in ones(self._board.free.summary):
                bits = self._board.free.blocks[block] & source.bits(block) & ~union(good, block)
                if bits:
                    return first_of(block, bits)
        return None

    def _left_to_others(self, source: Source, slot: int) -> bool:
        """Whether other sources would send all missing pieces before ``source`` sends this one.

        Another source must also send this piece sooner. So the fastest source for a piece never
        leaves it to another source.
        """
        if source.rate is None or not source.good:
            return False
        nbytes = self._board.sizes[slot]
        needed = source.seconds_for(source.outstanding_bytes + nbytes)
        if needed * self._rates <= self._board.free_bytes:
            return False
        others = [
            other
            for other in self._sources.values()
            if other is not source and other.good and other.rate and other.has(slot)
        ]
        if not any(
            other.seconds_for(other.outstanding_bytes + nbytes) < needed for other in others
        ):
            return False
        owed = sum(other.outstanding_bytes for other in others)
        return owed + self._board.free_bytes < needed * sum(other.rate or 0.0 for other in others)

    def _ask_twice(self) -> list[Ask]:
        """Play the end game: ask sources with little left to send for pieces of slower sources."""
        if not self._asked:
            return []
        helpers = [
            source
            for source in self._sources.values()
            if source.good and source.outstanding_bytes * 2 <= source.window_bytes
        ]
        asks: list[Ask] = []
        for helper in sorted(helpers, key=lambda source: -(source.rate or 0.0)):
            pieces: list[int] = []
            for slow in self._sources.values():
                if slow is not helper and slow.rate and slow.outstanding and not slow.overdue:
                    pieces += self._relieve(slow, helper)
            asks += _requests(helper, pieces)
        return asks

    def _relieve(self, slow: Source, helper: Source) -> list[int]:
        """Assign the last outstanding slots of a slow source to a helper too; return the pieces."""
        pieces: list[int] = []
        ahead_bytes = slow.outstanding_bytes
        for slot, nbytes in reversed(slow.outstanding.items()):
            needed = helper.seconds_for(helper.outstanding_bytes + nbytes)
            if needed * 2 >= slow.seconds_for(ahead_bytes) or not helper.fits(nbytes):
                break
            if helper.rate is None and helper.outstanding:
                break
            ahead_bytes -= nbytes
            if len(self._asked[slot]) == 1 and helper.has(slot):
                helper.take(slot, nbytes, self._now_ns)
                self._asked[slot] = (slow, helper)
                pieces.append(self._pieces[slot])
        return pieces

    # -- book-keeping -------------------------------------------------------------------------

    def _assign(self, source: Source, slot: int) -> tuple[Source, ...]:
        """Assign a slot to ``source``. Return the overdue sources that had it before."""
        passed = self._asked.get(slot, ())
        for overdue in passed:
            overdue.drop(slot, self._now_ns)
            overdue.late[slot] = None
        self._asked[slot] = (source,)
        self._board.occupy(slot)
        source.take(slot, self._board.sizes[slot], self._now_ns)
        return passed

    def _release(self, source: Source) -> None:
        """No longer expect a slot from ``source``; its pieces may still arrive."""
        for slot in list(source.outstanding):
            self._drop(source, slot)

    def _drop(self, source: Source, slot: int) -> None:
        """No longer expect ``slot`` from ``source``; its piece may still arrive."""
        source.drop(slot, self._now_ns)
        source.late[slot] = None
        others = tuple(other for other in self._asked.pop(slot) if other is not source)
        if others:
            self._asked[slot] = others
        self._settle(slot)

    def _settle(self, slot: int) -> None:
        """Make a missing slot free, unless a source that is not overdue has it outstanding."""
        if all(each.overdue for each in self._asked.get(slot, ())):
            self._board.release(slot)

    def _reconsider(self, source: Source) -> None:
        """Update rareness and starvation after ``source`` became better or worse."""
        if source.partial and source.held is not None:
            self._weigh(ones(source.held.summary))
        self._starved = None

    def _weigh(self, blocks: Iterable[int]) -> None:
        """Compute again which slots of these blocks are rare."""
        held = [each.held for each in self._sources.values() if each.partial and each.good]
        self._board.weigh(blocks, held)


def _requests(source: Source, pieces: list[int]) -> list[Ask]:
    return [
        Ask(source.peer, tuple(pieces[begin : begin + ASK_PIECES_MAX]))
        for begin in range(0, len(pieces), ASK_PIECES_MAX)
    ]
