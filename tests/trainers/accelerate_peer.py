"""A process that trains in its own loop with ``accelerate`` and ``DiLoCo``; see ``tiny``."""

from __future__ import annotations

from typing import Any

import torch

import pccl
from pccl.bindings.diloco import DiLoCo
from tests.trainers import tiny


def main() -> None:
    """Train until the run has made its steps."""
    given = tiny.given()
    accelerator = tiny.accelerator(given)
    model: Any = accelerator.prepare(tiny.make_model(given.peer))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        pccl.Communicator(given.master) as comm,
        DiLoCo(
            model, inner=inner, comm=comm, sync_every=tiny.SYNC_EVERY, min_peers=given.peers
        ) as opt,
    ):
        scheduler = opt.follow(torch.optim.lr_scheduler.ExponentialLR(opt, 0.99))
        loader = torch.utils.data.DataLoader(tiny.Texts(given), tiny.BATCH)
        optimizer, steps, loader = accelerator.prepare(opt, scheduler, loader)
        if given.resume:
            accelerator.load_state(given.folder)
            loader = accelerator.skip_first_batches(loader, given.save * tiny.ACCUMULATED)
        opt.join()
        rates: dict[int, float] = {}
        losses: dict[int, float] = {}
        batches = iter(loader)
        while opt.steps < given.steps:
            with accelerator.accumulate(model):
                loss = model(**next(batches)).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    rates[opt.steps + 1] = float(scheduler.get_last_lr()[0])
                    losses[opt.steps + 1] = loss.item()
                optimizer.step()
                steps.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and opt.steps == given.save:
                accelerator.save_state(given.folder)
        opt.finish()
        tiny.ended(
            model,
            opt,
            steps=opt.steps,
            counted=opt.steps,
            scheduled=scheduler.last_epoch,
            rates=rates,
            losses=losses,
        )


if __name__ == "__main__":
    main()
