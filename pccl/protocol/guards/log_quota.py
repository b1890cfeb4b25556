"""Limits the log lines about unproven connections: a few at once, then one count per interval.

It is pure: the caller passes in ``now_ns``, and writes the lines.
"""

from __future__ import annotations

from pccl.protocol.limits import LOG_INTERVAL_NS, LOG_LINES_MAX


class LogQuota:
    """The quota of log lines of one kind.

    Args:
        lines_max: number of lines in one interval, besides the line with the count of the rest.
        interval_ns: length of an interval, which begins with its first line.
    """

    def __init__(self, lines_max: int = LOG_LINES_MAX, interval_ns: int = LOG_INTERVAL_NS) -> None:
        self._lines_max = lines_max
        self._interval_ns = interval_ns
        self._ends_ns: int | None = None
        self._written = 0
        self._left_out = 0

    @property
    def due_ns(self) -> int | None:
        """Time at which to call ``take_count``; None: no line was omitted."""
        return self._ends_ns if self._left_out else None

    def admit(self, now_ns: int) -> bool:
        """Return True if the caller may write a line now; otherwise count the line as omitted."""
        over = self._ends_ns is None or now_ns >= self._ends_ns
        if over and not self._left_out:
            self._ends_ns, self._written = now_ns + self._interval_ns, 0
        if self._written < self._lines_max:
            self._written += 1
            return True
        self._left_out += 1
        return False

    def take_count(self) -> int:
        """Return the number of omitted lines, and begin a new interval with the next line."""
        count, self._left_out = self._left_out, 0
        self._ends_ns = None
        return count
