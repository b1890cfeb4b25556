"""How many log lines strangers may cause: a few as they come, then one per interval that counts.

Pure: ``now_ns`` goes in; the caller writes the lines.
"""

from __future__ import annotations

from pccl.protocol.limits import LOG_INTERVAL_NS, LOG_LINES_MAX


class LogQuota:
    """Of the lines of one kind.

    Args:
        lines_max: how many may be written in one interval, beside the one that counts.
        interval_ns: how long an interval is; it begins with the first line after the one before.
    """

    def __init__(self, lines_max: int = LOG_LINES_MAX, interval_ns: int = LOG_INTERVAL_NS) -> None:
        self._lines_max = lines_max
        self._interval_ns = interval_ns
        self._ends_ns: int | None = None
        self._written = 0
        self._left_out = 0

    @property
    def due_ns(self) -> int | None:
        """When ``take_count`` is to be called; None: nothing was left out."""
        return self._ends_ns if self._left_out else None

    def admit(self, now_ns: int) -> bool:
        """Whether a line may be written now; if not, it is counted."""
        over = self._ends_ns is None or now_ns >= self._ends_ns
        if over and not self._left_out:
            self._ends_ns, self._written = now_ns + self._interval_ns, 0
        if self._written < self._lines_max:
            self._written += 1
            return True
        self._left_out += 1
        return False

    def take_count(self) -> int:
        """How many lines were left out; a new interval begins with the next line."""
        count, self._left_out = self._left_out, 0
        self._ends_ns = None
        return count
