"""``all_reduce_many`` over sockets: a list of tensors is one operation with one outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl.errors import CollectiveAborted, DescriptorMismatch
from tests.integration.conftest import Run
from tests.support.members import grow
from tests.support.patience import LIMIT_S

torch = pytest.importorskip("torch")


SIZES = [1, 5000, 0, 300_000, 7, 7, 7, 40_000, 1, 150_000]
"""Elements: some parts are read one by one, some ranges are gathered."""


def split(values: Any, sizes: list[int]) -> list[Any]:
    """Copies, so that the parts lie anywhere."""
    ends = np.cumsum(sizes)
    return [values[end - size : end].copy() for size, end in zip(sizes, ends, strict=True)]


def joined(parts: list[Any]) -> list[float]:
    return [value for part in parts for value in np.asarray(part).reshape(-1).tolist()]


@pytest.mark.parametrize("algorithm", ["ring", "mesh"])
def test_members_may_split_the_same_tensor_in_different_ways(
    run_of: Callable[..., Run], algorithm: str
) -> None:
    run = run_of(3)
    count = sum(SIZES)
    values = np.arange(count, dtype=np.float32) % 1000
    many = split(values, SIZES)
    tensors = [torch.from_numpy(part) for part in split(2 * values, SIZES[::-1])]
    results = [torch.zeros_like(part) for part in tensors]
    one = 4 * values
    calls = [
        run.start(run.members[0].all_reduce_many, many, algorithm=algorithm, tag=9),
        run.start(run.members[1].all_reduce_many, tensors, results, algorithm=algorithm, tag=9),
        run.start(run.members[2].all_reduce, one, algorithm=algorithm, tag=9),
    ]
    infos = [call.result(LIMIT_S) for call in calls]
    expected = (7 * values).tolist()
    assert joined(many) == joined(results) == one.tolist() == expected
    assert joined(tensors) == (2 * values).tolist()
    assert {info.contributors for info in infos} == {(1, 2, 3)}
    # Of each element a rank sends what it must: 2(N-1)/N of the tensor on the average.
    assert sum(info.tx_bytes for info in infos) == 4 * count * 4


def test_quantized(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    values = np.random.default_rng(5).uniform(-1, 1, sum(SIZES)).astype(np.float32)
    many = [split(values * (rank + 1), SIZES) for rank in range(2)]
    options = pccl.QuantizationOptions()
    infos = [
        call.result(LIMIT_S)
        for call in [
            run.start(member.all_reduce_many, many[rank], quantization_options=options)
            for rank, member in enumerate(run.members)
        ]
    ]
    assert joined(many[0]) == joined(many[1])
    # Two roundings at most, of values up to 2 and up to 3, each by half a step of 1/255 of a range.
    assert np.abs(np.array(joined(many[0])) - 3 * values).max() <= (4 + 6) / 255 / 2 * 1.01
    assert all(info.tx_bytes < values.nbytes / 3 for info in infos)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("wire", [pccl.DataType.INT8, pccl.DataType.UINT8])
@pytest.mark.parametrize("algorithm", list(pccl.QuantizationAlgorithm)[1:])
def test_constants_are_exact_in_every_8_bit_format(
    run_of: Callable[..., Run],
    algorithm: pccl.QuantizationAlgorithm,
    wire: pccl.DataType,
    dtype: type[Any],
) -> None:
    run = run_of(2)
    for count in (1, 7, 100, 100_003):
        arrays = [np.full(count, value, dtype) for value in (42, 43)]
        options = pccl.QuantizationOptions(wire, algorithm)
        run.reduce(arrays, op=pccl.ReduceOp.SUM, quantization_options=options)
        assert all((array == 85).all() for array in arrays)


def test_a_loss_leaves_all_inputs_or_is_retried(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    arrays = [[np.full(size, 10.0**rank) for size in SIZES] for rank in range(3)]
    hopeless = run.start(run.members[0].all_reduce_many, arrays[0])
    run.start(run.members[1].all_reduce_many, arrays[1], retry=True)
    run.members[2].close()
    assert isinstance(hopeless.exception(LIMIT_S), CollectiveAborted)
    assert set(joined(arrays[0])) == {1.0}
    info = run.members[0].all_reduce_many(arrays[0], retry=True)
    run.members.pop()
    assert info.contributors == (1, 2)
    run.check()
    assert set(joined(arrays[0])) == set(joined(arrays[1])) == {11.0}
    assert set(joined(arrays[2])) == {100.0}


def test_different_totals_are_a_mismatch(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    arrays = [[np.full(3, 1.0), np.full(4 + rank, 1.0)] for rank in range(2)]
    calls = [
        run.start(member.all_reduce_many, arrays[rank]) for rank, member in enumerate(run.members)
    ]
    for call in calls:
        error = call.exception(LIMIT_S)
        assert isinstance(error, DescriptorMismatch)
        assert "SUM of 8 x float64" in str(error)
    assert all(set(joined(parts)) == {1.0} for parts in arrays)


def test_tensors_that_are_lent_already(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    arrays = [[np.full(100, 1.0) for _ in range(3)] for _ in range(2)]
    handle = run.members[0].all_reduce_async(arrays[0][1])
    with pytest.raises(ValueError, match="another collective still uses this memory"):
        run.members[0].all_reduce_many(arrays[0], tag=1)
    run.members[1].all_reduce(arrays[1][1])
    handle.result(LIMIT_S)
    calls = [
        run.start(member.all_reduce_many, arrays[rank]) for rank, member in enumerate(run.members)
    ]
    for call in calls:
        call.result(LIMIT_S)
    assert [[set(part.tolist()) for part in parts] for parts in arrays] == [
        [{2.0}, {4.0}, {2.0}]
    ] * 2


def test_asyncio(run_of: Callable[..., Run]) -> None:
    run = run_of(1)
    arrays = [[np.full(100, rank + 1.0) for _ in range(3)] for rank in range(2)]

    async def newcomer() -> None:
        async with pccl.aio.Communicator(run.master.address, timing=run.timing) as comm:
            await comm.connect()
            await comm.all_reduce_many(arrays[1], op=pccl.ReduceOp.AVG)

    joining = run.start(asyncio.run, newcomer())
    grow(run.members[0], 2)
    run.members[0].all_reduce_many(arrays[0], op=pccl.ReduceOp.AVG)
    joining.result(LIMIT_S)
    assert joined(arrays[0]) == joined(arrays[1]) == [1.5] * 300
    run.members[0].update_topology()
