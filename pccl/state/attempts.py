"""``SyncAttempts``: decides whether a call about shared state retries a failed attempt."""

from __future__ import annotations

import enum

from pccl.protocol.errors import (
    CollectiveAborted,
    Evicted,
    PCCLError,
    Result,
    StateUnavailable,
)
from pccl.protocol.types import RemovalCause

STARVED_MAX = 3
"""Number of attempts without a source of a missing piece after which the call fails."""


class Next(enum.Enum):
    """The next step after a failed attempt."""

    RETRY = enum.auto()
    """Make another attempt, which keeps the verified pieces."""
    REJOIN = enum.auto()
    """Join the run again as a newcomer, which keeps fetching; then make another attempt."""


class SyncAttempts:
    """The attempts of one call.

    Attributes:
        count: number of attempts begun.
    """

    def __init__(self) -> None:
        self.count = 0
        self._starved = 0

    def after(
        self, error: PCCLError, *, starved: bool, no_room: Exception | None, is_closing: bool
    ) -> Next | Exception:
        """Return the next step, or the error that the caller gets.

        Args:
            error: the error of the failed attempt.
            starved: whether no source sent a missing piece, although no source had withdrawn.
            no_room: the error if the peer had no room for the missing pieces; else None.
            is_closing: whether the communicator is being closed.
        """
        match error:
            case Evicted():
                too_slow = error.cause is RemovalCause.TOO_SLOW
                return Next.REJOIN if too_slow and not is_closing else error
            case CollectiveAborted(result=result):
                self._starved += starved
                if no_room is not None:
                    return no_room
                if result is not Result.RANK_CONNECTION_LOST:
                    return error
                if self._starved >= STARVED_MAX:
                    return StateUnavailable(reason=error.reason)
                return Next.RETRY
            case _:
                return error
