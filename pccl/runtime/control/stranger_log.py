"""Limits the log lines that other processes can cause: a few lines, then one count per interval."""

from __future__ import annotations

import logging

from pccl.protocol.guards.log_quota import LogQuota
from pccl.protocol.limits import LOG_INTERVAL_NS
from pccl.protocol.types import NS_PER_S
from pccl.runtime.clock import Clock, Timer


class StrangerLog:
    """Writes log lines that any process on the network can cause, up to a quota.

    Args:
        clock: gives the time.
        log: logger that gets the lines.
    """

    def __init__(self, clock: Clock, log: logging.Logger) -> None:
        self._clock = clock
        self._log = log
        self._quotas: dict[int, LogQuota] = {}
        """One quota per level, so that unimportant lines do not suppress important ones."""
        self._timers: dict[int, Timer] = {}
        self._last: dict[int, str] = {}
        """The last omitted line of each level."""

    def write(self, level: int, text: str, *arguments: object) -> None:
        """Write a line; if the quota is used up, only count it."""
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
        """Write the pending counts of omitted lines."""
        for level, timer in list(self._timers.items()):
            timer.cancel()
            self._count(level)

    def _count(self, level: int) -> None:
        del self._timers[level]
        count, seconds = self._quotas[level].take_count(), LOG_INTERVAL_NS // NS_PER_S
        text = "%d more lines like these within %d s, the last: %s"
        self._log.log(level, text, count, seconds, self._last.pop(level))
