"""Who holds up a run, and why (:mod:`pccl.telemetry.blame`), for tools."""

from __future__ import annotations

from pccl.protocol.guards.texts import printable as printable_text
from pccl.telemetry.blame import (
    BlameFinding,
    Cause,
    Clues,
    find_blame,
    waits_in_words,
)

__all__ = [
    "BlameFinding",
    "Cause",
    "Clues",
    "find_blame",
    "printable_text",
    "waits_in_words",
]
