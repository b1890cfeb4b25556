"""A program written for PCCL runs unchanged, also when one of its peers leaves early."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import LONG_LIMIT_S
from tests.support.ports import free_address

PROGRAM = Path(__file__).with_name("pccl_recipe.py")


def start(python: tuple[str, ...], *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*python, str(PROGRAM), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str]) -> tuple[dict[str, Any], list[str]]:
    output, complaints = process.communicate(timeout=LONG_LIMIT_S)
    assert process.returncode == 0, complaints
    told: dict[str, Any] = json.loads(output)
    return told, complaints.splitlines()


@pytest.fixture
def address() -> str:
    return free_address()


@pytest.fixture
def master(address: str, ready_python: tuple[str, ...]) -> Iterator[str]:
    process = start(ready_python, "master", address)
    yield address
    output, complaints = process.communicate("", timeout=LONG_LIMIT_S)
    assert (process.returncode, output, complaints) == (0, "", "")


def test_synchronous_diloco(master: str, ready_python: tuple[str, ...]) -> None:
    steps = (4, 4, 2)
    peers = [
        start(ready_python, "peer", master, len(steps), n, seed) for seed, n in enumerate(steps)
    ]
    try:
        told = [outcome(peer) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()
    for (result, complaints), wanted in zip(told, steps, strict=True):
        assert result["revision"] == wanted
        assert not [line for line in complaints if "uint8" in line]
        common = min(steps)
        assert result["worlds"] == [len(steps)] * common + [2] * (wanted - common)
    longest = [result for result, _ in told if result["revision"] == max(steps)]
    assert len(longest) == 2
    assert longest[0] == longest[1]
    assert longest[0]["losses"][-1] < longest[0]["losses"][0]
