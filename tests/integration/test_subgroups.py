"""Collectives of some members of a group, over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import pccl
from pccl.errors import CollectiveAborted, DescriptorMismatch, TooFewPeers
from tests.integration.conftest import Run, results_of
from tests.support.patience import LIMIT_S
from tests.support.waiting import until


def subgroups_of(run: Run, *sets: Sequence[int]) -> list[list[pccl.Subgroup]]:
    """The subgroups of these ranks, as each of their members makes them."""
    return [[run.members[rank].subgroup(ranks) for rank in ranks] for ranks in sets]


def all_of(run: Run, members: list[pccl.Subgroup], call: str, *arguments: Any, **how: Any) -> Any:
    """Let all members of a subgroup make a call, each with its own arguments."""
    given = zip(*arguments, strict=True) if arguments else [()] * len(members)
    calls = [
        run.start(getattr(member, call), *own, **how)
        for member, own in zip(members, given, strict=True)
    ]
    return results_of(calls)


@pytest.mark.parametrize("count", [10, 300_001])
def test_disjoint_subgroups_reduce_at_once(run_of: Callable[..., Run], count: int) -> None:
    run = run_of(4)
    values = [np.full(count, 10.0**rank, np.float32) for rank in range(4)]
    handles = [
        (member.all_reduce_async(values[rank]), rank)
        for ranks, members in zip(([0, 2], [3, 1]), subgroups_of(run, [0, 2], [3, 1]), strict=True)
        for member, rank in zip(members, ranks, strict=True)
    ]
    infos = {rank: handle.result(LIMIT_S) for handle, rank in handles}
    assert [set(own.tolist()) for own in values] == [{101}, {1010}, {101}, {1010}]
    ids = [member.peer_id for member in run.members]
    assert infos[0].contributors == infos[2].contributors == (ids[0], ids[2])
    assert infos[1].contributors == infos[3].contributors == (ids[3], ids[1])


def test_overlapping_subgroups_and_the_group_share_no_tag(run_of: Callable[..., Run]) -> None:
    """Each counts its calls by itself, also if one is the group in another order."""
    run = run_of(3)
    sets: list[list[int]] = [[0, 1], [1, 2], [2, 1], [0, 1, 2], [2, 0, 1]]
    made = dict(enumerate(subgroups_of(run, *sets)))
    values = [[np.full(5, 1 << 4 * rank) for rank in ranks] for ranks in (*sets, [0, 1, 2])]
    handles = [
        member.all_reduce_async(own)
        for at, members in reversed(made.items())
        for member, own in zip(members, values[at], strict=True)
    ]
    run.reduce(values[-1])
    for handle in handles:
        handle.result(LIMIT_S)
    assert [{one for own in each for one in own.tolist()} for each in values] == [
        {0x11}, {0x110}, {0x110}, {0x111}, {0x111}, {0x111}
    ]  # fmt: skip


def test_every_collective_takes_the_ranks_of_the_subgroup(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    (two,) = subgroups_of(run, [2, 0])
    assert [(one.rank, one.world_size) for one in two] == [(0, 2), (1, 2)]
    ids = [run.members[rank].peer_id for rank in (2, 0)]
    assert [one.peer_id for one in two] == ids
    assert [(each.peer_id, each.rank) for each in two[0].members()] == [(ids[0], 0), (ids[1], 1)]
    assert repr(two[1]).endswith(f"rank 1 of peers {ids[0]}, {ids[1]}>")
    own = [np.full(2, 1), np.full(2, 2)]
    all_of(run, two, "broadcast", own, root=1)
    assert [one.tolist() for one in own] == [[2, 2], [2, 2]]
    all_of(run, two, "barrier")
    own = [np.full(2, 1), np.full(2, 2)]
    got = [np.zeros(4, int), np.zeros(4, int)]
    all_of(run, two, "all_gather", own, got)
    assert [one.tolist() for one in got] == [[1, 1, 2, 2]] * 2
    got = [np.zeros(2, int), np.zeros(2, int)]
    all_of(run, two, "all_to_all", own, got)
    assert [one.tolist() for one in got] == [[1, 2]] * 2
    all_of(run, two, "gather", own, [None, whole := np.zeros(4, int)], root=1)
    assert whole.tolist() == [1, 1, 2, 2]
    parts = [np.zeros(1, int), np.zeros(1, int)]
    all_of(run, two, "scatter", [None, np.array([5, 6])], parts, root=1)
    assert [one.tolist() for one in parts] == [[5], [6]]
    all_of(run, two, "reduce_scatter", own, parts)
    assert [one.tolist() for one in parts] == [[3], [3]]
    all_of(run, two, "reduce", own, [None, total := np.zeros(2, int)], root=1)
    assert total.tolist() == [3, 3]
    handles = [two[0].send_async(np.array([7]), 1), two[1].recv_async(x := np.zeros(1, int), 0)]
    for handle in handles:
        handle.result(LIMIT_S)
    assert x.tolist() == [7]
    assert all_of(run, two, "all_gather_object", ["a", {"b": 1}]) == [["a", {"b": 1}]] * 2
    assert all_of(run, two, "broadcast_object", ["a", "b"], root=1) == ["b", "b"]
    floats = [np.full(3, 1.0, np.float32), np.full(3, 4.0, np.float32)]
    weights = [run.start(one.all_reduce, f, op="avg", weight=w) for one, f, w in zip(
        two, floats, (1, 2), strict=True)]  # fmt: skip
    assert [one.weights for one in results_of(weights)] == [(1, 2)] * 2
    assert [one.tolist() for one in floats] == [[3.0] * 3] * 2


def test_sends_of_a_subgroup_are_not_those_of_the_group(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    (two,) = subgroups_of(run, [0, 1])
    in_group, in_two = np.zeros(1, int), np.zeros(1, int)
    handles = [
        run.members[1].recv_async(in_group, 0),
        two[1].recv_async(in_two, 0),
        two[0].send_async(np.array([2]), 1),
        run.members[0].send_async(np.array([1]), 1),
    ]
    for handle in handles:
        handle.result(LIMIT_S)
    assert (in_group.tolist(), in_two.tolist()) == ([1], [2])


def test_differing_calls_name_the_subgroup(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    (two,) = subgroups_of(run, [2, 0])
    ids = sorted(member.peer_id for member in two)
    values = [np.zeros(2), np.zeros(3)]
    calls = [run.start(one.all_reduce, x, tag=5) for one, x in zip(two, values, strict=True)]
    for call in calls:
        with pytest.raises(DescriptorMismatch, match=f"tag 5 of peers {ids[0]}.*, {ids[1]}"):
            call.result(LIMIT_S)


def test_the_loss_of_a_member_ends_the_subgroup(new_run: Callable[..., Run]) -> None:
    run = new_run(4)
    lost, other = subgroups_of(run, [0, 3], [1, 2])
    waits = [run.start(lost[0].all_reduce, np.ones(3)), run.start(other[0].all_reduce, np.ones(3))]
    until(lambda: all(member.status().calls for member in run.members[:2]))
    run.members.pop().close()
    with pytest.raises(CollectiveAborted, match="make a new subgroup"):
        waits[0].result(LIMIT_S)
    with pytest.raises(CollectiveAborted, match="call again"):
        waits[1].result(LIMIT_S)
    with pytest.raises(CollectiveAborted, match="make a new subgroup"):
        lost[0].barrier()
    with pytest.raises(CollectiveAborted, match="before this call"):  # it has not seen the loss
        other[1].barrier()
    all_of(run, other, "barrier")
    (smaller,) = subgroups_of(run, [0, 2])
    assert all_of(run, smaller, "all_gather_object", [1, 2]) == [[1, 2]] * 2
    run.check()


def test_a_subgroup_of_one(run_of: Callable[..., Run]) -> None:
    alone = run_of(2).members[1].subgroup([1])
    alone.barrier()
    assert alone.all_gather_object(5) == [5]
    assert alone.broadcast_object(5) == 5
    calls: list[Callable[[], Any]] = [
        lambda: alone.all_reduce(np.ones(3)),
        lambda: alone.send(np.ones(3), 0),
    ]
    for call in calls:
        with pytest.raises(TooFewPeers, match="alone in its subgroup"):
            call()


def test_wrong_ranks(run_of: Callable[..., Run]) -> None:
    member = run_of(3).members[1]
    wrong: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "must have that of this peer, 1"),
        ([0, 2], ValueError, "must have that of this peer, 1"),
        ([1, 3], ValueError, "a rank must be from 0 to 2, not 3"),
        ([1, -1], ValueError, "a rank must be from 0 to 2, not -1"),
        ([1, 0, 1], ValueError, "ranks must differ"),
        ([1, 0.5], TypeError, "a rank must be an integer"),
        (1, TypeError, "must be a sequence of integers"),
    ]
    for ranks, error, says in wrong:
        with pytest.raises(error, match=says):
            member.subgroup(ranks)
    two = member.subgroup([1, 0])
    refused: list[dict[str, Any]] = [{"retry": True}, {"observable": True}, {"quorum": 2}]
    for options in refused:
        with pytest.raises(ValueError, match="takes no retry, quorum or observable"):
            two.all_reduce(np.ones(2), np.ones(2), **options)
    with pytest.raises(ValueError, match="root must be a rank of the group, from 0 to 1"):
        two.broadcast(np.ones(2), root=2)
    with pytest.raises(ValueError, match="another member, from 0 to 1 and not 0"):
        two.send(np.ones(2), 0)


def test_subgroups_of_asyncio(run_of: Callable[..., Run]) -> None:
    async def call(address: str) -> list[Any]:
        async with pccl.aio.Communicator(address) as one, pccl.aio.Communicator(address) as two:
            await asyncio.gather(one.connect(min_peers=2), two.connect(min_peers=2))
            first, second = one.subgroup([1, 0]), two.subgroup([1, 0])
            if one.rank == 0:
                first, second = second, first
            values = [np.ones(3), np.ones(3)]
            await asyncio.gather(first.all_reduce(values[0]), second.all_reduce(values[1]))
            handle = await first.all_reduce_async(values[0])
            await second.all_reduce(values[1])
            await handle
            return [first.rank, second.rank, *(own.tolist() for own in values)]

    run = run_of(0)
    assert asyncio.run(call(run.master.address)) == [0, 1, [4.0] * 3, [4.0] * 3]
