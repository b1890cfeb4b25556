"""Broadcast: a chain in which every rank gets every segment once; and what is carried out how."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.collectives.layout import SegmentLayout, segment_bytes_for
from pccl.collectives.route import Hop
from pccl.collectives.schedules.broadcast import BroadcastSchedule
from pccl.collectives.schedules.plan import schedule_of
from pccl.collectives.schedules.ring import RingSchedule
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Descriptor, ReduceOp
from tests.support.claims import check_drawn_claims, check_spoilt_claims

CHAINS = st.integers(2, 12).flatmap(
    lambda world_size: st.tuples(
        st.just(world_size),
        st.integers(0, world_size - 1),  # root
        st.integers(1, 80),  # elements
        st.sampled_from([1, 2, 4, 8]),  # bytes per element
        st.integers(1, 40),  # elements per segment
        st.integers(1, 4),  # chunks
    )
)


def chain(shape: tuple[int, int, int, int, int, int]) -> list[BroadcastSchedule]:
    world_size, root, count, itemsize, per_segment, chunks = shape
    layout = SegmentLayout(count, itemsize, chunks, itemsize * per_segment)
    return [BroadcastSchedule(rank, root, world_size, layout) for rank in range(world_size)]


@settings(max_examples=150)
@given(CHAINS, st.randoms(use_true_random=True))
def test_everybody_gets_every_segment_once(
    shape: tuple[int, int, int, int, int, int], rng: random.Random
) -> None:
    world_size, root, *_ = shape
    schedules = chain(shape)
    positions = list(range(schedules[0].layout.segment_count))
    got: list[list[int]] = [[] for _ in schedules]
    travelling: list[tuple[int, int, int, int]] = []
    """(to whom, step, offset, length)"""
    for rank, schedule in enumerate(schedules):
        finals = [s.position for s in schedule.initial_sends if schedule.sends_finals]
        assert finals == (positions if rank == root else [])
        got[rank] += finals
        travelling += [(schedule.downstream, 0, s.offset, s.length) for s in schedule.initial_sends]
    assert len(travelling) == len(positions)  # only the root starts
    sent = [0] * world_size
    sent[root] = len(positions)
    while travelling:
        rank, step, offset, length = travelling.pop(rng.randrange(len(travelling)))
        found = schedules[rank].incoming.find(step, offset, length)
        assert found is not None
        got[rank].append(found.segment.position)
        arrival = schedules[rank].arrivals[step]
        assert (arrival.reduce, arrival.finish, arrival.final) == (False, False, True)
        if arrival.forward:
            sent[rank] += 1
            travelling.append((schedules[rank].downstream, step + 1, offset, length))
    assert [sorted(positions_of_rank) for positions_of_rank in got] == [positions] * world_size
    assert sent == [schedule.outgoing.count for schedule in schedules]
    before_root = (root - 1) % world_size
    assert [rank for rank in range(world_size) if not sent[rank]] == [before_root]
    assert [s.incoming.count == 0 for s in schedules] == [
        rank == root for rank in range(world_size)
    ]


@settings(max_examples=150)
@given(CHAINS)
def test_neighbours_agree_on_every_number(shape: tuple[int, int, int, int, int, int]) -> None:
    world_size, root, *_ = shape
    schedules = chain(shape)
    for rank, sender in enumerate(schedules):
        receiver = schedules[(rank + 1) % world_size]
        assert (sender.rank, receiver.upstream, sender.downstream) == (rank, rank, receiver.rank)
        outgoing = [(hop.step, hop.segment) for hop in sender.outgoing.hops]
        assert sender.outgoing.count == receiver.incoming.count == len(outgoing)
        assert receiver.first_gather_index == 0
        for index, (step, segment) in enumerate(outgoing):
            assert step == (rank - root) % world_size
            hop = Hop(index, step, segment)
            assert sender.outgoing.legs[step][segment.offset] == hop
            assert receiver.incoming.find(step, segment.offset, segment.length) == hop


@settings(max_examples=150)
@given(CHAINS, st.data())
def test_what_is_not_expected_is_not_found(
    shape: tuple[int, int, int, int, int, int], data: st.DataObject
) -> None:
    world_size, *_ = shape
    schedules = chain(shape)
    receiver = schedules[data.draw(st.integers(0, world_size - 1))]
    upstream = schedules[receiver.upstream]
    check_drawn_claims(data, upstream, receiver, world_size + 1)


@settings(max_examples=100)
@given(CHAINS)
def test_a_claim_with_one_thing_wrong_is_not_found(
    shape: tuple[int, int, int, int, int, int],
) -> None:
    schedules = chain(shape)
    for receiver in schedules:
        check_spoilt_claims(schedules[receiver.upstream], receiver)


@pytest.mark.parametrize(
    ("rank", "root", "world_size"), [(0, 0, 1), (-1, 0, 2), (2, 0, 2), (0, -1, 2), (0, 2, 2)]
)
def test_ranks_and_roots_lie_in_the_ring(rank: int, root: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="invalid broadcast"):
        BroadcastSchedule(rank, root, world_size, SegmentLayout(4, 4, 1, 16))


# -- which schedule carries out what -----------------------------------------------------------


def test_a_reduce_is_a_ring() -> None:
    schedule = schedule_of(Descriptor(DataType.BFLOAT16, ReduceOp.MAX, 10), 2, 4, 6)
    assert isinstance(schedule, RingSchedule)
    assert (schedule.rank, schedule.world_size) == (2, 4)
    assert [s.length for s in schedule.layout.segments()] == [6, 6, 4, 4]


def test_a_broadcast_is_a_chain() -> None:
    schedule = schedule_of(Descriptor.broadcast(DataType.DOUBLE, 5, root=3), 3, 4, 16)
    assert isinstance(schedule, BroadcastSchedule)
    assert [s.length for s in schedule.initial_sends] == [16, 16, 8]
    with pytest.raises(ValueError, match="invalid broadcast"):
        schedule_of(Descriptor.broadcast(DataType.DOUBLE, 5, root=4), 0, 4, 16)


def test_a_barrier_moves_nothing() -> None:
    schedule = schedule_of(Descriptor.barrier(), 1, 3, None)
    assert isinstance(schedule, RingSchedule)
    assert (schedule.upstream, schedule.downstream, schedule.world_size) == (0, 2, 3)
    assert (schedule.incoming.count, schedule.outgoing.count) == (0, 0)
    assert list(schedule.layout.segments()) == []


@pytest.mark.parametrize(
    "descriptor",
    [
        Descriptor(DataType.FLOAT16, ReduceOp.SUM, 5_000_000),
        Descriptor.broadcast(DataType.FLOAT16, 5_000_000, 0),
    ],
)
def test_segments_are_chosen_by_size(descriptor: Descriptor) -> None:
    lengths = {segment.length for segment in schedule_of(descriptor, 0, 4, None).layout.segments()}
    assert max(lengths) == segment_bytes_for(10_000_000, 4)
