"""Which piece is asked of which source, by who fetches pieces from several at once.

Pure: the shell tells what sources have, what comes and what is wrong, and gets what to ask next.

* Each source has a window of bytes that it has been asked for and has not sent; the window follows
  its rate. Whoever has room is asked for the next piece, so fast sources take more by themselves.
* Several that fetch the same begin at different pieces and serve each other with what they have
  (*partial* sources). Of those that have everything, a piece is asked first that no partial source
  has: the rarest first, as in B. Cohen, "Incentives Build Robustness in BitTorrent" (2003), but
  with only two degrees of rareness.
* In the end, a slow source is left out if the others are done sooner, and what it has been asked
  for is asked once more of a faster one (the *end game* of the same paper), of one at most.
* A source that makes no progress for a while is *passed over*: its pieces are free for others, and
  stay with it until somebody takes them. A source that was wrong is distrusted. Both are asked only
  for what no better source has; so nothing waits for ever as long as somebody has it.

Inside, pieces are *slots*: their numbers in the order in which this member asks for them.

Costs: a piece takes a few operations on integers of 1024 bits, whatever the number of pieces (up to
a million; slowly more beyond). What concerns a whole source (its loss, distrust, a stall) takes
time for its window, and for the blocks of 1024 pieces if it is a partial one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pccl.protocol.types import PeerId
from pccl.state.fetch.slots import Board, SlotSet, block_of, first_of, ones, union
from pccl.state.fetch.source import ASK_PIECES_MAX, Source


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this source for these pieces, at most ``ASK_PIECES_MAX``."""

    source: PeerId
    pieces: tuple[int, ...]


class PieceFetch:
    """Spreads wanted pieces over sources; every call tells what is to be asked next.

    What is said of a source or a piece that is not known changes nothing.

    Args:
        sizes: number of each wanted piece and its bytes, 1 to ``PIECE_BYTES``.
        rank: of this member among those that fetch the same at the same time; it begins at the
            (rank / fetchers)-th part of the wanted pieces and wraps around.
        fetchers: how many those are, this one included.
        now_ns: the present; it never goes back.
        stall_ns: a source that owes something and sends nothing for so long is passed over.
    """

    def __init__(
        self, sizes: Mapping[int, int], rank: int, fetchers: int, now_ns: int, *, stall_ns: int
    ) -> None:
        self._now_ns = now_ns
        self._stall_ns = stall_ns
        ordered = sorted(sizes)
        begin = len(ordered) * rank // fetchers
        self._pieces = ordered[begin:] + ordered[:begin]
        """By slot."""
        self._board = Board([sizes[piece] for piece in self._pieces])
        self._slots = {piece: slot for slot, piece in enumerate(self._pieces)}
        self._asked: dict[int, tuple[Source, ...]] = {}
        """Of whom a slot has been asked: nobody, one or two."""
        self._sources: dict[PeerId, Source] = {}
        self._rates = 0.0
        """Of all good sources together, as of the last look."""
        self._starved: bool | None = None
        """None: must be looked up."""

    # -- what is left -------------------------------------------------------------------------

    def wants(self, piece: int) -> bool:
        """Whether it is still missing."""
        slot = self._slots.get(piece)
        return slot is not None and slot in self._board.wanted

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self._board.missing

    @property
    def missing(self) -> int:
        """Number of pieces that are missing."""
        return self._board.missing

    @property
    def starved(self) -> bool:
        """Whether something is missing that no source has that may be asked."""
        if self._starved is None:
            held = [source.held for source in self._sources.values() if source.askable]
            self._starved = None not in held and any(
                self._board.wanted.blocks[block] & ~union(held, block)
                for block in ones(self._board.wanted.summary)
            )
        return self._starved

    def expects(self, source: PeerId, piece: int) -> bool:
        """Whether a piece that is missing was asked of it, and may still come."""
        known, slot = self._sources.get(source), self._slots.get(piece)
        if known is None or not known.live or slot is None or slot not in self._board.wanted:
            return False
        return slot in known.outstanding or slot in known.late

    def outstanding(self, source: PeerId) -> tuple[int, ...]:
        """The pieces that are expected from it, in the order in which they were asked for."""
        known = self._sources.get(source)
        return () if known is None else tuple(self._pieces[slot] for slot in known.outstanding)

    def sources(self) -> tuple[Source, ...]:
        """All that have ever been added, in that order; to look at."""
        return tuple(self._sources.values())

    # -- what happens to sources --------------------------------------------------------------

    def add_source(
        self, source: PeerId, now_ns: int, pieces: Iterable[int] | None = None
    ) -> list[Ask]:
        """There is a source, or one that is known has more.

        Args:
            source: who.
            now_ns: the present.
            pieces: what it has so far, or has besides; None: everything.
        """
        self._now_ns = now_ns
        known = self._sources.get(source)
        if known is None:
            known = self._sources[source] = Source(source)
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
        """It is gone, or refuses everything; ``add_source`` brings it back."""
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
        """It does not have these, and is asked for them again only if ``add_source`` names them."""
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
        """What was on its way from it is lost: that is asked again, of it or of others."""
        self._now_ns = now_ns
        known = self._sources.get(source)
        if known is None or not known.live:
            return []
        self._heard_from(known)
        self._release(known)
        known.late.clear()
        return self._fill(self._ranked())

    def tick(self, now_ns: int) -> list[Ask]:
        """Time has passed: stalls and the end game; call it a few times a second."""
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
        """Bytes of pieces have come from it, also of pieces that are not complete."""
        self._now_ns = now_ns
        known = self._sources.get(source)
        if known is not None and known.live:
            self._heard_from(known)
            known.sent(nbytes, now_ns)

    def arrived(self, source: PeerId, piece: int, now_ns: int, *, sound: bool) -> list[Ask]:
        """A piece has come from a source that was asked for it.

        One that it was not asked for, or that is not missing any more, changes nothing.

        Args:
            source: who sent it.
            piece: its number.
            now_ns: the present.
            sound: whether it is what it should be. If not, the source is distrusted.
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
        """Others are asked for what it owes, as far as somebody has it."""
        source.strikes += 1
        others = [other for other in self._sources.values() if other.good and other is not source]
        for slot in list(source.outstanding):
            if slot == wrong or not source.askable or any(other.has(slot) for other in others):
                self._drop(source, slot)
        source.late.pop(wrong, None)
        self._reconsider(source)
        return self._fill(self._ranked())

    def _heard_from(self, source: Source) -> None:
        """It is alive; what it is still expected to send is not free any more."""
        source.silent_since_ns = self._now_ns
        if source.stalled:
            source.stalled = source.overdue = False
            for slot in source.outstanding:
                self._board.occupy(slot)
            self._reconsider(source)

    # -- who is asked for what ----------------------------------------------------------------

    def _ranked(self) -> list[Source]:
        """Those that may be asked, the better ones first."""
        sources = [source for source in self._sources.values() if source.askable]
        return sorted(sources, key=lambda source: (source.strikes, source.stalled))

    def _fill(self, sources: Iterable[Source]) -> list[Ask]:
        """Ask those that have room, and then those whose pieces they have taken over."""
        asks: list[Ask] = []
        queue = list(sources)
        for source in queue:
            pieces: list[int] = []
            room = self._board.free.summary and source.has_room
            while room:
                slot = self._next(source)
                if slot is None:
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
        """What it should be asked for next, if anything."""
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
        """What no good source has."""
        good = [other.held for other in self._sources.values() if other.good]
        if None not in good:
            for block in ones(self._board.free.summary):
                bits = self._board.free.blocks[block] & source.bits(block) & ~union(good, block)
                if bits:
                    return first_of(block, bits)
        return None

    def _left_to_others(self, source: Source, slot: int) -> bool:
        """Whether others would be done with everything before it were done with this.

        One of them would have this piece sooner, too; so whoever would have it first never leaves
        it to others.
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
        """The end game: who has little left to do is asked for what others will take long for."""
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
        """Ask a helper for the last of what a slow source has to send."""
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
        """Ask a source; returns who has been passed over."""
        passed = self._asked.get(slot, ())
        for overdue in passed:
            overdue.drop(slot, self._now_ns)
            overdue.late[slot] = None
        self._asked[slot] = (source,)
        self._board.occupy(slot)
        source.take(slot, self._board.sizes[slot], self._now_ns)
        return passed

    def _release(self, source: Source) -> None:
        """Nothing is expected from it any more, but may come."""
        for slot in list(source.outstanding):
            self._drop(source, slot)

    def _drop(self, source: Source, slot: int) -> None:
        """This is not expected from it any more, but may come."""
        source.drop(slot, self._now_ns)
        source.late[slot] = None
        others = tuple(other for other in self._asked.pop(slot) if other is not source)
        if others:
            self._asked[slot] = others
        self._settle(slot)

    def _settle(self, slot: int) -> None:
        """A slot that is missing becomes free, unless somebody is on it."""
        if all(each.overdue for each in self._asked.get(slot, ())):
            self._board.release(slot)

    def _reconsider(self, source: Source) -> None:
        """It is asked for more, or less, than before."""
        if source.partial and source.held is not None:
            self._weigh(ones(source.held.summary))
        self._starved = None

    def _weigh(self, blocks: Iterable[int]) -> None:
        """Look again what is common in these blocks."""
        held = [each.held for each in self._sources.values() if each.partial and each.good]
        self._board.weigh(blocks, held)


def _requests(source: Source, pieces: list[int]) -> list[Ask]:
    return [
        Ask(source.peer, tuple(pieces[begin : begin + ASK_PIECES_MAX]))
        for begin in range(0, len(pieces), ASK_PIECES_MAX)
    ]
