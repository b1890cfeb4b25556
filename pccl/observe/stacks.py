"""Where the threads of this process are, as Python and the kernel see them."""

from __future__ import annotations

import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

FRAMES_MAX = 24
"""Innermost frames of a thread that are shown."""

THREADS_MAX = 64


def stacks() -> list[dict[str, Any]]:
    """Return every thread of this process: its name, where the kernel holds it, and its frames.

    Frames are the innermost ones, innermost last, each with its source line.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    found: list[dict[str, Any]] = []
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    for number, frame in list(frames.items())[:THREADS_MAX]:
        thread = threads.get(number)
        found.append(
            {
                "thread": thread.name if thread is not None else str(number),
                "is_main": thread is threading.main_thread(),
                "waits_in": _waits_in(thread.native_id) if thread is not None else "",
                "frames": _frames(frame),
            }
        )
    return found


def _frames(frame: FrameType) -> list[str]:
    innermost = list(traceback.StackSummary.extract(traceback.walk_stack(frame)))[:FRAMES_MAX]
    return [f"{e.filename}:{e.lineno} in {e.name}: {e.line or ''}" for e in reversed(innermost)]


def _waits_in(native_id: int | None) -> str:
    """Return the function of the kernel in which a thread of this process waits; empty: none."""
    with suppress(OSError):
        text = Path(f"/proc/self/task/{native_id}/wchan").read_text()
        return text if text != "0" else ""
    return ""
