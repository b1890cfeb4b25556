"""``import pccl`` is cheap and brings nothing along that only some users need."""

import json
import subprocess
import sys
from typing import TypedDict

from tests.support.paths import ROOT

IMPORT_CPU_S_MAX = 0.3
"""CPU time, so that a busy machine does not fail the test; most of it is numpy."""

RUN_COUNT_MAX = 7
"""The best run counts: the first may compile, any may share its core with others."""

UNWANTED = ("torch", "matplotlib", "sklearn", "scipy", "rich", "click", "pccl.cli", "pccl.stress")

PROBE = """
import json, sys, time
started = time.process_time()
import {module}
import pccl
spent = time.process_time() - started
assert pccl.__file__, "a folder without __init__.py"
print(json.dumps({{"cpu_s": spent, "modules": sorted(sys.modules)}}))
"""


class Probed(TypedDict):
    cpu_s: float
    modules: list[str]


def probe(module: str = "pccl") -> Probed:
    """Import a module in a fresh interpreter and say what that cost and loaded."""
    command = [sys.executable, "-c", PROBE.format(module=module)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    probed: Probed = json.loads(run.stdout)
    return probed


def test_import_is_fast() -> None:
    spent_s: list[float] = []
    while len(spent_s) < RUN_COUNT_MAX:
        spent_s.append(probe()["cpu_s"])
        if spent_s[-1] < IMPORT_CPU_S_MAX:
            return
    raise AssertionError(f"import pccl takes {min(spent_s):.2f} s of CPU time at best")


def test_import_loads_no_extras() -> None:
    loaded = set(probe()["modules"])
    assert loaded.isdisjoint(UNWANTED), sorted(loaded.intersection(UNWANTED))


def test_a_master_needs_no_arrays() -> None:
    """Nor does what only starts processes: it serves a master beside them."""
    for module in ("pccl.master_node", "pccl.cli.master", "pccl.cli.processes.launch"):
        assert "numpy" not in probe(module)["modules"], module
