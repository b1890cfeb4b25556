"""Signals that end a benchmark."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that the processes are ended."""
    for wanted in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(wanted, _end)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
