"""DDP's gradients when ranks are lost in the middle of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import pccl.torch
from pccl.bindings.gradient_averager.reductions import Reductions
from pccl.bindings.process_group.group import Options, RunGroup
from pccl.bindings.process_group.team import RankLost
from tests.integration.process_group.conftest import Crew, options

SIZE, LAYERS, WIDTH = 3, 6, 8
BUCKET_MB = 1e-4
"""A bucket for each layer."""

Crews = Callable[..., Crew]

checkpointed: Any = import_module("torch.utils.checkpoint").checkpoint


def layers() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    result: Tensor = model(inputs).pow(2).mean()
    return result


def expected(ranks: list[int], step: int, divisor: int) -> list[Tensor]:
    """The sum of the gradients of these ranks, which each has divided."""
    sums = [torch.zeros_like(parameter) for parameter in layers().parameters()]
    for rank in ranks:
        model = layers()
        loss: Any = loss_of(model, rank, step)
        loss.backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad / divisor
    return sums


class Replica:
    """One rank's model. Its ``leaves_at`` layer's gradient ends its membership."""

    def __init__(
        self,
        crew: Crew,
        rank: int,
        *,
        hook: bool,
        leaves_at: int | None = None,
        model: Any = None,
        **arguments: Any,
    ) -> None:
        self.group, self.rank = crew.groups[rank], rank
        self.model: Any = layers() if model is None else model
        if leaves_at is not None:
            weight: Any = self.model[leaves_at].weight

            def leave(_: Tensor) -> None:
                crew.run.members[rank].close()

            weight.register_hook(leave)
        wrapped: Any = DistributedDataParallel(
            self.model, process_group=self.group, bucket_cap_mb=BUCKET_MB, **arguments
        )
        self.ddp = wrapped
        if hook:
            self.ddp.register_comm_hook(self.group, pccl.torch.ddp_hook)

    def backward(self, step: int) -> list[Tensor]:
        self.model.zero_grad()
        loss: Any = loss_of(self.ddp, self.rank, step)
        loss.backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def closeness(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("hook", [False, True])
def test_gradients_are_means_of_all_ranks(crew_of: Crews, hook: bool) -> None:
    crew = crew_of(SIZE)

    def train(rank: int, group: RunGroup) -> list[list[Tensor]]:
        replica = Replica(crew, rank, hook=hook)
        return [replica.backward(step) for step in range(3)]

    for steps in crew.each(train):
        for step, found in enumerate(steps):
            assert closeness(found, expected([0, 1, 2], step, SIZE)) < 1e-6


@pytest.mark.parametrize("leaves_at", range(LAYERS))
@pytest.mark.parametrize(
    ("lost_members", "hook", "divisor"),
    [
        ("repeat", False, SIZE),
        ("repeat", True, SIZE),
        ("rescale", True, 2),
        ("rescale", False, SIZE),
    ],
)
def test_all_buckets_of_a_step_are_over_the_same_ranks(
    losing_crew: Crews, leaves_at: int, lost_members: str, hook: bool, divisor: int
) -> None:
    crew = losing_crew(SIZE, options=Options(lost_members))

    def train(rank: int, group: RunGroup) -> list[list[Tensor]]:
        replica = Replica(crew, rank, hook=hook, leaves_at=leaves_at if rank == 1 else None)
        if rank == 1:
            with pytest.raises(pccl.PCCLError):
                replica.backward(0)
            return []
        return [replica.backward(step) for step in range(2)]

    first, _, third = crew.each(train)
    for step, (one, other) in enumerate(zip(first, third, strict=True)):
        assert all(map(torch.equal, one, other))
        assert closeness(one, expected([0, 2], step, divisor)) < 1e-6
    assert [pccl.torch.lost_ranks(crew.groups[rank]) for rank in (0, 2)] == [(1,), (1,)]


def test_the_last_rank_trains_on(losing_crew: Crews) -> None:
    crew = losing_crew(2)

    def train(rank: int, group: RunGroup) -> list[list[Tensor]]:
        replica = Replica(crew, rank, hook=False, leaves_at=2 if rank == 0 else None)
        if rank == 0:
            with pytest.raises(pccl.PCCLError):
                replica.backward(0)
            return []
        return [replica.backward(step) for step in range(2)]

    _, found = crew.each(train)
    for step, gradients in enumerate(found):
        assert closeness(gradients, expected([1], step, 2)) < 1e-6


def test_a_loss_while_gradients_accumulate(losing_crew: Crews) -> None:
    """In steps without a collective. What the live ranks have accumulated is summed."""
    crew = losing_crew(SIZE)

    def train(rank: int, group: RunGroup) -> list[Tensor]:
        replica = Replica(crew, rank, hook=False, leaves_at=2 if rank == 1 else None)
        for step in range(2):
            with replica.ddp.no_sync():
                loss: Any = loss_of(replica.ddp, rank, step)
                loss.backward()
        loss = loss_of(replica.ddp, rank, 2)
        if rank == 1:
            with pytest.raises(pccl.PCCLError):
                loss.backward()
            return []
        loss.backward()
        return [parameter.grad for parameter in replica.model.parameters()]

    first, _, third = crew.each(train)
    assert all(map(torch.equal, first, third))
    steps = zip(*(expected([0, 2], step, SIZE) for step in range(3)), strict=True)
    assert closeness(first, [torch.stack(one).sum(0) for one in steps]) < 1e-6


def test_after_a_loss_some_collectives_go_on_and_others_name_the_rank(losing_crew: Crews) -> None:
    crew = losing_crew(SIZE)
    crew.each(lambda rank, group: group.barrier().wait())
    crew.run.members[0].close()
    crew.groups.pop(0)

    def call(rank: int, group: RunGroup) -> tuple[float, float]:
        total, copy = torch.tensor([1.0 + rank]), torch.tensor([1.0 + rank])
        group.allreduce([total]).wait()
        with pytest.raises(RankLost, match=r"rank 0 was lost; call pccl\.torch\.reconfigure"):
            group.allgather([[torch.zeros(1)] * SIZE], [total], options("AllgatherOptions")).wait()
        with pytest.raises(RankLost, match="rank 0 was lost"):
            group.broadcast([copy], options("BroadcastOptions", rootRank=0)).wait()
        group.broadcast([copy], options("BroadcastOptions", rootRank=0, asyncOp=True)).wait()
        return total.item(), copy.item()

    assert crew.each(call) == [(3.0, 1.0)] * 2


@pytest.mark.parametrize(
    "arguments",
    [{"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
)
@pytest.mark.parametrize("hook", [False, True])
def test_ways_of_ddp(crew_of: Crews, hook: bool, arguments: dict[str, bool]) -> None:
    crew = crew_of(2)

    def train(rank: int, group: RunGroup) -> list[list[Tensor]]:
        replica = Replica(crew, rank, hook=hook, **arguments)
        return [replica.backward(step) for step in range(3)]

    for steps in crew.each(train):
        for step, found in enumerate(steps):
            assert closeness(found, expected([0, 1], step, 2)) < 1e-6


def test_a_pass_that_ctrl_c_has_ended(crew_of: Crews, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has left open is settled by the next pass."""
    crew, usual, interrupted = crew_of(2), Reductions.wait, set[int]()

    def wait(reductions: Reductions) -> Any:
        if id(reductions) not in interrupted:
            interrupted.add(id(reductions))
            raise KeyboardInterrupt
        return usual(reductions)

    def sum_of(rank: int, group: RunGroup) -> list[float]:
        sums: list[Tensor] = []

        def reduce(gradient: Tensor) -> None:
            sums.append(gradient.clone())
            group.allreduce([sums[-1]])

        value: Any = torch.ones(2, requires_grad=True)
        value.register_hook(reduce)
        losses: list[Any] = [(value * factor).sum() for factor in (1 + rank, 10 + rank)]
        with pytest.raises(KeyboardInterrupt):
            losses[0].backward()
        losses[1].backward()
        return [float(one[1]) for one in sums]

    monkeypatch.setattr(Reductions, "wait", wait)
    assert crew.each(sum_of) == [[3.0, 21.0]] * 2


class Checkpointed(nn.Module):
    """The layers, whose first half is computed again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers, self._reentrant = layers(), reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        half, inputs = LAYERS // 2, inputs.requires_grad_()
        middle: Any = checkpointed(self.layers[:half], inputs, use_reentrant=self._reentrant)
        result: Tensor = self.layers[half:](middle)
        return result


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(crew_of: Crews, reentrant: bool, static_graph: bool) -> None:
    """A reentrant checkpoint makes a backward pass inside another one, where DDP may wait."""
    crew = crew_of(2)

    def train(rank: int, group: RunGroup) -> list[list[Tensor]]:
        replica = Replica(
            crew,
            rank,
            hook=False,
            model=Checkpointed(reentrant=reentrant),
            static_graph=static_graph,
        )
        return [replica.backward(step) for step in range(3)]

    for steps in crew.each(train):
        for step, found in enumerate(steps):
            assert closeness(found, expected([0, 1], step, 2)) < 1e-6


def test_hooks_that_reduce_again(crew_of: Crews) -> None:
    """PowerSGD's callbacks reduce again and wait. It has no value that it does not compress."""
    crew = crew_of(2)

    def train(rank: int, group: RunGroup) -> list[list[Tensor]]:
        model: Any = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        replica = Replica(crew, rank, hook=False, model=model)
        compression: Any = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        replica.ddp.register_comm_hook(compression, powerSGD_hook.powerSGD_hook)
        steps: list[list[Tensor]] = []
        for step in range(4):
            model.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            replica.ddp(torch.rand(4, 64, generator=generator)).pow(2).mean().backward()
            steps.append([parameter.grad.clone() for parameter in model.parameters()])
        return steps

    for one, other in zip(*crew.each(train), strict=True):
        assert all(map(torch.equal, one, other))


def test_a_pass_after_one_that_failed(crew_of: Crews) -> None:
    crew = crew_of(2)

    def train(rank: int, group: RunGroup) -> list[list[float]]:
        weights: list[Any] = [torch.ones(2, requires_grad=True) for _ in range(3)]
        sums: list[Any] = []
        fails = [True, False]

        def reduce(gradient: Tensor) -> None:
            work: Any = group.allreduce([torch.full_like(gradient, 1.0 + rank)])
            sums.append(work.get_future())

        def fail(_: Tensor) -> None:
            if fails.pop(0):
                raise ZeroDivisionError

        for weight, hook in zip(weights, (fail, reduce, reduce), strict=True):
            weight.register_hook(hook)

        def loss() -> Any:
            first, second, third = weights
            return (first * 1 * second * third).sum()

        with pytest.raises(ZeroDivisionError):
            loss().backward()
        loss().backward()
        assert all(one.done() for one in sums)
        return [one.value()[0].tolist() for one in sums]

    assert crew.each(train) == [[[3.0, 3.0]] * 4] * 2


class _SumsInBackward(torch.autograd.Function):
    """Sums its gradient over all ranks, as a synchronized batch normalization does."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: RunGroup, open_before: list[bool]) -> Tensor:
        ctx.group, ctx.open_before = group, open_before
        return inputs * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone()
        ctx.group.allreduce([total], options("AllreduceOptions")).wait()
        ctx.open_before.append(bool(ctx.group._gradients._open))
        return total, None, None


def test_a_sum_inside_a_backward_function_leaves_the_gradients_open(crew_of: Crews) -> None:
    """Otherwise a rank that is lost later would be in some of the gradients only."""
    crew = crew_of(2)

    def train(rank: int, group: RunGroup) -> tuple[list[bool], float]:
        weights: list[Any] = [torch.ones(1, requires_grad=True) for _ in range(2)]
        first, last = weights
        for weight in weights:
            weight.register_post_accumulate_grad_hook(partial(reduce, group))
        open_before: list[bool] = []
        sums: Any = _SumsInBackward
        summed = sums.apply(first, group, open_before)
        (summed * last).sum().backward()
        return open_before, first.grad.item()

    def reduce(group: RunGroup, weight: Tensor) -> None:
        assert weight.grad is not None
        group.allreduce([weight.grad])

    assert crew.each(train) == [([True], 4.0)] * 2


def test_memory_of_gradients_of_other_sizes_is_freed(crew_of: Crews) -> None:
    crew = crew_of(2)

    def train(rank: int, group: RunGroup) -> int:
        for length in range(1, 20):
            weight: Any = torch.ones(length, requires_grad=True)
            weight.register_post_accumulate_grad_hook(partial(reduce, group))
            weight.pow(2).sum().backward()
        inside: Any = group
        return sum(map(len, inside._gradients._rooms.values()))

    def reduce(group: RunGroup, weight: Tensor) -> None:
        assert weight.grad is not None
        group.allreduce([weight.grad])

    assert crew.each(train) == [1, 1]
