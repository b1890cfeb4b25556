"""Real runs end with the bits of the batched trainer, whose only difference is the network."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from gpt.model import Shape, digest
from gpt.optimizers import make_inner
from gpt.text import Text, load
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.gradient_averager import GradientAverager
from pccl.stress.studies.quality.batch import GPTBatch
from pccl.stress.studies.quality.command import quality
from pccl.stress.studies.quality.trainer import RunLength, excerpts, prepare, set_rate, train
from pccl.stress.studies.quality.variants import MODES, TrainingVariant
from tests.support.diloco_peers import Peers
from tests.support.patience import LIMIT_S

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
    "int4": short("streaming", compression="int4"),
    "muon": short("muon"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Generator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def peers() -> Generator[Peers]:
    made = Peers()
    yield made
    made.close()


@pytest.fixture(scope="module")
def text() -> Text:
    return load(None, TINY.context + 1)


def real(peers: Peers, variant: TrainingVariant, rank: int, text: Text) -> str:
    """One replica of a run over sockets; gradients are those of a batch with one row."""
    torch.set_num_threads(1)
    batch = GPTBatch([SEED], TINY)
    (model,) = batch.models
    inner = prepare(make_inner(model, variant.inner, variant.lr))
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]

    def backward(step: int) -> None:
        batch.backward(excerpts(text, LENGTH, TINY, SEED, rank, step)[None])
        for parameter, gradient in gradients:  # an averager replaces them by its own
            parameter.grad = gradient
        set_rate(inner, step, variant.lr, LENGTH)

    if not variant.sync_every:
        with GradientAverager(
            model, inner, comm=peers.comm(), min_peers=variant.replicas
        ) as averager:
            for step in range(LENGTH.steps):
                averager.update()
                backward(step)
                averager.step()
        return digest(model.parameters())
    with DiLoCo(model, inner=inner, comm=peers.comm(), **variant.options()) as opt:
        opt.join()
        for step in range(LENGTH.steps):
            backward(step)
            opt.step()
        opt.finish()
    return digest(model.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_real_run_ends_with_the_bits_of_the_batched_trainer(
    peers: Peers, text: Text, name: str
) -> None:
    variant = VARIANTS[name]
    if variant.inner == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    calls: list[Future[str]] = []
    for rank in range(variant.replicas):
        calls.append(peers.start(real, peers, variant, rank, text))
        peers.until_registered(len(calls))
    ends = {call.result(LIMIT_S) for call in calls}

    other = replace(MODES["sync"], sync_every=EVERY)  # a second run in the batch changes nothing
    run, _ = train([(variant, SEED), (other, SEED + 1)], LENGTH, text, TINY)
    assert ends == {run.digest}


def test_the_variants_end_with_different_models(text: Text) -> None:
    jobs = [(variant, SEED) for variant in VARIANTS.values() if variant.inner == "adamw"]
    assert len({run.digest for run in train(jobs, LENGTH, text, TINY)}) == len(jobs)


def test_a_row_of_a_batch_computes_what_it_computes_alone(text: Text) -> None:
    drawn = torch.stack([excerpts(text, LENGTH, TINY, seed, 0, 0) for seed in range(3)])
    batch = GPTBatch([0, 1, 2], TINY)
    losses = batch.backward(drawn)
    for row in range(3):
        alone = GPTBatch([row], TINY)
        assert torch.equal(alone.backward(drawn[row : row + 1]), losses[row : row + 1])
        assert torch.equal(alone.gradients[0], batch.gradients[row])


def test_a_row_has_the_loss_and_gradients_of_the_example(text: Text) -> None:
    drawn = excerpts(text, LENGTH, TINY, 0, 0, 0)
    batch = GPTBatch([7], TINY)
    expected = GPTBatch([7], TINY).models[0]
    for parameter in expected.parameters():
        parameter.grad = None
    loss = expected.loss(drawn)
    torch.autograd.backward(loss)
    torch.testing.assert_close(batch.backward(drawn[None])[0], loss.detach())
    for own, other in zip(batch.models[0].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-6, rtol=1e-4)


def test_a_grid_uses_the_best_rates_of_a_sweep_and_finished_runs_are_not_repeated(
    tmp_path: Path,
) -> None:
    swept, out = str(tmp_path / "sweep"), str(tmp_path / "grid")
    counts = ["--steps", "2", "--excerpts", "1", "--held-out", "1"]
    length = [*counts, "--mode", "data-parallel", "--mode", "sync"]
    grid = ["grid", *length, "--tuned", swept, "--out", out, "--format", "int8", "--seeds", "0:2"]

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(quality, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    rates = ["--rate", "0.001", "--rate", "1000"]
    table = run("sweep", *length, "--out", swept, "--seeds", "7:8", *rates)
    assert "4 of 4 runs" in table
    assert table.count("best, at the edge") == 2
    first = run(*grid)
    assert "6 of 6 runs" in first
    assert first.count("of 2") == 2  # sync over data-parallel, and int8 over sync
    assert "0.001" in first
    assert "1000" not in first
    assert run(*grid) == first[first.index("\u250f") :]  # the table, and no training
