"""What follows when an attempt of a synchronization fails."""

from __future__ import annotations

import pytest

from pccl.protocol.errors import CollectiveAborted, Evicted, Result, StateUnavailable
from pccl.protocol.types import RemovalCause
from pccl.state.attempts import Next, SyncAttempts

LOST = CollectiveAborted(Result.RANK_CONNECTION_LOST, reason="peer 3 left")
FULL = OSError(28, "no space left")


def after(
    attempts: SyncAttempts,
    error: CollectiveAborted | Evicted,
    *,
    starved: bool = False,
    no_room: Exception | None = None,
    is_closing: bool = False,
) -> Next | Exception:
    return attempts.after(error, starved=starved, no_room=no_room, is_closing=is_closing)


def test_a_member_that_is_lost_is_no_reason_to_give_up() -> None:
    attempts = SyncAttempts()
    assert [after(attempts, LOST) for _ in range(10)] == [Next.RETRY] * 10


def test_the_third_attempt_that_starves_is_the_last() -> None:
    attempts = SyncAttempts()
    assert after(attempts, LOST, starved=True) is Next.RETRY
    assert after(attempts, LOST, starved=True) is Next.RETRY
    assert after(attempts, LOST) is Next.RETRY
    error = after(attempts, LOST, starved=True)
    assert isinstance(error, StateUnavailable)
    assert "peer 3 left" in str(error)


def test_a_full_disk_is_what_the_caller_gets() -> None:
    assert after(SyncAttempts(), LOST, no_room=FULL) is FULL


def test_another_abort_is_what_the_caller_gets() -> None:
    error = CollectiveAborted(Result.INTERNAL_ERROR, reason="a bug")
    assert after(SyncAttempts(), error) is error


@pytest.mark.parametrize("cause", RemovalCause)
@pytest.mark.parametrize("is_closing", [False, True])
def test_a_peer_that_was_too_slow_comes_back(cause: RemovalCause, is_closing: bool) -> None:
    error = Evicted(reason="removed")
    error.cause = cause
    comes_back = cause is RemovalCause.TOO_SLOW and not is_closing
    expected = Next.REJOIN if comes_back else error
    assert after(SyncAttempts(), error, is_closing=is_closing) is expected
