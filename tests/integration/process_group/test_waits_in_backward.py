"""All-reduces of a backward pass whose program waits in it, or which end in another way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.futures import Future

import pccl
from pccl.bindings.gradient_averager.reductions import Reductions
from pccl.bindings.process_group.arguments import Staged
from pccl.bindings.process_group.group import RunGroup
from tests.integration.process_group.conftest import Crew, options
from tests.integration.process_group.test_gradients import (
    LAYERS,
    SIZE,
    Checkpointed,
    Replica,
    closeness,
    expected,
)
from tests.support.patience import LIMIT_S

Crews = Callable[..., Crew]
Hook = Callable[[RunGroup, Tensor], object]


def weights_of(group: RunGroup, hook: Hook, count: int = 1) -> list[Any]:
    """Parameters of one element, each with a hook that gets its gradient."""
    weights: list[Any] = [torch.ones(1, requires_grad=True) for _ in range(count)]

    def call(weight: Tensor) -> None:
        assert weight.grad is not None
        hook(group, weight.grad)

    for weight in weights:
        weight.register_post_accumulate_grad_hook(call)
    return weights


def backward(weights: list[Any], factor: float) -> list[float]:
    for weight in weights:
        weight.grad = None
    loss: Any = sum(weight * factor for weight in weights)
    loss.backward()
    return [float(weight.grad) for weight in weights]


def value_of(future: Any) -> Tensor:
    result: Tensor = future.value()[0]
    return result


# -- waits in hooks ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chained", [False, True])
def test_a_hook_waits_for_a_future(crew_of: Crews, is_chained: bool) -> None:
    crew, sums = crew_of(2), list[float]()

    def wait(group: RunGroup, gradient: Tensor) -> None:
        work: Any = group.allreduce([gradient])
        future = work.get_future()
        total = future.then(value_of).wait() if is_chained else future.wait()[0]
        sums.append(float(total))

    def train(rank: int, group: RunGroup) -> list[float]:
        return backward(weights_of(group, wait, 2), 1.0 + rank)

    assert crew.each(train) == [[3.0, 3.0]] * 2
    assert sums == [3.0] * 4


def test_a_hook_waits_for_several_tensors(crew_of: Crews) -> None:
    def wait(group: RunGroup, gradient: Tensor) -> None:
        more = gradient.clone()
        work: Any = group.allreduce_coalesced(
            [gradient, more], options("AllreduceCoalescedOptions")
        )
        both = work.get_future().wait()
        assert float(both[1]) == float(gradient)

    def train(rank: int, group: RunGroup) -> list[float]:
        return backward(weights_of(group, wait), 1.0 + rank)

    assert crew_of(2).each(train) == [[3.0]] * 2


@pytest.mark.parametrize("by_ddp", [False, True])
def test_a_communication_hook_waits(crew_of: Crews, by_ddp: bool) -> None:
    """``by_ddp``: for a future that DDP has got in C++, as torch's own hooks do."""
    crew = crew_of(2)

    def train(rank: int, group: RunGroup) -> list[list[Tensor]]:
        replica = Replica(crew, rank, hook=False)

        def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
            if by_ddp:
                replica.ddp.reducer._run_allreduce_hook(bucket).wait()
            else:
                work: Any = group.allreduce([bucket.buffer()])
                work.get_future().then(value_of).wait()
            done: Future[Tensor] = Future()
            done.set_result(bucket.buffer().div_(2))
            return done

        hook.__annotations__.clear()  # they are strings, and DDP compares them with classes
        replica.ddp.register_comm_hook(None, hook)
        return [replica.backward(step) for step in range(2)]

    for steps in crew.each(train):
        for step, found in enumerate(steps):
            assert closeness(found, expected([0, 1], step, 2)) < 1e-6


def test_another_thread_waits(crew_of: Crews) -> None:
    """It settles what has been started, as a wait in the hook does."""

    def train(rank: int, group: RunGroup) -> list[float]:
        def reduce(group: RunGroup, gradient: Tensor) -> None:
            work: Any = group.allreduce([gradient])
            waiter = threading.Thread(target=work.wait)
            waiter.start()
            waiter.join(LIMIT_S)
            assert work.is_completed()

        return backward(weights_of(group, reduce, 3), 1.0 + rank)

    assert crew_of(2).each(train) == [[3.0] * 3] * 2


# -- limits of time ------------------------------------------------------------------------------


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_late_rank(losing_crew: Crews, in_backward: bool) -> None:
    """The time limit of the group ends an all-reduce, in a backward pass as elsewhere."""
    crew, given_up = losing_crew(2), threading.Event()
    crew.groups[0].set_timeout(timedelta(seconds=0.3))

    def train(rank: int, group: RunGroup) -> None:
        if rank == 1:
            assert given_up.wait(LIMIT_S)
            return
        works: list[Any] = []

        def call() -> None:
            if in_backward:
                backward(works_of(group, works), 1.0)
            else:
                group.allreduce([torch.ones(1)], options("AllreduceOptions")).wait()

        with pytest.raises(pccl.errors.DeadlineExceeded, match=r"all_reduce_async.* withdrawn"):
            call()
        given_up.set()
        assert all(type(work.exception()) is pccl.errors.DeadlineExceeded for work in works)
        inside: Any = group
        assert not inside._gradients._reductions.are_open

    crew.each(train)


def test_ddp_gets_an_error_in_cpp(losing_crew: Crews) -> None:
    """It starts those of the first step of a static graph at the end of the pass, and waits."""
    crew, given_up = losing_crew(2), threading.Event()

    def train(rank: int, group: RunGroup) -> None:
        replica = Replica(crew, rank, hook=False, static_graph=True)
        group.set_timeout(timedelta(seconds=0.3))
        if rank == 1:
            assert given_up.wait(LIMIT_S)
            return
        try:
            with pytest.raises(RuntimeError, match=r"DeadlineExceeded: all_reduce_async.* withdr"):
                replica.backward(0)
        finally:
            given_up.set()

    crew.each(train)


# -- errors and Ctrl-C ---------------------------------------------------------------------------


def works_of(group: RunGroup, works: list[Any], count: int = 3) -> list[Any]:
    return weights_of(group, lambda group, one: works.append(group.allreduce([one])), count)


@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt])
def test_an_error_while_results_are_given(
    crew_of: Crews, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    crew, usual, given = crew_of(2), Staged.give_back, dict[int, int]()

    def give_back(staged: Staged) -> None:
        ident = threading.get_ident()
        given[ident] = given.get(ident, 0) + 1
        if given[ident] == 2:
            raise kind("second")
        usual(staged)

    def train(rank: int, group: RunGroup) -> list[float]:
        works: list[Any] = []
        weights = works_of(group, works)
        with pytest.raises(kind):
            backward(weights, 1.0)
        assert all(type(work.exception()) is kind for work in works)
        with pytest.raises(RuntimeError, match="second"):
            works[2].get_future().wait()
        return backward(weights, 1.0)

    monkeypatch.setattr(Staged, "give_back", give_back)
    assert crew.each(train) == [[2.0] * 3] * 2


def test_ctrl_c_while_works_end(crew_of: Crews) -> None:
    def train(rank: int, group: RunGroup) -> list[float]:
        works: list[Any] = []
        weights = works_of(group, works)

        def interrupt(_: Any) -> None:
            raise KeyboardInterrupt

        def begin(one: Tensor) -> None:
            if len(works) == 1:
                works[0]._ended.add_done_callback(interrupt)

        for weight in weights:
            weight.register_post_accumulate_grad_hook(begin)
        with pytest.raises(KeyboardInterrupt):
            backward(weights, 1.0)
        assert all(work.is_completed() for work in works)
        return backward(weights, 1.0)

    assert crew_of(2).each(train) == [[2.0] * 3] * 2


def test_a_future_of_a_pass_that_ctrl_c_has_ended(
    crew_of: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew, usual, interrupted = crew_of(2), Reductions.wait, set[int]()

    def wait(reductions: Reductions) -> Any:
        if id(reductions) not in interrupted:
            interrupted.add(id(reductions))
            raise KeyboardInterrupt
        return usual(reductions)

    def train(rank: int, group: RunGroup) -> list[float]:
        works: list[Any] = []
        with pytest.raises(KeyboardInterrupt):
            backward(works_of(group, works), 1.0 + rank)
        return [float(work.get_future().wait()[0]) for work in works]

    monkeypatch.setattr(Reductions, "wait", wait)
    assert crew.each(train) == [[3.0] * 3] * 2


def test_an_all_reduce_that_cannot_start(crew_of: Crews, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program gets its error, and the pass after that one is not over its remains."""
    crew = crew_of(2)

    def train(rank: int, group: RunGroup) -> tuple[list[float], list[bool]]:
        works: list[Any] = []
        weights = works_of(group, works)
        inside: Any = group
        usual, started = inside._gradients._reductions._comm.all_reduce_async, list[int]()

        def start(values: Tensor, **how: Any) -> Any:
            started.append(how["tag"])
            if len(started) == 2:
                raise ZeroDivisionError
            return usual(values, **how)

        monkeypatch.setattr(group.team, "all_reduce_async", start)
        with pytest.raises(ZeroDivisionError):
            backward(weights, 1.0)
        sums = backward(weights, 1.0)
        return sums, [work.is_success() for work in works]

    assert crew.each(train) == [([2.0] * 3, [True] * 4)] * 2


def test_a_tensor_whose_elements_share_memory(crew_of: Crews) -> None:
    def train(rank: int, group: RunGroup) -> None:
        def reduce(group: RunGroup, gradient: Tensor) -> None:
            group.allreduce([gradient.expand(2)])

        with pytest.raises(ValueError, match=r"share memory, as after expand\(\); clone"):
            backward(weights_of(group, reduce), 1.0)

    crew_of(2).each(train)


# -- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves_at", range(LAYERS))
def test_a_loss_in_checkpointed_layers(losing_crew: Crews, leaves_at: int) -> None:
    """Each nested pass covers its own ranks, on all live ranks the same."""
    crew = losing_crew(SIZE)

    def train(rank: int, group: RunGroup) -> list[list[Tensor]]:
        model = Checkpointed(reentrant=True)
        if rank == 1:
            weight: Any = model.layers[leaves_at].weight

            def leave(_: Tensor) -> None:
                crew.run.members[rank].close()

            weight.register_hook(leave)
        replica = Replica(crew, rank, hook=False, model=model)
        if rank == 1:
            with pytest.raises(pccl.PCCLError):
                replica.backward(0)
            return []
        return [replica.backward(step) for step in range(2)]

    first, _, third = crew.each(train)
    for one, other in zip(first, third, strict=True):
        assert all(map(torch.equal, one, other))
    assert closeness(first[1], expected([0, 2], 1, SIZE)) < 1e-6


# -- callbacks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_callbacks_that_reduce_run_in_another_order_on_each_rank(
    crew_of: Crews, late: bool
) -> None:
    """``late``: rank 0 asks for them when the results are there, so they run at once."""
    crew, asked = crew_of(2), threading.Event()

    def train(rank: int, group: RunGroup) -> list[float]:
        begun = [threading.Event(), threading.Event()]
        is_late = late and rank == 0

        def again(place: int, future: Any) -> float:
            if place != rank and not is_late:
                assert begun[1 - place].wait(LIMIT_S)  # the other callback is the first one
            work: Any = group.allreduce([torch.full((1,), 10.0 ** (place + 1))])
            begun[place].set()
            return float(work.get_future().wait()[0])

        if rank == 0:
            assert asked.wait(LIMIT_S)
        works: list[Any] = [group.allreduce([torch.ones(1)]) for _ in range(2)]
        futures = [work.get_future() for work in works]
        if is_late:
            for future in futures:
                future.wait()
        chained = [future.then(partial(again, place)) for place, future in enumerate(futures)]
        asked.set()
        more = torch.full((1,), 5.0)
        group.allreduce([more]).wait()
        return [float(more), *(one.wait() for one in chained)]

    assert crew.each(train) == [[10.0, 20.0, 200.0]] * 2
