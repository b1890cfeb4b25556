"""The ring against an independently written fold; layout, received set and digest."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.collectives.bitmap import missing_in, to_bitmap
from pccl.collectives.digest import DIGEST_BYTES, ResultDigest
from pccl.collectives.layout import (
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    Segment,
    SegmentLayout,
    segment_bytes_for,
)
from pccl.collectives.reductions import Reduction, Scratch
from pccl.collectives.route import Hop
from pccl.collectives.schedules.ring import RingSchedule
from pccl.protocol.data_type import DataType
from pccl.protocol.types import ReduceOp
from tests.support.claims import check_drawn_claims, check_spoilt_claims

Array = npt.NDArray[Any]

# -- the expectation, written without the code under test --------------------------------------


def chunk_bounds(count: int, world_size: int) -> list[tuple[int, int]]:
    """The first ``count mod world_size`` chunks are one element longer."""
    sizes = [count // world_size] * world_size
    for index in range(count % world_size):
        sizes[index] += 1
    ends = list(itertools.accumulate(sizes))
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def folded(inputs: list[Array], op: ReduceOp) -> Array:
    """Element by element: what arrives plus the own, starting at the rank of the chunk."""
    world_size = len(inputs)
    result = np.empty_like(inputs[0])
    for chunk, (start, end) in enumerate(chunk_bounds(len(inputs[0]), world_size)):
        for element in range(start, end):
            incoming = inputs[chunk][element]
            with np.errstate(all="ignore"):
                for hop in range(1, world_size):
                    incoming = incoming + inputs[(chunk + hop) % world_size][element]
                if op is ReduceOp.AVG and result.dtype.kind == "f":
                    incoming = incoming / result.dtype.type(world_size)
            if op is ReduceOp.AVG and result.dtype.kind == "i":
                quotient = abs(int(incoming)) // world_size
                incoming = quotient if incoming >= 0 else -quotient
            result[element] = incoming
    return result


def expected_traffic(count: int, itemsize: int, world_size: int, rank: int) -> tuple[int, int]:
    """Bytes (sent, received): every chunk twice, except the ones that need not travel."""
    sizes = [(end - start) * itemsize for start, end in chunk_bounds(count, world_size)]
    owned = (rank + 1) % world_size
    # Reduce-scatter: all chunks are sent but the one that ends here; all received but the own.
    # All-gather: all are sent but the one whose owner is next; all received but the owned one.
    sent = (sum(sizes) - sizes[owned]) + (sum(sizes) - sizes[(rank + 2) % world_size])
    received = (sum(sizes) - sizes[rank]) + (sum(sizes) - sizes[owned])
    return sent, received


# -- a rank, as a runtime binds it to memory, but with lists instead of links --------------------


class Rank:
    def __init__(self, schedule: RingSchedule, own: Array, op: ReduceOp) -> None:
        self.schedule = schedule
        self.own = own
        data_type = DataType.from_numpy_dtype(own.dtype)
        self.reduction = Reduction(data_type, op, schedule.world_size, Scratch())
        self.result = np.full_like(own, 77)
        self.missing = set(range(schedule.incoming.count))
        self.digest = ResultDigest(schedule.layout.segment_count)
        self.finals: set[int] = set()
        self.sent_bytes = 0
        self.received_bytes = 0
        self.outbox: list[tuple[int, Segment, Array]] = []
        """Descriptors, as in a send queue: memory is read when a segment leaves, not before."""
        self.sent_indices: list[int] = []

    def begin(self) -> None:
        for segment in self.schedule.initial_sends:
            self._send(0, segment, self.own)

    def _slice(self, array: Array, segment: Segment) -> Array:
        itemsize = array.dtype.itemsize
        start, stop = segment.offset // itemsize, (segment.offset + segment.length) // itemsize
        part: Array = array[start:stop]
        return part

    def _send(self, step: int, segment: Segment, source: Array) -> None:
        self.outbox.append((step, segment, self._slice(source, segment)))
        self.sent_indices.append(self.schedule.outgoing.legs[step][segment.offset].number)
        self.sent_bytes += segment.length

    def take(self, step: int, offset: int, data: bytes) -> None:
        """A segment arrives for the first time."""
        found = self.schedule.incoming.find(step, offset, len(data))
        assert found is not None
        index, segment = found.number, found.segment
        self.missing.remove(index)
        causes = self.schedule.arrivals[step]
        place = self._slice(self.result, segment)
        place[:] = np.frombuffer(data, place.dtype)
        if causes.reduce:
            self.reduction.combine(place, self._slice(self.own, segment), finish=causes.finish)
        if causes.final:
            assert segment.position not in self.finals
            self.finals.add(segment.position)
            self.digest.add(segment.position, memoryview(place.tobytes()))
        if causes.forward:
            self._send(step + 1, segment, self.result)
        self.received_bytes += segment.length


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Array], int, ReduceOp]:
    world_size = draw(st.integers(2, 12))
    count = draw(st.integers(1, world_size) | st.integers(1, 4 * world_size + 5))
    dtype = np.dtype(draw(st.sampled_from(["float32", "int64", "float64", "int32"])))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    magnitudes = draw(st.sampled_from([[1.0], [1e-30, 1.0, 1e30], [1e-7, 1.0, 3e7], [3e38]]))
    inputs: list[Array] = []
    for _ in range(world_size):
        if dtype.kind == "f":
            scale = rng.choice(magnitudes, count)
            with np.errstate(all="ignore"):
                inputs.append((rng.standard_normal(count) * scale).astype(dtype))
        else:
            info = np.iinfo(np.int64 if dtype.itemsize == 8 else np.int32)
            inputs.append(rng.integers(info.min, info.max, count, info.dtype, endpoint=True))
            if draw(st.booleans()):
                inputs[-1] //= 1 << (dtype.itemsize * 8 - 8)
    segment_bytes = dtype.itemsize * draw(st.integers(1, 5)) + draw(st.integers(0, 3))
    return inputs, segment_bytes, draw(st.sampled_from([ReduceOp.SUM, ReduceOp.AVG]))


@settings(max_examples=150)
@given(cases(), st.randoms(use_true_random=True), st.floats(0, 0.5))
def test_every_rank_holds_the_fold_whatever_the_order_of_arrival(
    case: tuple[list[Array], int, ReduceOp], rng: random.Random, repeat: float
) -> None:
    inputs, segment_bytes, op = case
    world_size, count, itemsize = len(inputs), len(inputs[0]), inputs[0].dtype.itemsize
    ranks = [
        Rank(RingSchedule(rank, SegmentLayout(count, itemsize, world_size, segment_bytes)), own, op)
        for rank, own in enumerate(inputs)
    ]
    for rank in ranks:
        rank.begin()
    copies: list[tuple[int, tuple[int, int, bytes]]] = []
    assert not any(rank.schedule.sends_finals for rank in ranks)
    while True:
        ready: list[Rank] = [rank for rank in ranks if rank.outbox]
        if not ready and not copies:
            break
        if copies and (not ready or rng.random() < 0.3):
            target, message = copies.pop(rng.randrange(len(copies)))
            found = ranks[target].schedule.incoming.find(message[0], message[1], len(message[2]))
            assert found is not None
            assert (
                found.number not in ranks[target].missing
            )  # a second copy: dropped before any memory
            continue
        sender = ready[rng.randrange(len(ready))]
        step, segment, memory = sender.outbox.pop(rng.randrange(len(sender.outbox)))
        message = (step, segment.offset, memory.tobytes())
        downstream = sender.schedule.downstream
        assert ranks[downstream].schedule.upstream == sender.schedule.rank
        ranks[downstream].take(*message)
        if rng.random() < repeat:
            copies.append((downstream, message))

    expected = folded(inputs, op).tobytes()
    for rank in ranks:
        assert rank.result.tobytes() == expected
        assert not rank.missing
        assert len(rank.finals) == rank.schedule.layout.segment_count
        assert sorted(rank.sent_indices) == list(range(rank.schedule.outgoing.count))
        traffic = (rank.sent_bytes, rank.received_bytes)
        assert traffic == expected_traffic(count, itemsize, world_size, rank.schedule.rank)
    assert len({rank.digest.value() for rank in ranks}) == 1


def test_the_order_of_the_fold_matters_in_these_tests() -> None:
    """Three magnitudes at which another order would give other bits."""
    inputs = [np.array([value], np.float32) for value in (1e8, 1.0, -1e8)]
    assert folded(inputs, ReduceOp.SUM)[0] == 0.0  # (1e8 + 1) - 1e8
    turned = [inputs[0], inputs[2], inputs[1]]
    assert folded(turned, ReduceOp.SUM)[0] == 1.0  # (1e8 - 1e8) + 1


# -- the schedule ------------------------------------------------------------------------------

SHAPES = st.tuples(
    st.integers(2, 12), st.integers(1, 80), st.sampled_from([1, 2, 4, 8]), st.integers(1, 40)
)


@settings(max_examples=150)
@given(SHAPES)
def test_neighbours_agree_on_every_number(shape: tuple[int, int, int, int]) -> None:
    world_size, count, itemsize, per_segment = shape
    layout = SegmentLayout(count, itemsize, world_size, itemsize * per_segment)
    schedules = [RingSchedule(rank, layout) for rank in range(world_size)]
    for sender in schedules:
        receiver = schedules[(sender.rank + 1) % world_size]
        assert (sender.downstream, receiver.upstream) == (receiver.rank, sender.rank)
        outgoing = [(hop.step, hop.segment) for hop in sender.outgoing.hops]
        assert sender.outgoing.count == receiver.incoming.count == len(outgoing)
        for index, (step, segment) in enumerate(outgoing):
            hop = Hop(index, step, segment)
            assert sender.outgoing.legs[step][segment.offset] == hop
            assert receiver.incoming.find(step, segment.offset, segment.length) == hop
        initial = [segment for step, segment in outgoing if step == 0]
        assert list(sender.initial_sends) == initial
        partial = sum(1 for step, _ in outgoing if step < world_size - 1)
        assert receiver.first_gather_index == partial


@settings(max_examples=200)
@given(SHAPES, st.data())
def test_what_is_not_expected_is_not_found(
    shape: tuple[int, int, int, int], data: st.DataObject
) -> None:
    world_size, count, itemsize, per_segment = shape
    layout = SegmentLayout(count, itemsize, world_size, itemsize * per_segment)
    receiver = RingSchedule(data.draw(st.integers(0, world_size - 1)), layout)
    upstream = RingSchedule(receiver.upstream, layout)
    check_drawn_claims(data, upstream, receiver, 2 * world_size + 1)


@settings(max_examples=100)
@given(SHAPES)
def test_a_claim_with_one_thing_wrong_is_not_found(shape: tuple[int, int, int, int]) -> None:
    world_size, count, itemsize, per_segment = shape
    layout = SegmentLayout(count, itemsize, world_size, itemsize * per_segment)
    schedules = [RingSchedule(rank, layout) for rank in range(world_size)]
    for receiver in schedules:
        check_spoilt_claims(schedules[receiver.upstream], receiver)


def test_a_ring_needs_two_and_a_rank_in_it() -> None:
    layout = SegmentLayout(4, 4, 2, 16)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="invalid ring"):
            RingSchedule(rank, layout)
    with pytest.raises(ValueError, match="invalid ring"):
        RingSchedule(0, SegmentLayout(4, 4, 1, 16))


def test_a_ring_of_nothing_has_nothing_to_do() -> None:
    layout = SegmentLayout(0, 1, 3, 64)
    assert (layout.segment_count, layout.nbytes, list(layout.segments())) == (0, 0, [])
    schedule = RingSchedule(1, layout)
    assert (schedule.incoming.count, schedule.outgoing.count) == (0, 0)
    assert schedule.initial_sends == ()
    assert schedule.incoming.find(0, 0, 0) is None


# -- the layout --------------------------------------------------------------------------------


@settings(max_examples=200)
@given(SHAPES, st.integers(0, 7))
def test_the_layout_partitions_exactly(shape: tuple[int, int, int, int], odd: int) -> None:
    world_size, count, itemsize, per_segment = shape
    segment_bytes = itemsize * per_segment + odd % itemsize
    layout = SegmentLayout(count, itemsize, world_size, segment_bytes)
    offset = position = 0
    for index, (start, end) in enumerate(chunk_bounds(count, world_size)):
        assert offset == start * itemsize
        segments = layout.chunk(index)
        assert len(segments) == math.ceil((end - start) / per_segment)
        for segment in segments:
            assert (segment.position, segment.offset) == (position, offset)
            assert 0 < segment.length <= segment_bytes
            assert segment.length % itemsize == 0
            position += 1
            offset += segment.length
        assert offset == end * itemsize
    chunks = [layout.chunk(index) for index in range(world_size)]
    assert list(layout.segments()) == list(itertools.chain(*chunks))
    assert offset == layout.nbytes == count * itemsize
    assert position == layout.segment_count


@pytest.mark.parametrize("wrong", [(-1, 4, 2, 64), (1, 0, 2, 64), (1, 4, 0, 64), (1, 8, 2, 7)])
def test_impossible_layouts(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="invalid layout"):
        SegmentLayout(*wrong)


@given(st.integers(1, 1 << 40), st.integers(2, 1000))
def test_segments_have_a_sensible_size(tensor_bytes: int, world_size: int) -> None:
    size = segment_bytes_for(tensor_bytes, world_size)
    assert SEGMENT_BYTES_MIN <= size <= SEGMENT_BYTES_MAX <= 1 << 20
    assert size % 4096 == 0
    chunk = tensor_bytes / world_size
    if chunk >= 4 * SEGMENT_BYTES_MIN:
        assert chunk / size > 3  # a few segments a chunk: the steps overlap
    if chunk <= 4 * SEGMENT_BYTES_MAX:
        assert chunk / size <= 4  # and no more: each costs a fixed time


@given(st.integers(1, 1 << 34), st.integers(2, 1000))
def test_near_members_move_whole_chunks(tensor_bytes: int, world_size: int) -> None:
    size = segment_bytes_for(tensor_bytes, world_size, near=True)
    assert size % 4096 == 0
    chunk = tensor_bytes / world_size
    if chunk <= 4 << 20:
        assert size == max(math.ceil(chunk / 4096) * 4096, 128 << 10)
    else:  # in equal parts, as few as possible
        assert size <= 4 << 20
        assert math.ceil(chunk / size) == math.ceil(chunk / (4 << 20))


# -- the bitmap of what is here ------------------------------------------------------------------


@settings(max_examples=200)
@given(st.integers(0, 70), st.data())
def test_a_bitmap_says_what_is_missing(size: int, data: st.DataObject) -> None:
    numbers = st.integers(0, max(size - 1, 0))
    missing = set(data.draw(st.lists(numbers, max_size=100)) if size else [])
    bitmap = to_bitmap(missing, size)
    number = sum(1 << index for index in range(size) if index not in missing)
    assert bitmap == number.to_bytes((size + 7) // 8, "little")
    assert missing_in(memoryview(bitmap), size) == sorted(missing)


@settings(max_examples=60)
@given(st.integers(0, 70), st.binary(max_size=12))
def test_foreign_bitmaps(size: int, bitmap: bytes) -> None:
    if len(bitmap) != (size + 7) // 8:
        with pytest.raises(ValueError, match="bitmap of"):
            missing_in(bitmap, size)
    else:
        assert all(0 <= index < size for index in missing_in(bitmap, size))


# -- the digest --------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=8), st.randoms(use_true_random=True))
def test_a_digest_depends_on_positions_and_not_on_the_order_of_arrival(
    parts: list[bytes], rng: random.Random
) -> None:
    straight, shuffled = ResultDigest(len(parts)), ResultDigest(len(parts))
    for position, part in enumerate(parts):
        straight.add(position, memoryview(part))
    order = list(enumerate(parts))
    rng.shuffle(order)
    for position, part in order:
        shuffled.add(position, memoryview(part))
    assert straight.value() == shuffled.value()
    assert len(straight.value()) == DIGEST_BYTES
    if parts != parts[::-1]:
        turned = ResultDigest(len(parts))
        for position, part in enumerate(parts[::-1]):
            turned.add(position, memoryview(part))
        assert turned.value() != straight.value()
    flipped = ResultDigest(len(parts))
    for position, part in enumerate(parts):
        flipped.add(position, memoryview(part + b"!" if position == 0 else part))
    assert flipped.value() != straight.value()


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=8))
def test_a_digest_does_not_depend_on_where_a_segment_is_split(parts: list[bytes]) -> None:
    whole, split = ResultDigest(1), ResultDigest(1)
    whole.add(0, memoryview(b"".join(parts)))
    split.add(0, *(memoryview(part) for part in parts))
    assert split.value() == whole.value()
