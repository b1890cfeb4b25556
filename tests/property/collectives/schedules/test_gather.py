"""The gather of sparse contributions, compared with plain Python."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pccl.error_feedback import ErrorFeedback
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Algorithm, Quantization, ReduceOp, WireFormat
from tests.support import plain_sparse
from tests.support.memory_ring import OPERATION, Ring, all_reduce, lend
from tests.support.plain_sparse import distinct

SPARSE = Quantization(WireFormat.SPARSE, 100)


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.5, 40.0]), min_size=2, max_size=8),
    st.integers(100, 900),
    st.sampled_from([ReduceOp.SUM, ReduceOp.AVG]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_the_result_is_bit_for_bit_the_sum_in_rank_order(
    weights: list[float], count: int, op: ReduceOp, weighted: bool, seed: int
) -> None:
    """With error feedback: what the first round has left out is added in the second."""
    size, rng = len(weights), random.Random(seed)
    weighted &= op is ReduceOp.AVG
    values = [distinct(count, rng.randrange(1 << 30)) for _ in weights]
    asks = replace(all_reduce(DataType.FLOAT, op, count, Algorithm.MESH, SPARSE), weighted=weighted)
    used = weights if weighted else [1.0] * size
    equal = len(set(used) - {0}) == 1
    unit = max(used) if equal else 2.0 ** math.ceil(math.log2(max(used) or 1))
    factors = [weight / (unit or 1) for weight in used]
    divisor = math.fsum(factors) or 1.0
    mean_factor = divisor / size if weighted else 1.0
    owed = [ErrorFeedback() for _ in weights]
    residuals = [np.zeros(count, np.float32) for _ in weights]
    for _ in range(2):
        total = None
        for rank, own in enumerate(values):
            if not used[rank]:
                continue
            whole: Any = own * np.float32(factors[rank]) + residuals[rank] * np.float32(mean_factor)
            blocks = [np.abs(whole[first : first + 100]) for first in range(0, count, 100)]
            assume(all(len(np.unique(block)) == len(block) for block in blocks))
            sent = np.array(plain_sparse.sent(whole.tolist(), 100), np.float32)
            residuals[rank] = np.asarray(whole - sent) * np.float32(1 / mean_factor)
            total = sent if total is None else total + sent
        wanted = np.zeros(count, np.float32) if total is None else total
        if op is ReduceOp.AVG:
            wanted = wanted / np.float32(divisor if weighted else size)
        ring = Ring(size, 400, rng)  # a segment is a block
        ring.weights = tuple(weights) if weighted else ()
        assert ring.reduce(asks, values, owed).tolist() == wanted.tolist()
        for rank in range(size):
            assert owed[rank].state_dict()["w"].tolist() == residuals[rank].tolist()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_each_rank_sends_its_contribution_to_all_others(size: int) -> None:
    count = 64_000
    ring = Ring(size, 1 << 16, random.Random(size))
    what = all_reduce(
        DataType.FLOAT, ReduceOp.SUM, count, Algorithm.MESH, Quantization(WireFormat.SPARSE, 3200)
    )
    ring.reduce(what, [distinct(count, rank) for rank in range(size)])
    segments = [min(1 << 14, count - first) for first in range(0, count, 1 << 14)]
    one = sum(plain_sparse.nbytes(length, 3200, 4) for length in segments)
    assert 4 * count / one > 145
    for transfer in ring.transfers:
        assert (transfer.tx_bytes, transfer.rx_bytes) == ((size - 1) * one, (size - 1) * one)


@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(60, 400), st.integers(0, 2**32 - 1))
def test_who_is_done_may_leave_before_others_have_its_contribution(
    size: int, count: int, seed: int
) -> None:
    rng = random.Random(seed)
    values = [distinct(count, rng.randrange(1 << 30)) for _ in range(size)]
    buffers = lend(values, rng)
    ring = Ring(size, 400, rng)
    ring.post(all_reduce(DataType.FLOAT, ReduceOp.SUM, count, Algorithm.MESH, SPARSE), buffers)
    left: set[int] = set()
    while ring.step():
        for rank in sorted(ring.done.keys() - left):
            if rng.random() < 0.5:
                left.add(rank)
                ring.planes[rank].detach(OPERATION)
                send, recv = buffers[rank]
                assert send.tobytes() == values[rank].tobytes()
                send[:], recv[:] = np.nan, np.nan
    assert len(ring.done) == size
    assert len(set(ring.done.values())) == 1
    ring.end(committed=True)
    sent = [np.array(plain_sparse.sent(own.tolist(), 100), np.float32) for own in values]
    wanted = sent[0]
    for other in sent[1:]:
        wanted = wanted + other
    for rank, (_, recv) in enumerate(buffers):
        if rank not in left:
            np.testing.assert_array_equal(recv, wanted)


def test_all_nan_of_a_result_are_the_same() -> None:
    """Which NaN a sum gives differs from one kind of processor to the next."""
    values = [np.full(200, 1 + rank, np.float32) for rank in range(3)]
    values[1].view(np.uint32)[7], values[2].view(np.uint32)[7] = 0xFFC12345, 0x7FC00001
    values[0][8] = -math.inf
    what = all_reduce(DataType.FLOAT, ReduceOp.SUM, 200, Algorithm.MESH, SPARSE)
    result = Ring(3, 400, random.Random(0)).reduce(what, values)
    assert result.view(np.uint32)[[7, 8]].tolist() == [0x7FC00000] * 2
    assert np.isfinite(np.delete(result, [7, 8])).all()


@pytest.mark.parametrize("wire", [WireFormat.SPARSE, WireFormat.INT8])
def test_values_that_are_not_finite_leave_no_warning(wire: WireFormat) -> None:
    """Neither what is sent of them, nor what error feedback keeps."""
    values = np.ones(200, np.float32)
    values.view(np.uint32)[:3] = 0x7F800000, 0xFF800000, 0x7FA00001  # the last NaN signals
    what = all_reduce(DataType.FLOAT, ReduceOp.SUM, 200, Algorithm.MESH, Quantization(wire, 100))
    owed = [ErrorFeedback(), ErrorFeedback()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ring(2, 400, random.Random(0)).reduce(what, [values, values], owed)
    assert all(np.isfinite(one.state_dict()["w"]).all() for one in owed)
