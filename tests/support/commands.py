"""Commands and programs as users run them: processes, and what they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.support.paths import ROOT
from tests.support.patience import LONG_LIMIT_S

PCCL = (sys.executable, "-m", "pccl.cli.main")
"""The command ``pccl``."""

STRICT_PYTHON = (sys.executable, "-W", "error")
"""The interpreter; a warning is an error."""

HINT = r"\Apccl launch: the master is 127\.0\.0\.1:\d+; see the run with: pccl status\n"
"""The first line of a launch on stderr, unless the master is another process."""

FROM_ANYWHERE = {**os.environ, "PYTHONPATH": str(ROOT)}
"""The environment of a command that does not run in the project's folder."""


def environment_with(**more: str) -> dict[str, str]:
    """The environment, with these variables and without other settings of pccl.

    Only errors are logged, unless ``PCCL_LOG`` is among them.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PCCL_")}
    return {**kept, "PCCL_LOG": "error", **more}


def run_to_end(
    *command: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    limit_s: float = LONG_LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command until it ends, whatever its status."""
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=limit_s, check=False
    )


def printed_objects(
    *command: str, env: Mapping[str, str] | None = None, limit_s: float = LONG_LIMIT_S
) -> list[dict[str, Any]]:
    """The JSON objects that a command prints, one a line; it succeeds without a complaint."""
    done = run_to_end(*command, env=env, limit_s=limit_s)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def without_hint(stderr: str) -> str:
    """What a launch with a master of its own wrote, after the line that says how to see the run."""
    said, found = re.subn(HINT, "", stderr)
    assert found, stderr
    return said


def launch_example(
    script: str,
    folder: Path,
    limit_s: float = LONG_LIMIT_S,
    python: tuple[str, ...] = STRICT_PYTHON,
) -> subprocess.CompletedProcess[str]:
    """Let two peers run an example of the documentation; a warning is an error."""
    example = folder / "example.py"
    example.write_text(script, encoding="utf-8")
    command = (*python, str(example))
    ended = run_to_end(*PCCL, "launch", "-n", "2", "--", *command, cwd=folder, limit_s=limit_s)
    assert ended.returncode == 0, ended.stderr
    return ended


def start(
    *command: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    stderr: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start a command; the caller ends it."""
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True
    )


@contextmanager
def running(
    *command: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    stderr: int | IO[str] = subprocess.PIPE,
) -> Generator[subprocess.Popen[str]]:
    """Start a command; it is killed with the block, unless it has ended before."""
    process = start(*command, cwd=cwd, env=env, stderr=stderr)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
