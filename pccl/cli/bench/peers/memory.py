"""How much memory this process has and has had at once, as the system counts it."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")

RESET_PEAK = "5"
"""What Linux wants to be told to forget the peak; see proc(5)."""

UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
"""Of ``ru_maxrss``."""


def give_back() -> None:
    """Return to the system what is free: what is filled again without a trace is not counted."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def reset_peak() -> None:
    """Let the peak be what is resident now. Where that cannot be asked for, nothing happens."""
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return


def resident_bytes() -> int:
    """Memory that is resident now; where the system does not say: the peak."""
    return _status_bytes("VmRSS")


def anonymous_bytes() -> int:
    """Of what is resident now, what lies in no file; where the system does not say: the peak."""
    return _status_bytes("RssAnon")


def peak_bytes() -> int:
    """The most that was resident since ``reset_peak``; where it has no effect: ever."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    try:
        text = STATUS.read_text()
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT_BYTES
