"""One replica of real runs, whose gradients are those of the batched trainer.

As a program that is launched, it trains all variants, one after the other, and prints the digest of
each model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import pccl
from gpt.model import Shape, digest
from gpt.optimizers import make_inner
from gpt.text import Text, load
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.gradient_averager import GradientAverager
from pccl.stress.studies.quality.batch import GPTBatch
from pccl.stress.studies.quality.trainer import RunLength, excerpts, prepare, set_rate
from pccl.stress.studies.quality.variants import MODES, TrainingVariant

TINY = Shape(width=16, layers=1, heads=2, context=16)
LENGTH = RunLength(steps=14, excerpts=2, warm_up=3, held_out=8)
SEED, EVERY = 5, 4


def short(mode: str, **changes: Any) -> TrainingVariant:
    """Some rounds in a few steps; a delay of a whole round stays one."""
    variant = MODES[mode]
    if not variant.sync_every:
        return variant
    delay = {0: 0, variant.sync_every: EVERY}.get(variant.delay, 1)
    return replace(variant, sync_every=EVERY, delay=delay, **changes)


VARIANTS = {
    "data-parallel": short("data-parallel"),
    "sync": short("sync"),
    "streaming": short("streaming", outer_lr=0.7, outer_momentum=0.9),
    "delayed": short("delayed", outer_momentum=0.5),
    "late": short("late"),
    "eager": short("eager", outer_lr=0.7, outer_momentum=0.9),
    "int8": short("sync", compression="int8"),
    "e3m0": short("sync", compression="e3m0"),
    "int2": short("sync", compression="int2"),
    "sparse": short("sync", compression="sparse"),
    "int4": short("streaming", compression="int4"),
    "muon": short("muon"),
}
"""By name. Each trains in a peer group of its own."""
if not hasattr(torch.optim, "Muon"):
    del VARIANTS["muon"]


def real(comm: pccl.Communicator, variant: TrainingVariant, text: Text) -> str:
    """One replica of a run over sockets; gradients are those of a batch with one row."""
    torch.set_num_threads(1)
    batch = GPTBatch([SEED], TINY)
    (model,) = batch.models
    inner = prepare(make_inner(model, variant.inner, variant.lr))
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]

    def backward(step: int) -> None:
        (rank,) = (member.rank for member in comm.members() if member.peer_id == comm.peer_id)
        batch.backward(excerpts(text, LENGTH, TINY, SEED, rank, step)[None])
        for parameter, gradient in gradients:  # an averager replaces them by its own
            parameter.grad = gradient
        set_rate(inner, step, variant, LENGTH)

    if not variant.sync_every:
        with GradientAverager(model, inner, comm=comm, min_peers=variant.replicas) as averager:
            for step in range(LENGTH.steps):
                averager.update()
                backward(step)
                averager.step()
        return digest(model.parameters())
    with DiLoCo(model, inner=inner, comm=comm, **variant.options()) as opt:
        opt.join()
        for step in range(LENGTH.steps):
            backward(step)
            opt.step()
        opt.finish()
    return digest(model.parameters())


def main() -> None:
    text = load(None, TINY.context + 1)
    for group, (name, variant) in enumerate(VARIANTS.items()):
        comm = pccl.Communicator(peer_group=group)
        print(name, real(comm, variant, text), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
