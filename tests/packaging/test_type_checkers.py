"""What type checkers show to users of the methods that are made from one signature."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_to_end
from tests.support.paths import ROOT

PROGRAM = """\
from typing import assert_type

import numpy as np

import pccl
import pccl.aio

array = np.ones(3)


def blocks(comm: pccl.Communicator, state: pccl.SharedState) -> None:
    assert_type(comm.connect(3, min_peers=2), None)
    assert_type(comm.are_peers_pending(timeout_s=1), bool)
    assert_type(comm.all_reduce(array, op=pccl.ReduceOp.AVG, weight=2.0), pccl.ReduceInfo)
    assert_type(comm.all_reduce_async(array, tag=3), pccl.AsyncReduceHandle)
    assert_type(comm.all_reduce_many([array], retry=True), pccl.ReduceInfo)
    assert_type(comm.broadcast(array, root=1).tx_bytes, int)
    assert_type(comm.barrier(tag=1), None)
    assert_type(comm.sync_shared_state(state, resume="highest"), pccl.SharedStateSyncInfo)
    comm.all_reduce()  # wrong
    comm.all_reduce(array, tag="1")  # wrong
    comm.all_reduce(array, array, pccl.ReduceOp.AVG)  # wrong
    comm.all_reduce(array, quantisation_options=None)  # wrong
    comm.all_reduce_many(array, retries=True)  # wrong
    comm.connect("localhost")  # wrong
    comm.barrier(1)  # wrong
    comm.update_topology(timeout_s="1")  # wrong
    comm.verify()  # wrong


async def awaits(comm: pccl.aio.Communicator, state: pccl.SharedState) -> None:
    assert_type(await comm.connect(3, min_peers=2), None)
    assert_type(await comm.are_peers_pending(timeout_s=1), bool)
    assert_type(await comm.all_reduce(array, op=pccl.ReduceOp.AVG, weight=2.0), pccl.ReduceInfo)
    handle = await comm.all_reduce_async(array, tag=3)
    assert_type(handle, pccl.AsyncReduceHandle)
    assert_type(await handle, pccl.ReduceInfo)
    assert_type(await comm.sync_shared_state(state), pccl.SharedStateSyncInfo)
    await comm.all_reduce()  # wrong
    await comm.all_reduce(array, tag="1")  # wrong
    await comm.all_reduce(array, array, pccl.ReduceOp.AVG)  # wrong
    await comm.barrier(1)  # wrong
    comm.all_reduce(array).tx_bytes  # wrong
"""
MYPY_INI = f"""\
[mypy]
strict = true
mypy_path = {ROOT}

# The program has no tensors, and mypy reads the 1400 modules of torch for longer than all others.
[mypy-torch.*]
follow_imports = skip
"""
WRONG = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def test_mypy(program: Path) -> None:
    config = program.with_name("mypy.ini")
    config.write_text(MYPY_INI, encoding="utf-8")
    cache = ROOT / ".mypy_cache" / "program"  # with torch skipped it is of no use to `make check`
    options = ["--config-file", str(config), "--cache-dir", str(cache), "--no-error-summary"]
    ended = run_to_end(sys.executable, "-m", "mypy", *options, str(program))
    assert ended.stderr == ""
    found = re.findall(r"program\.py:(\d+): error", ended.stdout)
    assert {int(line) for line in found} == WRONG, ended.stdout


def test_pyright(program: Path) -> None:
    config = {"extraPaths": [str(ROOT)], "pythonVersion": "3.11", "include": [program.name]}
    (program.parent / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    asked = ["--project", str(program.parent), "--pythonpath", sys.executable, "--outputjson"]
    ended = run_to_end(sys.executable, "-m", "pyright", *asked)
    told = json.loads(ended.stdout)["generalDiagnostics"]
    found = {1 + each["range"]["start"]["line"] for each in told if each["severity"] == "error"}
    assert found == WRONG, ended.stdout
