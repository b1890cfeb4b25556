"""``python -m pccl.stress quality``: real runs of the example, made once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_to_end

pytest.importorskip("torch")

SMALL = (
    "--steps 8 --sync-every 4 --width 16 --layers 1 --batch 2 --context 16 --warm-up 2"
    " --evaluate-every 4 --held-out 8"
)
WHICH = "--seeds 5 --variant data-parallel --variant streaming-int4"


def quality(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pccl.stress", "quality", str(folder), *SMALL.split()]
    return run_to_end(*command, *WHICH.split(), *words)


def test_a_grid_is_made_once_and_told_again(tmp_path: Path) -> None:
    first = quality(tmp_path, "--json")
    assert first.returncode == 0, first.stderr
    usual, streaming = map(json.loads, first.stdout.splitlines())
    assert [usual["name"], streaming["name"]] == ["data-parallel", "streaming-int4"]
    assert usual["seeds"] == streaming["seeds"] == [5]
    # Two peers send each other one half of all values, then the other half of the averages; what
    # stays on top are the headers of frames.
    values = 256 * 16 + 16 * 16 + (4 * 16 + 12 * 16 * 16) + 2 * 16
    tokens_per_step = 2 * 16
    assert usual["bytes_per_token"] == pytest.approx(4 * values / tokens_per_step, rel=0.05)
    # Two periods instead of eight steps, and 4 bits instead of 32.
    assert 16 < streaming["fewer_bytes"] < 32

    again = quality(tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("from before") == 2
    assert f"{usual['loss']:.4f}" in again.stdout


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    failed = quality(tmp_path, "--layers", "1", "--width", "18")  # no multiple of its heads
    assert failed.returncode == 1
    assert "18 is no multiple of 4 heads" in failed.stderr
    assert not list(tmp_path.rglob("run.json"))
