"""Broadcast, barrier, who is there, budgets, ``retry=``, joining in its many ways."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import Attribute, MemberInfo, ReduceOp, Result, Timing
from pccl.errors import (
    CollectiveAborted,
    DeadlineExceeded,
    DescriptorMismatch,
    LinkError,
    MasterLost,
    NotConnected,
    TooFewPeers,
)
from tests.integration.conftest import Run
from tests.support.insides import port_of
from tests.support.members import admit, pair_at
from tests.support.patience import LIMIT_S, patient
from tests.support.ports import free_ports

PROMPT_S = patient(3.0)


# -- broadcast and barrier -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint64"])
@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast(run_of: Callable[..., Run], dtype: str, root: int) -> None:
    run = run_of(3)
    for count in (1, 2, 100_003):
        arrays = [((np.arange(count) + rank) % 100).astype(dtype) for rank in range(3)]
        expected = ((np.arange(count) + root) % 100).astype(dtype)
        futures = [
            run.start(member.broadcast, array, root=root, tag=root)
            for member, array in zip(run.members, arrays, strict=True)
        ]
        infos = [future.result(LIMIT_S) for future in futures]
        assert all(np.array_equal(array, expected) for array in arrays)
        assert {info.local_world_size for info in infos} == {3}
        assert sum(info.rx_bytes for info in infos) == 2 * expected.nbytes


def test_a_reduce_in_the_background_cannot_retry(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    ones = [np.ones(3, np.float32) for _ in run.members]
    with pytest.raises(ValueError, match="call again if the handle fails"):
        run.members[0].all_reduce_async(ones[0], retry=True)
    handles = [  # the refused one has not begun: its tag is free
        member.all_reduce_async(x) for member, x in zip(run.members, ones, strict=True)
    ]
    assert all(handle.wait()[0] for handle in handles)
    assert [x.tolist() for x in ones] == [[2.0] * 3] * 2


def test_broadcast_of_a_tensor_and_its_mistakes(run_of: Callable[..., Run]) -> None:
    torch = pytest.importorskip("torch")
    run = run_of(2)
    parameters: list[Any] = [torch.nn.Parameter(torch.full((3, 4), rank + 1.5)) for rank in (0, 1)]
    futures = [
        run.start(member.broadcast, parameter, root=1)
        for member, parameter in zip(run.members, parameters, strict=True)
    ]
    for future in futures:
        future.result(LIMIT_S)
    assert all((parameter == 2.5).all() for parameter in parameters)
    first, second = run.members
    for root, kind in ((2, ValueError), (-1, ValueError), ("0", TypeError)):
        with pytest.raises(kind, match="root must be"):
            first.broadcast(np.ones(3), root=root)  # type: ignore[arg-type]
    arrays = [np.zeros(3), np.ones(3)]
    disagreeing = run.start(first.broadcast, arrays[0], root=0)
    with pytest.raises(DescriptorMismatch, match="from rank 1"):
        second.broadcast(arrays[1], root=1)
    assert isinstance(disagreeing.exception(LIMIT_S), DescriptorMismatch)
    assert [array.tolist() for array in arrays] == [[0, 0, 0], [1, 1, 1]]


def test_barrier(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    first, second, third = run.members
    waiting = [run.start(member.barrier, tag=3) for member in (first, second)]
    run.until(lambda: run.requests == 2)
    assert not any(future.done() for future in waiting)
    third.barrier(tag=3)
    assert [future.result(LIMIT_S) for future in waiting] == [None, None]
    mixed = [run.start(member.barrier) for member in (first, second)]
    with pytest.raises(DescriptorMismatch, match="barrier"):
        third.all_reduce(np.ones(3))
    assert all(isinstance(f.exception(LIMIT_S), DescriptorMismatch) for f in mixed)


def test_alone(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    (alone,) = run.members
    alone.barrier()
    array = np.arange(3.0)
    info = alone.broadcast(array)
    assert (info.local_world_size, info.contributors) == (1, (alone.peer_id,))
    assert array.tolist() == [0, 1, 2]
    with pytest.raises(TooFewPeers) as caught:
        alone.optimize_topology()
    assert (caught.value.result, caught.value.func) == (Result.INVALID_USAGE, "optimize_topology")


def test_optimize_topology(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    before = [member.members() for member in run.members]
    assert run.each(pccl.Communicator.optimize_topology) == [None] * 3
    assert [member.members() for member in run.members] == before
    run.check()


# -- who is there --------------------------------------------------------------------------------


def test_members(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    other = run.join(group=5)
    first, second = run.members[:2]
    assert first.members() == second.members()
    assert [(member.peer_id, member.rank) for member in first.members()] == [(1, 0), (2, 1)]
    assert {member.host for member in first.members()} == {"127.0.0.1"}
    for comm, info in zip(run.members, first.members(), strict=False):
        assert replace(info, name="") == MemberInfo(comm.peer_id, comm.rank, *port_of(comm))
    assert [comm.rank for comm in run.members] == [0, 1, 0]
    assert [comm.world_size for comm in run.members] == [2, 2, 1]
    assert [member.peer_id for member in other.members()] == [3]
    with pytest.raises(ValueError, match="attribute must be one of 'global_world_size'"):
        first.get_attribute(5)  # type: ignore[arg-type]
    assert first.get_attribute("local_world_size") == 2


# -- budgets -------------------------------------------------------------------------------------


def all_reduce(comm: pccl.Communicator, **options: Any) -> object:
    return comm.all_reduce(np.ones(3), **options)


def broadcast(comm: pccl.Communicator, **options: Any) -> object:
    return comm.broadcast(np.ones(3), **options)


WAITING: dict[str, tuple[Callable[..., object], Result]] = {
    "update_topology": (pccl.Communicator.update_topology, Result.UPDATE_TOPOLOGY_FAILED),
    "are_peers_pending": (pccl.Communicator.are_peers_pending, Result.INVALID_USAGE),
    "optimize_topology": (pccl.Communicator.optimize_topology, Result.TOPOLOGY_OPTIMIZATION_FAILED),
    "all_reduce": (all_reduce, Result.RANK_CONNECTION_LOST),
    "broadcast": (broadcast, Result.RANK_CONNECTION_LOST),
    "barrier": (pccl.Communicator.barrier, Result.RANK_CONNECTION_LOST),
}


@pytest.mark.parametrize("name", WAITING)
def test_budgets(new_run: Callable[..., Run], name: str) -> None:
    run = new_run(2)
    call, result = WAITING[name]
    first, second = run.members
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"timeout_s=0\.1 ran out") as caught:
        call(first, timeout_s=0.1)
    assert 0.09 < time.monotonic() - started < PROMPT_S  # the loop counts milliseconds
    assert (caught.value.result, caught.value.func) == (result, name)
    assert isinstance(caught.value, TimeoutError)
    if name != "are_peers_pending":
        run.each(pccl.Communicator.are_peers_pending)
    if name in ("all_reduce", "broadcast", "barrier"):
        with pytest.raises(CollectiveAborted, match=r"withdrew: timeout_s=0\.1 ran out"):
            call(second, timeout_s=LIMIT_S)  # the one that the first has given up
    both = [run.start(call, comm, timeout_s=LIMIT_S) for comm in (first, second)]
    for future in both:
        future.result(LIMIT_S)
    run.check()


def test_a_budget_for_connect(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    second = run.newcomer()
    with pytest.raises(DeadlineExceeded, match="update_topology") as caught:
        second.connect(timeout_s=0.1)
    assert caught.value.result is Result.MASTER_CONNECTION_FAILED
    run.members.append(second)
    joining = run.start(second.connect, timeout_s=LIMIT_S)
    while run.members[0].world_size < 2:
        run.members[0].update_topology()
    joining.result(LIMIT_S)
    run.check()


# -- retry= --------------------------------------------------------------------------------------


def test_retry(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    lost = run.members.pop()
    arrays = [np.full(1000, rank + 1.0) for rank in range(2)]
    futures = [
        run.start(member.all_reduce, array, op=ReduceOp.SUM, retry=True)
        for member, array in zip(run.members, arrays, strict=True)
    ]
    run.until(lambda: run.requests == 2)
    lost.close()
    infos = [future.result(LIMIT_S) for future in futures]
    assert {info.contributors for info in infos} == {(1, 2)}
    assert {info.attempts for info in infos} == {2}
    assert [array.tolist() for array in arrays] == [[3.0] * 1000] * 2
    run.members.pop().close()
    with pytest.raises(TooFewPeers):
        run.members[0].all_reduce(arrays[0], retry=True)


def test_retry_does_not_repeat_mistakes(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    futures = [
        run.start(member.all_reduce, np.ones(3 + rank), retry=True)
        for rank, member in enumerate(run.members)
    ]
    assert all(isinstance(f.exception(LIMIT_S), DescriptorMismatch) for f in futures)


# -- joining -------------------------------------------------------------------------------------


def test_min_peers(new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    run.members = [run.newcomer() for _ in range(3)]
    joining = [run.start(member.connect, min_peers=3) for member in run.members[:2]]
    run.until(lambda: run.registered == 2)
    assert not any(future.done() for future in joining)
    monkeypatch.setenv("PCCL_MIN_PEERS", "3")
    run.members[2].connect()
    for future in joining:
        future.result(LIMIT_S)
    assert [member.world_size for member in run.members] == [3, 3, 3]
    run.check()


def test_update_topology_joins_again_after_a_lost_master(new_run: Callable[..., Run]) -> None:
    run = new_run(2, Timing(heartbeat_s=0.1, tick_s=0.05, master_lost_s=0.5, connect_retry_s=0.01))
    first, second = run.members
    array = np.ones(10)
    futures: list[Future[Any]] = [
        run.start(first.all_reduce, array),
        run.start(second.are_peers_pending),
    ]
    run.until(lambda: run.requests + run.round_requests == 2)
    run.master.interrupt()
    assert all(isinstance(future.exception(LIMIT_S), MasterLost) for future in futures)
    assert (array == 1).all()
    with pytest.raises(NotConnected, match=r"update_topology\(\)|connect\(\)"):
        first.all_reduce(array)
    with pccl.MasterNode(run.master.address):
        first.update_topology()
        assert first.world_size == 1
        rejoining = run.start(second.update_topology)
        while first.world_size < 2:
            first.update_topology()
        rejoining.result(LIMIT_S)
        run.check()
        first.close()
        second.close()


def test_the_environment(new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    monkeypatch.delenv("PCCL_MASTER", raising=False)
    with pytest.raises(ValueError, match="set PCCL_MASTER"):
        pccl.Communicator()
    monkeypatch.setenv("PCCL_MASTER", run.master.address)
    monkeypatch.setenv("PCCL_GROUP", "7")
    monkeypatch.setenv("PCCL_LANES", "3")
    with pccl.Communicator(timing=run.timing) as comm, pccl.Communicator(None, 0, 0) as other:
        assert comm.p2p_connection_pool_size == 3
        assert other.p2p_connection_pool_size == 0
        comm.connect()
        admit(comm, other)
        assert comm.world_size == other.world_size == 1
        assert comm.get_attribute(Attribute.NUM_DISTINCT_PEER_GROUPS) == 2


def reduce_on(first: pccl.Communicator, second: pccl.Communicator) -> list[float]:
    array, other = np.full(3, 1.0), np.full(3, 2.0)
    handle = first.all_reduce_async(array)
    second.all_reduce(other)
    assert handle.wait()[0]
    return array.tolist()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


HOSTS = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"} | (
    {"[::1]": "::1"} if has_ipv6() else {}
)


@pytest.mark.parametrize(("host", "number"), HOSTS.items())
def test_hosts(host: str, number: str) -> None:
    with pccl.MasterNode(f"{host}:0") as master:
        port = master.address.rpartition(":")[2]
        first, second = pair_at(f"{host}:{port}")
        with first, second:
            assert reduce_on(first, second) == [3.0] * 3
            assert {member.host for member in first.members()} == {number}


def test_advertise(new_run: Callable[..., Run]) -> None:
    run = new_run()
    low, high = free_ports(2)
    first, second = pair_at(run.master.address, advertise=f"localhost:{low}-{high}")
    with first, second:
        assert {(member.host, member.port) for member in first.members()} == {
            ("127.0.0.1", low),
            ("127.0.0.1", high),
        }
        assert reduce_on(first, second) == [3.0] * 3
        with (
            pccl.Communicator(run.master.address, advertise=f":{low}-{high}") as third,
            pytest.raises(LinkError, match="cannot open its port"),
        ):
            third.connect()
    with pytest.raises(ValueError, match="HOST:FIRST-LAST"):
        pccl.Communicator(run.master.address, advertise=":9-8")


def test_a_lost_member_ends_broadcast_and_barrier(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    lost = run.members.pop()
    array = np.ones(3)
    futures: list[Future[Any]] = [
        run.start(run.members[0].broadcast, array, root=1, tag=1),
        run.start(run.members[1].barrier, tag=2),
    ]
    run.until(lambda: run.requests == 2)
    lost.close()
    for future, func in zip(futures, ("broadcast", "barrier"), strict=True):
        error = future.exception(LIMIT_S)
        assert isinstance(error, CollectiveAborted)
        assert (error.func, error.result) == (func, Result.RANK_CONNECTION_LOST)
    assert (array == 1).all()
