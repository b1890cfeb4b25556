"""Turns the bytes that a terminal sends into keys."""

from __future__ import annotations

import re
from collections.abc import Iterator

NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "escape",
    "\b": "escape",
    "\x1b": "escape",
    "\x03": "q",
    "\x04": "q",
}
"""Keys with a name. Other keys are their characters."""

_KEY = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)


def keys(data: bytes) -> Iterator[str]:
    """Yield the keys in the bytes of one read; skip sequences that mean nothing here."""
    for text in _KEY.findall(data.decode("utf-8", "replace")):
        if text in NAMES:
            yield NAMES[text]
        elif len(text) == 1 and text.isprintable():
            yield text
