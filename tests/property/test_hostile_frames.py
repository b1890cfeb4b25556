"""Any bytes at the edge: nothing raised but what closes the connection, nothing written elsewhere.

The bytes come through the whole of a peer's port: handshake, keeper, lanes, data plane.
"""

from __future__ import annotations

import struct
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.checksum import payload_hash, seal
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import HEADER_BYTES, NO_OPERATION, FrameHeader, FrameKind, encode_header
from pccl.protocol.guards.source_shares import PortLimits
from pccl.protocol.handshake.certificates import Certificate, certify
from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.limits import EARLY_STORE_BYTES_MAX, Timing
from pccl.protocol.types import Descriptor, Member, OperationId, PeerId, ReduceOp
from pccl.runtime.collective.data_plane import DataPlane
from pccl.runtime.collective.operand import borrow
from pccl.runtime.control.greeting import Credentials
from pccl.runtime.links.frame_router import FrameRouter
from pccl.runtime.links.keeper import LinkKeeper
from pccl.runtime.links.pulls import Pulls
from pccl.stress.sim.curves import QuickCurves
from pccl.transports.announcement import encode_ask, encode_at
from pccl.transports.base import Connection
from pccl.transports.link import Lane, Link, Links
from pccl.transports.sim.memory import SimMemories, SimMemory
from pccl.transports.sinks import Drain, Sink
from tests.support.clear import in_the_clear
from tests.support.frames import encode_frame
from tests.support.secrets import secrets_of
from tests.support.wires import FakeClock, Wire

SEEDS = st.integers(0, (1 << 32) - 1)
CURVES = QuickCurves()
KEY = CURVES.signer(b"y" * 32).key
"""The key of every other peer."""
RUN = b"the run of these"
ME, DOWNSTREAM, UPSTREAM = PeerId(1), PeerId(2), PeerId(3)
RING = (ME, DOWNSTREAM, UPSTREAM)
OPERATION = OperationId(1, 0, 1, 0, 0)
COUNT = 30
SEGMENT_BYTES = 16

MASTER_SIGNER = CURVES.signer(b"m" * 32)
CERTIFICATE = certify(MASTER_SIGNER, RUN, ME, KEY)


# -- a peer's port ----------------------------------------------------------------------


@dataclass
class Identity:
    peer: PeerId = ME
    run: bytes = RUN
    term: int = 1
    certificate: Certificate = CERTIFICATE


class FakeNetwork:
    """Nobody is dialled."""

    port_limits = PortLimits()


class NoExchange:
    """Of shared state: there is none."""

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        return Drain(header.length)

    def lane_up(self, lane: Lane) -> None:
        pass

    def lane_failed(self, link: Link, number: int) -> None:
        pass

    def lane_lost(self, lane: Lane) -> None:
        pass


class Liar:
    """A process of the same machine. It announces some memory, and withdraws some of it."""

    def __init__(self, memories: SimMemories) -> None:
        memory = memories.boot("elsewhere", lambda: True)
        assert memory is not None
        self.place = memory.show(bytes(16)).place
        self._lease = memory.lease()

    @property
    def answer(self) -> bytes:
        """The frame that answers PULL_ASK."""
        payload = encode_at(*self.place)
        header = FrameHeader(FrameKind.PULL_AT, NO_OPERATION, 0, 0, len(payload))
        return encode_frame(header, payload)

    def draw(self, kind: FrameKind, length: int, rng: Random) -> bytes:
        """The payload of a frame that may fit; of an announcement, mostly of so many bytes."""
        if kind is FrameKind.PULL_AT:
            pid, address = self.place
            return encode_at(pid, address + (rng.random() < 0.2))
        if kind is FrameKind.PULL_ASK:
            return encode_ask(rng.randbytes(16), [rng.randrange(1, 1 << 31)] * rng.randint(1, 64))
        if rng.random() < 0.1:
            self._lease.revoke()
        fitting = ((length,), (1, length - 1), (1,) * length) if 1 < length <= 16 else ()
        lengths = rng.choice((*fitting, *fitting, (1,) * 64, (24,)))
        views = [memoryview(rng.randbytes(length)) for length in lengths]
        payload = bytearray(self._lease.announce(views))
        if rng.random() < 0.2:
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
        return bytes(payload)


class Port:
    """Peer 1 of three: its port, its data plane, and one operation in guarded memory."""

    def __init__(self, *, in_place: bool) -> None:
        self.goes_on = True
        self.links = Links()
        memories = SimMemories()
        memories.machines = {"here": "m", "elsewhere": "m"}
        memory = memories.boot("here", lambda: True)
        self.liar = Liar(memories)
        self.plane = DataPlane(
            self.links.to,
            lambda operation: self.goes_on and operation.n > 0 and operation.view == 1,
            lambda operation, digest: None,
            SEGMENT_BYTES,
            memory,
        )
        pulls = Pulls(memory, bytes, self.plane.pulls_failed)
        self._keeper = LinkKeeper(
            FakeClock(),
            typing.cast("Any", FakeNetwork()),
            Timing(),
            Identity(),
            self.links,
            FrameRouter(self.plane, typing.cast("Any", NoExchange()), pulls),
            lambda link: None,
            typing.cast("Any", None),
            Credentials(None, lambda count: bytes(count), CURVES, encrypts=in_the_clear),
            lanes=0,
        )
        self._keeper.want(tuple(Member(peer, "there", 1, key=KEY) for peer in RING[1:]))
        self._send_guarded = np.full(COUNT + 200, -7, np.int32)
        self._recv_guarded = np.full(COUNT + 200, -7, np.int32)
        self.send = self._send_guarded[100:-100]
        self.send[:] = np.arange(COUNT)
        self.recv = self._recv_guarded[100:-100]
        recv = None if in_place else self.recv
        descriptor = Descriptor(DataType.INT32, ReduceOp.SUM, COUNT)
        self.plane.post(OPERATION, descriptor, borrow(self.send, recv), RING, ME)

    def accept(self, on_sent: Callable[[bytes], None] | None = None) -> Wire:
        wire = Wire(on_sent)
        self._keeper.accept(typing.cast("Connection", wire))
        return wire

    def check(self) -> None:
        """What must hold at any time."""
        for guarded in (self._send_guarded, self._recv_guarded):
            assert (guarded[:100] == -7).all()
            assert (guarded[-100:] == -7).all()
        stores = self.plane._early.items()  # pyright: ignore[reportPrivateUsage]
        assert {peer for peer, _ in stores} <= set(RING)
        for _, store in stores:
            assert 0 <= store.used_bytes <= EARLY_STORE_BYTES_MAX  # pyright: ignore[reportPrivateUsage]
        for link in self.links.all():
            assert link.backlog_bytes <= 100 * COUNT


def greet(wire: Wire, rng: Random, source: PeerId, lane: int = 0) -> None:
    """Do the handshake of a peer, as far as the other side takes part."""
    signature = certify(MASTER_SIGNER, RUN, source, KEY).signature
    opening = Opening(Channel.LANE, RUN, 1, source, ME, lane, certificate=signature)
    secrets = replace(secrets_of(None, b"y"), curves=CURVES, signer=CURVES.signer(b"y" * 32))
    handshake, heard = Handshake.dial(opening, secrets), bytearray()
    on_sent, wire.on_sent = wire.on_sent, heard.extend
    wire.feed(handshake.take_output(), rng)
    while heard and handshake.awaited_bytes:
        part = bytes(heard[: handshake.awaited_bytes])
        del heard[: len(part)]
        with suppress(RemoteProtocolError):  # it was refused
            handshake.receive(part)
        wire.feed(handshake.take_output(), rng)
    wire.on_sent = on_sent


PULLING = (FrameKind.ANNOUNCE, FrameKind.PULL_ASK, FrameKind.PULL_AT)


def draw_frame(rng: Random, liar: Liar) -> bytes:
    """One that may fit, or differs in something, or is noise."""
    kind = rng.choice([FrameKind.DATA] * 4 + [FrameKind.ANNOUNCE] * 4 + list(FrameKind))
    step = rng.choice((0, 1, 2, 3, rng.randrange(1 << 16)))
    offset = rng.choice((*range(0, 4 * COUNT, 4), 40 * rng.randrange(3), rng.randrange(1 << 64)))
    length = rng.choice((16, 16, 8, 8, 0, 1, 24, rng.randrange(1 << 12), rng.randrange(1 << 32)))
    if rng.random() < 0.3:  # it does fit
        step, part = rng.randrange(4), rng.randrange(3)
        offset, length = 40 * ((2 - step) % 3) + 16 * part, (16, 16, 8)[part]
    bare = (FrameKind.QUERY, FrameKind.PING, FrameKind.PONG, FrameKind.PULL_READY)
    if kind in (*bare, FrameKind.PULL_FAILED, FrameKind.MEET) and rng.random() < 0.9:
        length = 0
    if kind is FrameKind.HAVE and rng.random() < 0.5:
        offset, length = rng.randrange(3), 2
    n = rng.choice((0, 0, 0, 1, 2))
    operation = OperationId(rng.choice((1, 1, 1, 2)), 0, rng.choice((1, 1, 1, 2)), 0, n)
    payload = rng.randbytes(min(length, rng.choice((1 << 12, 5))))
    if kind in PULLING and rng.random() < 0.9:
        payload = liar.draw(kind, length, rng)
        length = len(payload)
    check = payload_hash(payload)
    header = bytearray(encode_header(FrameHeader(kind, operation, step, offset, length), check))
    match rng.randrange(60):
        case 0:
            header[rng.randrange(HEADER_BYTES)] ^= 1 << rng.randrange(8)
        case 1 | 2:  # whoever changes it on purpose makes the checksum fit
            header[rng.randrange(52)] ^= 1 << rng.randrange(8)
            header = bytearray(seal(bytes(header[:52])))
        case _:
            pass
    return bytes(header) + payload


@settings(max_examples=400)
@given(SEEDS, st.booleans())
def test_any_bytes_to_a_peer(seed: int, in_place: bool) -> None:
    rng, port = Random(seed), Port(in_place=in_place)
    wires: list[Wire] = []
    sources = (UPSTREAM, UPSTREAM, DOWNSTREAM, PeerId(9))
    for _ in range(rng.randrange(1, 30)):
        match rng.randrange(6):
            case 0 if rng.random() < 0.3:
                if not next(iter(port.plane.transfers.values())).begun:
                    port.plane.begin(OPERATION)
            case 0 | 1:
                wire = port.accept(rng.choice((None, lambda data: None)))
                lane = rng.choice((0, 0, 1, 7, rng.randrange(1 << 16)))
                source = rng.choice(sources)
                greet(wire, rng, source, lane)
                link = port.links.find(source)
                if link is not None and len(link.lanes) == 1 and rng.random() < 0.7:
                    wire.feed(port.liar.answer, rng)  # an honest answer
                wires.append(wire)
            case 2 if wires and rng.random() < 0.1:
                rng.choice(wires).feed(rng.randbytes(rng.randrange(200)), rng)
            case _ if wires:
                rng.choice(wires).feed(b"".join(draw_frame(rng, port.liar) for _ in range(3)), rng)
            case _:
                pass
        port.check()
        for wire in [wire for wire in wires if not wire.open]:
            wires.remove(wire)
            wire.end()
    last = port.accept(lambda data: None)  # in the middle of a segment when the operation ends
    wires.append(last)
    segment = FrameHeader(FrameKind.DATA, OPERATION, rng.choice((0, 3)), 80, 16)
    begun = encode_frame(segment, bytes(16))[: HEADER_BYTES + rng.randrange(16)]
    greet(last, rng, UPSTREAM)
    last.feed(begun, rng)
    port.plane.end(OPERATION, committed=False)
    received = port.recv.tolist()
    for wire in wires:
        wire.feed(b"".join(draw_frame(rng, port.liar) for _ in range(10)), rng)
        wire.end()
    port.check()
    assert port.send.tolist() == list(range(COUNT))
    assert port.recv.tolist() == received
    port.goes_on = False
    port.plane.forget_early()
    stores = port.plane._early.values()  # pyright: ignore[reportPrivateUsage]
    assert [store.used_bytes for store in stores] == [0, 0]  # pyright: ignore[reportPrivateUsage]


def test_questions_of_one_who_does_not_read_cost_no_memory() -> None:
    port, rng = Port(in_place=True), Random(0)
    wire = port.accept(lambda data: None)
    greet(wire, rng, UPSTREAM)
    wire.on_sent = None
    query = encode_header(FrameHeader(FrameKind.QUERY, OPERATION, 0, 0, 0))
    wire.feed(query * 5000, rng)
    assert wire.open
    (lane,) = port.links.to(UPSTREAM).lanes
    assert lane.backlog_bytes < 200


def test_the_answer_that_waits_is_the_newest() -> None:
    """One answer may be on its way already; of those that wait the newest stands for all."""
    port, rng, sent = Port(in_place=True), Random(0), bytearray()
    wire = port.accept(lambda data: None)
    greet(wire, rng, UPSTREAM)
    wire.on_sent = None
    first, second, third = (
        encode_header(FrameHeader(FrameKind.QUERY, OPERATION, 0, number, 0)) for number in (1, 3, 2)
    )
    segment = FrameHeader(FrameKind.DATA, OPERATION, 0, 80, 16)
    wire.feed(first + second + encode_frame(segment, bytes(16)) + third, rng)
    wire.on_sent = sent.extend
    (lane,) = port.links.to(UPSTREAM).lanes
    lane.writable()
    have = [FrameHeader(FrameKind.HAVE, OPERATION, 0, number, 2) for number in (1, 3)]
    assert split(bytes(sent)) == [
        encode_frame(have[0], b"\0\0"),  # one bit for each of twelve segments
        encode_frame(have[1], b"\1\0"),
    ]


# -- a recorded exchange, spoilt ----------------------------------------------------------


class Peer:
    """One of three whose data planes talk to each other over wires."""

    def __init__(self, own: PeerId, ring: Ring, memory: SimMemory | None) -> None:
        self.own = own
        self.links = Links()
        self.digest: bytes | None = None
        self.plane = DataPlane(
            self.links.to, lambda operation: False, self._on_done, SEGMENT_BYTES, memory
        )
        pulls = Pulls(memory, ring.rng.randbytes, self.plane.pulls_failed)
        self.frames = FrameRouter(self.plane, typing.cast("Any", NoExchange()), pulls)
        self.memory = np.full(COUNT + 200, -7, np.int64)
        self.result = self.memory[100:-100]
        self.result[:] = np.arange(COUNT) * own

    def post(self) -> None:
        descriptor = Descriptor(DataType.INT64, ReduceOp.SUM, COUNT)
        self.plane.post(OPERATION, descriptor, borrow(self.result), RING, self.own)

    def _on_done(self, operation: OperationId, digest: bytes) -> None:
        self.digest = digest

    # what lanes call

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        return self.frames.frame_started(lane, header)

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        assert self.links.to(lane.link.peer).remove(lane)
        self.frames.lane_lost(lane)


class Ring:
    """Three peers; what 3 sends to 1 goes through somebody's hands.

    Args:
        rng: decides what is left to chance; in half of the runs the three pull segments.
        spoil: takes whole frames that are on their way, returns bytes to deliver instead.
    """

    def __init__(self, rng: Random, spoil: Callable[[list[bytes]], bytes]) -> None:
        self.rng = rng
        memories = SimMemories()
        if rng.random() < 0.5:
            memories.machines = {"here": "m", "elsewhere": "m"}
        self.memories = [memories.boot("elsewhere", lambda: True) for _ in RING]
        self.peers = {
            peer: Peer(peer, self, memory) for peer, memory in zip(RING, self.memories, strict=True)
        }
        self._spoil = spoil
        self._ends: dict[tuple[PeerId, PeerId], Wire] = {}
        self._under_way: dict[tuple[PeerId, PeerId], bytearray] = {}
        for pair in ((ME, DOWNSTREAM), (DOWNSTREAM, UPSTREAM), (UPSTREAM, ME)):
            self._connect(*pair)
        for peer in self.peers.values():
            peer.post()
        for peer in self.peers.values():
            peer.plane.begin(OPERATION)

    def _connect(self, one: PeerId, other: PeerId) -> None:
        for here, there in ((one, other), (other, one)):
            sent = self._under_way[here, there] = bytearray()
            wire = self._ends[here, there] = Wire(sent.extend)
            link = self.peers[here].links.to(there)
            link.add(Lane(typing.cast("Connection", wire), 0, link, self.peers[here]))
        for here, there in ((one, other), (other, one)):
            self.peers[here].frames.lane_up(self.peers[here].links.to(there).lanes[0])

    def run(self, reconnects_max: int = 20) -> None:
        """Deliver until nothing moves; lost connections are made anew."""
        for _ in range(400):
            moved = False
            for (here, there), data in list(self._under_way.items()):
                moved |= bool(data)
                taken, data[:] = bytes(data), b""
                if (here, there) == (UPSTREAM, ME):
                    taken = self._spoil(split(taken))
                self._ends[there, here].feed(taken, self.rng)
            for here, there in ((UPSTREAM, ME), (DOWNSTREAM, UPSTREAM), (ME, DOWNSTREAM)):
                ends = self._ends[here, there], self._ends[there, here]
                if not all(end.open for end in ends) and reconnects_max:
                    reconnects_max -= 1
                    for end in ends:
                        end.end()
                    self._connect(here, there)
                    moved = True
            if all(peer.digest for peer in self.peers.values()):
                return
            if not moved:  # a frame was held back; a network that does that cuts the connection
                for end in (self._ends[UPSTREAM, ME], self._ends[ME, UPSTREAM]):
                    end.open = False

    @property
    def committed(self) -> bool:
        digests = {peer.digest for peer in self.peers.values()}
        return len(digests) == 1 and None not in digests

    def check(self) -> None:
        """Nothing beside the buffers was touched; who commits holds what the others hold."""
        results = [peer.result.tolist() for peer in self.peers.values()]
        for peer in self.peers.values():
            assert (peer.memory[:100] == -7).all()
            assert (peer.memory[-100:] == -7).all()
        if self.committed:
            assert results[0] == results[1] == results[2]

    @property
    def is_right(self) -> bool:
        right = [6 * number for number in range(COUNT)]
        return all(peer.result.tolist() == right for peer in self.peers.values())


def split(data: bytes) -> list[bytes]:
    frames: list[bytes] = []
    while data:
        (length,) = struct.unpack_from("<I", data, 4)
        frames.append(data[: HEADER_BYTES + length])
        data = data[HEADER_BYTES + length :]
    return frames


STALE = encode_frame(FrameHeader(FrameKind.DATA, OperationId(1, 0, 0, 0, 0), 0, 80, 16), b"x" * 16)
UNFIT = encode_frame(FrameHeader(FrameKind.DATA, OPERATION, 9, 80, 16), b"x" * 16)


@settings(max_examples=200)
@given(SEEDS)
def test_frames_lost_doubled_swapped_and_cut_change_no_result(seed: int) -> None:
    """Whole frames arrive in any order, twice, late, among others, or the connection ends.

    From some moment on, the system may refuse to read memory.
    """
    rng = Random(seed)
    mischief, refusing = rng.choice((0.0, 0.1, 0.5)), rng.choice((0.0, 0.1))

    def spoil(frames: list[bytes]) -> bytes:
        spoilt: list[bytes] = []
        if rng.random() < refusing and (memory := rng.choice(ring.memories)) is not None:
            memory.forbidden = True
        for frame in frames:
            if frame[0] not in (FrameKind.DATA, FrameKind.ANNOUNCE) or rng.random() >= mischief:
                spoilt.append(frame)
                continue
            match rng.randrange(6):
                case 0:
                    spoilt += [frame, frame]
                case 1:
                    spoilt.insert(rng.randrange(len(spoilt) + 1), frame)
                case 2:
                    spoilt += [STALE, frame]
                case 3:
                    spoilt += [UNFIT, frame]
                case 4:
                    return b"".join(spoilt) + frame[: rng.randrange(48)] + b"\xff" * 48
                case _:
                    pass  # lost, with whatever said that it was sent
        return b"".join(spoilt)

    ring = Ring(rng, spoil)
    ring.run(reconnects_max=400)
    ring.check()
    assert ring.committed
    assert ring.is_right


@settings(max_examples=200)
@given(SEEDS)
def test_flipped_bits_never_leave_members_with_different_results(seed: int) -> None:
    """What a member sends counts as its contribution, right or wrong; but all get the same."""
    rng = Random(seed)

    def spoil(frames: list[bytes]) -> bytes:
        data = bytearray(b"".join(frames))
        while data and rng.random() < 0.3:
            place = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[place] ^= 1 << rng.randrange(8)
                case 1:
                    data[place:place] = rng.randbytes(rng.randrange(1, 60))
                case _:
                    del data[place : place + rng.randrange(1, 60)]
        return bytes(data)

    ring = Ring(rng, spoil)
    ring.run()
    ring.check()
