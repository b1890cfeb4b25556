"""A process that trains in its own loop with ``accelerate`` and ``GradientAverager``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

import pccl
from pccl.bindings.gradient_averager import GradientAverager
from tests.trainers import tiny


def main() -> None:
    """Train until the run has made its steps."""
    given = tiny.given()
    accelerator = tiny.accelerator(given)
    model: Any = accelerator.prepare(tiny.make_model(given.peer))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.99)
    loader: Any = torch.utils.data.DataLoader(tiny.Texts(given), tiny.BATCH)
    optimizer, steps, loader = accelerator.prepare(inner, scheduler, loader)
    rates: dict[int, float] = {}
    losses: dict[int, float] = {}
    with (
        pccl.Communicator(given.master) as comm,
        GradientAverager(
            model, inner, comm=comm, min_peers=given.peers, stateful={"lr": scheduler}
        ) as averager,
    ):
        accelerator.register_for_checkpointing(averager)
        if given.resume:
            accelerator.load_state(given.folder)
            loader = accelerator.skip_first_batches(loader, given.save * tiny.ACCUMULATED)
        batches = iter(loader)
        averager.update()
        while averager.steps < given.steps:
            with accelerator.accumulate(model):
                is_last = accelerator.sync_gradients
                with nullcontext() if is_last else averager.no_sync():
                    loss = model(**next(batches)).loss
                    accelerator.backward(loss)
                if is_last:
                    assert averager.synchronize()
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    rates[averager.steps + 1] = float(scheduler.get_last_lr()[0])
                    losses[averager.steps + 1] = loss.item()
                optimizer.step()
                steps.step()
                optimizer.zero_grad()
            if is_last:
                if averager.steps == given.save:
                    accelerator.save_state(given.folder)
                averager.update()
        tiny.ended(
            model,
            inner,
            steps=averager.steps,
            counted=averager.steps,
            scheduled=scheduler.last_epoch,
            rates=rates,
            losses=losses,
        )


if __name__ == "__main__":
    main()
