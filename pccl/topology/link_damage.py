"""``LinkDamage``: when a link on which bits flip counts as one that is down.

A damaged frame closes its lane, and the next one is made at once: one flipped bit costs no more
than that. On a line that damages whatever is large, greetings pass and segments fail. Its link
would come up and go down for ever, and never be down for long enough to be avoided. So after the
second damaged lane in a row a link counts as down, whatever lanes it has, until as much as the
frame that failed has come intact, or nothing was damaged for a while. That while doubles each time.
"""

from __future__ import annotations

FREE = 1
"""Damaged lanes in a row that say nothing about the line."""

DOUBLINGS_MAX = 5


class LinkDamage:
    """What has come damaged on one link.

    Args:
        patience_ns: a link on which nothing was damaged for so long has another chance.
    """

    def __init__(self, patience_ns: int) -> None:
        self._patience_ns = patience_ns
        self._in_a_row = 0
        self._doublings = 0
        self._until_ns = 0
        self._wanted_bytes = 0

    def struck(self, length: int, now_ns: int) -> None:
        """A lane was closed because a frame with a payload of ``length`` bytes was damaged."""
        if self._in_a_row and now_ns >= self._until_ns:  # it had its chance
            self._doublings = min(self._doublings + 1, DOUBLINGS_MAX)
        self._in_a_row += 1
        self._wanted_bytes = max(1, length)
        self._until_ns = now_ns + (self._patience_ns << self._doublings)

    def passed(self, intact_bytes: int) -> None:
        """A lane that was made since then has brought so much intact."""
        if self._in_a_row and intact_bytes >= self._wanted_bytes:
            self._in_a_row = self._doublings = 0

    def is_down(self, now_ns: int) -> bool:
        """Whether the link counts as down although it may have lanes."""
        return self._in_a_row > FREE and now_ns < self._until_ns
