"""Weighted averages over sockets: every way to ask for one, and what becomes of a lost member's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl import ErrorFeedback, QuantizationOptions, ReduceInfo, ReduceOp
from pccl._api import arguments
from pccl.errors import CollectiveAborted, DescriptorMismatch, TooFewPeers
from pccl.observe.events import ContributionFlagged, PeerReport
from tests.integration.conftest import Array, Run
from tests.support.patience import LIMIT_S
from tests.support.unnamed import unnamed

AVG = ReduceOp.AVG
COUNT = 100_000


def values_of(rank: int, count: int = COUNT) -> Array:
    return np.random.default_rng(rank).uniform(-1, 1, count).astype(np.float32)


def truth(weights: list[float], count: int = COUNT) -> Array:
    inputs = [values_of(rank, count).astype(np.float64) for rank in range(len(weights))]
    return np.average(inputs, axis=0, weights=weights)


def weighed(
    run: Run, weights: list[float], *, in_place: bool, **options: Any
) -> tuple[list[Array], list[ReduceInfo]]:
    """All members reduce, each with its weight; their results are bit for bit the same."""
    sends = [values_of(rank) for rank in range(len(weights))]
    results = [send if in_place else np.empty_like(send) for send in sends]
    started = [
        run.start(member.all_reduce, send, result, op=AVG, weight=weight, **options)
        for member, send, result, weight in zip(run.members, sends, results, weights, strict=True)
    ]
    infos = [call.result(LIMIT_S) for call in started]
    assert len({result.tobytes() for result in results}) == 1
    if not in_place:
        assert [s.tobytes() for s in sends] == [values_of(r).tobytes() for r in range(len(sends))]
    return results, infos


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("algorithm", ["ring", "star", "mesh"])
@pytest.mark.parametrize("weights", [[3.0, 1.0], [100.5, 0.0, 7.25], [1e9, 5e8, 1e9, 2.5e8]])
def test_all_members_get_the_same_average_and_know_whose(
    run_of: Callable[..., Run], weights: list[float], algorithm: str, in_place: bool
) -> None:
    run = run_of(len(weights))
    results, infos = weighed(run, weights, in_place=in_place, algorithm=algorithm)
    assert np.abs(results[0] - truth(weights)).max() < 1e-6
    assert {info.contributors for info in infos} == {tuple(m.peer_id for m in run.members)}
    assert {info.weights for info in infos} == {tuple(weights)}
    assert {info.total_weight for info in infos} == {sum(weights)}


def test_a_plain_average_has_no_weights(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    infos = run.reduce([np.ones(5), np.ones(5)], op=AVG)
    assert {(info.weights, info.total_weight) for info in infos} == {((), None)}


def test_together_nothing_is_zeros(run_of: Callable[..., Run]) -> None:
    results, infos = weighed(run_of(3), [0.0, 0.0, 0.0], in_place=True)
    assert not results[0].any()
    assert {info.total_weight for info in infos} == {0.0}


def test_several_tensors_handles_and_descriptors(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    parts = [[np.full(3, 2.0), np.full(4, 6.0)], [np.full(3, 10.0), np.full(4, 2.0)]]

    def many(member: pccl.Communicator, rank: int) -> ReduceInfo:
        return member.all_reduce_many(parts[rank], op=AVG, weight=[3, 1][rank])

    def launch(member: pccl.Communicator, rank: int) -> ReduceInfo:
        parts[rank] = [np.full(3, 4.0 * rank), np.full(4, -4.0 * rank)]
        handles = [
            member.all_reduce_async(part, op=AVG, weight=[1, 0.5][rank], tag=tag)
            for tag, part in enumerate(parts[rank])
        ]
        return [handle.result() for handle in handles][-1]

    def described(member: pccl.Communicator, rank: int) -> ReduceInfo:
        parts[rank] = [np.full(3, 1.0 - rank), np.full(4, 8.0 * rank)]
        what = [
            pccl.ReduceDescriptor(part.size, AVG, tag, None, None, weight=1 + 6.0 * rank)
            for tag, part in enumerate(parts[rank])
        ]
        made = [
            pccl.ReduceOpDescriptor.from_numpy(part, part, one)
            for part, one in zip(parts[rank], what, strict=True)
        ]
        return member.all_reduce_multiple_with_retry(made)

    for call, weights, expected in (
        (many, (3.0, 1.0), [4.0, 5.0]),
        (launch, (1.0, 0.5), [4 / 3, -4 / 3]),
        (described, (1.0, 7.0), [0.125, 7.0]),
    ):
        started = [run.start(call, member, rank) for rank, member in enumerate(run.members)]
        infos = [one.result(LIMIT_S) for one in started]
        assert {info.weights for info in infos} == {weights}
        for own in parts:
            assert [set(part.tolist()) for part in own] == [{value} for value in expected]


def test_asyncio() -> None:
    async def part(address: str, rank: int) -> list[float]:
        async with pccl.aio.Communicator(address) as comm:
            await comm.connect(min_peers=2)
            array = np.full(4, 8.0 * rank)
            results = [await comm.all_reduce(array.copy(), array, op=AVG, weight=3 - 2 * rank)]
            then = np.full(4, 8.0 * rank)
            results.append(await (await comm.all_reduce_async(then, op=AVG, weight=rank)))
            last = np.full(4, 8.0 * rank)
            results.append(await comm.all_reduce_many([last], op=AVG, weight=1))
            await comm.barrier()
            totals = [info.total_weight for info in results]
            assert totals == [4, 1, 2]
            return [array[0], then[3], last[2]]

    async def main(address: str) -> None:
        both = await asyncio.gather(part(address, 0), part(address, 1))
        assert list(both) == [[2.0, 8.0, 4.0], [2.0, 8.0, 4.0]]

    with pccl.MasterNode("127.0.0.1:0") as master:
        asyncio.run(main(master.address))


def test_a_weight_is_given_by_all_or_by_none(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    weights = dict(zip(run.members, (2.0, None), strict=True))

    def reduce(member: pccl.Communicator) -> str:
        array = np.full(4, 7.0)
        with pytest.raises(DescriptorMismatch) as caught:
            member.all_reduce(array, op=AVG, weight=weights[member])
        assert np.array_equal(array, np.full(4, 7.0))
        return unnamed(caught.value.reason)

    first, second = run.members
    for reason in run.each(reduce):
        assert f"peer {first.peer_id} asked for weighted AVG of 4 x float64" in reason
        assert f"peer {second.peer_id} asked for AVG of 4 x float64" in reason
    with pytest.raises(ValueError, match="not for SUM; leave them out"):
        first.all_reduce(np.ones(4), weight=1.0)
    with pytest.raises(ValueError, match="weight must be from 0"):
        first.all_reduce_async(np.ones(4), op=AVG, weight=-1.0)


def test_alone_is_what_it_is_without_a_weight(new_run: Callable[..., Run]) -> None:
    (alone,) = new_run(1).members
    with pytest.raises(TooFewPeers):
        alone.all_reduce(np.ones(4), op=AVG, weight=1.0)


@pytest.mark.parametrize("algorithm", ["ring", "star", "mesh"])
def test_quantized_with_error_feedback(run_of: Callable[..., Run], algorithm: str) -> None:
    """What the results have lost in ten rounds of changing weights is what one of them loses."""
    run = run_of(3)
    owed = [ErrorFeedback() for _ in range(3)]
    lost, last = np.zeros(COUNT), np.zeros(COUNT)
    for turn in range(10):
        weights = [float(10 ** ((rank + turn) % 3)) for rank in range(3)]
        weights[turn % 3] *= turn % 2

        def reduce(member: pccl.Communicator, rank: int, weight: float) -> Array:
            options = QuantizationOptions(format="int8", error_feedback=owed[rank], name="w")
            array = values_of(rank)
            info = member.all_reduce(
                array, op=AVG, weight=weight, quantization_options=options, algorithm=algorithm
            )
            assert info.compression > 3
            return array

        started = [
            run.start(reduce, member, rank, weights[rank])
            for rank, member in enumerate(run.members)
        ]
        results = [call.result(LIMIT_S) for call in started]
        assert len({result.tobytes() for result in results}) == 1
        last = truth(weights) - results[0]
        lost += last
    assert np.abs(lost).max() < 0.03
    assert np.abs(last).max() < 0.06


@pytest.mark.parametrize("wire", ["sparse", "int8"])
def test_a_residual_that_is_not_sent_does_not_decay(run_of: Callable[..., Run], wire: str) -> None:
    run = run_of(3)
    owed = [ErrorFeedback(decay=0.5) for _ in range(3)]

    def reduce(member: pccl.Communicator, rank: int, weight: float) -> None:
        options = QuantizationOptions(format=wire, error_feedback=owed[rank], name="w")
        member.all_reduce(values_of(rank), op=AVG, weight=weight, quantization_options=options)

    def residual_after(weight: float) -> Array:
        calls = [run.start(reduce, m, rank, weight if rank == 2 else 1.0)
                 for rank, m in enumerate(run.members)]  # fmt: skip
        for call in calls:
            call.result(LIMIT_S)
        return owed[2].state_dict()["w"]

    first, second = residual_after(1.0), residual_after(0.0)
    assert np.any(first)
    # Beside sparse formats, each member also rounds the sums of its own third.
    assert np.mean(first == second) >= (1.0 if wire == "sparse" else 0.6)


def test_the_total_of_another_attempt_is_that_of_who_is_left(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    arrays = [np.full(1000, value) for value in (1.0, 4.0, 9.0)]
    hopeless = run.start(run.members[0].all_reduce, arrays[0], op=AVG, weight=1.0)
    started = run.start(run.members[1].all_reduce, arrays[1], op=AVG, weight=2.0, retry=True)
    run.until(lambda: run.requests == 2)
    run.members[2].close()
    assert isinstance(hopeless.exception(LIMIT_S), CollectiveAborted)
    assert set(arrays[0].tolist()) == {1.0}
    infos = [
        run.members[0].all_reduce(arrays[0], op=AVG, weight=1.0, retry=True),
        started.result(LIMIT_S),
    ]
    run.members.pop()
    assert {info.weights for info in infos} == {(1.0, 2.0)}
    assert {info.total_weight for info in infos} == {3.0}
    assert set(arrays[0].tolist()) == set(arrays[1].tolist()) == {3.0}
    run.check()


VICTIM = """
import sys
import numpy as np, pccl
comm = pccl.Communicator(sys.argv[1])
comm.connect()
comm.all_reduce(np.ones(4), op=pccl.ReduceOp.AVG, weight=5.0)
print("reduced", flush=True)
sys.stdin.read()
"""


def test_a_killed_member_takes_its_weight_with_it(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    command = [sys.executable, "-c", VICTIM, run.master.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as victim:
        try:

            def grow(member: pccl.Communicator) -> None:
                while len(member.members()) < 3:
                    member.update_topology()

            run.each(grow)
            arrays = [np.full(4, 1.0 + rank) for rank in range(2)]
            infos = run.reduce(arrays, op=AVG, weight=1.0)
            assert {info.weights for info in infos} == {(1.0, 1.0, 5.0)}
            assert {array[0] for array in arrays} == {(1 + 2 + 5) / 7}
            assert victim.stdout is not None
            assert victim.stdout.readline() == "reduced\n"
            tensors = [values_of(rank) for rank in range(2)]
            calls = [
                run.start(member.all_reduce, tensor, op=AVG, weight=3.0 - rank, retry=True)
                for rank, (member, tensor) in enumerate(zip(run.members, tensors, strict=True))
            ]
            run.until(lambda: run.requests == 2)
        finally:
            victim.kill()
    infos = [call.result(LIMIT_S) for call in calls]
    assert {(info.weights, info.total_weight, info.attempts) for info in infos} == {
        ((3.0, 2.0), 5.0, 2)
    }
    assert tensors[0].tobytes() == tensors[1].tobytes()
    assert np.abs(tensors[0] - truth([3.0, 2.0])).max() < 1e-6


# -- guarded -----------------------------------------------------------------------------------


def collector(events: list[ContributionFlagged]) -> Callable[[PeerReport], None]:
    def collect(event: PeerReport) -> None:
        if isinstance(event, ContributionFlagged):
            events.append(event)

    return collect


def has_two(events: list[ContributionFlagged]) -> bool:
    return len(events) == 2


def constantly_one(arrays: Iterable[Array]) -> float:
    return 1.0


@pytest.mark.parametrize("algorithm", ["ring", "star", "mesh"])
@pytest.mark.parametrize("wire", [None, "int8"])
def test_a_nan_is_excluded_as_if_its_member_had_called_with_weight_zero(
    run_of: Callable[..., Run], algorithm: str, wire: str | None
) -> None:
    run = run_of(3)
    told: list[list[ContributionFlagged]] = [[], [], []]
    for member, events in zip(run.members, told, strict=True):
        member.on_event(collector(events))
    options = QuantizationOptions(format=wire) if wire is not None else None

    def reduce(guard: str | None, weights: list[float]) -> tuple[list[Array], list[ReduceInfo]]:
        tensors = [values_of(rank, 5000) for rank in range(3)]
        tensors[1][4321] = np.nan
        calls = [
            run.start(
                member.all_reduce, tensor, op=AVG, weight=weight, guard=guard,
                algorithm=algorithm, quantization_options=options,
            )
            for member, tensor, weight in zip(run.members, tensors, weights, strict=True)
        ]  # fmt: skip
        return tensors, [call.result(LIMIT_S) for call in calls]

    plain, infos = reduce(None, [1.0, 0.0, 3.0])
    assert {info.excluded for info in infos} == {()}
    results, infos = reduce("exclude", [1.0, 5.0, 3.0])
    peer = run.members[1].peer_id
    assert {(info.excluded, info.weights) for info in infos} == {((peer,), (1.0, 0.0, 3.0))}
    assert {one.tobytes() for one in results} == {one.tobytes() for one in plain}
    assert np.isfinite(results[0]).all()
    results, infos = reduce("warn", [1.0, 5.0, 3.0])
    assert {info.excluded for info in infos} == {()}
    assert np.isnan(results[0]).any()
    for events in told:
        run.until(partial(has_two, events))
        assert [(one.peer_id, one.norm, one.excluded) for one in events] == [
            (peer, None, True),
            (peer, None, False),
        ]


def test_guards_must_agree_and_are_for_averages_of_floats(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    guards = ["exclude", pccl.Guard("exclude", "exclude", rounds=3)]
    calls = [
        run.start(member.all_reduce, np.ones(4), op=AVG, guard=guard)
        for member, guard in zip(run.members, guards, strict=True)
    ]
    for call in calls:
        with pytest.raises(DescriptorMismatch, match="over 3 rounds"):
            call.result(LIMIT_S)
    reduce: Any = run.members[0].all_reduce
    for wrong, says in (
        ({"op": "sum", "guard": "warn"}, "weight and guard are for"),
        ({"op": AVG, "guard": "sometimes"}, "guard"),
        ({"op": AVG, "guard": pccl.Guard(outliers="often")}, "outliers"),
        ({"op": AVG, "guard": pccl.Guard(deviations=0.5)}, "deviations must be from 1 to"),
        ({"op": AVG, "guard": pccl.Guard(rounds=65)}, "rounds must be from 0 to 64"),
    ):
        with pytest.raises(ValueError, match=says):
            reduce(np.ones(4), **wrong)
    with pytest.raises(ValueError, match="only floats can"):
        reduce(np.ones(4, np.int32), op=AVG, guard="warn")
    with pytest.raises(TypeError, match="guard must be"):
        reduce(np.ones(4), op=AVG, guard=3)


def test_a_member_whose_tensor_becomes_nan_after_its_declaration_is_named(
    run_of: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Declared as finite: what a hostile member would do."""
    run = run_of(3)
    monkeypatch.setattr(arguments, "l2_norm", constantly_one)
    tensors = [values_of(rank, 5000) for rank in range(3)]
    tensors[1][:] = np.nan
    calls = [
        run.start(member.all_reduce, tensor, op=AVG, guard="exclude", algorithm="mesh")
        for member, tensor in zip(run.members, tensors, strict=True)
    ]
    for rank, call in enumerate(calls):
        with pytest.raises(CollectiveAborted, match=f"peer {run.members[1].peer_id}.*not finite"):
            call.result(LIMIT_S)
        assert rank == 1 or tensors[rank].tobytes() == values_of(rank, 5000).tobytes()
