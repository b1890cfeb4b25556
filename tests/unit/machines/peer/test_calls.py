"""Who is told that this peer lost its place, or has to take over the others' state."""

from __future__ import annotations

import pytest

from pccl.machines.peer.calls import OneTimeError, Refusals
from pccl.machines.peer.events import ReduceCall, RoundCall, SyncCall
from pccl.protocol import errors
from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import (
    Offer,
    ResumePolicy,
    SharedStateSyncStrategy,
    SyncPurpose,
)
from pccl.protocol.types import (
    SYNC_TAG,
    Descriptor,
    OperationId,
    PeerId,
    ReduceOp,
    RoundKind,
)

SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8)
ME, LATER = PeerId(3), PeerId(9)
OFFER = Offer(
    SyncPurpose.SYNC,
    SharedStateSyncStrategy.ENFORCE_POPULAR,
    ResumePolicy.NEVER,
    revision=4,
    lineage=None,
    stale=False,
    unchanged=False,
    layout=b"layout",
    content=b"content",
    extra=b"extra",
)
EVICTED = errors.Evicted(reason="silent")


def waits(call: int, begun_by: int = 0) -> ReduceCall:
    return ReduceCall(call, 5, SUM, begun_by=PeerId(begun_by))


def launches(call: int) -> ReduceCall:
    return ReduceCall(call, 5, SUM, detached=True)


def syncs(call: int) -> SyncCall:
    return SyncCall(call, OFFER)


def lost(*launched: int) -> Refusals:
    """A peer that was evicted while it had these calls open, for which nobody waits."""
    refusals = Refusals()
    refusals.loss = OneTimeError(EVICTED)
    for call in launched:
        refusals.loss.ends(call, detached=True)
    return refusals


def kind_of(error: errors.PCCLError | None) -> type[errors.PCCLError] | None:
    return type(error) if error is not None else None


# -- a lost place ----------------------------------------------------------------------------------


def test_a_member_may_call() -> None:
    for event in (waits(1), launches(2), syncs(3), RoundCall(4, RoundKind.UPDATE_TOPOLOGY)):
        assert Refusals().refusal(event, ME) is None


def test_a_loss_is_raised_once() -> None:
    refusals = lost()
    assert refusals.refusal(waits(1), ME) is EVICTED
    error = refusals.refusal(waits(2), ME)
    assert isinstance(error, errors.NotConnected)
    assert error.__cause__ is EVICTED
    assert "update_topology() or connect() joins again" in error.reason


def test_all_that_is_launched_before_anybody_was_told_ends_with_the_loss() -> None:
    """As the buckets of a gradient that backward is still making."""
    refusals = lost(1, 2)
    assert refusals.loss is not None
    for call in (3, 4, 5):
        assert refusals.refusal(launches(call), ME) is EVICTED
        assert not refusals.loss.is_reported
    for call in (1, 2, 3, 4):
        refusals.claim(call)
        assert refusals.loss.is_reported
        assert refusals.refusal(launches(10 + call), ME) is EVICTED  # the fifth is still open
    refusals.claim(5)
    assert kind_of(refusals.refusal(launches(20), ME)) is errors.NotConnected


def test_what_is_launched_after_the_report_does_not_put_its_end_off() -> None:
    """Else who always has one more in flight would never hear that he has to join again."""
    refusals = lost(1, 2)
    refusals.claim(1)
    assert refusals.refusal(launches(3), ME) is EVICTED
    refusals.claim(2)
    assert kind_of(refusals.refusal(launches(4), ME)) is errors.NotConnected
    refusals.claim(3)


def test_a_handle_that_is_dropped_reports_nothing_and_keeps_nothing_open() -> None:
    refusals = lost(1, 2)
    refusals.forget(1)
    refusals.forget(2)
    assert refusals.refusal(waits(3), ME) is EVICTED
    assert kind_of(refusals.refusal(waits(4), ME)) is errors.NotConnected


def test_a_call_that_waits_is_told_although_another_was_while_a_handle_is_open() -> None:
    refusals = lost(1)
    assert refusals.refusal(waits(2), ME) is EVICTED
    assert refusals.refusal(waits(3), ME) is EVICTED
    refusals.claim(1)
    assert kind_of(refusals.refusal(waits(4), ME)) is errors.NotConnected


def test_whoever_was_inside_between_two_attempts_is_told_too() -> None:
    refusals = lost()
    assert refusals.refusal(waits(1), ME) is EVICTED
    assert kind_of(refusals.refusal(waits(2), ME)) is errors.NotConnected
    assert refusals.refusal(waits(3, begun_by=ME), ME) is EVICTED


@pytest.mark.parametrize("present", [PeerId(0), LATER], ids=["joining", "member"])
def test_whoever_was_inside_since_before_the_peer_came_back(present: PeerId) -> None:
    """Another caller was told, and joins again, or has."""
    refusals = Refusals(former_loss=EVICTED)
    assert refusals.refusal(waits(1, begun_by=ME), present) is EVICTED
    assert refusals.refusal(waits(2), present) is None
    assert refusals.refusal(waits(3, begun_by=present), present) is None


def test_a_caller_who_left_without_noticing_was_not_told() -> None:
    refusals = lost()
    assert refusals.refusal(waits(1), ME) is EVICTED
    refusals.left_unnoticed(EVICTED)
    assert refusals.loss is not None
    assert not refusals.loss.is_reported
    assert refusals.refusal(waits(2), ME) is EVICTED
    assert kind_of(refusals.refusal(waits(3), ME)) is errors.NotConnected


def test_of_two_who_were_told_one_left_without_noticing() -> None:
    refusals = lost(7)
    for call in (1, 2):
        assert refusals.refusal(waits(call), ME) is EVICTED
    refusals.left_unnoticed(EVICTED)
    assert refusals.loss is not None
    assert refusals.loss.is_reported


# -- a result that was left ------------------------------------------------------------------------


def missed(tag: int) -> Refusals:
    refusals = Refusals()
    refusals.require_resync(OperationId(1, 0, 1, tag, 0))
    return refusals


def test_a_missed_reduce_is_told_to_all_until_a_sync() -> None:
    refusals = missed(5)
    for call in (1, 2):
        assert kind_of(refusals.refusal(waits(call), ME)) is errors.ResyncRequired
    assert refusals.refusal(syncs(3), ME) is None
    refusals.synchronized()
    assert refusals.refusal(waits(4), ME) is None


def test_a_missed_sync_is_not_repeated_before_the_caller_knows_of_it() -> None:
    refusals = missed(SYNC_TAG)
    assert kind_of(refusals.refusal(syncs(1), ME)) is errors.ResyncRequired
    assert refusals.refusal(syncs(2), ME) is None


def test_a_handle_tells_of_a_missed_sync_when_somebody_looks_at_it() -> None:
    refusals = missed(SYNC_TAG)
    assert kind_of(refusals.refusal(launches(1), ME)) is errors.ResyncRequired
    assert kind_of(refusals.refusal(syncs(2), ME)) is errors.ResyncRequired  # nobody has looked
    refusals.claim(1)
    assert refusals.refusal(syncs(3), ME) is None


def test_a_missed_sync_is_told_although_a_reduce_was_missed_after_it() -> None:
    refusals = missed(SYNC_TAG)
    refusals.require_resync(OperationId(1, 0, 1, 5, 0))
    assert kind_of(refusals.refusal(syncs(1), ME)) is errors.ResyncRequired
    assert refusals.refusal(syncs(2), ME) is None
