"""What the operating system knows of a process that does not answer, seen from its machine.

A stopped process, one whose interpreter lock is held, and one behind a dead link look alike from
afar. Linux tells them apart: ``/proc/PID`` has the state of every thread and its processor time. To
see where the threads are, :func:`dump_stacks_on_request` lets :mod:`faulthandler` write all stacks
to a file when ``STACKS_SIGNAL`` arrives. It does so in C, so also while C code holds the lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

from pccl.config import STACKS_DIR

STACKS_SIGNAL: int = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else 0
"""A signal that programs hardly use; 0: the system has none. It is only sent to processes that
handle it, because it ends others."""

CPU_WINDOW_S = 0.2
"""Time over which the use of a processor is measured."""

DUMP_S_MAX = 1.0
"""How long to wait until the stacks are written."""

STACKS_BYTES_MAX = 64 << 10
STACKS_FILE_BYTES_MAX = 1 << 20
"""A longer file of stacks begins anew."""

NAMES_MAX = 1000
NAMES_BYTES_MAX = 1 << 17
"""Bounds on the names of one process's peers."""

THREADS_MAX = 64

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_known: set[tuple[int, str]] = set()
"""Processes that write their stacks on request, and their peers. A forked child does not yet."""


def dump_stacks_on_request(name: str) -> None:
    """If ``PCCL_STACKS_DIR`` is set, write all stacks there whenever ``STACKS_SIGNAL`` arrives.

    Args:
        name: name of a peer of this process, by which ``inspect_process`` finds the file.
    """
    folder, pid = os.environ.get(STACKS_DIR), os.getpid()
    if not folder or not STACKS_SIGNAL or (pid, name) in _known or len(_known) >= NAMES_MAX:
        return
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # a help, never a reason to fail
        names = _opened(folder, f"{pid}.names")
        os.write(names, f"{name}\n".encode(errors="replace"))
        os.close(names)
        if not any(process == pid for process, _ in _known):
            file = _opened(folder, f"{pid}.stacks")
            faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        _known.add((pid, name))


def _opened(folder: str, name: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return os.open(os.path.join(folder, name), flags, 0o600)


def inspect_process(name: str, folder: str) -> dict[str, Any] | None:
    """Return what is known of the process of a peer of this machine. Blocks for up to 1.3 s.

    Args:
        name: name of the peer.
        folder: ``PCCL_STACKS_DIR`` of its process.

    Returns:
        None if no such process has a file in ``folder``. Otherwise ``pid``; ``state``, as in
        ``ps``: R, S, D, T (stopped), t (traced), Z, or ``gone``; ``busy``: processors that it uses,
        1.0 for one; ``threads``: name, state and ``waits_in`` (the kernel's function) of each;
        ``stacks``: the text of faulthandler, or empty.
    """
    wanted = f"{name}\n".encode(errors="replace")
    paths = sorted(Path(folder).glob("*.names"), key=lambda path: path.stat().st_mtime_ns)
    for path in reversed(paths):
        with path.open("rb") as file:
            if path.stem.isdigit() and wanted in file.readlines(NAMES_BYTES_MAX):
                return _inspect(int(path.stem), path.with_suffix(".stacks"))
    return None


def _inspect(pid: int, stacks: Path) -> dict[str, Any]:
    before = _cpu_s(pid)
    time.sleep(CPU_WINDOW_S)
    state, after = _state(Path(f"/proc/{pid}/stat")), _cpu_s(pid)
    busy = (after - before) / CPU_WINDOW_S if after is not None and before is not None else 0.0
    return {
        "pid": pid,
        "state": state,
        "busy": round(busy, 2),
        "threads": _threads(pid),
        "stacks": _stacks(pid, stacks) if state in ("R", "S") else "",
    }


def _stat(path: Path) -> list[str]:
    """Return the fields of a ``stat`` file after the name of the process."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(path: Path) -> str:
    fields = _stat(path)
    return fields[0] if fields else "gone"


def _cpu_s(pid: int) -> float | None:
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if len(fields) > 12 else None


def _threads(pid: int) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    with contextlib.suppress(OSError):
        for folder in sorted(Path(f"/proc/{pid}/task").iterdir())[:THREADS_MAX]:
            with contextlib.suppress(OSError):
                name = (folder / "comm").read_text().strip()
                waits_in = (folder / "wchan").read_text().strip()
                state = _state(folder / "stat")
                found.append({"name": name, "state": state, "waits_in": waits_in})
    return found


def _stacks(pid: int, path: Path) -> str:
    """Ask a process for its stacks; return them, or an empty text."""
    try:
        if not _handles_signal(pid):  # another program or process may have its id now
            return ""
        size = path.stat().st_size
        if size > STACKS_FILE_BYTES_MAX:
            size = 0
            os.truncate(path, size)
        os.kill(pid, STACKS_SIGNAL)
        deadline_s = time.monotonic() + DUMP_S_MAX
        while time.monotonic() < deadline_s:
            time.sleep(0.05)
            grown, before = path.stat().st_size, size
            if grown > before and _is_complete(path, before):
                break
        with path.open("rb") as file:
            file.seek(size)
            return file.read(STACKS_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""


def _handles_signal(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _is_complete(path: Path, begin: int) -> bool:
    """Whether the file has not grown for a moment."""
    size = path.stat().st_size
    time.sleep(0.02)
    return path.stat().st_size == size > begin
