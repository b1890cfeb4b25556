"""Rings of data planes that lose members at any moment: repaired exactly when that is possible.

Frames travel in any order, as on many lanes. Beside each data plane runs a model that knows nothing
of steps and indices: whose contributions each segment holds at each rank. What a ring can still
finish, and what the result must be, is worked out from that.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.machines.repair import find_gaps
from pccl.protocol.checksum import payload_hash
from pccl.protocol.data_type import DataType
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import Descriptor, OperationId, PeerId, ReduceOp
from pccl.runtime.collective import memory
from pccl.runtime.collective.data_plane import DataPlane
from pccl.runtime.collective.operand import Operand, borrow, borrow_many
from pccl.stress.sim.fold import fold
from pccl.transports.link import Link
from pccl.transports.outgoing import Payload

Array = npt.NDArray[Any]

OPERATION = OperationId(1, 0, 1, 5, 0)
SEGMENT_BYTES = 8


class WireLink(Link):
    """What it is given waits in the world's bag."""

    def __init__(self, world: World, source: PeerId, peer: PeerId) -> None:
        super().__init__(peer)
        self.world = world
        self.source = source

    @property
    def up(self) -> bool:
        return self.peer not in self.world.lost

    def send(
        self, header: FrameHeader, payload: Payload, number: int, check: int | None = None
    ) -> None:
        self.world.bag.append((self, replace(header, check=check or 0), payload))

    def ask(self, header: FrameHeader) -> None:
        self.world.bag.append((self, header, memoryview(b"")))

    def revoke(self, operation: OperationId) -> None:
        self.world.bag = [entry for entry in self.world.bag if entry[0] is not self]


class ArrivalLane:
    """The receiver's end; answers go back into the bag."""

    def __init__(self, back: WireLink) -> None:
        self.link: Any = back
        self.carried: dict[OperationId, list[int]] = {}

    def say(self, header: FrameHeader, payload: bytes = b"") -> None:
        self.link.world.bag.append((self.link, header, memoryview(payload)))


class World:
    """One operation on all ranks of a ring."""

    def __init__(self, rng: random.Random, size: int, count: int, root: int | None) -> None:
        self.rng = rng
        self.ring = tuple(PeerId(n + 1) for n in range(size))
        self.lost: list[PeerId] = []
        self.bag: list[tuple[WireLink, FrameHeader, Payload]] = []
        self.done: dict[PeerId, bytes] = {}
        self.root = root
        self.inputs = [np.random.default_rng([size, count, n]).standard_normal(count)
                       for n in range(size)]  # fmt: skip
        self.buffers = [values.copy() for values in self.inputs]
        self.links = {(a, b): WireLink(self, a, b) for a in self.ring for b in self.ring}
        self.planes = {peer: self._plane(peer) for peer in self.ring}
        self.held: dict[tuple[PeerId, int], int] = {}
        """(peer, offset) -> how many have contributed to what is there, beyond the own input."""
        if root is None:
            what = Descriptor(DataType.DOUBLE, ReduceOp.SUM, count)
        else:
            what = Descriptor.broadcast(DataType.DOUBLE, count, root)
        self.what = what
        self.attempt = (OPERATION, self.ring)
        memory.PART_BYTES_MIN = rng.choice((0, 1 << 20))  # are lists gathered? never, always
        self.operands = [self._borrow(buffer) for buffer in self.buffers]
        for peer in self.ring:
            self.planes[peer].post(OPERATION, what, self.operands[peer - 1], self.ring, peer)
        for peer in self.ring:
            self.planes[peer].begin(OPERATION)

    def _borrow(self, buffer: npt.NDArray[np.float64]) -> Operand:
        """One tensor, or a list of tensors."""
        if self.rng.random() < 0.5:
            return borrow(buffer)
        ends = sorted(self.rng.randint(0, len(buffer)) for _ in range(self.rng.randint(1, 9)))
        return borrow_many(np.split(buffer, ends))

    def _plane(self, peer: PeerId) -> DataPlane:
        return DataPlane(
            lambda other: self.links[peer, other],
            lambda operation: False,
            lambda operation, digest: self.done.__setitem__(peer, digest),
            SEGMENT_BYTES,
        )

    def deliver_one(self) -> None:
        link, header, payload = self.bag.pop(self.rng.randrange(len(self.bag)))
        if link.peer in self.lost or link.source in self.lost:
            return
        lane: Any = ArrivalLane(self.links[link.peer, link.source])
        made = payload() if callable(payload) else payload
        data = b"".join(made) if isinstance(made, list) else bytes(made)
        check = payload_hash(data)
        assert header.check in (0, check)
        sink = self.planes[link.peer].frame_started(lane, replace(header, check=check))
        received = 0
        while received < len(data):
            part = sink.memory(received)
            take = min(len(part), len(data) - received, 5)
            part[:take] = data[received : received + take]
            received += take
        sink.complete()

    def run(self, frames: int | None = None) -> None:
        while self.bag and frames != 0:
            self.deliver_one()
            frames = None if frames is None else frames - 1

    def lose(self, peer: PeerId) -> None:
        self.lost.append(peer)

    def repair(self) -> bool:
        """What master and peers do; whether all who were asked said yes."""
        operation, ring = self.attempt
        gaps = find_gaps(ring, self.lost)
        asked = [gap for gap in gaps if gap.downstream not in self.done]
        for gap in asked:
            plane = self.planes[gap.downstream]
            if not plane.close_gap(operation, gap.upstream, gap.size):
                return False
            self.run(self.rng.choice([0, 0, 3]))
        for gap in asked:
            self.planes[gap.upstream].send_across(operation, gap.downstream, gap.size)
            self.run(self.rng.choice([0, 0, 3]))
        return True

    def try_again(self, operation: OperationId) -> None:
        """The survivors' next attempt."""
        for peer in self.survivors:
            for before in list(self.planes[peer].transfers):
                self.planes[peer].end(before, committed=False)
        self.bag.clear()
        self.done.clear()
        ring = tuple(self.survivors)
        self.attempt = (operation, ring)
        for peer in ring:
            self.planes[peer].post(operation, self.what, self.operands[peer - 1], ring, peer)
        for peer in self.rng.sample(ring, len(ring)):
            self.planes[peer].begin(operation)
            self.run(self.rng.choice([0, 0, 4]))

    # -- the model ---------------------------------------------------------------------------

    @property
    def survivors(self) -> list[PeerId]:
        return [peer for peer in self.ring if peer not in self.lost]

    def check_done(self, expected: Array) -> None:
        """All survivors are done, with this result."""
        for peer in self.survivors:
            assert peer in self.done
            assert self.buffers[peer - 1].tobytes() == expected.tobytes()
        assert len({self.done[peer] for peer in self.survivors}) == 1

    def check_restored(self) -> None:
        """Survivors that give it up have their inputs again."""
        for peer in self.survivors:
            self.planes[peer].end(OPERATION, committed=False)
            assert self.buffers[peer - 1].tobytes() == self.inputs[peer - 1].tobytes()

    def expected(self) -> Array:
        if self.root is not None:
            return self.inputs[self.root]
        size, count = len(self.ring), len(self.inputs[0])
        result = np.empty(count)
        ends = np.cumsum([count // size + (c < count % size) for c in range(size)])
        for chunk, end in enumerate(ends):
            begin = ends[chunk - 1] if chunk else 0
            total = self.inputs[chunk][begin:end]
            for hop in range(1, size):
                total = total + self.inputs[(chunk + hop) % size][begin:end]
            result[begin:end] = total
        return result

    def can_be_finished(self) -> bool:
        """Whether of each element some survivor holds a value with all that the lost ones gave."""
        if self.root is not None:
            source = self.inputs[self.root]
            left = [self.buffers[peer - 1] for peer in self.survivors]
            return all(any(buffer[i] == source[i] for buffer in left) for i in range(len(source)))
        return all(self._element_survives(i) for i in range(len(self.inputs[0])))

    def _element_survives(self, element: int) -> bool:
        size, count = len(self.ring), len(self.inputs[0])
        sizes = [count // size + (c < count % size) for c in range(size)]
        chunk = next(c for c in range(size) if element < sum(sizes[: c + 1]))
        total = self.inputs[chunk][element]
        lost_so_far = {self.ring[chunk]} & set(self.lost)
        held: list[set[float]] = [{float(self.buffers[p - 1][element])} for p in self.survivors]
        everything = lost_so_far == set(self.lost)
        good: set[float] = set()
        for hop in range(1, size):
            rank = (chunk + hop) % size
            total = total + self.inputs[rank][element]
            lost_so_far |= {self.ring[rank]} & set(self.lost)
            everything = lost_so_far == set(self.lost)
            if everything:
                good.add(float(total))
        return any(values & good for values in held)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[tuple[int, PeerId]]]:
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    size = draw(st.integers(2, 7))
    count = draw(st.integers(1, 3 * size))
    root = draw(st.none() | st.integers(0, size - 1))
    world = World(rng, size, count, root)
    frames = 2 * (size - 1) * count
    losses = draw(st.integers(1, size - 1))
    victims = rng.sample(world.ring, losses)
    return world, [(rng.randrange(frames), victim) for victim in victims]


@settings(max_examples=600, deadline=None)
@given(worlds())
def test_it_is_repaired_exactly_when_that_is_possible(
    case: tuple[World, list[tuple[int, PeerId]]],
) -> None:
    world, losses = case
    for frames, victim in losses:
        world.run(frames)
        world.lose(victim)
        possible = world.can_be_finished()
        assert world.repair() == possible
        if not possible:
            return
    world.run()
    world.check_done(world.expected())


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_inputs_are_restored_when_a_repair_was_not_possible(
    case: tuple[World, list[tuple[int, PeerId]]],
) -> None:
    world, losses = case
    for frames, victim in losses:
        world.run(frames)
        world.lose(victim)
        if not world.repair():
            break
    world.check_restored()


NEXT = [OperationId(1, 0, view, 5, 0) for view in range(2, 9)]


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_another_attempt_is_that_of_the_survivors_alone(
    case: tuple[World, list[tuple[int, PeerId]]],
) -> None:
    """Loss after loss, each followed by another attempt on the same memory."""
    world, losses = case
    losses = losses[: len(world.ring) - 2]
    if world.root is not None or not losses:
        return
    for operation, (frames, victim) in zip(NEXT, losses, strict=False):
        world.run(frames)
        world.lose(victim)
        world.try_again(operation)
    world.run()
    inputs = [world.inputs[peer - 1] for peer in world.survivors]
    world.check_done(fold(inputs, ReduceOp.SUM))


def test_what_came_before_the_weights_leaves_no_trace() -> None:
    values = np.arange(9.0)
    plane = DataPlane(Link, lambda operation: False, lambda operation, digest: None, SEGMENT_BYTES)
    what = Descriptor(DataType.DOUBLE, ReduceOp.AVG, 9, weighted=True)
    ring = (PeerId(1), PeerId(2), PeerId(3))
    plane.post(OPERATION, what, borrow(values), ring, ring[0])
    header = FrameHeader(FrameKind.DATA, OPERATION, 0, 48, 8)
    lane: Any = ArrivalLane(WireLink(World(random.Random(1), 3, 9, None), ring[0], ring[2]))
    sink = plane.frame_started(lane, header)
    sink.memory(0)[:] = np.array([5.0]).tobytes()
    sink.complete()
    assert values.tolist() == [0, 1, 2, 3, 4, 5, 5, 7, 8]
    plane.end(OPERATION, committed=False)
    assert values.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("frames", [0, 20, 60])
def test_every_missing_segment_comes_once(size: int, frames: int) -> None:
    """The chain loses a rank in its middle: from then on everybody gets what he lacks, once."""
    world = World(random.Random(frames), size, 20, 0)
    world.run(frames)
    world.lose(world.ring[1])
    transfers = [world.planes[peer].transfers[OPERATION] for peer in world.survivors]
    missing = sum(transfer.lacking for transfer in transfers)
    waiting = sum(
        link.peer not in world.lost and link.source not in world.lost for link, _, _ in world.bag
    )
    sent_bytes = sum(transfer.tx_bytes for transfer in transfers)
    assert world.repair()
    world.run()
    sent_bytes = sum(transfer.tx_bytes for transfer in transfers) - sent_bytes
    assert sent_bytes == SEGMENT_BYTES * (missing - waiting)
    assert all(transfer.lacking == 0 for transfer in transfers)
