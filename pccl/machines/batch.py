"""Retries of a reduce, and a list of reduces as one call.

Members that pass the same list in the same order keep the same operations in flight. Each operation
has its own outcome. If a reduce cannot succeed, the call waits for started reduces and withdraws
the other reduces. The error names the tags whose tensors were reduced. Of several errors the call
raises the most urgent one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from pccl.protocol import errors

WITHDRAWN = "another tensor of the same call could not be reduced"


def may_succeed_again(error: errors.PCCLError) -> bool:
    """Whether a retry with the remaining members may succeed after ``error``."""
    lost = error.result is errors.Result.RANK_CONNECTION_LOST
    return lost and isinstance(error, errors.CollectiveAborted)


class ReduceBatch:
    """One call that reduces several tensors, with a bounded number in flight.

    Args:
        tags: one per reduce, in the order in which they begin; at least one.
        in_flight_max: how many reduces may be in flight at once.

    Raises:
        ValueError: a tag occurs twice.
    """

    def __init__(self, tags: Sequence[int], in_flight_max: int) -> None:
        twice = next((tag for tag, count in Counter(tags).items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"tag {twice} occurs twice; give each tensor a tag of its own")
        self._tags = tags
        self.width = min(in_flight_max, len(tags))
        """How many reduces may be in flight at once."""
        self._waiting = deque(tags)
        self._running: list[int] = []
        self._completed: set[int] = set()
        self.failure: Exception | None = None
        """Why the call cannot succeed; None: no reduce has failed."""

    @property
    def goes_on(self) -> bool:
        """Whether further reduces and retries may begin."""
        return self.failure is None

    def begin_next(self) -> int | None:
        """Return the tag of the reduce that begins now; None if no further reduce begins."""
        if not (self._waiting and self.goes_on):
            return None
        assert len(self._running) < self.width
        self._running.append(self._waiting.popleft())
        return self._running[-1]

    def completed(self, tag: int) -> None:
        """Record that the reduce of ``tag`` was committed."""
        self._running.remove(tag)
        self._completed.add(tag)

    def failed(self, tag: int, error: Exception) -> list[int]:
        """Record that a reduce cannot succeed; return the tags to withdraw if not yet started."""
        self._running.remove(tag)
        if self.failure is None:
            self.failure = error
            return list(self._running)
        if _weight(error) > _weight(self.failure):
            self.failure = error
        return []

    def named_failure(self) -> Exception | None:
        """Return the error that the call raises, with the completed tags; None if all succeeded."""
        error = self.failure
        if not isinstance(error, errors.PCCLError):
            return error
        completed = tuple(tag for tag in self._tags if tag in self._completed)
        tags = ", ".join(str(tag) for tag in completed) or "none"
        reason = f"{error.reason}; tags that completed: {tags}; the other inputs are intact"
        named = type(error)(error.result, error.func, reason)
        if isinstance(error, errors.Evicted) and isinstance(named, errors.Evicted):
            named.cause, named.ago_s = error.cause, error.ago_s
        named.completed_tags = completed
        named.__cause__ = error.with_traceback(None)  # its frames hold the tensors
        return named


def _weight(error: Exception) -> int:
    """Return how urgent ``error`` is; the call raises its first error of the highest urgency."""
    if isinstance(error, errors.Evicted | errors.MasterLost):
        return 2  # the caller must rejoin before any other call
    return 1 if isinstance(error, errors.OutcomeUnknown) else 0
