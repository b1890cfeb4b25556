"""``all_reduce_multiple_with_retry``: every tensor reduced by everyone, or the tags that are."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import (
    DataType,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
)
from pccl.errors import (
    DeadlineExceeded,
    DescriptorMismatch,
    NotConnected,
    PendingOperations,
    TooFewPeers,
)
from pccl.machines.peer.events import ReduceCall
from pccl.protocol.limits import Timing
from pccl.protocol.operation import Phase
from pccl.protocol.types import Descriptor
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.master_server import MasterServer
from pccl.runtime.requests import JoinRequest, PeerOptions, ReduceManyRequest, ReduceRequest
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address
from pccl.transports.sim.network import SimNetwork
from tests.integration.conftest import Run
from tests.support.clear import in_the_clear
from tests.support.patience import LIMIT_S


def described(send: Any, recv: Any, tag: int, op: ReduceOp = ReduceOp.SUM) -> ReduceOpDescriptor:
    return ReduceOpDescriptor.from_numpy(
        send, recv, ReduceDescriptor(send.size, op, tag, None, None)
    )


def in_place(arrays: list[Any], first_tag: int = 0) -> list[ReduceOpDescriptor]:
    return [described(array, array, first_tag + n) for n, array in enumerate(arrays)]


def start(run: Run, member: int, arrays: list[Any], **options: Any) -> Future[ReduceInfo]:
    call = run.members[member].all_reduce_multiple_with_retry
    return run.start(call, in_place(arrays), **options)


@pytest.mark.parametrize("max_in_flight", [1, 3, 100])
def test_values(run_of: Callable[..., Run], max_in_flight: int) -> None:
    run = run_of(3)
    ops = list(itertools.islice(itertools.cycle(ReduceOp), 12))
    dtypes = list(itertools.islice(itertools.cycle(["int64", "float32", "int8"]), 12))
    sends = [
        [(np.arange(1 + 997 * n) % 3 * (rank + 1)).astype(dtype) for n, dtype in enumerate(dtypes)]
        for rank in range(3)
    ]
    results = [[np.zeros_like(send) for send in own] for own in sends]

    def call(rank: int) -> ReduceInfo:
        descriptors = [
            described(sends[rank][n], results[rank][n], n, op) for n, op in enumerate(ops)
        ]
        comm = run.members[rank]
        return comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=max_in_flight)

    infos = [future.result(LIMIT_S) for future in [run.start(call, rank) for rank in range(3)]]
    for n, op in enumerate(ops):
        x = np.arange(1 + 997 * n) % 3
        expected = {
            ReduceOp.SUM: 6 * x,
            ReduceOp.AVG: 2 * x,
            ReduceOp.PROD: 6 * x**3,
            ReduceOp.MAX: 3 * x,
            ReduceOp.MIN: x,
        }[op]
        assert all(np.array_equal(results[rank][n], expected) for rank in range(3)), (n, op)
    total = 4 * sum(send.nbytes for send in sends[0])
    assert sum(info.tx_bytes for info in infos) == sum(info.rx_bytes for info in infos) == total
    ids = tuple(member.peer_id for member in run.members)
    assert {info.contributors for info in infos} == {ids}
    assert {info.local_world_size for info in infos} == {3}


def test_raw_pointers(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    sends = [np.array([1, 2, 3], np.uint16), np.array([10, 20, 30], np.uint16)]
    results = [np.zeros(3, np.uint16) for _ in sends]
    what = ReduceDescriptor(3, ReduceOp.SUM, 7, ReduceOperandDescriptor(DataType.UINT16), None)
    futures = [
        run.start(
            member.all_reduce_multiple_with_retry,
            [ReduceOpDescriptor(send.ctypes.data, result.ctypes.data, what)],
        )
        for member, send, result in zip(run.members, sends, results, strict=True)
    ]
    assert [future.result(LIMIT_S).attempts for future in futures] == [1, 1]
    assert [result.tolist() for result in results] == [[11, 22, 33]] * 2
    assert [send.tolist() for send in sends] == [[1, 2, 3], [10, 20, 30]]


def test_a_member_is_lost_on_the_way(new_run: Callable[..., Run]) -> None:
    """Eight tensors, two at a time; the third member only ever reduces three of them."""
    run = new_run(3)
    arrays = [[np.full(1000, 10.0**rank) for _ in range(8)] for rank in range(3)]
    lost = run.members[2]
    staying = [start(run, rank, arrays[rank], max_in_flight=2) for rank in range(2)]
    lost.all_reduce_multiple_with_retry(in_place(arrays[2][:3]), max_in_flight=2)
    lost.close()
    infos = [future.result(LIMIT_S) for future in staying]
    assert {info.local_world_size for info in infos} == {2}
    assert {info.contributors for info in infos} == {(1, 2)}
    reduced = [[set(array.tolist()) for array in own] for own in arrays]
    assert reduced[0] == reduced[1] == [{111.0}] * 3 + [{11.0}] * 5
    assert reduced[2] == [{111.0}] * 3 + [{100.0}] * 5
    run.members.pop()
    assert [member.world_size for member in run.members] == [2, 2]
    run.check()


def test_everybody_else_is_lost(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    first, second = run.members
    arrays = [[np.full(1000, rank + 1.0) for _ in range(6)] for rank in range(2)]
    alone = start(run, 0, arrays[0], max_in_flight=2)
    second.all_reduce_multiple_with_retry(in_place(arrays[1][:2]))
    second.close()
    error = alone.exception(LIMIT_S)
    assert isinstance(error, TooFewPeers)
    assert (error.result, error.func) == (5, "all_reduce_multiple_with_retry")
    assert error.completed_tags == (0, 1)
    assert [array[0] for array in arrays[0]] == [3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    assert first.world_size == 1


def test_a_mismatch(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    arrays = [[np.full(10, rank + 1.0) for _ in range(4)] for rank in range(2)]
    arrays[1][2] = np.full(11, 2.0)
    futures = [start(run, rank, arrays[rank], max_in_flight=1) for rank in range(2)]
    for future in futures:
        error = future.exception(LIMIT_S)
        assert isinstance(error, DescriptorMismatch)
        assert error.result is Result.INVALID_ARGUMENT
        assert "SUM of 11 x float64" in str(error)
        assert error.completed_tags == (0, 1)
    assert [[array[0] for array in own] for own in arrays] == [
        [3.0, 3.0, 1.0, 1.0],
        [3.0, 3.0, 2.0, 2.0],
    ]
    run.check()


def test_a_budget(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    arrays = [[np.full(10, rank + 1.0) for _ in range(4)] for rank in range(2)]
    hasty = start(run, 0, arrays[0], timeout_s=0.3)
    run.members[1].all_reduce_multiple_with_retry(in_place(arrays[1][:2]))
    error = hasty.exception(LIMIT_S)
    assert isinstance(error, DeadlineExceeded)
    assert error.completed_tags == (0, 1)
    assert [array[0] for array in arrays[0]] == [3.0, 3.0, 1.0, 1.0]
    run.each(pccl.Communicator.are_peers_pending)
    run.check()


def test_mistakes(run_of: Callable[..., Run], new_run: Callable[..., Run]) -> None:
    run = run_of(2)
    first = run.members[0]
    array = np.ones(10)
    with pytest.raises(ValueError, match="nothing to reduce"):
        first.all_reduce_multiple_with_retry([])
    with pytest.raises(ValueError, match="tag 0 occurs twice"):
        first.all_reduce_multiple_with_retry([*in_place([array]), *in_place([np.ones(5)])])
    for one, another in ((array, array), (array, array[9:]), (array[2:5], array)):
        with pytest.raises(ValueError, match="overlap"):
            first.all_reduce_multiple_with_retry(in_place([one, another]))
    other = new_run(1)
    for member, kind in ((other.members[0], TooFewPeers), (other.newcomer(), NotConnected)):
        with pytest.raises(kind) as caught:
            member.all_reduce_multiple_with_retry(in_place([array]))
        assert caught.value.func == "all_reduce_multiple_with_retry"
        assert caught.value.completed_tags == ()
    assert (array == 1).all()


def test_nothing_else_is_held_up(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    first, second = run.members
    arrays = [[np.ones(10), np.ones(10)] for _ in range(2)]
    waiting = start(run, 0, arrays[0])
    run.until(lambda: run.requests == 2)
    with pytest.raises(pccl.PCCLError, match="tag 1 is in use"):
        first.all_reduce(np.ones(5), tag=1)
    with pytest.raises(PendingOperations):
        first.update_topology()
    single = run.start(first.all_reduce, np.ones(5), tag=9)
    second.all_reduce(np.ones(5), tag=9)
    single.result(LIMIT_S)
    second.all_reduce_multiple_with_retry(in_place(arrays[1]))
    waiting.result(LIMIT_S)
    assert all((array == 2).all() for own in arrays for array in own)


# -- in virtual time -------------------------------------------------------------------------------


MASTER = Address("master", 48148)
LATENCY_NS = 5_000_000


async def sleep_ns(loop: VirtualLoop, duration_ns: int) -> None:
    woken: asyncio.Future[None] = loop.create_future()
    loop.call_at_ns(loop.now_ns() + duration_ns, woken.set_result, None)
    await woken


def requests_for(arrays: list[Any], first_tag: int) -> list[ReduceRequest]:
    return [
        ReduceRequest(
            borrow(array), ReduceCall(0, tag, Descriptor(DataType.FLOAT, ReduceOp.SUM, array.size))
        )
        for tag, array in enumerate(arrays, first_tag)
    ]


async def lose_the_other_one(loop: VirtualLoop, arrays: list[Any], theirs: Any) -> None:
    """Two members; one reduces ``arrays`` as tags 7 and 8, the other one 8 only, and dies.

    It dies with its result complete and unreported. So one message of the master's aborts tag 7,
    and the next one, in the same instant, commits tag 8: everybody left has that result.
    """
    network = SimNetwork(loop, Random(1), ragged=False, latency_ns=LATENCY_NS)
    master = MasterServer(
        loop, network.host("master"), Timing(), Random(2).randbytes, encrypts=in_the_clear
    )
    await master.start(MASTER)
    options = PeerOptions(
        listen=Address("", 0), random_bytes=Random(3).randbytes, encrypts=in_the_clear
    )
    hosts = [network.host(name) for name in ("staying", "dying")]
    staying, dying = (PeerEngine(loop, loop, host, MASTER, 0, options) for host in hosts)
    for joining in [
        loop.create_task(e.connect(JoinRequest(min_peers=2))) for e in (staying, dying)
    ]:
        await joining
    many = ReduceManyRequest(tuple(requests_for(arrays, 7)), max_in_flight=2)
    call = loop.create_task(staying.reduce_many(many))
    (request,) = requests_for([theirs], 8)
    lost = loop.create_task(dying.reduce(request))

    def phases(engine: PeerEngine) -> list[Phase | None]:
        return [engine.machine.phase_of(operation) for operation in engine.data_plane.transfers]

    while Phase.STARTED not in phases(dying):
        await sleep_ns(loop, LATENCY_NS // 10)
    network.stall("dying", "master", None, one_way=True)
    while phases(staying) != [Phase.REQUESTED, Phase.DONE] or phases(dying) != [Phase.DONE]:
        await sleep_ns(loop, LATENCY_NS // 10)
    await sleep_ns(loop, 2 * LATENCY_NS)
    network.stall("master", "staying", None, one_way=True)
    hosts[1].crash()
    await sleep_ns(loop, 4 * LATENCY_NS)
    network.heal("master", "staying")  # all at once, as after a moment without the processor
    try:
        await call
    finally:
        lost.cancel()
        await asyncio.wait([lost])
        assert not staying.machine.needs_resync
        assert len(staying.calls) == 0
        await staying.close()
        master.close()


def test_the_last_one_left_keeps_what_was_committed_with_the_loss() -> None:
    loop = VirtualLoop(limit_ns=300 * 10**9)
    arrays = [np.full(1000, 1.0, np.float32), np.full(1000, 2.0, np.float32)]
    theirs = np.full(1000, 4.0, np.float32)
    try:
        with pytest.raises(TooFewPeers, match="tags that completed: 8;") as caught:
            loop.run_until_complete(lose_the_other_one(loop, arrays, theirs))
    finally:
        loop.close()
    assert caught.value.completed_tags == (8,)
    assert [set(array.tolist()) for array in arrays] == [{1.0}, {6.0}]
