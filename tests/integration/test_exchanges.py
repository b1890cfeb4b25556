"""All-gather, gather, scatter, all-to-all, reduce and reduce-scatter, over sockets; and objects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pccl
from pccl._api.objects import checked_lengths
from pccl.errors import CollectiveAborted, DescriptorMismatch, RemoteProtocolError, TooFewPeers
from tests.integration.conftest import Run
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

LARGE = 700_001
"""Elements of several segments, which do not end where one does."""


def all_of(run: Run, call: str, *arguments: list[Any], **options: Any) -> list[Any]:
    """Let all members make a call, each with its own arguments; return what they return."""
    futures = [
        run.start(getattr(member, call), *own, **options)
        for member, own in zip(run.members, zip(*arguments, strict=True), strict=True)
    ]
    return [future.result(LIMIT_S) for future in futures]


@pytest.mark.parametrize("count", [1, LARGE])
def test_all_gather(run_of: Callable[..., Run], count: int) -> None:
    run = run_of(3)
    inputs = [np.arange(count, dtype=np.float32) * (rank + 1) for rank in range(3)]
    results = [np.zeros(3 * count, np.float32) for _ in range(3)]
    infos = all_of(run, "all_gather", inputs, results)
    for result in results:
        assert result.tobytes() == b"".join(own.tobytes() for own in inputs)
    assert {(info.local_world_size, info.rx_bytes, info.tx_bytes) for info in infos} == {
        (3, 2 * inputs[0].nbytes, 2 * inputs[0].nbytes)
    }
    assert {info.algorithm for info in infos} == {"mesh"}


def test_all_gather_of_different_lengths_and_in_place(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    inputs = [torch.full((10 * rank,), rank, dtype=torch.bfloat16) for rank in range(3)]
    results = [[torch.zeros(10 * rank, dtype=torch.bfloat16) for rank in range(3)] for _ in inputs]
    all_of(run, "all_gather", inputs, results)
    assert all(torch.equal(a, b) for own in results for a, b in zip(own, inputs, strict=True))
    flat = [torch.zeros(6) for _ in range(3)]
    blocks = [one[2 * rank : 2 * rank + 2] for rank, one in enumerate(flat)]
    for rank, block in enumerate(blocks):
        block.fill_(rank)
    all_of(run, "all_gather", blocks, flat)
    assert all(torch.equal(one, torch.tensor([0.0, 0, 1, 1, 2, 2])) for one in flat)


def test_gather_and_scatter(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    inputs = [np.full(LARGE, rank, np.uint8) for rank in range(3)]
    gathered = np.zeros((3, LARGE), np.uint8)
    all_of(run, "gather", inputs, [None, gathered, None], root=1)
    assert [set(row.tolist()) for row in gathered] == [{0}, {1}, {2}]
    parts = [np.zeros(n, np.uint8) for n in (1, 0, 3)]
    all_of(run, "scatter", [None, None, [parts[0] + 7, parts[1], parts[2] + 9]], parts, root=2)
    assert [part.tolist() for part in parts] == [[7], [], [9, 9, 9]]


def test_all_to_all(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    inputs = [np.repeat(np.arange(3, dtype=np.int64) + 10 * rank, 2) for rank in range(3)]
    results = [np.zeros(6, np.int64) for _ in range(3)]
    all_of(run, "all_to_all", inputs, results)
    assert [one.tolist() for one in results] == [
        [rank, rank, 10 + rank, 10 + rank, 20 + rank, 20 + rank] for rank in range(3)
    ]
    sends = [[np.full(to * rank, rank, np.int8) for to in range(3)] for rank in range(3)]
    takes = [[np.zeros(rank * by, np.int8) for by in range(3)] for rank in range(3)]
    all_of(run, "all_to_all", sends, takes)
    assert [[part.tolist() for part in own] for own in takes] == [
        [[by] * (rank * by) for by in range(3)] for rank in range(3)
    ]


def test_reduce_and_reduce_scatter(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    inputs = [np.arange(LARGE, dtype=np.int32) * (rank + 1) for rank in range(3)]
    total = 6 * np.arange(LARGE, dtype=np.int32)
    sends = [own.copy() for own in inputs]
    all_of(run, "reduce", sends, root=2)
    assert np.array_equal(sends[2], total)
    assert np.array_equal(sends[:2], inputs[:2])
    ends = [233_334, 466_668, LARGE]
    parts = [np.zeros(n, np.int32) for n in (233_334, 233_334, 233_333)]
    infos = all_of(run, "reduce_scatter", inputs, parts, op="max")
    expected = np.split(3 * np.arange(LARGE, dtype=np.int32), ends[:-1])
    assert all(map(np.array_equal, parts, expected))
    assert sum(info.rx_bytes for info in infos) == 2 * inputs[0].nbytes


def test_send_and_receive(run_of: Callable[..., Run]) -> None:
    """No third member takes part; each pair and direction counts by itself."""
    run = run_of(3)
    first, second, third = run.members
    values: list[Any] = [np.arange(LARGE, dtype=np.float32), np.full(3, 7, np.int8)]
    got: list[Any] = [np.zeros_like(one) for one in values]
    sent = run.start(first.send, values[0], 2)
    there = run.start(third.recv, got[0], 0)
    assert sent.result(LIMIT_S).contributors == there.result(LIMIT_S).contributors
    assert len(there.result().contributors) == 2
    answer = second.recv_async(got[1], 0, tag=5)
    for member, to in ((first, 1), (third, 1)):
        member.send_async(values[1] + to, to, tag=5 if member is first else 6)
    answer.result(LIMIT_S)
    other = np.zeros(3, np.int8)
    second.recv(other, 2, tag=6)
    assert np.array_equal(got[0], values[0])
    assert [one.tolist() for one in (got[1], other)] == [[8] * 3] * 2
    with pytest.raises(ValueError, match="another member, from 0 to 2 and not 1"):
        second.send(values[1], 1)
    with pytest.raises(ValueError, match="but it is 3"):
        second.recv(values[1], 3)
    longer, shorter = run.start(first.send, values[1], 1), run.start(second.recv, got[1][:2], 0)
    for future in (longer, shorter):
        with pytest.raises(DescriptorMismatch, match=r"gives 3 elements .* expects 2"):
            future.result(LIMIT_S)


def test_handles(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    results = [np.zeros(2, np.int32) for _ in range(2)]
    inputs = [np.array([5 + rank], np.int32) for rank in range(2)]
    handles = all_of(run, "all_gather_async", inputs, results)
    barriers = [member.barrier_async(tag=1) for member in run.members]
    waits = [run.start(handle.result) for handle in (*handles, *barriers)]
    assert [wait.result(LIMIT_S).local_world_size for wait in waits] == [2] * 4
    assert [one.tolist() for one in results] == [[5, 6], [5, 6]]


def test_coroutines() -> None:
    got, parts = np.zeros(2, np.int8), [np.zeros(1, np.int16) for _ in range(2)]

    async def call(address: str) -> None:
        async with pccl.aio.Communicator(address) as one, pccl.aio.Communicator(address) as two:
            await asyncio.gather(one.connect(min_peers=2), two.connect(min_peers=2))
            first, second = sorted((one, two), key=lambda member: member.rank)
            own = [np.array([7 + rank], np.int8) for rank in range(2)]
            await asyncio.gather(first.gather(own[0], got), second.gather(own[1]))
            handle, _ = await asyncio.gather(
                first.reduce_scatter_async(np.arange(2, dtype=np.int16), parts[0]),
                second.reduce_scatter(np.arange(2, dtype=np.int16), parts[1]),
            )
            assert (await handle).local_world_size == 2

    with pccl.MasterNode("127.0.0.1:0") as master:
        asyncio.run(call(master.address))
    assert got.tolist() == [7, 8]
    assert [part.tolist() for part in parts] == [[0], [2]]


def test_a_lost_member_ends_a_gather_for_all(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    inputs = [np.full(4, rank, np.int32) for rank in range(3)]
    results = [np.zeros(12, np.int32) for _ in range(2)]
    futures = [
        run.start(member.all_gather, own, result)
        for member, own, result in zip(run.members, inputs, results, strict=False)
    ]
    until(lambda: run.members[0].status().calls)
    run.members[2].close()
    for future in futures:
        with pytest.raises(CollectiveAborted):
            future.result(LIMIT_S)
    assert [own.tolist() for own in inputs] == [[rank] * 4 for rank in range(3)]
    run.members.pop()
    with pytest.raises(ValueError, match="3 tensors"):
        run.members[0].all_gather(inputs[0], [inputs[1], inputs[2], np.zeros(4, np.int32)])
    shorter = [result[:8] for result in results]
    all_of(run, "all_gather", inputs[:2], shorter)
    assert [one.tolist() for one in shorter] == 2 * [[0] * 4 + [1] * 4]


def test_members_that_disagree_are_named(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    longer = run.start(run.members[0].all_gather, np.zeros(3, np.int8), np.zeros(6, np.int8))
    shorter = run.start(run.members[1].all_gather, np.zeros(2, np.int8), np.zeros(4, np.int8))
    for future in (longer, shorter):
        with pytest.raises(DescriptorMismatch, match=r"gives 3 elements to peer \d+ .* expects 2"):
            future.result(LIMIT_S)
    one = run.start(run.members[0].all_to_all, np.zeros(2, np.int8), np.zeros(2, np.int8))
    other = run.start(run.members[1].all_gather, np.zeros(2, np.int8), np.zeros(4, np.int8))
    for future in (one, other):
        with pytest.raises(DescriptorMismatch, match="all_to_all of int8"):
            future.result(LIMIT_S)


def test_objects(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    values = [{"rank": rank, "what": [None, 1.5, b"x" * rank]} for rank in range(3)]
    assert all_of(run, "all_gather_object", values) == [values] * 3
    assert all_of(run, "broadcast_object", values, root=2) == [values[2]] * 3
    assert all_of(run, "broadcast_object", [{1}, {2}, {3}], pickled=True) == [{1}] * 3
    assert all_of(run, "all_gather_object", [1, (2,), "3"], timeout_s=60) == [[1, [2], "3"]] * 3
    with pytest.raises(TypeError, match="pickled=True if all members trust"):
        run.members[0].all_gather_object({1})
    with pytest.raises(ValueError, match="root must be a rank"):
        run.members[0].broadcast_object(1, root=3)


@pytest.mark.parametrize("name", ["all_gather_object", "broadcast_object"])
def test_a_loss_between_the_steps_of_objects_ends_the_call_for_all(
    new_run: Callable[..., Run], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first member learns of the loss from a call of another thread."""
    run, held, reached, go_on = new_run(3), list[int](), threading.Event(), threading.Event()
    own = run.members[0]

    def checked(lengths: Any) -> list[int]:
        if threading.get_ident() in held:
            reached.set()
            assert go_on.wait(LIMIT_S)
        return checked_lengths(lengths)

    def call() -> Any:
        held.append(threading.get_ident())
        return getattr(own, name)(1, **root)

    root = {"root": 1} if name == "broadcast_object" else {}
    monkeypatch.setattr("pccl._api.objects.checked_lengths", checked)
    calls = [run.start(call), *(run.start(getattr(m, name), 1, **root) for m in run.members[1:])]
    assert reached.wait(LIMIT_S)
    run.members.pop().close()
    with pytest.raises(CollectiveAborted):
        calls[1].result(LIMIT_S)
    with pytest.raises(CollectiveAborted):
        own.barrier(tag=1)
    assert own.world_size == 2
    go_on.set()
    with pytest.raises(CollectiveAborted, match="between the two steps"):
        calls[0].result(LIMIT_S)
    held.clear()
    assert all_of(run, name, [1, 1]) == ([1] if root else [[1, 1]]) * 2


def test_a_retry_without_its_root_fails_for_all(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    values = [np.ones(4, np.float32) for _ in range(2)]
    futures = [
        run.start(member.reduce, own, root=2, retry=True)
        for member, own in zip(run.members, values, strict=False)
    ]
    until(lambda: all(member.status().calls for member in run.members[:2]))
    run.members.pop().close()
    for future in futures:
        with pytest.raises(CollectiveAborted, match="without a rank 2"):
            future.result(LIMIT_S)
    assert [own.tolist() for own in values] == [[1.0] * 4] * 2


def test_an_object_that_cannot_be_read_names_its_sender(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    said = run.start(run.members[0].all_gather_object, 1)
    garbage, lengths = np.array([0xC1], np.uint8), np.zeros(2, np.int64)
    run.members[1].all_gather(np.array([1]), lengths)
    run.members[1].all_gather(garbage, [np.zeros(n, np.uint8) for n in lengths])
    with pytest.raises(RemoteProtocolError, match="rank 1 sent an object that cannot be read"):
        said.result(LIMIT_S)
    said = run.start(run.members[0].all_gather_object, 1)
    run.members[1].all_gather(np.array([1 << 40]), lengths)
    with pytest.raises(RemoteProtocolError, match="1099511627776"):
        said.result(LIMIT_S)


def test_alone(run_of: Callable[..., Run]) -> None:
    (member,) = run_of(1).members
    x = np.zeros(2, np.int8)
    calls: list[Callable[[], Any]] = [
        lambda: member.all_gather(x, x.copy()),
        lambda: member.gather(x, x.copy()),
        lambda: member.scatter(x, x.copy()),
        lambda: member.all_to_all(x, x.copy()),
        lambda: member.reduce(x),
        lambda: member.reduce_scatter(x, x.copy()),
        lambda: member.send(x, 1),
        lambda: member.recv(x, 0),
    ]
    for call in calls:
        with pytest.raises(TooFewPeers):
            call()
    assert member.all_gather_object([1, "a"]) == [[1, "a"]]
    assert member.broadcast_object({"a": 1}) == {"a": 1}


def test_arguments_that_cannot_be_used(run_of: Callable[..., Run]) -> None:
    member = run_of(2).members[0]
    x, y = np.zeros(4, np.int8), np.zeros(8, np.int8)
    with pytest.raises(ValueError, match="recv has dtype int16, send has int8"):
        member.all_gather(x, y.view(np.int16))
    with pytest.raises(ValueError, match="overlap"):
        member.all_to_all(y[:4], y[2:6])
    with pytest.raises(ValueError, match="overlap"):
        member.reduce_scatter(y, y[:4])
    with pytest.raises(ValueError, match="neither send nor recv"):
        member.gather(None)
    with pytest.raises(ValueError, match="read-only"):
        member.all_gather(x, np.frombuffer(bytes(8), np.int8))
    with pytest.raises(ValueError, match="recv must be one tensor"):
        member.scatter(y, None)
    with pytest.raises(ValueError, match="only the root, rank 1"):
        member.gather(x, y, root=1)
    with pytest.raises(ValueError, match="root must be a rank of the group"):
        member.gather(x, y, root=2)
    with pytest.raises(ValueError, match="the part of rank 0 of 2 has 4"):
        member.reduce_scatter(y, x[:3].copy())
