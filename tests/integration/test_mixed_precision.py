"""``torch.compile``, autocast, GradScaler and accumulated gradients, with both wrappers.

Peers may differ in what they compile, since parameters keep their names and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from pccl.bindings.gradient_averager import GradientAverager
from tests.support.diloco_peers import Peers, batch, equal, make_inner, make_model, parameters
from tests.support.patience import LIMIT_S

STEPS = 12
OVERFLOWS = 7
"""The step at which a gradient of one peer is infinite."""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    # The compiler believes that it runs in the DDP which a thread of an earlier test entered last.
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)
    made = Peers()
    yield made
    made.close()


def float_of(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss as it is."""
    return loss


def backward(model: Any, rank: int, step: int, scaled: Any) -> None:
    """Add the gradients of a batch, in bfloat16."""
    x, y = batch(rank, step)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.mse_loss(model(x).float(), y)
    torch.autograd.backward(scaled(loss))


def compiled(rank: int) -> tuple[torch.nn.Module, Any]:
    """Return a model, and what its peer calls: on rank 0 the compiled model."""
    model = make_model(rank)
    if rank:
        return model, model
    whole: Any = torch  # torch types this only in part
    called = whole.compile(model, backend="aot_eager")
    backward(called, rank, 0, float_of)  # imports the compiler, which two threads cannot do
    model.zero_grad()
    return model, called


def overflow(model: torch.nn.Module, rank: int, number: int) -> None:
    """Make a gradient of one peer infinite in one step."""
    gradient = next(model.parameters()).grad
    if rank == 0 and number == OVERFLOWS and gradient is not None:
        gradient.fill_(math.inf)


def with_diloco(
    peers: Peers, rank: int, model: torch.nn.Module, called: Any
) -> tuple[list[torch.Tensor], int]:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with peers.make(rank, called, sync_every=4, min_peers=2) as opt:
        assert all(name[:1] in "02" for names in opt.fragments for name in names)
        scheduler = opt.follow(torch.optim.lr_scheduler.ExponentialLR(opt, 0.9))
        opt.join()
        number = 0
        while opt.steps < STEPS:
            number += 1
            opt.zero_grad()
            for half in range(2):
                backward(called, rank, 2 * number + half, scaler.scale)
            overflow(model, rank, number)
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            if opt.steps > scheduler.last_epoch:
                scheduler.step()
        opt.finish()
        assert opt.inner_steps == scheduler.last_epoch == STEPS
    return parameters(model), number


def test_with_diloco(peers: Peers) -> None:
    """A step that overflows counts on no peer."""
    calls = [peers.start(with_diloco, peers, rank, *compiled(rank)) for rank in range(2)]
    (one, steps), (two, others) = (call.result(LIMIT_S) for call in calls)
    assert equal(one, two)
    assert (steps, others) == (STEPS + 1, STEPS)


def with_averager(
    peers: Peers, rank: int, model: torch.nn.Module, called: Any
) -> tuple[list[torch.Tensor], int, float]:
    optimizer = make_inner(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    averager = GradientAverager(
        called,
        optimizer,
        comm=peers.comm(),
        min_peers=2,
        stateful={"lr": scheduler, "scaler": scaler},
    )
    number = 0
    averager.update()
    while averager.steps < STEPS:
        number += 1
        optimizer.zero_grad()
        with averager.no_sync():
            backward(called, rank, 2 * number, scaler.scale)
            overflow(model, rank, number)
        backward(called, rank, 2 * number + 1, scaler.scale)
        assert averager.synchronize()
        before = averager.steps
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if averager.steps > before:
            scheduler.step()
        averager.update()
    averager.close()
    return parameters(model), number, scaler.get_scale()


def test_with_a_gradient_averager(peers: Peers) -> None:
    """A step that overflows on one peer is taken by none, and the scales stay equal."""
    calls = [peers.start(with_averager, peers, rank, *compiled(rank)) for rank in range(2)]
    (one, *counts), (two, *others) = (call.result(LIMIT_S) for call in calls)
    assert equal(one, two)
    assert counts == others == [STEPS + 1, 128.0]
