"""Processes of this machine: what others have started, and whether they run."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from tests.support.patience import LIMIT_S


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked about does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _state(pid) not in "XZ"
    return not Path("/proc").is_dir()


def assert_gone(pids: list[int]) -> None:
    """The kernel takes a moment to end what was killed."""
    assert pids
    deadline = time.monotonic() + LIMIT_S
    while left := [pid for pid in pids if is_there(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.001)


def wait_stopped(pid: int) -> None:
    """Wait until a signal has stopped a process."""
    deadline_s = time.monotonic() + LIMIT_S
    while _state(pid) != "T":
        assert time.monotonic() < deadline_s, f"process {pid} has not stopped"
        time.sleep(0.001)


def _state(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def descendants(pid: int) -> list[int]:
    """Process ids of all that a process has started, directly or not."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(stat[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]
