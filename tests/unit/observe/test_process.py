"""The processes of other peers, seen from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pccl.observe.process import inspect_process
from tests.support.commands import environment_with
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

PROGRAM = """
import os, sys
from pccl.observe.process import dump_stacks_on_request
dump_stacks_on_request("p0")
dump_stacks_on_request("another")
"""
THEN_WAIT = "print(flush=True); sys.stdin.read()"
THEN_BECOME_CAT = "os.execvp('cat', ['cat'])"


@pytest.mark.parametrize(("then", "has_stacks"), [(THEN_WAIT, True), (THEN_BECOME_CAT, False)])
def test_only_a_process_that_has_asked_for_the_signal_gets_it(
    tmp_path: Path, then: str, has_stacks: bool
) -> None:
    """The file may outlive its process, and another program may have the id: it would die."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment_with(PCCL_STACKS_DIR=str(tmp_path)),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if has_stacks:
            process.stdout.readline()
        else:
            until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "cat\n")
        for name in ("p0", "another"):
            seen = inspect_process(name, str(tmp_path))
            assert seen is not None
            assert bool(seen["stacks"]) is has_stacks
        assert inspect_process("p", str(tmp_path)) is None
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0
