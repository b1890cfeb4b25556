"""Trains several runs as one batch, and evaluates their models."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from train_gpt import learning_rate

from gpt.model import GPT, Shape, digest
from gpt.optimizers import make_inner
from gpt.text import Text
from pccl.stress.studies.quality.batch import ROWS, SHAPE, GPTBatch
from pccl.stress.studies.quality.replica import DiLoCoReplica, GradientCalls, MemoryRounds
from pccl.stress.studies.quality.results import FinishedRun
from pccl.stress.studies.quality.variants import TrainingVariant


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """What all runs have alike.

    Attributes:
        steps: inner steps of each replica; of all on average, if they are unequally fast.
        excerpts: excerpts in a batch of one replica.
        warm_up: steps of the linear warm-up.
        held_out: excerpts for the evaluation, evenly spread over the held-out text.
    """

    steps: int
    excerpts: int = 8
    warm_up: int = 100
    held_out: int = 8192

    def settings(self) -> dict[str, Any]:
        """Return all settings in plain values."""
        return asdict(self)


def prepare(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let AdamW update each tensor by one kernel instead of a dozen; return the optimizer."""
    for group in inner.param_groups:
        if "fused" in group:
            group["fused"] = True
    return inner


def set_rate(
    inner: torch.optim.Optimizer, step: int, variant: TrainingVariant, length: RunLength
) -> None:
    """Set the rate of a step, the same on all replicas: warm-up, then half a cosine."""
    steps = variant.longest(length.steps)
    rate = learning_rate(step, peak=variant.lr, warm_up=length.warm_up, steps=steps)
    for group in inner.param_groups:
        group["lr"] = rate


def excerpts(
    text: Text, length: RunLength, shape: Shape, seed: int, rank: int, step: int
) -> Tensor:
    """Return the batch of one replica in a step, int64, shape (excerpts, context + 1)."""
    return text.batch(length.excerpts, shape.context + 1, seed=seed, peer=rank, step=step)


class TrainedRun:
    """One run in a batch: some rows, which train together.

    Args:
        variant: how they train.
        seed: seed of the weights and of the batches.
        models: the models of the rows.
        gradients: the gradients of the rows, shape (rows, n).
    """

    def __init__(
        self, variant: TrainingVariant, seed: int, models: Sequence[GPT], gradients: Tensor
    ) -> None:
        self.variant, self.seed = variant, seed
        self.models = models
        self._inners = [prepare(make_inner(model, variant.inner, variant.lr)) for model in models]
        self._gradients = GradientCalls(gradients) if not variant.sync_every else None
        self._rounds = None
        if variant.sync_every:
            replicas = [DiLoCoReplica(model, variant, rank) for rank, model in enumerate(models)]
            self._rounds = MemoryRounds(replicas)

    def step(self, step: int, length: RunLength) -> None:
        """Apply the gradients of a step of the fastest replica; make the joint calls due then."""
        if step >= self.variant.longest(length.steps):
            return
        if self._gradients is not None:
            self._gradients.average()
        for rank, inner in enumerate(self._inners):
            if (step + 1) % self.variant.pace(rank) == 0:
                set_rate(inner, step, self.variant, length)
                inner.step()
        if self._rounds is not None:
            self._rounds.stepped()

    def finish(self) -> None:
        """Give all replicas the common model."""
        if self._rounds is not None:
            self._rounds.finish()

    def digest(self) -> str:
        """Return the digest of the common model, after ``finish``."""
        (common,) = {digest(model.parameters()) for model in self.models}
        return common


def train(
    jobs: Sequence[tuple[TrainingVariant, int]],
    length: RunLength,
    text: Text,
    shape: Shape = SHAPE,
) -> list[FinishedRun]:
    """Train runs as one batch in this thread.

    Args:
        jobs: variant and seed of each run.
        length: length of all runs.
        text: the text.
        shape: size of the models.

    Returns:
        The runs, in the order of ``jobs``. The digest of a run is that of its common model.
    """
    torch.set_num_threads(1)
    began_s = time.process_time()
    rows = [(variant, seed, rank) for variant, seed in jobs for rank in range(variant.replicas)]
    batch = GPTBatch([seed for _, seed, _ in rows], shape)
    runs: list[TrainedRun] = []
    begin = 0
    for variant, seed in jobs:
        own = slice(begin, begin + variant.replicas)
        runs.append(TrainedRun(variant, seed, batch.models[own], batch.gradients[own]))
        begin += variant.replicas
    for step in range(max(variant.longest(length.steps) for variant, _ in jobs)):
        drawn = [
            excerpts(text, length, shape, seed, rank, step // variant.pace(rank))
            for variant, seed, rank in rows
        ]
        batch.backward(torch.stack(drawn))
        for run in runs:
            run.step(step, length)
    for run in runs:
        run.finish()
    firsts = [batch.models.index(run.models[0]) for run in runs]
    held_out = text.held_out_excerpts(length.held_out, shape.context + 1)
    losses = batch.evaluate(held_out, firsts)
    cpu_s = (time.process_time() - began_s) / len(rows)
    return [
        FinishedRun(
            name=run.variant.name,
            seed=run.seed,
            loss=loss,
            digest=run.digest(),
            cpu_s=round(cpu_s * run.variant.replicas, 1),
            settings=run.variant.settings() | length.settings(),
        )
        for run, loss in zip(runs, losses, strict=True)
    ]


def batches(
    jobs: Iterable[tuple[TrainingVariant, int]], rows: int = ROWS
) -> Iterator[list[tuple[TrainingVariant, int]]]:
    """Group jobs in order, so that the replicas of each group fill at most ``rows`` rows."""
    group: list[tuple[TrainingVariant, int]] = []
    for job in jobs:
        if group and sum(variant.replicas for variant, _ in [*group, job]) > rows:
            yield group
            group = []
        group.append(job)
    if group:
        yield group
