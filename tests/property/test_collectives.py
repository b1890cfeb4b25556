"""Whole collectives: data planes joined by links in memory, every frame at a moment of its own.

What they must give comes from the simulator's fold, which ``test_reductions`` compares with the
definition.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.collectives.schedules.direct import PUBLISH
from pccl.error_feedback import ErrorFeedback
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import (
    Algorithm,
    Collective,
    Descriptor,
    Quantization,
    ReduceOp,
    WireFormat,
)
from pccl.protocol.vocabulary.mesh_plan import MeshPlan
from pccl.stress.sim.fold import differences, fold, implausible
from tests.support.memory_ring import (
    ALGORITHMS,
    OPERATION,
    Array,
    Ring,
    Travelling,
    all_reduce,
    lend,
    random_values,
)

SCHEDULED = [Collective.ALL_REDUCE, Collective.BROADCAST, Collective.BARRIER]
"""What follows the ring."""


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("data_type", DataType)
@settings(max_examples=12)
@given(
    st.sampled_from(ALGORITHMS),
    st.integers(2, 9),
    st.integers(1, 30),
    st.integers(1, 40),
    st.randoms(use_true_random=True),
)
def test_a_reduce_of_every_kind(
    data_type: DataType,
    op: ReduceOp,
    algorithm: Algorithm,
    world_size: int,
    count: int,
    segment_bytes: int,
    rng: random.Random,
) -> None:
    inputs = [random_values(data_type, count, rng) for _ in range(world_size)]
    ring = Ring(world_size, max(segment_bytes, data_type.itemsize), rng)
    result = ring.reduce(all_reduce(data_type, op, count, algorithm), inputs)
    if algorithm is Algorithm.MESH:
        assert implausible(result, inputs, op) == []
    else:
        firsts = [0] if algorithm is Algorithm.STAR else None
        assert differences(result, fold(inputs, op, firsts), op) == []


@pytest.mark.parametrize("data_type", DataType)
@settings(max_examples=10)
@given(st.integers(2, 9), st.integers(1, 30), st.integers(1, 40), st.randoms(use_true_random=True))
def test_a_broadcast(
    data_type: DataType, world_size: int, count: int, segment_bytes: int, rng: random.Random
) -> None:
    inputs = [random_values(data_type, count, rng) for _ in range(world_size)]
    buffers = [own.copy() for own in inputs]
    root = rng.randrange(world_size)
    ring = Ring(world_size, max(segment_bytes, data_type.itemsize), rng)
    ring.post(Descriptor.broadcast(data_type, count, root), [(own, own) for own in buffers])
    ring.run()
    traffic = [plane.transfers[OPERATION] for plane in ring.planes]
    nbytes = buffers[0].nbytes
    ring.end(committed=True)
    assert {own.tobytes() for own in buffers} == {inputs[root].tobytes()}
    ring.check_done()
    last = (root - 1) % world_size
    for rank, transfer in enumerate(traffic):
        assert transfer.tx_bytes == (0 if rank == last else nbytes)
        assert transfer.rx_bytes == (0 if rank == root else nbytes)


@settings(max_examples=30)
@given(st.integers(2, 9), st.randoms(use_true_random=True))
def test_a_barrier_is_done_where_it_begins(world_size: int, rng: random.Random) -> None:
    ring = Ring(world_size, 64, rng)
    ring.post(Descriptor.barrier(), None)
    assert ring.done == {}
    while ring.step():
        assert ring.frames == []
    ring.end(committed=True)
    ring.check_done()


def lent_for(
    collective: Collective, op: ReduceOp, inputs: list[Array], rng: random.Random
) -> tuple[Descriptor, list[tuple[Array, Array]]]:
    data_type, count = DataType.from_numpy_dtype(inputs[0].dtype), len(inputs[0])
    if collective is Collective.BROADCAST:
        descriptor = Descriptor.broadcast(data_type, count, rng.randrange(len(inputs)))
        return descriptor, [(own, own) for own in (own.copy() for own in inputs)]
    return all_reduce(data_type, op, count, rng.choice(ALGORITHMS)), lend(inputs, rng)


@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.BROADCAST])
@settings(max_examples=60)
@given(
    st.sampled_from(DataType),
    st.integers(2, 6),
    st.integers(1, 30),
    st.integers(0, 150),
    st.randoms(use_true_random=True),
)
def test_an_abort_at_any_moment_leaves_every_input_as_it_was(
    collective: Collective,
    data_type: DataType,
    world_size: int,
    count: int,
    moment: int,
    rng: random.Random,
) -> None:
    inputs = [random_values(data_type, count, rng) for _ in range(world_size)]
    descriptor, buffers = lent_for(collective, rng.choice(tuple(ReduceOp)), inputs, rng)
    ring = Ring(world_size, 16, rng)
    ring.post(descriptor, buffers)
    ring.run(moment)
    ring.check_abort(inputs, buffers)


@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.BROADCAST])
@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(1, 30), st.randoms(use_true_random=True))
def test_who_is_done_may_leave_with_his_input(
    collective: Collective, world_size: int, count: int, rng: random.Random
) -> None:
    """The others get their result from a copy, whatever he does with his memory."""
    inputs = [random_values(DataType.INT16, count, rng) for _ in range(world_size)]
    descriptor, buffers = lent_for(collective, ReduceOp.PROD, inputs, rng)
    ring = Ring(world_size, 8, rng)
    ring.post(descriptor, buffers)
    left: set[int] = set()
    while ring.step():
        for rank in sorted(ring.done.keys() - left):
            if rng.random() < 0.3:
                left.add(rank)
                ring.planes[rank].detach(OPERATION)
                send, recv = buffers[rank]
                assert send.tobytes() == inputs[rank].tobytes()
                send[:], recv[:] = -7, -7
    assert len(ring.done) == world_size
    assert len(set(ring.done.values())) == 1
    ring.end(committed=rng.random() < 0.5 and len(left) < world_size)
    for rank, (send, recv) in enumerate(buffers):
        if rank in left:
            assert (send == -7).all()
            assert (recv == -7).all()
        elif send is not recv:
            assert send.tobytes() == inputs[rank].tobytes()
            assert recv.tobytes() == fold(inputs, ReduceOp.PROD).tobytes()


@settings(max_examples=60)
@given(
    st.sampled_from(SCHEDULED),
    st.integers(2, 6),
    st.integers(0, 60),
    st.randoms(use_true_random=True),
)
def test_progress_shows_who_owes_what(
    collective: Collective, world_size: int, moment: int, rng: random.Random
) -> None:
    """What a rank has ready less what the next one has received is what travels between them."""
    buffers: list[tuple[Array, Array]] | None = None
    descriptor = Descriptor.barrier()
    if collective is not Collective.BARRIER:
        arrays = [np.full(20, rank, np.int16) for rank in range(world_size)]
        buffers = [(own, own) for own in arrays]
        descriptor = Descriptor(DataType.INT16, ReduceOp.SUM, 20, collective, world_size // 2)
    ring = Ring(world_size, 4, rng)
    ring.post(descriptor, buffers)
    ring.run(moment)
    progress = [mine.progress for plane in ring.planes for mine in plane.transfers.values()]
    for rank, mine in enumerate(progress):
        travelling = sum(frame.target == rank for frame in ring.frames)
        assert progress[rank - 1].ready - mine.received == travelling


@settings(max_examples=60)
@given(
    st.sampled_from((Algorithm.STAR, Algorithm.MESH)),
    st.integers(2, 7),
    st.integers(1, 40),
    st.randoms(use_true_random=True),
)
def test_what_a_direct_reduce_moves(
    algorithm: Algorithm, world_size: int, count: int, rng: random.Random
) -> None:
    """Star: all the tensor, the root N-1 times. Mesh: what others own, and N-1 times the own part.

    With equal shares that is 2(N-1)/N of the tensor, as in a ring.
    """
    inputs = [random_values(DataType.INT32, count, rng) for _ in range(world_size)]
    ring = Ring(world_size, 8, rng)
    ring.mesh = replace(ring.mesh, sites=())
    ring.reduce(all_reduce(DataType.INT32, ReduceOp.SUM, count, algorithm), inputs)
    base, longer = divmod(count, world_size)
    for rank, transfer in enumerate(ring.transfers):
        if algorithm is Algorithm.STAR:
            moved = 4 * count * (world_size - 1 if rank == 0 else 1)
        else:
            own = base + (rank < longer)
            if ring.mesh.shares:
                ends = [
                    count * sum(ring.mesh.shares[:n]) // sum(ring.mesh.shares)
                    for n in (rank, rank + 1)
                ]
                own = ends[1] - ends[0]
            moved = 4 * ((count - own) + own * (world_size - 1))
        assert (transfer.tx_bytes, transfer.rx_bytes) == (moved, moved)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=9),
    st.integers(1, 40),
    st.randoms(use_true_random=True),
)
def test_a_mesh_sends_a_tensor_once_each_way_between_two_sites(
    sites: list[int], count: int, rng: random.Random
) -> None:
    """Each member sends and receives a tensor twice but for its own part, with or without sites."""
    world_size = len(sites)
    inputs = [random_values(DataType.INT32, count, rng) for _ in range(world_size)]
    ring = Ring(world_size, 8, rng)
    ring.mesh = replace(ring.mesh, sites=tuple(sites))
    ring.reduce(all_reduce(DataType.INT32, ReduceOp.SUM, count, Algorithm.MESH), inputs)
    all_bytes = across_bytes = 0
    for site, transfer in zip(sites, ring.transfers, strict=True):
        for peer, outlet in transfer.outlets.items():
            all_bytes += outlet.sent_bytes
            if sites[ring.peers.index(peer)] != site:
                across_bytes += outlet.sent_bytes
    assert all_bytes == 4 * count * 2 * (world_size - 1)
    assert across_bytes == 4 * count * 2 * (len(set(sites)) - 1)


@given(st.integers(0, 3), st.randoms(use_true_random=True))
def test_a_result_that_comes_before_the_sum_of_a_site_is_refused(
    arrived: int, rng: random.Random
) -> None:
    """Otherwise the sum would replace the result, of which the digest has been taken."""
    inputs = [np.array([rank, 10 * rank], np.int32) for rank in range(4)]
    ring = Ring(4, 8, rng, local=False)
    ring.mesh = MeshPlan((1, 0, 0, 0), (0, 1, 1, 1))  # rank 1 collects the only segment
    buffers = lend(inputs, rng)
    ring.post(all_reduce(DataType.INT32, ReduceOp.SUM, 2, Algorithm.MESH), buffers)
    ring.run(arrived)
    header = FrameHeader(FrameKind.DATA, OPERATION, PUBLISH, 0, 8)
    ring.frames.append(Travelling(0, 1, header, np.array([6, 60], np.int32).tobytes()))
    with pytest.raises(RemoteProtocolError, match="lacks contributions"):
        ring.deliver_the_rest()  # beginning with the newest
    ring.run()
    ring.check_done()
    ring.end(committed=True)
    assert [recv.tolist() for _, recv in buffers] == [[6, 60]] * 4


@given(st.randoms(use_true_random=True))
def test_a_result_that_comes_before_a_partial_one_is_refused_in_a_ring(rng: random.Random) -> None:
    """Rank 1 adds to what rank 0 sends of chunk 0; it would keep that sum, not the result."""
    inputs = [np.arange(6, dtype=np.int32) * 10**rank for rank in range(3)]
    ring = Ring(3, 8, rng, local=False)
    buffers = lend(inputs, rng)
    ring.post(all_reduce(DataType.INT32, ReduceOp.SUM, 6, Algorithm.RING), buffers)
    header = FrameHeader(FrameKind.DATA, OPERATION, 3, 0, 8)
    ring.frames.append(Travelling(0, 1, header, np.array([0, 111], np.int32).tobytes()))
    with pytest.raises(RemoteProtocolError, match="lacks contributions"):
        ring.deliver_the_rest()
    ring.run()
    ring.check_done()
    ring.end(committed=True)
    assert [recv.tolist() for _, recv in buffers] == [[0, 111, 222, 333, 444, 555]] * 3


FORMATS = [format for format in WireFormat if format is not WireFormat.NONE]


@pytest.mark.parametrize("data_type", [DataType.FLOAT, DataType.DOUBLE, DataType.BFLOAT16])
@pytest.mark.parametrize("wire_format", FORMATS)
@settings(max_examples=10)
@given(
    st.sampled_from(ALGORITHMS),
    st.sampled_from((ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX)),
    st.integers(2, 6),
    st.integers(1, 90),
    st.booleans(),
    st.randoms(use_true_random=True),
)
def test_a_quantized_reduce_is_the_same_for_all_and_near_the_truth(
    wire_format: WireFormat,
    data_type: DataType,
    algorithm: Algorithm,
    op: ReduceOp,
    world_size: int,
    count: int,
    stochastic: bool,
    rng: random.Random,
) -> None:
    """Values within +-1, so a step is at most 2/3 (int2), and a half of it off without noise.

    A mesh or a star rounds each contribution but the owner's once, and the result once; a ring
    rounds what all contributions before it have become at every hop, which is up to N times larger.
    """
    dtype = data_type.to_numpy_dtype()
    inputs = [
        np.array([rng.uniform(-1, 1) for _ in range(count)]).astype(dtype)
        for _ in range(world_size)
    ]
    ring = Ring(world_size, 16 * data_type.itemsize, rng)
    quantization = Quantization(wire_format, 8, stochastic)
    result = ring.reduce(all_reduce(data_type, op, count, algorithm, quantization), inputs)
    exact = np.array([own.astype(np.float64) for own in inputs])
    truth = {ReduceOp.SUM: exact.sum(0), ReduceOp.AVG: exact.mean(0), ReduceOp.MAX: exact.max(0)}[
        op
    ]
    few = {WireFormat.INT4: 2 / 15, WireFormat.E3M0: 2 / 3, WireFormat.INT2: 2 / 3}
    few[WireFormat.SPARSE] = 2  # all 8 of a block are kept, but as means of some of them
    step = {**few, WireFormat.COMPANDED8: 4 / 127}.get(wire_format, 2 / 127)
    rounded = step * (1.02 if stochastic else 0.51)
    largest = world_size if op is ReduceOp.SUM else 1
    hops = world_size * (world_size if algorithm is Algorithm.RING else 1) + largest
    slack = rounded * hops + float(np.finfo(np.float32).eps) * world_size * 100
    if data_type is DataType.BFLOAT16:
        slack += 2**-7 * world_size * (world_size + 1)
    assert np.abs(result.astype(np.float64) - truth).max() <= slack
    assert all(0 <= transfer.quantization_error <= 1 for transfer in ring.transfers)


@pytest.mark.parametrize("data_type", [DataType.FLOAT, DataType.DOUBLE, DataType.BFLOAT16])
@pytest.mark.parametrize("wire_format", FORMATS)
@settings(max_examples=15)
@given(
    st.sampled_from(ALGORITHMS),
    st.sampled_from((ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PROD)),
    st.lists(
        st.sampled_from([42.0, 43.0, -1 / 3, 1e-30, 3e38, 0.0]) | st.floats(-1e3, 1e3, width=32),
        min_size=2,
        max_size=6,
    ),
    st.integers(1, 90),
    st.booleans(),
    st.randoms(use_true_random=True),
)
def test_constants_are_reduced_as_if_they_were_not_quantized(
    wire_format: WireFormat,
    data_type: DataType,
    algorithm: Algorithm,
    op: ReduceOp,
    constants: list[float],
    count: int,
    stochastic: bool,
    rng: random.Random,
) -> None:
    """Through all hops of a ring too: 42 + 43 = 85. The sign of a zero is not kept."""
    dtype, world_size = data_type.to_numpy_dtype(), len(constants)
    inputs = [np.full(count, constant, dtype) for constant in constants]
    ring = Ring(world_size, 16 * data_type.itemsize, rng)
    quantization = Quantization(wire_format, 8, stochastic)
    result = ring.reduce(all_reduce(data_type, op, count, algorithm, quantization), inputs)
    if algorithm is Algorithm.MESH:
        assert implausible(result, inputs, op) == []
    else:
        firsts = [0] if algorithm is Algorithm.STAR else None
        wanted = fold(inputs, op, firsts).astype(np.float64)
        if wire_format in (WireFormat.INT2, WireFormat.SPARSE):  # they have no infinities
            assert (np.isfinite(result) == np.isfinite(wanted)).all()
            result, wanted = result[np.isfinite(wanted)], wanted[np.isfinite(wanted)]
        np.testing.assert_array_equal(result.astype(np.float64), wanted)


@settings(max_examples=60)
@given(
    st.sampled_from(ALGORITHMS),
    st.sampled_from(FORMATS),
    st.integers(2, 5),
    st.integers(1, 60),
    st.integers(0, 120),
    st.randoms(use_true_random=True),
)
def test_an_aborted_quantized_reduce_leaves_every_input_as_it_was(
    algorithm: Algorithm,
    wire_format: WireFormat,
    world_size: int,
    count: int,
    moment: int,
    rng: random.Random,
) -> None:
    inputs = [random_values(DataType.FLOAT, count, rng) for _ in range(world_size)]
    buffers = lend(inputs, rng)
    ring = Ring(world_size, 40, rng)
    quantization = Quantization(wire_format, 8)
    ring.post(all_reduce(DataType.FLOAT, ReduceOp.SUM, count, algorithm, quantization), buffers)
    ring.run(moment)
    left = {rank for rank in ring.done if rng.random() < 0.3}
    for rank in sorted(left):
        ring.planes[rank].detach(OPERATION)
        assert buffers[rank][0].tobytes() == inputs[rank].tobytes()
    while left and ring.step():
        pass
    ring.check_abort(inputs, buffers)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_with_error_feedback_the_running_mean_converges(algorithm: Algorithm, op: ReduceOp) -> None:
    """What one reduce loses the next one makes good: the error of the mean of n shrinks as 1/n."""
    world_size, count, rounds = 4, 200, 50
    values = np.random.default_rng(7).normal(size=(world_size, count)).astype(np.float32)
    truth = values.astype(np.float64).sum(0) / (world_size if op is ReduceOp.AVG else 1)
    owed = [ErrorFeedback() for _ in range(world_size)]
    rng = random.Random(3)
    what = all_reduce(DataType.FLOAT, op, count, algorithm, Quantization(WireFormat.INT4, 16))
    sums = {"with": np.zeros(count), "without": np.zeros(count)}
    for kind, total in sums.items():
        for turn in range(rounds):
            ring = Ring(world_size, 256, rng)
            buffers = [(own, np.zeros_like(own)) for own in values]
            residuals = ring.post(what, buffers, owed if kind == "with" else None)
            ring.run()
            committed = turn % 5 != 4  # one of five fails, and must not count
            ring.end(committed=committed)
            for residual in residuals:
                residual.drop()  # nothing, after a commit
            if committed:
                total += buffers[0][1]
    committed_rounds = rounds - rounds // 5
    off = {k: float(np.abs(v / committed_rounds - truth).max()) for k, v in sums.items()}
    assert off["with"] <= off["without"] / 8
    assert off["with"] <= 0.02 * (world_size if op is ReduceOp.SUM else 1)


def test_a_second_copy_that_leaves_late_costs_nothing() -> None:
    """Its place may hold other bytes by then; nobody takes it, and what is owed stays the same."""
    residuals: list[list[bytes]] = []
    for repeats in (False, True):
        ring = Ring(4, 4096, random.Random(1))
        values = np.random.default_rng(0).normal(size=(4, 4096)).astype(np.float32)
        quantization = Quantization(WireFormat.INT8, 32)
        what = all_reduce(DataType.FLOAT, ReduceOp.SUM, 4096, Algorithm.RING, quantization)
        owed = [ErrorFeedback() for _ in range(4)]
        ring.post(what, [(own, own) for own in values], owed)
        late: list[Travelling] = []
        while ring.step():
            for frame in ring.frames:
                if repeats and frame.header.step == 1 and not late:
                    late.append(frame)
        for frame in late:
            frame.read()
        ring.end(committed=True)
        residuals.append([each.state_dict()["w"].tobytes() for each in owed])
    assert residuals[0] == residuals[1]


@pytest.mark.parametrize("data_type", [DataType.BFLOAT16, DataType.FLOAT16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_error_feedback_near_the_largest_number(algorithm: Algorithm, data_type: DataType) -> None:
    """No finite value becomes infinite because something is owed."""
    dtype = data_type.to_numpy_dtype()
    largest = {DataType.BFLOAT16: 3.3e38, DataType.FLOAT16: 65000.0}[data_type]
    values = [np.linspace(-largest, largest, 64).astype(dtype), np.zeros(64, dtype)]
    owed = [ErrorFeedback() for _ in values]
    quantization = Quantization(WireFormat.INT4, 16)
    what = all_reduce(data_type, ReduceOp.SUM, 64, algorithm, quantization)
    for _ in range(4):
        result = Ring(2, 4096, random.Random(1)).reduce(what, values, owed)
        assert np.isfinite(result.astype(np.float64)).all()
