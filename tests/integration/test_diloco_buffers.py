"""Buffers of models that train with ``DiLoCo``: averaged, fetched, and alike at the end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from pccl.bindings.diloco import DiLoCo
from tests.support.diloco_peers import Batch, Peers, backward, batch, make_inner
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

ROUNDS = 4
WEIGHTS = (1.0, 3.0, 0.5)


def gentle(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"sync_every": 4},
    "delayed": {"sync_every": 6, "delay": 2},
    "one round delayed": {
        "sync_every": 4,
        "delay": 4,
        "outer": gentle,
    },
    "streaming, 4 bits": {"sync_every": 6, "delay": 2, "fragments": 3, "compression": "int4"},
}


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


def make_model() -> torch.nn.Sequential:
    torch.default_generator.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    )


def data(rank: int, step: int) -> Batch:
    """Each peer sees inputs of another scale, so its statistics are others."""
    x, y = batch(rank, step)
    return x * 10.0**rank, y


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def alike(*models: torch.nn.Module) -> bool:
    first, *rest = (state(model) for model in models)
    return all(torch.equal(first[name], one[name]) for one in rest for name in first)


def make(peers: Peers, rank: int, model: torch.nn.Module, **options: Any) -> DiLoCo:
    peers.events[rank] = []
    inner = make_inner(model)
    listener = peers.events[rank].append
    return DiLoCo(model, inner=inner, comm=peers.comm(), on_event=listener, **options)


def step(optimizer: DiLoCo, model: torch.nn.Module, rank: int, number: int, weight: float) -> None:
    optimizer.zero_grad()
    backward(model, data(rank, number))
    optimizer.step(weight=weight)


def weighted_sum(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0] * WEIGHTS[0]
    for value, weight in zip(values[1:], WEIGHTS[1:], strict=False):
        total = total + value * weight
    return total


def textbook(count: int, sync_every: int) -> torch.nn.Module:
    """All replicas in one process; buffers are averaged by weight, counters are the first one's."""
    common, models = make_model(), [make_model() for _ in range(count)]
    outer: Any = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.6, nesterov=True)
    inners = [make_inner(model) for model in models]
    for number in range(ROUNDS * sync_every):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.zero_grad()
            backward(model, data(rank, number))
            inner.step()
        if (number + 1) % sync_every:
            continue
        total = sum(WEIGHTS[:count])
        places = zip(common.parameters(), *(model.parameters() for model in models), strict=True)
        for here, *theirs in places:
            work = [here.detach() - one.detach() for one in theirs]
            here.grad = weighted_sum(work) / total
        outer.step()
        for here, *theirs in zip(common.buffers(), *(one.buffers() for one in models), strict=True):
            if here.dtype == torch.int64:
                here.copy_(theirs[0])
            else:
                here.copy_(weighted_sum([one.double() for one in theirs]) / total)
        for model in models:
            model.load_state_dict(common.state_dict())
    return common


@pytest.mark.parametrize("count", [1, 2, 3])
def test_buffers_are_averaged_as_the_textbook_does_bit_for_bit(peers: Peers, count: int) -> None:
    def run(rank: int) -> torch.nn.Module:
        model = make_model()
        with make(peers, rank, model, sync_every=4, min_peers=count) as optimizer:
            for number in range(ROUNDS * 4):
                step(optimizer, model, rank, number, WEIGHTS[rank])
            optimizer.finish()
        return model

    calls: list[Future[torch.nn.Module]] = []
    for rank in range(count):
        calls.append(peers.start(run, rank))
        peers.until_registered(rank + 1)
    ended = [call.result(LIMIT_S) for call in calls]
    wanted = textbook(count, 4)
    assert alike(*ended)
    assert alike(ended[0], wanted)


@pytest.mark.parametrize("mode", MODES)
def test_a_late_peer_and_the_others_end_with_the_same_buffers(peers: Peers, mode: str) -> None:
    """The late one has the buffers of the run before its first step."""

    def rounds_left(rank: int) -> float:
        three = [one for one in peers.outer_steps(rank) if len(one.contributors) == 3]
        return three[0].number + 6 if three else 1e9

    def run(rank: int) -> torch.nn.Module:
        model = make_model()
        with make(peers, rank, model, min_peers=2, **MODES[mode]) as optimizer:
            optimizer.join()
            if rank == 2:
                assert int(model.get_buffer("1.num_batches_tracked")) > 0
                assert not torch.equal(model.get_buffer("1.running_var"), torch.ones(16))
            number = 0
            while optimizer.round < rounds_left(rank):
                step(optimizer, model, rank, number, 1.0)
                number += 1
            optimizer.finish()
        return model

    calls = [peers.start(run, rank) for rank in range(2)]
    until(lambda: 0 in peers.events and len(peers.outer_steps(0)) > 3)
    calls.append(peers.start(run, 2))
    ended = [call.result(LIMIT_S) for call in calls]
    assert alike(*ended)
    losses = evaluate(ended)
    assert len(set(losses)) == 1
    assert losses[0] < 2


def evaluate(models: list[torch.nn.Module]) -> list[float]:
    losses: list[float] = []
    for model in models:
        model.eval()
        with torch.no_grad():
            parts = [data(rank, 999) for rank in range(3)]
            losses.append(
                sum(torch.nn.functional.mse_loss(model(x), y).item() for x, y in parts) / 3
            )
    return losses


def test_without_buffers_each_peer_keeps_its_own(peers: Peers) -> None:
    def run(rank: int) -> torch.nn.Module:
        model = make_model()
        with make(peers, rank, model, sync_every=4, min_peers=2, buffers=()) as optimizer:
            optimizer.join()
            while optimizer.steps < 8:  # of the run: if one was late, both end in the same round
                step(optimizer, model, rank, optimizer.steps, 1.0)
            optimizer.finish()
        return model

    calls = [peers.start(run, rank) for rank in range(2)]
    one, two = (call.result(LIMIT_S) for call in calls)
    assert torch.equal(one.get_parameter("0.weight"), two.get_parameter("0.weight"))
    assert not torch.equal(one.get_buffer("1.running_var"), two.get_buffer("1.running_var"))


def test_a_checkpoint_continues_bit_for_bit() -> None:
    """It is taken between a launch and its merge, so it holds buffers that are not merged yet."""

    def run(*stops: int) -> torch.nn.Module:
        model, saved = make_model(), None
        first = 0
        for stop in stops:
            peers = Peers()
            with make(peers, 0, model, sync_every=4, delay=3) as optimizer:
                if saved is not None:
                    optimizer.load_state_dict(saved)
                for number in range(first, stop):
                    step(optimizer, model, 0, number, 1.0)
                saved = optimizer.state_dict()
                if stop == stops[-1]:
                    optimizer.finish()
            first = stop
            peers.close()
        return model

    assert alike(run(20), run(9, 14, 20))
