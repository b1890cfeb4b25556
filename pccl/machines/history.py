"""The bounded history of a machine: its last events and effects, printed when it fails."""

from __future__ import annotations

from collections import deque

from pccl.protocol.limits import HISTORY_EVENTS_MAX
from pccl.protocol.types import NS_PER_S


class History:
    """The last events and effects of one machine."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.entries: deque[tuple[int, object]] = deque(maxlen=HISTORY_EVENTS_MAX)
        """(time in ns, event or effect); converted to text only when printed."""

    def __str__(self) -> str:
        lines = [f"history of {self.owner} (last {len(self.entries)} events):"]
        lines += [f"  {now_ns / NS_PER_S:12.6f} {entry}" for now_ns, entry in self.entries]
        return "\n".join(lines)


class InvariantViolation(AssertionError):
    """A machine reached a state that its rules exclude: a bug. The error carries the history."""

    def __init__(self, what: str, history: History) -> None:
        super().__init__(f"{what}\n{history}")
        self.what = what
