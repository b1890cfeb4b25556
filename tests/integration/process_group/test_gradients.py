"""DDP's gradients when ranks are lost in the middle of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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
        **arguments: Any,
    ) -> None:
        self.group, self.rank = crew.groups[rank], rank
        self.model = layers()
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
def test_ways_of_ddp(crew_of: Crews, arguments: dict[str, bool]) -> None:
    crew = crew_of(2)

    def train(rank: int, group: RunGroup) -> list[list[Tensor]]:
        replica = Replica(crew, rank, hook=False, **arguments)
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
