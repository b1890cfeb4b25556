"""Any frames of shared state from one who means harm: his lane is closed, or he is ignored.

Two honest members exchange a state all the while. Nothing is raised but what closes the lane, what
is kept for him is bounded, and the honest ones end with what was elected.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl import TensorInfo
from pccl.machines.peer.events import ComparisonDone, ReduceDone, SyncStarved
from pccl.protocol.frame import PAYLOAD_BYTES_MAX, FrameHeader, FrameKind, encode_header
from pccl.protocol.shared_state import DIGEST_BYTES, Difference, Elected
from pccl.protocol.types import SYNC_TAG, OperationId, PeerId
from pccl.runtime.state.exchange import KINDS, StateExchange
from pccl.runtime.state.frames import QUEUED_PIECES_MAX
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.session import StateNews, StateSession
from pccl.state.digests import layout_digest, piece_digest
from pccl.transports.base import Connection
from pccl.transports.link import Lane, Links
from pccl.transports.sinks import Sink
from tests.support.frames import encode_frame
from tests.support.wires import Wire

SEEDS = st.integers(0, (1 << 32) - 1)
PIECE = 64
FETCHER, SOURCE, HOSTILE, OUTSIDER = PeerId(1), PeerId(2), PeerId(3), PeerId(4)
RING = (FETCHER, SOURCE, HOSTILE)
OPERATION = OperationId(1, 0, 3, SYNC_TAG, 5)
PAST = OperationId(1, 0, 3, SYNC_TAG, 4)
STALL_NS = 2_000_000_000
TICK_NS = 250_000_000


class KeepingWire(Wire):
    """One that keeps what the network takes, if it takes anything, and tells of its end at once."""

    portions = (7, 48, 1000)

    def __init__(self, *, takes: bool = True) -> None:
        self.sent = bytearray()
        super().__init__(self.sent.extend if takes else None)

    def feed(self, data: bytes, rng: Random) -> None:
        was_open = self.open
        super().feed(data, rng)
        if was_open and self.error is not None:
            assert self.receiver is not None
            self.receiver.connection_lost(self.error)

    def end(self) -> None:
        if self.open:
            super().end()


class Member:
    """A peer with a state in guarded memory, as far as frames of shared state concern it."""

    def __init__(self, own: PeerId, value: int, now_ns: Callable[[], int]) -> None:
        self.own = own
        self.done: bytes | None = None
        self.starved: list[str] = []
        self.differences: list[Difference] = []
        self._guarded = np.full(4000, -7, np.int32)
        self.tensor, self.extra = self._guarded[100:705], self._guarded[1000:1090]
        self.tensor[:] = np.arange(605) * value
        self.extra[:] = value
        self.memory = StateMemory(
            [
                TensorInfo.from_numpy(self.tensor, "w"),
                TensorInfo.from_numpy(self.extra, "own", allow_content_inequality=True),
            ],
            piece_bytes=PIECE,
        )
        for number in self.memory.stale_pieces():
            piece = self.memory.layout.piece(number)
            self.memory.piece_map[number] = piece_digest(self.memory.view(piece))
        self.links = Links()
        self.exchange = StateExchange(0, self.links, now_ns, STALL_NS, self._hear)
        self.fetched = FetchedPieces(self.memory, 1 << 30)
        self.session = self.post()

    def post(self) -> StateSession:
        return self.exchange.post(OPERATION, self.memory, self.fetched, RING, self.own)

    def _hear(self, news: StateNews) -> None:
        match news:
            case ReduceDone(digest=digest):
                self.done = digest
            case SyncStarved(reason=reason):
                self.starved.append(reason)
            case ComparisonDone(difference=difference):
                self.differences.append(difference)

    def accept(self, peer: PeerId, *, takes: bool = True) -> KeepingWire:
        wire = KeepingWire(takes=takes)
        link = self.links.to(peer)
        link.add(Lane(typing.cast("Connection", wire), len(link.lanes), link, self))
        self.exchange.link_changed(peer, up=True)
        return wire

    def check(self) -> None:
        assert (self._guarded[:100] == -7).all()
        assert (self._guarded[705:1000] == -7).all()
        assert (self._guarded[1090:] == -7).all()

    # what lanes call

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        return self.exchange.frame_started(lane, header)

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        link = lane.link
        assert link.remove(lane)
        self.exchange.lane_lost(lane)
        if not link.up:
            self.exchange.link_changed(link.peer, up=False)


class Scene:
    """A source and a fetcher that are connected, and time."""

    def __init__(self, rng: Random, *, hostile_source: bool, in_swarm: bool) -> None:
        self.now_ns = 0
        self.rng = rng
        self.source = Member(SOURCE, 3, lambda: self.now_ns)
        self.fetcher = Member(FETCHER, 5, lambda: self.now_ns)
        digest = self.source.memory.piece_map.digest
        self.elected = Elected(
            revision=1,
            layout=layout_digest(self.source.memory.layout),
            content=digest(may_differ=False),
            sources=(SOURCE, HOSTILE) if hostile_source else (SOURCE,),
            behind=(FETCHER, HOSTILE) if in_swarm else (FETCHER,),
            outdated=(FETCHER,),
            extra=digest(may_differ=True),
            extra_sources=(SOURCE, HOSTILE) if hostile_source else (SOURCE,),
        )
        self.ends = self.source.accept(FETCHER), self.fetcher.accept(SOURCE)

    def begin(self) -> None:
        for member in (self.source, self.fetcher):
            member.session.begin(self.elected)

    def step(self) -> None:
        """What the honest ones have said arrives, and time passes."""
        for here, there in (self.ends, self.ends[::-1]):
            taken, here.sent[:] = bytes(here.sent), b""
            there.feed(taken, self.rng)
            assert there.open
        self.now_ns += TICK_NS
        for member in (self.source, self.fetcher):
            member.exchange.tick()

    def check_complete(self) -> None:
        assert self.source.done == self.fetcher.done == self.elected.content
        assert not self.fetcher.starved
        self.fetcher.fetched.apply(self.fetcher.session.download.wanted)
        assert self.fetcher.tensor.tolist() == [3 * number for number in range(605)]
        assert self.fetcher.extra.tolist() == [3] * 90
        for member in (self.source, self.fetcher):
            member.check()


def frame(
    kind: FrameKind,
    payload: bytes = b"",
    *,
    operation: OperationId = OPERATION,
    offset: int = 0,
    what: int = 0,
    step: int = 0,
) -> bytes:
    return encode_frame(FrameHeader(kind, operation, step, offset, len(payload), what), payload)


def numbers(*pieces: int) -> bytes:
    return np.array(pieces, np.uint32).tobytes()


def draw_frame(rng: Random, scene: Scene) -> bytes:
    """One that may fit, or differs in something, or is noise."""
    memory = scene.source.memory
    count = memory.layout.piece_count
    kind = rng.choice(sorted(KINDS))
    term, group, view, n = (rng.randrange(4) for _ in range(4))
    unknown = OperationId(term, group, view, SYNC_TAG, n)
    operation = rng.choice((OPERATION,) * 6 + (PAST, unknown))
    number = rng.randrange(count)
    offset = rng.choice((number,) * 5 + (0, count, rng.randrange(1 << 64)))
    what = rng.choice((count, count, 0, rng.randrange(1 << 32)))
    listed = [rng.randrange(rng.choice((count, count, count + 1))) for _ in range(rng.randrange(9))]
    match rng.randrange(4):
        case 0:
            payload = rng.randbytes(rng.choice((0, 1, 4, 32, PIECE, 3000)))
        case _ if kind is FrameKind.PIECE:
            real = bytearray(memory.view(memory.layout.piece(number)))
            real[rng.randrange(len(real))] ^= rng.choice((0, 1))
            payload = bytes(real)
        case _ if kind is FrameKind.MAP:
            real = bytearray(memory.piece_map.part(range(count)))
            real[rng.randrange(len(real))] ^= rng.choice((0, 1))
            payload = bytes(real[: rng.choice((len(real), DIGEST_BYTES))])
            offset = rng.choice((0, 0, offset))
        case _ if kind is FrameKind.LAYOUT:
            payload = memory.layout.pack()[: rng.choice((20, None))]
        case _:
            payload = numbers(*listed)
    if kind in (FrameKind.MAP_ASK, FrameKind.LAYOUT_ASK) and rng.random() < 0.95:
        payload = b""
    drawn = frame(
        kind, payload, operation=operation, offset=offset, what=what, step=rng.randrange(3)
    )
    return drawn[: rng.randrange(len(drawn))] if rng.random() < 0.02 else drawn


@settings(max_examples=300, deadline=None)
@given(SEEDS, st.booleans(), st.booleans())
def test_any_frames(seed: int, hostile_source: bool, in_swarm: bool) -> None:
    rng = Random(seed)
    scene = Scene(rng, hostile_source=hostile_source, in_swarm=in_swarm)
    members = (scene.source, scene.fetcher)
    begin_at = rng.randrange(5)
    wires: list[KeepingWire] = []
    for round_number in range(20):
        if round_number == begin_at:
            scene.begin()
        if rng.random() < 0.05 and round_number < begin_at:
            scene.fetcher.exchange.compare(OPERATION, rng.choice((SOURCE, HOSTILE)))
        for member in members:
            if rng.random() < 0.5:
                peer = rng.choice((HOSTILE, HOSTILE, OUTSIDER))
                wires.append(member.accept(peer, takes=rng.random() < 0.7))
        for wire in wires:
            frames = b"".join(draw_frame(rng, scene) for _ in range(rng.randrange(6)))
            wire.feed(frames, rng)
            wire.sent.clear()
        for member in members:
            member.check()
            layout = member.memory.layout
            kept = layout.nbytes + layout.piece_count * (DIGEST_BYTES + 200) + (1 << 14)
            assert member.links.to(HOSTILE).backlog_bytes <= kept
            assert member.links.to(OUTSIDER).backlog_bytes <= kept
        scene.step()
    for wire in wires:  # he has gone, or says nothing any more
        if rng.random() < 0.7:
            wire.end()
    for _ in range(60):
        scene.step()
    scene.check_complete()


# -- floods --------------------------------------------------------------------------------------

FLOODS: dict[str, Callable[[int], bytes]] = {
    "maps": lambda n: frame(FrameKind.MAP_ASK),
    "layouts": lambda n: frame(FrameKind.LAYOUT_ASK),
    "pieces": lambda n: frame(FrameKind.PIECE_ASK, numbers(n % 38)),
    "pieces that are not there": lambda n: frame(FrameKind.PIECE_ASK, numbers(*range(38)) * 100),
    "other operations": lambda n: frame(
        FrameKind.PIECE_ASK, numbers(1), operation=OperationId(1, 0, 3, SYNC_TAG, 6 + n)
    ),
    "many operations": lambda n: frame(
        FrameKind.MAP_ASK, operation=OperationId(n, n, n, SYNC_TAG, n)
    ),
    "news": lambda n: frame(FrameKind.PIECE_HAVE, numbers(*range(38)) * 100),
    "refusals": lambda n: frame(FrameKind.PIECE_LACK, numbers(*range(38)) * 100),
}


@pytest.mark.parametrize("peer", [HOSTILE, OUTSIDER])
@pytest.mark.parametrize("name", FLOODS)
def test_floods_of_one_who_does_not_read(name: str, peer: PeerId) -> None:
    rng = Random(0)
    scene = Scene(rng, hostile_source=False, in_swarm=True)
    wires = [member.accept(peer, takes=False) for member in (scene.source, scene.fetcher)]
    fetching = name == "pieces that are not there"
    for begun in (False, True):
        if begun:
            scene.begin()
        for number in range(1000):
            for wire in wires:
                wire.feed(FLOODS[name](number), rng)
        for member in (scene.source, scene.fetcher):
            if fetching and peer is HOSTILE and not member.links.to(peer).up:
                continue
            layout = member.memory.layout
            gives = name == "pieces" and peer is HOSTILE
            kept_bytes = layout.nbytes + 100 * layout.piece_count if gives else 0
            assert member.links.to(peer).backlog_bytes <= kept_bytes + (40 << 10)
            known = member.session.download._haves.get(peer, [])  # pyright: ignore[reportPrivateUsage]
            assert len(known) <= 2 * layout.piece_count + 3800
    for _ in range(40):
        scene.step()
    scene.check_complete()


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        (FrameKind.PIECE_ASK, 4 * QUEUED_PIECES_MAX + 4),
        (FrameKind.PIECE_LACK, PAYLOAD_BYTES_MAX),
        (FrameKind.PIECE_HAVE, PAYLOAD_BYTES_MAX),
        (FrameKind.PIECE_ASK, 6),
        (FrameKind.PIECE_HAVE, 6),
        (FrameKind.PIECE, PIECE + 1),
        (FrameKind.PIECE, 0),
    ],
)
def test_lengths_that_make_no_sense_close_the_lane(kind: FrameKind, length: int) -> None:
    """Before any memory is set aside for what is announced."""
    scene = Scene(Random(0), hostile_source=False, in_swarm=True)
    scene.begin()
    wire = scene.source.accept(HOSTILE)
    wire.feed(encode_header(FrameHeader(kind, OPERATION, 0, 0, length)), Random(0))
    assert not wire.open


@pytest.mark.parametrize("kind", [FrameKind.MAP, FrameKind.LAYOUT])
def test_what_was_not_asked_for_is_not_kept(kind: FrameKind) -> None:
    scene = Scene(Random(0), hostile_source=False, in_swarm=True)
    scene.begin()
    header = FrameHeader(kind, OPERATION, 0, 0, PAYLOAD_BYTES_MAX)
    for _ in range(3):
        wire = scene.source.accept(HOSTILE)
        wire.feed(encode_header(header) + bytes(100), Random(0))
        receiver: Any = wire.receiver
        assert not hasattr(receiver._sink, "payload")


def test_a_map_of_another_length_closes_the_lane() -> None:
    scene = Scene(Random(0), hostile_source=True, in_swarm=False)
    wire = scene.fetcher.accept(HOSTILE)
    scene.fetcher.session.begin(scene.elected)
    asked = scene.fetcher.session.download._maps  # pyright: ignore[reportPrivateUsage]
    count = scene.fetcher.memory.layout.piece_count
    scene.ends[1].end()
    assert HOSTILE in asked
    wire.feed(frame(FrameKind.MAP, bytes(DIGEST_BYTES), what=count + 1), Random(0))
    assert not wire.open


def test_pieces_that_nobody_asked_of_him_displace_nothing() -> None:
    """He begins a piece that is on its way, and never ends it; and sends others that are right."""
    rng = Random(0)
    scene = Scene(rng, hostile_source=False, in_swarm=True)
    source_end, fetcher_end = scene.ends
    scene.begin()

    def deliver(here: KeepingWire, there: KeepingWire) -> None:
        taken, here.sent[:] = bytes(here.sent), b""
        there.feed(taken, rng)

    deliver(fetcher_end, source_end)  # asks for the map
    deliver(source_end, fetcher_end)
    deliver(fetcher_end, source_end)  # asks for pieces
    pieces = bytes(source_end.sent)
    source_end.sent.clear()
    fetcher_end.feed(pieces[:70], rng)
    arrivals = scene.fetcher.session.receiver._arrivals  # pyright: ignore[reportPrivateUsage]
    ((number, arrival),) = arrivals.items()
    layout, memory = scene.source.memory.layout, scene.source.memory
    liar = scene.fetcher.accept(HOSTILE)
    other = layout.piece(number + 1)
    liar.feed(frame(FrameKind.PIECE, bytes(memory.view(other)), offset=number + 1, step=1), rng)
    begun = FrameHeader(FrameKind.PIECE, OPERATION, 1, number, layout.piece(number).length)
    liar.feed(encode_header(begun) + bytes(10), rng)
    assert liar.open
    assert arrivals == {number: arrival}
    fetcher_end.feed(pieces[70:], rng)
    for _ in range(3):
        deliver(fetcher_end, source_end)
        deliver(source_end, fetcher_end)
    scene.check_complete()  # no time has passed
    download = scene.fetcher.session.download
    assert (download.wrong_pieces, download.rx_bytes) == (0, download.wanted_bytes)
