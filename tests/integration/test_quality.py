"""Real runs end with the bits of the batched trainer, whose only difference is the network."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from gpt.text import Text, load
from pccl.stress.studies.quality.batch import GPTBatch
from pccl.stress.studies.quality.command import quality
from pccl.stress.studies.quality.trainer import excerpts, train
from tests.support.commands import environment_with, run_to_end
from tests.support.diloco_peers import Peers
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S
from tests.support.quality_run import LENGTH, SEED, TINY, VARIANTS, real, short


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


def test_four_replicas_end_with_the_bits_of_the_batched_trainer(peers: Peers, text: Text) -> None:
    """Sparse contributions are always added in the same order; others as the network is."""
    variant = replace(VARIANTS["sparse"], replicas=4)
    calls = [
        peers.start(lambda: real(peers.comm(), variant, text)) for _ in range(variant.replicas)
    ]
    ends = {call.result(LIMIT_S) for call in calls}
    (run,) = train([(variant, SEED)], LENGTH, text, TINY)
    assert ends == {run.digest}


def test_launched_processes_end_with_the_bits_of_the_batched_trainer(
    ready_pccl: tuple[str, ...], text: Text
) -> None:
    program = (sys.executable, "-m", "tests.support.quality_run")
    environment = environment_with(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "examples")]))
    ended = run_to_end(*ready_pccl, "launch", "-n", "2", "--", *program, env=environment)
    assert ended.returncode == 0, ended.stderr
    ends: dict[str, list[str]] = {}
    for line in ended.stdout.splitlines():
        *_, name, digest = line.split()
        ends.setdefault(name, []).append(digest)
    jobs = [(variant, SEED) for variant in VARIANTS.values()]
    runs = train(jobs, LENGTH, text, TINY)
    assert ends == {name: [run.digest] * 2 for name, run in zip(VARIANTS, runs, strict=True)}


def test_replicas_of_unequal_speed_end_with_one_model(text: Text) -> None:
    """Three make 8 steps, and one makes 4 of them: each round has 4, 4, 4 and 2."""
    equal = replace(short("sync"), replicas=4, sync_every=4)
    unequal = replace(equal, slowest=2)
    length = replace(LENGTH, steps=7)
    runs = train([(unequal, SEED), (equal, SEED)], length, text, TINY)
    assert unequal.longest(length.steps) == 8
    assert len({run.digest for run in runs}) == 2


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


def test_a_slow_peer_hardly_slows_the_others() -> None:
    asked = ["--peers", "2", "--slowest", "5", "--step-s", "0.02", "--sync-every", "1s"]
    result = CliRunner().invoke(
        quality, ["speeds", *asked, "--rounds", "2"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    *peers, share = sorted(result.output.splitlines(), key=lambda line: not line.startswith("peer"))
    steps = [int(line.split()[2]) for line in sorted(peers)]
    assert steps[0] > 2 * steps[1] > 0  # in step with the slow one it would make as few
    assert share.endswith(" %")
