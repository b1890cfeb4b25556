"""``LinkDamage``: when a link that flips bits counts as down.

A damaged frame closes its lane, and the peer opens the next one at once. So one flipped bit costs
little. But some lines pass greetings and damage all large frames. Such a link would go up and down
forever, and would never be avoided. So after two consecutive damaged lanes a link counts as down,
even if it has lanes. It is up again once one lane has delivered as many intact bytes as the failed
frame had, or after a time without damage. This time doubles with each relapse, up to a limit.
"""

from __future__ import annotations

FREE = 1
"""Number of consecutive damaged lanes after which a link still counts as up."""

DOUBLINGS_MAX = 5


class LinkDamage:
    """The record of damaged and intact data that has arrived on one link.

    Args:
        patience_ns: time without damage after which a link gets another chance.
    """

    def __init__(self, patience_ns: int) -> None:
        self._patience_ns = patience_ns
        self._in_a_row = 0
        self._doublings = 0
        self._until_ns = 0
        self._wanted_bytes = 0

    def struck(self, length: int, now_ns: int) -> None:
        """Record that a lane was closed because a payload of ``length`` bytes was damaged."""
        if self._in_a_row and now_ns >= self._until_ns:  # it had another chance
            self._doublings = min(self._doublings + 1, DOUBLINGS_MAX)
        self._in_a_row += 1
        self._wanted_bytes = max(1, length)
        self._until_ns = now_ns + (self._patience_ns << self._doublings)

    def passed(self, intact_bytes: int) -> None:
        """Record that a lane opened since the damage has delivered ``intact_bytes``."""
        if self._in_a_row and intact_bytes >= self._wanted_bytes:
            self._in_a_row = self._doublings = 0

    def is_down(self, now_ns: int) -> bool:
        """Whether the link counts as down, although it may have lanes."""
        return self._in_a_row > FREE and now_ns < self._until_ns
