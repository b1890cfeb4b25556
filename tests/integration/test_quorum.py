"""Calls with a quorum over sockets: members go on without one that sleeps, which loses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import ErrorFeedback, QuantizationOptions, ReduceInfo, ReduceOp
from pccl.errors import CollectiveAborted, OutcomeUnknown, ResyncRequired
from pccl.runtime.hashing import hash_here
from pccl.state.digests import piece_digest
from tests.integration.conftest import Array, Run, results_of
from tests.support.insides import engine_of
from tests.support.members import Call, grow, pair_at
from tests.support.patience import LIMIT_S, patient

COUNT = 50_000
SOON: dict[str, Any] = {"quorum": 2, "grace_s": 0.05}


def values_of(rank: int, count: int = COUNT) -> Array:
    return np.random.default_rng(rank).uniform(-1, 1, count).astype(np.float32)


def sums(*ranks: int) -> Array:
    """What members of these ranks add up to, in rank order, as a ring does."""
    return np.asarray(np.sum([values_of(rank) for rank in ranks], axis=0, dtype=np.float64))


class Sleeper:
    """A run of three; the last member sleeps while the others call."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.awake, self.asleep = run.members[:2], run.members[2]

    def without_it(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """The others call. ``arguments``: for both, or one for each in a list."""
        started: list[Future[Any]] = []
        for rank, member in enumerate(self.awake):
            own: list[Any] = [one[rank] if isinstance(one, list) else one for one in arguments]
            started.append(self.run.start(call, member, *own, **options))
        return results_of(started)

    def reduce(self, **options: Any) -> tuple[list[Array], list[ReduceInfo]]:
        """Those that are awake reduce."""
        recv = [np.zeros(COUNT, np.float32) for _ in self.awake]
        sends = [values_of(rank) for rank in range(2)]
        infos = self.without_it(pccl.Communicator.all_reduce, sends, recv, **{**SOON, **options})
        assert [one.tobytes() for one in sends] == [values_of(r).tobytes() for r in range(2)]
        return recv, infos

    def wake(self, **options: Any) -> tuple[Array, ReduceInfo]:
        """The sleeper makes the same call."""
        send, recv = values_of(2), np.zeros(COUNT, np.float32)
        info = self.asleep.all_reduce(send, recv, **{**SOON, **options})
        assert send.tobytes() == values_of(2).tobytes()
        return recv, info


@pytest.fixture
def sleeper(new_run: Callable[..., Run]) -> Sleeper:
    return Sleeper(new_run(3))


@pytest.mark.parametrize("algorithm", ["ring", "star", "mesh"])
def test_the_others_go_on_and_the_late_one_gets_their_result(
    sleeper: Sleeper, algorithm: str
) -> None:
    began_s = time.monotonic()
    results, infos = sleeper.reduce(algorithm=algorithm)
    assert time.monotonic() - began_s < patient(2.0)
    late, told = sleeper.wake(algorithm=algorithm)
    assert {one.tobytes() for one in (*results, late)} == {late.tobytes()}
    assert np.abs(late - sums(0, 1)).max() < 1e-6
    assert [info.took_part for info in (*infos, told)] == [True, True, False]
    both = tuple(member.peer_id for member in sleeper.awake)
    assert {info.contributors for info in (*infos, told)} == {both}
    # Its next call is for their next one, in which all take part.
    started = [
        sleeper.run.start(member.all_reduce, values_of(rank), np.zeros(COUNT, np.float32), **SOON)
        for rank, member in enumerate(sleeper.run.members)
    ]
    assert {info.contributors for info in results_of(started)} == {(*both, told_id(sleeper))}


def told_id(sleeper: Sleeper) -> int:
    return sleeper.asleep.peer_id


def test_several_results_come_in_the_order_of_the_calls(sleeper: Sleeper) -> None:
    firsts: list[float] = []
    for round_ in range(3):
        recv = [np.zeros(4) for _ in range(2)]
        sends = [np.full(4, 10.0**round_) for _ in range(2)]
        sleeper.without_it(pccl.Communicator.all_reduce, sends, recv, **SOON)
        firsts.append(float(recv[0][0]))
    assert firsts == [2.0, 20.0, 200.0]
    for expected in firsts:
        late = np.zeros(4)
        assert not sleeper.asleep.all_reduce(np.ones(4), late, **SOON).took_part
        assert late.tolist() == [expected] * 4


def test_weights(sleeper: Sleeper) -> None:
    recv = [np.zeros(COUNT, np.float32) for _ in range(2)]
    sends = [values_of(rank) for rank in range(2)]
    options = {"op": ReduceOp.AVG, **SOON}
    started = [
        sleeper.run.start(member.all_reduce, sends[r], recv[r], weight=[3.0, 1.0][r], **options)
        for r, member in enumerate(sleeper.awake)
    ]
    infos = results_of(started)
    late, told = sleeper.wake(op=ReduceOp.AVG, weight=100.0)
    mean = np.average([values_of(0), values_of(1)], axis=0, weights=[3.0, 1.0])
    assert np.abs(late - mean).max() < 1e-6
    assert late.tobytes() == recv[0].tobytes() == recv[1].tobytes()
    assert {info.weights for info in (*infos, told)} == {(3.0, 1.0)}


def test_many_tensors_handles_and_asyncio_arguments(sleeper: Sleeper) -> None:
    def many(member: pccl.Communicator) -> list[float]:
        recv = [np.zeros(3), np.zeros(5)]
        info = member.all_reduce_many([np.full(3, 2.0), np.full(5, 4.0)], recv, **SOON)
        return [info.took_part, *np.unique(np.concatenate(recv))]

    def launched(member: pccl.Communicator) -> list[float]:
        recv = [np.zeros(3), np.zeros(5)]
        handles = [
            member.all_reduce_async(np.full(part.size, 3.0), part, tag=tag, **SOON)
            for tag, part in enumerate(recv)
        ]
        infos = [handle.result() for handle in handles]
        return [all(info.took_part for info in infos), *np.unique(np.concatenate(recv))]

    assert sleeper.without_it(many) == [[True, 4.0, 8.0]] * 2
    assert sleeper.without_it(launched) == [[True, 6.0]] * 2
    assert many(sleeper.asleep) == [False, 4.0, 8.0]
    assert launched(sleeper.asleep) == [False, 6.0]


def test_a_late_call_pays_no_residual(sleeper: Sleeper) -> None:
    """Error feedback: what the sleeper owes stays owed until its values are in a result."""
    feedback = [ErrorFeedback() for _ in range(3)]
    options = [QuantizationOptions(format="int4", error_feedback=f, name="w") for f in feedback]

    def reduce(rank: int) -> ReduceInfo:
        member, send = sleeper.run.members[rank], values_of(rank)
        return member.all_reduce(
            send, np.zeros(COUNT, np.float32), quantization_options=options[rank], **SOON
        )

    results_of([sleeper.run.start(reduce, rank) for rank in range(3)])
    owed = [feedback[rank].state_dict()["w"].copy() for rank in range(3)]
    assert all(one.any() for one in owed)
    results_of([sleeper.run.start(reduce, rank) for rank in range(2)])
    info = reduce(2)
    assert not info.took_part
    now = [one.state_dict()["w"] for one in feedback]
    assert [np.array_equal(a, b) for a, b in zip(owed, now, strict=True)] == [False, False, True]


@pytest.mark.parametrize("algorithm", ["ring", "star", "mesh"])
def test_quantized_results_are_the_same_for_all(sleeper: Sleeper, algorithm: str) -> None:
    options = {"quantization_options": QuantizationOptions(format="int8"), "algorithm": algorithm}
    results, _ = sleeper.reduce(**options)
    late, _ = sleeper.wake(**options)
    assert {one.tobytes() for one in (*results, late)} == {late.tobytes()}
    assert np.abs(late - sums(0, 1)).max() < 0.05


def test_sparse_results_are_the_same_for_all(sleeper: Sleeper) -> None:
    options = QuantizationOptions(format="sparse")
    results, _ = sleeper.reduce(quantization_options=options)
    late, _ = sleeper.wake(quantization_options=options)
    assert {one.tobytes() for one in (*results, late)} == {late.tobytes()}


def test_results_are_hashed_on_worker_threads(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The I/O thread has to send heartbeats meanwhile."""
    names: list[str] = []

    def hashed(content: Any) -> bytes:
        names.append(threading.current_thread().name)
        return piece_digest(content)

    monkeypatch.setattr("pccl.runtime.hashing.piece_digest", hashed)
    sleeper.reduce()
    assert names
    assert all(name.startswith("pccl-work") for name in names)


# -- members that serve other values -----------------------------------------------------------


def lie(member: pccl.Communicator, *, also_digests: bool) -> None:
    """A member flips a bit of the last result that it keeps."""
    exchange = engine_of(member).exchange
    memory, _ = vars(exchange.late_results)["_kept"][-1]
    memory.view(memory.layout.piece(0))[5] ^= 1
    if also_digests:
        hash_here(memory, [0])
        exchange.show(memory)


@pytest.mark.parametrize("also_digests", [False, True])
@pytest.mark.parametrize("liar", [0, 1])
def test_a_member_that_serves_other_values_is_not_believed(
    sleeper: Sleeper, liar: int, *, also_digests: bool
) -> None:
    results, _ = sleeper.reduce()
    lie(sleeper.awake[liar], also_digests=also_digests)
    late, told = sleeper.wake()
    assert not told.took_part
    assert late.tobytes() == results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize("also_digests", [False, True])
def test_a_call_takes_no_values_from_members_that_all_lie(
    sleeper: Sleeper, *, also_digests: bool
) -> None:
    sleeper.reduce()
    for member in sleeper.awake:
        lie(member, also_digests=also_digests)
    with pytest.raises(ResyncRequired):
        sleeper.wake()


# -- what a late call cannot get -------------------------------------------------------------------


@pytest.mark.parametrize("what", ["another op", "another size", "barrier", "no quorum"])
def test_a_late_call_for_something_else_fails_its_caller_only(sleeper: Sleeper, what: str) -> None:
    sleeper.reduce()
    calls: dict[str, Callable[[], object]] = {
        "another op": lambda: sleeper.wake(op=ReduceOp.MAX),
        "another size": lambda: sleeper.asleep.all_reduce(np.ones(3), np.ones(3), **SOON),
        "barrier": lambda: sleeper.asleep.barrier(),
        "no quorum": lambda: sleeper.asleep.all_reduce(values_of(2), np.ones(COUNT, np.float32)),
    }
    with pytest.raises(ResyncRequired, match="without this peer, which was late"):
        calls[what]()
    results, _ = sleeper.reduce()
    assert np.abs(results[0] - sums(0, 1)).max() < 1e-6


def test_a_caller_leaves_that_the_others_went_on_without(sleeper: Sleeper) -> None:
    sleeper.reduce()
    sleeper.reduce()
    sleeper.wake()
    with pytest.raises(OutcomeUnknown, match="the input is intact"):
        sleeper.wake(timeout_s=1e-6)
    with pytest.raises(ResyncRequired):
        sleeper.wake()


# -- rounds, and shared state ----------------------------------------------------------------------


def test_newcomers_enter_while_a_member_sleeps(sleeper: Sleeper) -> None:
    run = sleeper.run
    newcomer = run.newcomer()
    joining = run.start(newcomer.connect)
    while not joining.done():
        sleeper.without_it(pccl.Communicator.update_topology, **SOON)
    joining.result(LIMIT_S)
    sizes = [world_size_of(member) for member in (*sleeper.awake, newcomer, sleeper.asleep)]
    assert sizes == [4, 4, 4, 3]
    three: dict[str, Any] = {**SOON, "quorum": 3}  # which all wait for, however busy the machine is
    recv = [np.zeros(2) for _ in range(3)]
    started = [
        run.start(member.all_reduce, np.ones(2), into, **three)
        for member, into in zip((*sleeper.awake, newcomer), recv, strict=True)
    ]
    assert {len(info.contributors) for info in results_of(started)} == {3}
    while world_size_of(sleeper.asleep) < 4:
        sleeper.asleep.update_topology(**SOON)  # returns at once: the others are further
    late = np.zeros(2)
    assert not sleeper.asleep.all_reduce(np.ones(2), late, **three).took_part
    assert late.tolist() == recv[0].tolist() == [3.0, 3.0]
    run.members.append(newcomer)
    run.check()


def world_size_of(member: pccl.Communicator) -> int:
    return member.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE)


def test_shared_state_is_synchronized_without_a_member_that_has_the_same(sleeper: Sleeper) -> None:
    states = [pccl.SharedState([pccl.TensorInfo.from_numpy(np.arange(9.0), "w")]) for _ in range(3)]

    def sync(rank: int) -> pccl.SharedStateSyncInfo:
        return sleeper.run.members[rank].sync_shared_state(states[rank], **SOON)

    results_of([sleeper.run.start(sync, rank) for rank in range(2)])
    info = sync(2)
    assert info.members == tuple(member.peer_id for member in sleeper.awake)
    assert (info.rx_bytes, states[2].revision) == (0, states[0].revision)
    for state in states:
        state.revision += 1
    infos = results_of([sleeper.run.start(sync, rank) for rank in range(3)])
    assert {len(info.members) for info in infos} == {3}


def test_a_late_synchronization_gives_way_to_members_that_wait_for_handles() -> None:
    """Only they have the state that it waits for, and they wait for a call of its member."""
    made = threading.Barrier(3)

    def train(member: pccl.Communicator) -> None:
        grow(member, 3)
        member.all_reduce(values_of(0), np.zeros(COUNT, np.float32), **SOON)
        made.wait()
        handles = [member.all_reduce_async(np.ones(3), tag=tag) for tag in (1, 2)]
        handles[0].result()

    def come_late(member: pccl.Communicator) -> None:
        member.connect()
        made.wait()
        with pytest.raises(ResyncRequired):  # this is another call, so it lacks their result
            member.barrier()
        state = pccl.SharedState([pccl.TensorInfo.from_numpy(np.arange(9.0), "w")])
        with pytest.raises(ResyncRequired):
            member.sync_shared_state(state, **SOON)

    timing = pccl.Timing(heartbeat_s=0.05, tick_s=0.02, lockstep_s=0.3)
    with pccl.MasterNode("127.0.0.1:0", timing=timing) as master:
        awake = Call(pair_at, master.address, timing=timing).result()
        late = pccl.Communicator(master.address, timing=timing)
        calls = [Call(train, member) for member in awake]  # in threads that make no other calls
        Call(come_late, late).result()
        late.close()
        for call in calls:
            assert isinstance(call.exception(), CollectiveAborted)
        for member in awake:
            member.close()
