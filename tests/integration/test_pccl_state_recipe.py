"""A program written for PCCL trains with shared state, while one peer joins and another leaves."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pccl
from tests.support.commands import start
from tests.support.patience import LONG_LIMIT_S

PROGRAM = Path(__file__).with_name("pccl_state_recipe.py")
OUTER_BYTES = 4 * (4 * 32 + 32 + 32 + 1)
STATE_BYTES = 2 * OUTER_BYTES + 8
"""With momentum, and the counter of steps."""


class Trainers:
    """Processes that train together."""

    def __init__(self, python: tuple[str, ...], how: str, address: str) -> None:
        self._python, self._how, self._address = python, how, address
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, steps: int, *waits: str) -> subprocess.Popen[str]:
        seed = str(len(self.processes))
        told = (self._how, self._address, str(steps), seed, *waits)
        process = start(*self._python, str(PROGRAM), *told)
        self.processes.append(process)
        return process

    def outcomes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for process in self.processes:
            output, complaints = process.communicate(timeout=LONG_LIMIT_S)
            assert (process.returncode, complaints) == (0, "")
            found.append(json.loads(output.splitlines()[-1]))
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def trainers(request: pytest.FixtureRequest, ready_python: tuple[str, ...]) -> Iterator[Trainers]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        made = Trainers(ready_python, request.param, master.address)
        yield made
        made.close()


def wait_for_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"


@pytest.mark.parametrize("trainers", ["sync"], indirect=True)
def test_synchronous(trainers: Trainers) -> None:
    """Two begin, one of them leaves after two steps, and one that comes later takes its place."""
    stays = trainers.start(6, "0=2", "2=2")
    trainers.start(2, "0=2")
    wait_for_step(stays)
    trainers.start(6)
    one, other, newcomer = trainers.outcomes()
    assert sorted((one["received"][0], other["received"][0])) == [0, OUTER_BYTES]
    assert newcomer["received"][0] == STATE_BYTES
    for result in (one, other, newcomer):
        assert not any(result["received"][1:])
    assert one["digest"] == newcomer["digest"]
    assert (one["revision"], other["revision"], newcomer["revision"]) == (6, 2, 6)
    assert one["losses"][-1] < one["losses"][0]


@pytest.mark.parametrize("trainers", ["async"], indirect=True)
def test_asynchronous(trainers: Trainers) -> None:
    """Its newcomer is given what it was not there for in a second synchronization."""
    first = trainers.start(6, "2=3")
    trainers.start(6, "2=3")
    wait_for_step(first)
    trainers.start(6)
    results = trainers.outcomes()
    *members, newcomer = results
    assert len({result["digest"] for result in results}) == 1
    assert len({result["revision"] for result in results}) == 1
    assert newcomer["received"] == [STATE_BYTES, STATE_BYTES - 8]
    for member in members:
        assert member["received"][1:] == [0, 0]
