"""A network of uplinks in steps of 10 ms, and a judge who watches what a ``PieceFetch`` says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pccl.protocol.types import NS_PER_S, PeerId
from pccl.state.fetch.pieces import Ask, PieceFetch

MIB = 1 << 20
WINDOW_MIN = 4 * MIB
WINDOW_MAX = 64 * MIB
STEP_NS = NS_PER_S // 100
TICK_NS = NS_PER_S // 10
QUANTUM = 16 << 10
"""Bytes that an uplink sends to one client before the next one has its turn."""


# -- the judge ----------------------------------------------------------------


@dataclass
class Known:
    """What a source was said to be."""

    live: bool = True
    everything: bool = False
    has: set[int] = field(default_factory=set[int])
    lacks: set[int] = field(default_factory=set[int])
    strikes: int = 0
    owed: dict[int, None] = field(default_factory=dict[int, None])
    """What it was asked for and has not sent, though others may have."""
    heard_ns: int = 0
    doubted: bool = False
    """It has let the time go by once."""

    def holds(self, piece: int) -> bool:
        return (self.everything and piece not in self.lacks) or piece in self.has

    @property
    def askable(self) -> bool:
        return self.live and self.strikes < 3


class Judge:
    """Has the calls of a ``PieceFetch``, and keeps by itself what is true.

    Args:
        sizes: of the wanted pieces.
        stall_ns: as for ``PieceFetch``.
        strict: no rate is ever known, so whoever has room is asked.
    """

    def __init__(
        self, sizes: Mapping[int, int], stall_ns: int, *, strict: bool, rank: int = 0
    ) -> None:
        self.sizes = dict(sizes)
        self.stall_ns = stall_ns
        self.strict = strict
        self.fetch = PieceFetch(sizes, rank, 3, 0, stall_ns=stall_ns)
        self.missing = set(sizes)
        self.known: dict[PeerId, Known] = {}
        self.check()

    def outstanding(self, source: PeerId) -> tuple[int, ...]:
        return self.fetch.outstanding(source)

    def add_source(
        self, source: PeerId, now_ns: int, pieces: Iterable[int] | None = None
    ) -> list[Ask]:
        known = self.known.get(source)
        if known is None or not known.live:
            strikes = known.strikes if known else 0
            known = self.known[source] = Known(strikes=strikes, heard_ns=now_ns)
        if pieces is None:
            known.everything = True
            known.lacks = set()
        else:
            pieces = list(pieces)
            known.has |= set(pieces)
            known.lacks -= set(pieces)
        return self.judged(lambda: self.fetch.add_source(source, now_ns, pieces), now_ns)

    def lose_source(self, source: PeerId, now_ns: int) -> list[Ask]:
        if source in self.known:
            self.known[source].live = False
            self.known[source].owed = {}
        return self.judged(lambda: self.fetch.lose_source(source, now_ns), now_ns)

    def refuse(self, source: PeerId, pieces: list[int], now_ns: int) -> list[Ask]:
        if source in self.known:
            self.known[source].has -= set(pieces)
            self.known[source].lacks |= set(pieces)
            self.known[source].heard_ns = now_ns
            for piece in pieces:
                self.known[source].owed.pop(piece, None)
        return self.judged(lambda: self.fetch.refuse(source, pieces, now_ns), now_ns)

    def progressed(self, source: PeerId, nbytes: int, now_ns: int) -> None:
        if source in self.known:
            self.known[source].heard_ns = now_ns
        self.fetch.progressed(source, nbytes, now_ns)
        self.check()

    def arrived(self, source: PeerId, piece: int, now_ns: int, *, sound: bool) -> list[Ask]:
        known = self.known.get(source)
        if known is not None and piece in known.owed:
            del known.owed[piece]
            if piece in self.missing:
                known.heard_ns = now_ns
                if sound:
                    self.missing.discard(piece)
                else:
                    known.strikes += 1
        return self.judged(
            lambda: self.fetch.arrived(source, piece, now_ns, sound=sound),
            now_ns,
            again=set() if sound else {(source, piece)},
        )

    def ask_again(self, source: PeerId, now_ns: int) -> list[Ask]:
        if source in self.known:
            self.known[source].heard_ns = now_ns
            self.known[source].owed = {}
        again = {(source, piece) for piece in self.outstanding(source)}
        return self.judged(lambda: self.fetch.ask_again(source, now_ns), now_ns, again=again)

    def tick(self, now_ns: int) -> list[Ask]:
        for source, known in self.known.items():
            if self.outstanding(source) and now_ns - known.heard_ns >= self.stall_ns:
                known.doubted = True
        return self.judged(lambda: self.fetch.tick(now_ns), now_ns)

    def judged(
        self, call: Callable[[], list[Ask]], now_ns: int, again: Collection[tuple[PeerId, int]] = ()
    ) -> list[Ask]:
        """Call, and look at what is asked.

        Args:
            call: what to call.
            now_ns: the present.
            again: what may be asked of a source though it was outstanding there.
        """
        before = {source: set(self.outstanding(source)) for source in self.known}
        asks = call()
        asked: set[tuple[PeerId, int]] = set()
        for ask in asks:
            known = self.known[ask.source]
            assert 1 <= len(ask.pieces) <= 64
            for piece in ask.pieces:
                assert known.askable
                assert known.holds(piece)
                assert piece in self.missing
                assert piece in self.outstanding(ask.source)
                assert piece not in before[ask.source] or (ask.source, piece) in again
                assert (ask.source, piece) not in asked
                asked.add((ask.source, piece))
                known.owed[piece] = None
            if not before[ask.source]:
                known.heard_ns = now_ns
        for source in self.known:
            new = set(self.outstanding(source)) - before[source]
            assert all((source, piece) in asked for piece in new)
        self.check()
        return asks

    def check(self) -> None:
        fetch = self.fetch
        asked_of: dict[int, list[PeerId]] = {piece: [] for piece in self.missing}
        for source, known in self.known.items():
            pieces = fetch.outstanding(source)
            assert len(pieces) == len(set(pieces))
            assert not pieces or known.askable
            nbytes = sum(self.sizes[piece] for piece in pieces)
            assert nbytes <= (WINDOW_MIN if self.strict else WINDOW_MAX) or len(pieces) == 1
            for piece in pieces:
                assert known.holds(piece)
                asked_of[piece].append(source)
        assert all(len(sources) <= 2 for sources in asked_of.values())
        askable = [known for known in self.known.values() if known.askable]
        assert {piece for piece in self.sizes if fetch.wants(piece)} == self.missing
        assert fetch.complete is (not self.missing)
        assert fetch.missing == len(self.missing)
        reachable = [any(known.holds(piece) for known in askable) for piece in self.missing]
        assert fetch.starved is (not all(reachable))
        if self.strict:
            for piece, sources in asked_of.items():
                assert len(sources) <= 1
                if not sources:
                    self.check_why_unasked(piece)

    def check_why_unasked(self, piece: int) -> None:
        """Whoever should be asked for it has enough to do."""
        holders = {s: known for s, known in self.known.items() if known.holds(piece)}
        better = [s for s, known in holders.items() if self.is_good(known)]
        for source in better:
            pieces = self.outstanding(source)
            nbytes = sum(self.sizes[each] for each in pieces)
            assert pieces
            assert nbytes + MIB > WINDOW_MIN
        others = [s for s, known in holders.items() if known.askable]
        if others and not better:
            assert any(self.outstanding(source) for source in others)

    def is_good(self, known: Known) -> bool:
        return known.live and not known.strikes and not known.doubted


# -- the network --------------------------------------------------------------


@dataclass
class Uplink:
    """One source: how fast it sends to all its clients together, and what is wrong with it."""

    rate: int
    dies_s: float = float("inf")
    silent_s: tuple[float, float] = (float("inf"), float("inf"))
    lies: Callable[[int], bool] = lambda _piece: False
    sent_bytes: int = 0
    queues: dict[PeerId, deque[list[int]]] = field(default_factory=dict[PeerId, deque[list[int]]])
    """By client: pieces with their bytes that are still to be sent."""
    credit: float = 0.0


class Network:
    """Members that fetch, and uplinks; a request takes 50 ms to its source.

    What a source has been asked for it sends, also if it came from another in the meantime.

    Args:
        sizes: of the wanted pieces.
        stall_ns: as for ``PieceFetch``.
    """

    def __init__(self, sizes: Mapping[int, int], *, stall_ns: int = 5 * NS_PER_S) -> None:
        self.sizes = dict(sizes)
        self.stall_ns = stall_ns
        self.now_ns = 0
        self.fetchers: dict[PeerId, PieceFetch] = {}
        self.uplinks: dict[PeerId, Uplink] = {}
        self.got: dict[PeerId, list[int]] = {}
        self._under_way: deque[tuple[int, PeerId, Ask]] = deque()

    @property
    def extra_bytes(self) -> int:
        """Sent beyond what had to be."""
        needed = sum(self.sizes.values()) * len(self.fetchers)
        return sum(uplink.sent_bytes for uplink in self.uplinks.values()) - needed

    def fetcher(self, peer: int, rank: int = 0, fetchers: int = 1) -> PieceFetch:
        fetch = PieceFetch(self.sizes, rank, fetchers, self.now_ns, stall_ns=self.stall_ns)
        self.fetchers[PeerId(peer)] = fetch
        self.got[PeerId(peer)] = []
        return fetch

    def source(self, peer: int, uplink: Uplink) -> None:
        """It has everything, and all that fetch know it."""
        self.uplinks[PeerId(peer)] = uplink
        for client, fetch in self.fetchers.items():
            self._send(client, fetch.add_source(PeerId(peer), self.now_ns))

    def serves_others(self, peer: int, uplink: Uplink) -> None:
        """One that fetches gives what it has got to the others."""
        self.uplinks[PeerId(peer)] = uplink
        for client, fetch in self.fetchers.items():
            if client != peer:
                self._send(client, fetch.add_source(PeerId(peer), self.now_ns, []))

    def run(self, limit_s: float = 600.0) -> float:
        """Until everybody has everything; how long it took, in seconds."""
        while not all(fetch.complete for fetch in self.fetchers.values()):
            assert self.now_ns < limit_s * NS_PER_S
            self.run_for(STEP_NS / NS_PER_S)
        return self.now_ns / NS_PER_S

    def run_for(self, seconds: float) -> None:
        """Let some time pass."""
        for _ in range(round(seconds * NS_PER_S / STEP_NS)):
            self.now_ns += STEP_NS
            self._deliver_requests()
            for peer, uplink in self.uplinks.items():
                self._step(peer, uplink)
            if self.now_ns % TICK_NS == 0:
                for client, fetch in self.fetchers.items():
                    self._send(client, fetch.tick(self.now_ns))

    def _send(self, client: PeerId, asks: list[Ask]) -> None:
        for ask in asks:
            self._under_way.append((self.now_ns + 5 * STEP_NS, client, ask))

    def _deliver_requests(self) -> None:
        while self._under_way and self._under_way[0][0] <= self.now_ns:
            _, client, ask = self._under_way.popleft()
            queue = self.uplinks[ask.source].queues.setdefault(client, deque())
            queue.extend([piece, self.sizes[piece]] for piece in ask.pieces)

    def _step(self, peer: PeerId, uplink: Uplink) -> None:
        now_s = self.now_ns / NS_PER_S
        if now_s >= uplink.dies_s:
            for client, fetch in self.fetchers.items():
                self._send(client, fetch.lose_source(peer, self.now_ns))
            return
        if uplink.silent_s[0] <= now_s < uplink.silent_s[1]:
            return
        uplink.credit = min(uplink.credit, 0.0) + uplink.rate * STEP_NS / NS_PER_S
        while uplink.credit > 0 and any(uplink.queues.values()):
            for client, queue in list(uplink.queues.items()):
                if queue:
                    self._send_some(peer, uplink, client, queue)

    def _send_some(
        self, peer: PeerId, uplink: Uplink, client: PeerId, queue: deque[list[int]]
    ) -> None:
        fetch = self.fetchers[client]
        piece, left = queue[0]
        nbytes = min(QUANTUM, left)
        uplink.credit -= nbytes
        uplink.sent_bytes += nbytes
        fetch.progressed(peer, nbytes, self.now_ns)
        queue[0][1] -= nbytes
        if queue[0][1]:
            return
        queue.popleft()
        sound, wanted = not uplink.lies(piece), fetch.wants(piece)
        self._send(client, fetch.arrived(peer, piece, self.now_ns, sound=sound))
        if wanted and not fetch.wants(piece):
            self.got[client].append(piece)
            if client in self.uplinks:
                for other, its in self.fetchers.items():
                    if other != client:
                        self._send(other, its.add_source(client, self.now_ns, [piece]))
