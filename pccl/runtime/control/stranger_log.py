"""What strangers do, in the log: a few lines, then one per interval that counts the others."""

from __future__ import annotations

import logging

from pccl.protocol.guards.log_quota import LogQuota
from pccl.protocol.limits import LOG_INTERVAL_NS
from pccl.protocol.types import NS_PER_S
from pccl.runtime.clock import Clock, Timer


class StrangerLog:
    """Writes lines of which anybody can cause as many as he likes.

    Args:
        clock: time.
        log: where to.
    """

    def __init__(self, clock: Clock, log: logging.Logger) -> None:
        self._clock = clock
        self._log = log
        self._quotas: dict[int, LogQuota] = {}
        """One per level, so that what is of no interest leaves room for what is."""
        self._timers: dict[int, Timer] = {}
        self._last: dict[int, str] = {}
        """Of the lines that were left out."""

    def write(self, level: int, text: str, *arguments: object) -> None:
        """Write a line, or count it."""
        if not self._log.isEnabledFor(level):
            return
        quota = self._quotas.setdefault(level, LogQuota())
        if quota.admit(self._clock.now_ns()):
            self._log.log(level, text, *arguments)
            return
        self._last[level] = text % arguments
        if level not in self._timers:
            when_ns = quota.due_ns
            assert when_ns is not None
            self._timers[level] = self._clock.call_at_ns(when_ns, self._count, level)

    def close(self) -> None:
        """Write what was counted."""
        for level, timer in list(self._timers.items()):
            timer.cancel()
            self._count(level)

    def _count(self, level: int) -> None:
        del self._timers[level]
        count, seconds = self._quotas[level].take_count(), LOG_INTERVAL_NS // NS_PER_S
        text = "%d more lines like these within %d s, the last: %s"
        self._log.log(level, text, count, seconds, self._last.pop(level))
