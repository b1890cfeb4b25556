"""Planted bugs in what processes do that train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from unittest.mock import patch

from pccl.bindings.diloco.ledger import Ledger, Revisions
from pccl.bindings.diloco.pipeline import Launch, Pipeline
from pccl.collectives.residual import Residual
from pccl.error_feedback import ErrorFeedback


def _doubt_taken_for_applied(stack: ExitStack) -> None:
    """Whoever was cut off while it reduced takes its work for applied."""

    def has_applied(ledger: Ledger, number: int, peer: int) -> bool:
        return True

    stack.enter_context(patch.object(Ledger, "has_applied", has_applied))


def _doubt_taken_for_lost(stack: ExitStack) -> None:
    """Whoever was cut off while it reduced does its work again."""

    def has_applied(ledger: Ledger, number: int, peer: int) -> bool:
        return False

    stack.enter_context(patch.object(Ledger, "has_applied", has_applied))


def _flights_forgotten(stack: ExitStack) -> None:
    """What was in flight is not carried into the next entry."""

    def in_flight(pipeline: Pipeline) -> tuple[Launch, ...]:
        return ()

    stack.enter_context(patch.object(Pipeline, "in_flight", in_flight))


def _contributors_kept_back(stack: ExitStack) -> None:
    """The ledger does not say whose work is in a round."""
    close = Ledger.close

    def terse(ledger: Ledger, contributors: Sequence[int]) -> None:
        close(ledger, ())

    stack.enter_context(patch.object(Ledger, "close", terse))


def _rounds_not_counted(stack: ExitStack) -> None:
    """A round since the last synchronization does not count in the revision."""
    following = Revisions.next

    def one_more(revisions: Revisions) -> int:
        known = vars(revisions)
        if known["_synced"] is None:
            return following(revisions)
        return int(max(known["_synced"], known["_ledger"].number)) + 1

    stack.enter_context(patch.object(Revisions, "next", one_more))


def _residual_stays(stack: ExitStack) -> None:
    """What a round has left out is not added to the next one."""

    def commit(residual: Residual) -> None:
        residual.drop()

    stack.enter_context(patch.object(Residual, "commit", commit))


def _residual_advances_always(stack: ExitStack) -> None:
    """What was left out of a round that failed is added to the next one."""

    def drop(residual: Residual) -> None:
        with suppress(AssertionError):
            residual.commit()

    stack.enter_context(patch.object(Residual, "drop", drop))


def _residual_paid_twice(stack: ExitStack) -> None:
    """Whoever learns in the ledger that its work was applied still owes what was added to it."""

    def forget(feedback: ErrorFeedback, name: str) -> None:
        pass

    stack.enter_context(patch.object(ErrorFeedback, "forget", forget))


PLANTED_IN_TRAINING: dict[str, Callable[[ExitStack], None]] = {
    "doubt_taken_for_applied": _doubt_taken_for_applied,
    "doubt_taken_for_lost": _doubt_taken_for_lost,
    "flights_forgotten": _flights_forgotten,
    "contributors_kept_back": _contributors_kept_back,
    "residual_stays": _residual_stays,
    "rounds_not_counted": _rounds_not_counted,
    "residual_advances_always": _residual_advances_always,
    "residual_paid_twice": _residual_paid_twice,
}
