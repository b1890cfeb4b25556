"""torch's own tests of its distributed package, with another backend in the place of Gloo.

    pip install expecttest
    python -m pccl.stress.studies.torch_conformance gloo > gloo.jsonl
    python -m pccl.stress.studies.torch_conformance pccl > pccl.jsonl

It prints a line for each test: its name, pass, fail or skip, why, and how long it took. Tests for
CUDA and NCCL are left out. torch ships the tests, but not the program that runs them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from typing import Any

_ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception|Lost|Mismatch|Aborted|Exceeded)\b.*")
_RANKS, _LIMIT_S = 4, 25
_WHY_CHARS_MAX = 300


def main() -> None:
    """Run the tests whose names match."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("pattern", nargs="?", default="")
    given = parser.parse_args()
    case = _case(given.backend)
    for name in unittest.TestLoader().getTestCaseNames(case):
        if re.search(given.pattern, name) and not re.search("cuda|nccl", name):
            began_s = time.monotonic()
            verdict, why = _run(case(name))
            line = {"test": name, "result": verdict, "why": why}
            print(json.dumps({**line, "s": round(time.monotonic() - began_s, 1)}), flush=True)


def _case(backend: str) -> Any:
    """Return the test case of torch, as it is for Gloo, except that it makes other groups."""
    os.environ |= {
        "BACKEND": "gloo", "WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1",
        "TEMP_DIR": tempfile.mkdtemp(), "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(_LIMIT_S),
        "OMP_NUM_THREADS": "1", "PCCL_LOG": "error",
    }  # fmt: skip
    importlib.import_module("pccl.torch")
    theirs: Any = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)

    def renaming(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Any:
            if options.get("backend") == "gloo":
                options["backend"] = backend
            return make(*args, **options)

        return made

    for name in ("init_process_group", "new_group"):
        setattr(torch.distributed, name, renaming(getattr(torch.distributed, name)))

    def set_up(self: Any) -> None:
        """Fork the ranks: torch is imported already."""
        theirs.TestDistBackend.setUp(self)
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    bases = (theirs.TestDistBackend, theirs.DistributedTest._DistTestBase)
    return type("Conformance", bases, {"setUp": set_up})


def _run(case: Any) -> tuple[str, str]:
    """Run one test. Whatever its ranks print is searched for the first error."""
    result = unittest.TestResult()
    with tempfile.TemporaryFile() as printed:
        kept = {number: os.dup(number) for number in (1, 2)}
        for number in kept:
            os.dup2(printed.fileno(), number)
        try:
            case.run(result)
        finally:
            sys.stderr.flush()
            for number, original in kept.items():
                os.dup2(original, number)
                os.close(original)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    if result.skipped:
        return "skip", result.skipped[0][1]
    problems = [*result.errors, *result.failures]
    if not problems:
        return "pass", ""
    lines = [line.strip() for line in (text + problems[0][1]).splitlines()]
    found = [line for line in lines if _ERROR.fullmatch(line) and " exited with " not in line]
    return "fail", (found or lines[-1:])[0][:_WHY_CHARS_MAX]


if __name__ == "__main__":
    main()
