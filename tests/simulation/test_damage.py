"""One bit flips on the way, somewhere in every kind of frame: it costs a lane, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from pccl.collectives.schedules.direct import PUBLISH
from pccl.machines.peer.events import ReduceCall
from pccl.machines.peer.machine import Standing
from pccl.protocol.data_type import DataType
from pccl.protocol.frame import HEADER_BYTES, FrameHeader, FrameKind, decode_header
from pccl.protocol.types import (
    UNQUANTIZED,
    Algorithm,
    Descriptor,
    Quantization,
    ReduceOp,
    WireFormat,
)
from pccl.runtime.collective.operand import borrow
from pccl.runtime.control.greeting import Greeting
from pccl.runtime.control.stream import ControlStream
from pccl.runtime.requests import ReduceInfo, ReduceRequest
from pccl.transports.link import Lane
from pccl.transports.sim.connection import SimConnection
from tests.support.virtual_runs import VirtualRun

PEERS = 3
COUNT = 3 * 96
"""Values of 4 bytes: three chunks of three segments."""

FIELDS = {
    "kind": 0,
    "flags": 1,
    "step": 2,
    "length": 4,
    "a length far too long": 7,
    "term": 8,
    "group": 12,
    "view": 16,
    "n": 20,
    "tag": 24,
    "offset": 32,
    "check": 40,
    "what": 48,
    "seal": 52,
}
PAYLOAD = ("first", "middle", "last")


def position(place: str, header: FrameHeader) -> int:
    """Of the byte, counted from the beginning of the frame."""
    if place in FIELDS:
        return FIELDS[place]
    of_payload = {"first": 0, "middle": header.length // 2, "last": header.length - 1}
    return HEADER_BYTES + of_payload[place]


@dataclass
class OneFlip:
    """Flips a bit in the ``skip``-th frame that is wanted and arrives in one portion."""

    wanted: Callable[[FrameHeader], bool]
    place: str
    skip: int = 0
    hits: list[FrameHeader] = field(default_factory=list[FrameHeader])

    def changed(self, end: SimConnection, data: memoryview) -> memoryview:
        lane = end.receiver
        if self.hits or not isinstance(lane, Lane):
            return data
        begun = lane._sink is not None  # pyright: ignore[reportPrivateUsage]
        done, header = lane._received, lane._header  # pyright: ignore[reportPrivateUsage]
        length = header.length if header is not None else 0
        if not begun and done:
            return data  # in the middle of a header
        at = length - done if begun else 0
        while at + HEADER_BYTES <= len(data):
            header = decode_header(data[at : at + HEADER_BYTES])
            end_of_it = at + HEADER_BYTES + header.length
            if self.wanted(header) and end_of_it <= len(data):
                self.skip -= 1
                if self.skip < 0:
                    self.hits.append(header)
                    damaged = bytearray(data)
                    damaged[at + position(self.place, header)] ^= 0x10
                    return memoryview(damaged)
            at = end_of_it
        return data


class World(VirtualRun):
    """Three peers, of whom each knows what the sum is."""

    def __init__(self, *, eager: bool = False, token: bytes | None = None) -> None:
        network = {"latency_ns": 5_000_000, "bytes_per_s": 100_000, "window_bytes": 4096}
        ahead = 1 << 16 if eager else 0
        super().__init__(
            [0] * PEERS,
            {**network, "ragged": False},
            token=token,
            segment_bytes=128,
            lanes=4,
            eager_bytes_max=ahead,
        )

    async def reduce(self, rank: int, algorithm: Algorithm, how: Quantization) -> ReduceInfo:
        values = np.arange(COUNT, dtype=np.float32) % 64 * 4**rank
        result = np.empty_like(values)
        before = values.copy()
        descriptor = Descriptor(
            DataType.FLOAT, ReduceOp.SUM, COUNT, quantization=how, algorithm=algorithm, forced=True
        )
        info = await self.engines[rank].reduce(
            ReduceRequest(borrow(values, result), ReduceCall(0, 0, descriptor))
        )
        assert np.array_equal(values, before)
        if not how.active:
            assert np.array_equal(result, np.arange(COUNT) % 64 * 21)
        self.results.append(result.tobytes())
        return info

    def reduce_all(
        self, algorithm: Algorithm, how: Quantization = UNQUANTIZED, *, times: int = 1
    ) -> None:
        """All of them; nobody has to repeat anything, and nobody is removed."""
        self.results: list[bytes] = []

        async def main() -> None:
            await self.start()
            for _ in range(times):
                self.results.clear()
                works = [self.reduce(rank, algorithm, how) for rank in range(PEERS)]
                for info in await self.all(works):
                    assert info.attempts == 1
                    assert len(info.contributors) == PEERS
                assert len(set(self.results)) == 1
            assert {e.machine.standing for e in self.engines} == {Standing.MEMBER}
            await self.close()

        self.run_test(main())


def is_data(steps: range) -> Callable[[FrameHeader], bool]:
    return lambda header: header.kind is FrameKind.DATA and header.step in steps


INT8 = Quantization(WireFormat.INT8, 32)
HOW: dict[str, tuple[Algorithm, Quantization, range]] = {
    "reduce-scatter of a ring": (Algorithm.RING, UNQUANTIZED, range(2)),
    "gather of a ring": (Algorithm.RING, UNQUANTIZED, range(2, 4)),
    "quantized partial sum": (Algorithm.RING, INT8, range(2)),
    "quantized gather": (Algorithm.RING, INT8, range(2, 4)),
    "contribution to a star": (Algorithm.STAR, UNQUANTIZED, range(1)),
    "result of a star": (Algorithm.STAR, UNQUANTIZED, range(PUBLISH, PUBLISH + 1)),
    "contribution to a mesh": (Algorithm.MESH, UNQUANTIZED, range(1)),
    "result of a mesh": (Algorithm.MESH, INT8, range(PUBLISH, PUBLISH + 1)),
}


def damages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "damaged on the way" in r.message]


@pytest.mark.parametrize("place", [*FIELDS, *PAYLOAD])
@pytest.mark.parametrize("how", HOW)
def test_one_flipped_bit_costs_one_lane(
    how: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm, quantization, steps = HOW[how]
    world = World()
    flip = OneFlip(is_data(steps), place, skip=2)
    world.network.noises.append(flip)
    world.reduce_all(algorithm, quantization)
    assert len(flip.hits) == 1
    assert len(damages(caplog)) == 1
    assert damages(caplog)[0].startswith("closed a lane from ")


@pytest.mark.parametrize("place", ["offset", "what", "length", *PAYLOAD])
@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.STAR, Algorithm.MESH])
def test_one_flipped_bit_of_what_goes_ahead(
    algorithm: Algorithm, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the early store, or in the place of a call that is not known to have started."""
    world = World(eager=True)
    flip = OneFlip(lambda header: header.kind is FrameKind.DATA and header.what != 0, place)
    world.network.noises.append(flip)
    world.reduce_all(algorithm, times=3)
    assert len(flip.hits) == 1
    assert len(damages(caplog)) == 1


@pytest.mark.parametrize("kind", [FrameKind.QUERY, FrameKind.HAVE])
@pytest.mark.parametrize("place", [*FIELDS, *PAYLOAD])
def test_one_flipped_bit_of_what_repairs_a_lost_lane(
    kind: FrameKind, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A lane is lost to damage, and the question about it, or the answer, is damaged, too."""
    if place in PAYLOAD and kind is FrameKind.QUERY:
        place = "seal"  # it has no payload
    world = World()
    first = OneFlip(is_data(range(2)), "middle", skip=2)
    second = OneFlip(lambda header: header.kind is kind, place)
    world.network.noises += [first, second]
    world.reduce_all(Algorithm.RING)
    assert [len(flip.hits) for flip in (first, second)] == [1, 1]
    assert len(damages(caplog)) == 2


@dataclass
class OnePortion:
    """Flips a bit in the ``skip``-th portion that a receiver of a kind is handed."""

    receiver: type
    skip: int
    bit: int
    flips: int = 0

    def changed(self, end: SimConnection, data: memoryview) -> memoryview:
        if isinstance(end.receiver, self.receiver):
            self.skip -= 1
            if self.skip == -1:
                self.flips += 1
                damaged = bytearray(data)
                bit = self.bit % (8 * len(damaged))
                damaged[bit // 8] ^= 1 << bit % 8
                return memoryview(damaged)
        return data


@pytest.mark.parametrize("bit", [0, 27, 60, 100, 130, 200, 1111])
@pytest.mark.parametrize("skip", [0, 1, 2, 5, 9, 14, 20, 26, 33])
def test_one_flipped_bit_of_a_control_connection(
    skip: int, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A request, a start, a digest, a roster: whichever it is, everybody stays, and is right."""
    world = World()
    flip = OnePortion(ControlStream, skip, bit)
    world.network.noises.append(flip)
    world.reduce_all(Algorithm.RING)
    assert flip.flips == 1
    (line,) = damages(caplog)
    assert line.startswith("closed a control connection with ")


@pytest.mark.parametrize("token", [None, b"a secret that all of them know"])
@pytest.mark.parametrize("skip", range(12))
@pytest.mark.parametrize("bit", [3, 37, 50, 71, 400, 1011])
def test_one_flipped_bit_of_a_greeting(skip: int, bit: int, token: bytes | None) -> None:
    """Nobody takes it for a wrong version or a wrong token, for which nobody would try again."""
    world = World(token=token)
    flip = OnePortion(Greeting, skip, bit)
    world.network.noises.append(flip)
    world.reduce_all(Algorithm.RING)
    assert flip.flips == 1
