"""Describes the machine for the output, and measures memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import os
import platform
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import click

import pccl
from pccl.cli.sizes import format_size

PROC = Path("/proc")

RESIDENT, PEAK = "VmRSS", "VmHWM"
"""Linux's names of the resident memory now, and of its peak since ``reset_peak``."""

RESET_PEAK = "5"
"""Text for ``clear_refs`` with which Linux resets the peak; see proc(5)."""

GIB = 1 << 30
MIB = 1 << 20


def conditions_of(*packages: str) -> dict[str, Any]:
    """Return the properties of the machine and the versions, as ``--json`` prints them.

    Args:
        packages: packages whose versions to add to those of Python and this library.
    """
    versions = {"pccl": pccl.__version__, "Python": platform.python_version()}
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "versions": versions | {name: importlib.metadata.version(name) for name in packages},
        "processor": _field("cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "congestion_default": congestion_default(),
        "load": round(os.getloadavg()[0], 2),
    }


def to_lines(conditions: dict[str, Any]) -> list[str]:
    """Return ``conditions`` as lines for people."""
    default = conditions["congestion_default"]
    return [
        ", ".join(f"{name} {version}" for name, version in conditions["versions"].items()),
        f"{conditions['processor']}, {conditions['cores']} cores, {conditions['system']}"
        + (f", {default} by default" if default else "")
        + f", load {conditions['load']:.2f}",
    ]


def congestion_default() -> str:
    """Return the congestion control that new sockets of this thread get; empty: unknown."""
    return _read("sys/net/ipv4/tcp_congestion_control").strip()


def give_back() -> None:
    """Return free memory to the system. Otherwise later uses of it would not raise the peak.

    The garbage is collected in another thread, because Python handles signals in the main thread.
    There a signal could be handled in a finalizer, and Python ignores what a finalizer raises: the
    Ctrl-C would be lost.
    """
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def reset_peak() -> None:
    """Set the peak to the memory that is resident now. Does nothing on systems other than Linux."""
    with contextlib.suppress(OSError):
        (PROC / "self/clear_refs").write_text(RESET_PEAK)


def own_bytes(name: str) -> int:
    """Return this process's ``RESIDENT`` or ``PEAK`` memory in bytes; without ``/proc``: peak."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS has bytes
    return _kilobytes("self/status", name) or most * (1 if sys.platform == "darwin" else 1024)


def check_memory(size: int, count: int) -> None:
    """Refuse ``count`` buffers of ``size`` bytes if this machine has too little memory.

    Raises:
        click.UsageError: too little memory; the message says how much is needed and available.
    """
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = _kilobytes("meminfo", "MemAvailable") or whole
    if size * count > available:
        raise click.UsageError(
            f"{count} times {format_size(size)} need {size * count / GIB:.1f} GiB of memory, but "
            f"{available / GIB:.1f} GiB are available; take a smaller --size or fewer processes"
        )


def _kilobytes(file: str, name: str) -> int:
    return int((_field(file, name) or "0").removesuffix("kB")) * 1024


def _field(file: str, name: str) -> str:
    """Return the value of ``name`` in a file of ``/proc``; empty if the file lacks it."""
    fields = (line.partition(":") for line in _read(file).splitlines())
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def _read(file: str) -> str:
    try:
        return (PROC / file).read_text()
    except OSError:
        return ""
