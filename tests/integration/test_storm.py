"""A storm of real processes, from its file to its report."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pccl.stress.studies.storm.schedules import make_storm
from pccl.stress.studies.storm.storm import Storm, StormTraining
from pccl.stress.studies.storm.tape import ReplicaTrains, read_tape
from pccl.stress.timeline import FaultKind, Timeline, TimelineFault
from tests.support.commands import environment_with, run_to_end

STEP_S = 0.05


def storm(tmp_path: Path) -> Path:
    """One of two replicas is killed, and one naps."""
    faults = (
        TimelineFault(1.0, FaultKind.RESTART, 1, duration_s=0.1),
        TimelineFault(6.0, FaultKind.NAP, 0, duration_s=1.0),
    )
    training = StormTraining(step_s=STEP_S, sync_every=10, grace_s=0.3, excerpts=1)
    path = tmp_path / "storm.json"
    Storm(Timeline(1, 3, 9.0, faults, lanes=1, deadline_s=5.0), training).dump(path)
    return path


RunStorm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_storm(ready_python: tuple[str, ...]) -> RunStorm:
    """Run the command to its end; it and its replicas need not import torch."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = (*ready_python, "-m", "pccl.stress", "storm", *map(str, arguments))
        return run_to_end(*command, env=environment_with())

    return run


def test_a_storm_of_processes_is_reported(run_storm: RunStorm, tmp_path: Path) -> None:
    report, tape = tmp_path / "report.json", tmp_path / "tape"
    ended = run_storm(storm(tmp_path), "--json", report, "--tape", tape)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "replicas are bit-identical" in ended.stdout
    found: dict[str, Any] = json.loads(report.read_text())
    figures, harness = found["figures"], found["harness"]
    assert found["form"] == "real"
    assert figures["is_equal"]
    assert figures["faults"] == {"nap": 1, "restart": 1}
    assert harness["verdict"] == "ok"
    assert harness["false_removals"] == harness["wrong_values"] == 0
    assert len(figures["training_again_s"]) == 3
    assert figures["took_part"] > 0.5
    # Three at the start, and the process that took the place of the killed one.
    trains = [one.index for one in read_tape(tape) if isinstance(one, ReplicaTrains)]
    assert sorted(trains) == [0, 1, 1, 2]


def test_a_simulated_storm_draws_a_page_and_a_picture(run_storm: RunStorm, tmp_path: Path) -> None:
    drawn = make_storm("torchft-15", 3, 40.0, 1)
    path = tmp_path / "storm.json"
    replace(drawn, training=replace(drawn.training, computes=False)).dump(path)
    page, picture = tmp_path / "page.html", tmp_path / "picture.gif"
    ended = run_storm(path, "--simulate", "--html", page, "--gif", picture)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 restart" in ended.stdout
    assert page.read_text().startswith("<!doctype html>")
    assert picture.read_bytes().startswith(b"GIF89a")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("thunder",), "is no file, and none of quiet, ft-diloco"),
        (("ft-diloco", "--replicas", "1"), "1 is not in the range"),
    ],
)
def test_wrong_arguments_are_refused(
    run_storm: RunStorm, arguments: tuple[str, ...], why: str
) -> None:
    ended = run_storm(*arguments)
    assert ended.returncode == 2
    assert why in ended.stderr


def test_a_file_sets_its_own_options(run_storm: RunStorm, tmp_path: Path) -> None:
    ended = run_storm(storm(tmp_path), "--minutes", 2)
    assert ended.returncode == 2
    assert "--minutes is set by the file" in ended.stderr


def test_a_full_disk_costs_only_the_file(run_storm: RunStorm, tmp_path: Path) -> None:
    ended = run_storm(storm(tmp_path), "--simulate", "--no-compute", "--json", "/dev/full")
    assert ended.returncode == 1
    assert "replicas are bit-identical" in ended.stdout
    assert "Error: cannot write /dev/full: No space left on device" in ended.stderr
