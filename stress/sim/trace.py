"""The trace of a run: a hash over everything that happened, and the last lines of the story."""

from __future__ import annotations

import hashlib
from collections import deque

from pccl.protocol.types import NS_PER_S

STORY_LINES_MAX = 400

_ROUTINE = ("deliver ", "writable ", "Tick(")
"""What happens all the time: it counts for the hash, and is left out of the story."""


class Trace:
    """Collects what happens, in order."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._story: deque[tuple[int, str, str]] = deque(maxlen=STORY_LINES_MAX)

    def note(self, now_ns: int, who: str, what: str) -> None:
        """Something happened to ``who``."""
        self.count += 1
        self._hash.update(f"{now_ns} {who} {what}\n".encode())
        if not what.startswith(_ROUTINE):
            self._story.append((now_ns, who, what))

    @property
    def digest(self) -> str:
        """Hash of everything so far: equal if and only if the same things happened."""
        return self._hash.hexdigest()

    def story(self, lines: int = STORY_LINES_MAX) -> str:
        """The last ``lines`` lines, for people."""
        entries = list(self._story)[-lines:]
        return "\n".join(
            f"{now_ns / NS_PER_S:14.9f} {who:<8} {what}" for now_ns, who, what in entries
        )
