"""``SyncAttempts``: what follows when an attempt of a synchronization fails."""

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
"""Attempts that end because nobody gives what is missing; after that the caller is told."""


class Next(enum.Enum):
    """What to do after a failed attempt."""

    RETRY = enum.auto()
    """Make another one, which goes on with the pieces that are here."""
    REJOIN = enum.auto()
    """Come back as a newcomer first, which goes on fetching."""


class SyncAttempts:
    """The attempts of one call.

    Attributes:
        count: of attempts that were begun.
    """

    def __init__(self) -> None:
        self.count = 0
        self._starved = 0

    def after(
        self, error: PCCLError, *, starved: bool, no_room: Exception | None, is_closing: bool
    ) -> Next | Exception:
        """What to do, or the error that the caller gets.

        Args:
            error: with which the attempt has failed.
            starved: whether nobody gave what was missing, though nobody had withdrawn.
            no_room: why what was missing could not be put anywhere.
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
