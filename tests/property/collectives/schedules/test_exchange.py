"""Exchanges and reductions of parts: data planes joined by links in memory.

The expected blocks come from plain slices of the inputs, and the expected sums from the simulator's
fold.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.machines.blocks import BufferLengths, blocks_of
from pccl.protocol.data_type import DataType
from pccl.protocol.operation import BlockLengths
from pccl.protocol.types import Collective, Descriptor, ReduceOp
from pccl.runtime.collective.block_operand import borrow_blocks
from pccl.runtime.collective.operand import Operand
from pccl.stress.sim.fold import implausible
from tests.support.memory_ring import OPERATION, Array, Ring, random_values

EXCHANGES = [
    Collective.ALL_GATHER, Collective.GATHER, Collective.SCATTER, Collective.ALL_TO_ALL
]  # fmt: skip
PARTS = [Collective.REDUCE, Collective.REDUCE_SCATTER]


def cut(values: Array, lengths: list[int], rng: random.Random) -> Array | list[Array]:
    """One tensor, if all lengths are equal and chance says so; otherwise a tensor per rank."""
    ends = np.cumsum(lengths)
    if len(set(lengths)) == 1 and lengths[0] and rng.random() < 0.5:
        return values
    return [values[end - n : end] for n, end in zip(lengths, ends, strict=True)]


class Exchange:
    """An exchange of random blocks, and what each rank must get."""

    def __init__(self, collective: Collective, size: int, rng: random.Random) -> None:
        data_type = rng.choice(tuple(DataType))
        dtype, root = data_type.to_numpy_dtype(), rng.randrange(size)
        equal = rng.random() < 0.5
        each = rng.randint(0, 9)

        def length() -> int:
            return each if equal else rng.randint(0, 9)

        self.descriptor = Descriptor.direct(collective, data_type, root=root)
        lengths = [[length() for _ in range(size)] for _ in range(size)]
        """By giver and taker."""
        if collective is Collective.ALL_GATHER:
            lengths = [[row[0]] * size for row in lengths]
        blocks = [[random_values(data_type, n, rng) for n in row] for row in lengths]
        if collective is Collective.ALL_GATHER:
            blocks = [[row[0]] * size for row in blocks]
        self.sends: list[Array] = []
        self.recvs: list[Array] = []
        self.expected: list[Array] = []
        self.given: list[tuple[Array | list[Array] | None, Array | list[Array] | None]] = []
        for rank in range(size):
            gives, takes = blocks[rank], [row[rank] for row in blocks]
            if collective is Collective.ALL_GATHER:
                gives = gives[:1]
            elif collective is Collective.GATHER:
                gives, takes = [gives[root]], takes if rank == root else []
            elif collective is Collective.SCATTER:
                gives, takes = gives if rank == root else [], [takes[root]]
            send = np.concatenate([np.empty(0, dtype), *gives])
            self.expected.append(np.concatenate([np.empty(0, dtype), *takes]))
            recv = np.zeros_like(self.expected[-1])
            inside = collective is Collective.ALL_GATHER and rng.random() < 0.3 and len(send) > 0
            if inside:  # in place: the input is its block of the result
                before = sum(row[0] for row in lengths[:rank])
                recv[before : before + len(send)] = send
                send = recv[before : before + len(send)]
            self.sends.append(send)
            self.recvs.append(recv)
            given_send = cut(send, list(map(len, gives)), rng) if gives else None
            given_recv = cut(recv, list(map(len, takes)), rng) if takes else None
            if len(gives) == 1:
                given_send = send
            if len(takes) == 1:
                given_recv = recv
            self.given.append((given_send, given_recv))

    def check(self, rank: int) -> None:
        assert self.recvs[rank].tobytes() == self.expected[rank].tobytes()

    def post(self, ring: Ring) -> None:
        for rank, plane in enumerate(ring.planes):
            operand, lengths = borrow_blocks(*self.given[rank])
            blocks = blocks_of(self.descriptor, lengths, rank, len(ring.peers))
            plane.post(
                OPERATION, self.descriptor, operand, ring.peers, ring.peers[rank], blocks=blocks
            )


@pytest.mark.parametrize("collective", EXCHANGES)
@settings(max_examples=80)
@given(st.integers(2, 7), st.integers(8, 40), st.randoms(use_true_random=True))
def test_each_member_gets_the_blocks_that_are_for_it(
    collective: Collective, world_size: int, segment_bytes: int, rng: random.Random
) -> None:
    made = Exchange(collective, world_size, rng)
    inputs = [send.tobytes() for send in made.sends]
    ring = Ring(world_size, segment_bytes, rng)
    made.post(ring)
    ring.run()
    ring.check_done()
    ring.end(committed=True)
    assert [recv.tobytes() for recv in made.recvs] == [one.tobytes() for one in made.expected]
    assert [send.tobytes() for send in made.sends] == inputs


@pytest.mark.parametrize("collective", EXCHANGES)
@settings(max_examples=40)
@given(st.integers(2, 5), st.integers(0, 80), st.randoms(use_true_random=True))
def test_an_abort_leaves_inputs_and_writes_no_more(
    collective: Collective, world_size: int, moment: int, rng: random.Random
) -> None:
    made = Exchange(collective, world_size, rng)
    inputs = [send.tobytes() for send in made.sends]
    ring = Ring(world_size, 16, rng)
    made.post(ring)
    ring.run(moment)
    ring.end(committed=False)
    results = [recv.tobytes() for recv in made.recvs]
    assert [send.tobytes() for send in made.sends] == inputs
    ring.deliver_the_rest()
    assert [recv.tobytes() for recv in made.recvs] == results


@pytest.mark.parametrize("collective", [*EXCHANGES, *PARTS])
@settings(max_examples=60)
@given(st.integers(2, 5), st.randoms(use_true_random=True))
def test_a_member_that_is_done_may_leave_with_its_memory(
    collective: Collective, world_size: int, rng: random.Random
) -> None:
    """Others may lack its input still; they get it from a copy."""
    made = made_of(collective, world_size, rng)
    ring = Ring(world_size, 16, rng)
    made.post(ring)
    left: set[int] = set()
    while ring.step():
        for rank in sorted(ring.done.keys() - left):
            if rng.random() < 0.5:
                left.add(rank)
                ring.planes[rank].detach(OPERATION)
                made.sends[rank].view(np.uint8)[:] = 0xEE
                made.recvs[rank].view(np.uint8)[:] = 0xEE
    ring.check_done()
    ring.end(committed=len(left) < world_size)
    for rank, recv in enumerate(made.recvs):
        if rank in left:
            assert recv.tobytes() == b"\xee" * recv.nbytes
        else:
            made.check(rank)


class Parts:
    """A reduce or a reduce-scatter of random values."""

    def __init__(self, collective: Collective, size: int, rng: random.Random) -> None:
        data_type = rng.choice(tuple(DataType))
        self.op, count = rng.choice(tuple(ReduceOp)), rng.randint(1, 40)
        self.root = rng.randrange(size)
        self.descriptor = Descriptor.direct(
            collective, data_type, root=self.root, count=count, op=self.op
        )
        self.inputs = [random_values(data_type, count, rng) for _ in range(size)]
        self.sends = [own.copy() for own in self.inputs]
        self.recvs: list[Array] = []
        self.where: list[slice] = []
        """The part of the result that each rank gets."""
        base, longer = divmod(count, size)
        at = 0
        for rank in range(size):
            part = slice(0, count)
            if collective is Collective.REDUCE_SCATTER:
                part = slice(at, at + base + (rank < longer))
                at = part.stop
            in_place = collective is Collective.REDUCE and rng.random() < 0.5
            self.where.append(part)
            recv = np.zeros(part.stop - part.start, self.sends[rank].dtype)
            self.recvs.append(self.sends[rank] if in_place else recv)

    def post(self, ring: Ring) -> None:
        for rank, plane in enumerate(ring.planes):
            scatters = self.descriptor.collective is Collective.REDUCE_SCATTER
            send, recv = self.sends[rank], self.recvs[rank]
            operand: Operand
            if scatters:
                operand, lengths = borrow_blocks(send, recv)
                blocks_of(self.descriptor, lengths, rank, len(ring.peers))
            else:
                operand = ring.borrow(send, recv)
            plane.post(OPERATION, self.descriptor, operand, ring.peers, ring.peers[rank])

    def check(self, rank: int) -> None:
        is_reduce = self.descriptor.collective is Collective.REDUCE
        if is_reduce and rank != self.root:
            assert self.sends[rank].tobytes() == self.inputs[rank].tobytes()
            return
        where = self.where[rank]
        parts = [own[where] for own in self.inputs]
        if where.stop > where.start:
            assert implausible(self.recvs[rank], parts, self.op) == []


def made_of(collective: Collective, size: int, rng: random.Random) -> Exchange | Parts:
    return Parts(collective, size, rng) if collective in PARTS else Exchange(collective, size, rng)


@pytest.mark.parametrize("collective", PARTS)
@settings(max_examples=80)
@given(st.integers(2, 7), st.integers(8, 40), st.randoms(use_true_random=True))
def test_each_member_gets_its_part_of_a_reduction(
    collective: Collective, world_size: int, segment_bytes: int, rng: random.Random
) -> None:
    made = Parts(collective, world_size, rng)
    ring = Ring(world_size, segment_bytes, rng)
    made.post(ring)
    ring.run()
    ring.check_done()
    ring.end(committed=True)
    for rank in range(world_size):
        made.check(rank)
        if made.sends[rank] is not made.recvs[rank]:
            assert made.sends[rank].tobytes() == made.inputs[rank].tobytes()


@settings(max_examples=40)
@given(st.integers(2, 5), st.integers(0, 60), st.randoms(use_true_random=True))
def test_an_aborted_reduce_leaves_its_input(
    world_size: int, moment: int, rng: random.Random
) -> None:
    made = Parts(Collective.REDUCE, world_size, rng)
    ring = Ring(world_size, 16, rng)
    made.post(ring)
    ring.run(moment)
    ring.check_abort(made.inputs, list(zip(made.sends, made.recvs, strict=True)))


GROUP_OF_THREE = [
    (Collective.ALL_GATHER, ((4,), (11,)), "11 elements"),
    (Collective.ALL_GATHER, ((4, 4), (12,)), "one tensor"),
    (Collective.ALL_GATHER, ((4,), (4, 4)), "2 tensors"),
    (Collective.ALL_GATHER, ((4,), (4, 5, 4)), "rank 1"),
    (Collective.GATHER, ((4,), (12,)), "only the root, rank 2"),
    (Collective.SCATTER, ((12,), (4,)), "only the root, rank 2"),
    (Collective.ALL_TO_ALL, ((9,), (10,)), "10 elements"),
    (Collective.ALL_TO_ALL, ((9,), (3, 2, 4)), "rank 1"),
    (Collective.REDUCE_SCATTER, ((10,), (4,)), "rank 1 of 3 has 3"),
]


@pytest.mark.parametrize(("collective", "lengths", "says"), GROUP_OF_THREE)
def test_buffers_that_do_not_fit_are_refused(
    collective: Collective, lengths: tuple[tuple[int, ...], tuple[int, ...]], says: str
) -> None:
    descriptor = Descriptor.direct(collective, DataType.INT16, root=2, count=10)
    with pytest.raises(ValueError, match=says):
        blocks_of(descriptor, BufferLengths(*lengths), 1, 3)


def test_an_input_elsewhere_in_the_result_is_refused() -> None:
    memory = np.zeros(12, np.int16)
    operand, lengths = borrow_blocks(memory[:4], memory)
    descriptor = Descriptor.direct(Collective.ALL_GATHER, operand.data_type)
    assert blocks_of(descriptor, lengths, 0, 3) == BlockLengths((4, 4, 4), (4, 4, 4))
    with pytest.raises(ValueError, match="is not the block of rank 1"):
        blocks_of(descriptor, lengths, 1, 3)
    with pytest.raises(ValueError, match="send and recv overlap"):
        borrow_blocks(memory[:8], memory[4:])
