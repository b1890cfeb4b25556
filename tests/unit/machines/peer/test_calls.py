"""Who is told that this peer lost its place, or has to take over the others' state."""

from __future__ import annotations

import pytest

from pccl.machines.peer.calls import (
    CallAllowed,
    CallDeferred,
    CallRejected,
    JointCall,
    OneTimeError,
    Refusals,
)
from pccl.machines.peer.events import Close, ReduceCall, RoundCall, SyncCall
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.machines.peer.operations import OpenOperation
from pccl.protocol import errors
from pccl.protocol.data_type import DataType
from pccl.protocol.types import SYNC_TAG, Descriptor, PeerId, RoundKind
from tests.support.offers import offer
from tests.support.peer_stage import SUM, PeerStage
from tests.support.scenarios import op, roster

ME, LATER = PeerId(2), PeerId(9)
EVICTED = errors.Evicted(reason="silent")


def waits(call: int, begun_by: int = 0) -> ReduceCall:
    return ReduceCall(call, 5, SUM, begun_by=PeerId(begun_by))


def launches(call: int) -> ReduceCall:
    return ReduceCall(call, 5, SUM, detached=True)


def syncs(call: int) -> SyncCall:
    return SyncCall(call, offer())


def lost(*launched: int) -> Refusals:
    """A peer that was evicted while it had these calls open, for which nobody waits."""
    refusals = Refusals()
    refusals.loss = OneTimeError(EVICTED)
    for call in launched:
        refusals.loss.ends(call, detached=True)
    return refusals


def kind_of(error: Exception | None) -> type[Exception] | None:
    return type(error) if error is not None else None


# -- a lost place ----------------------------------------------------------------------------------


def test_a_member_may_call() -> None:
    for event in (waits(1), launches(2), syncs(3), RoundCall(4, RoundKind.UPDATE_TOPOLOGY)):
        assert Refusals().refuse(event, ME) is None


def test_a_loss_is_raised_once() -> None:
    refusals = lost()
    assert refusals.refuse(waits(1), ME) is EVICTED
    error = refusals.refuse(waits(2), ME)
    assert isinstance(error, errors.NotConnected)
    assert error.__cause__ is EVICTED
    assert "update_topology() or connect() rejoins it" in error.reason


def test_all_that_is_launched_before_anybody_was_told_ends_with_the_loss() -> None:
    """As the buckets of a gradient that backward is still making."""
    refusals = lost(1, 2)
    assert refusals.loss is not None
    for call in (3, 4, 5):
        assert refusals.refuse(launches(call), ME) is EVICTED
        assert not refusals.loss.is_reported
    for call in (1, 2, 3, 4):
        refusals.claim(call)
        assert refusals.loss.is_reported
        assert refusals.refuse(launches(10 + call), ME) is EVICTED  # the fifth is still open
    refusals.claim(5)
    assert kind_of(refusals.refuse(launches(20), ME)) is errors.NotConnected


def test_what_is_launched_after_the_report_does_not_put_its_end_off() -> None:
    """Else who always has one more in flight would never hear that he has to join again."""
    refusals = lost(1, 2)
    refusals.claim(1)
    assert refusals.refuse(launches(3), ME) is EVICTED
    refusals.claim(2)
    assert kind_of(refusals.refuse(launches(4), ME)) is errors.NotConnected
    refusals.claim(3)


def test_a_handle_that_is_dropped_reports_nothing_and_keeps_nothing_open() -> None:
    refusals = lost(1, 2)
    refusals.forget(1)
    refusals.forget(2)
    assert refusals.refuse(waits(3), ME) is EVICTED
    assert kind_of(refusals.refuse(waits(4), ME)) is errors.NotConnected


def test_a_call_that_waits_is_told_although_another_was_while_a_handle_is_open() -> None:
    refusals = lost(1)
    assert refusals.refuse(waits(2), ME) is EVICTED
    assert refusals.refuse(waits(3), ME) is EVICTED
    refusals.claim(1)
    assert kind_of(refusals.refuse(waits(4), ME)) is errors.NotConnected


def test_whoever_was_inside_between_two_attempts_is_told_too() -> None:
    refusals = lost()
    assert refusals.refuse(waits(1), ME) is EVICTED
    assert kind_of(refusals.refuse(waits(2), ME)) is errors.NotConnected
    assert refusals.refuse(waits(3, begun_by=ME), ME) is EVICTED


@pytest.mark.parametrize("present", [PeerId(0), LATER], ids=["joining", "member"])
def test_whoever_was_inside_since_before_the_peer_came_back(present: PeerId) -> None:
    """Another caller was told, and joins again, or has."""
    refusals = Refusals(former_loss=EVICTED)
    assert refusals.refuse(waits(1, begun_by=ME), present) is EVICTED
    assert refusals.refuse(waits(2), present) is None
    assert refusals.refuse(waits(3, begun_by=present), present) is None


def test_a_caller_who_left_without_noticing_was_not_told() -> None:
    refusals = lost()
    assert refusals.refuse(waits(1), ME) is EVICTED
    refusals.left_unnoticed(EVICTED)
    assert refusals.loss is not None
    assert not refusals.loss.is_reported
    assert refusals.refuse(waits(2), ME) is EVICTED
    assert kind_of(refusals.refuse(waits(3), ME)) is errors.NotConnected


def test_of_two_who_were_told_one_left_without_noticing() -> None:
    refusals = lost(7)
    for call in (1, 2):
        assert refusals.refuse(waits(call), ME) is EVICTED
    refusals.left_unnoticed(EVICTED)
    assert refusals.loss is not None
    assert refusals.loss.is_reported


# -- a result that was left ------------------------------------------------------------------------


def missed(tag: int) -> Refusals:
    refusals = Refusals()
    refusals.require_resync(op(tag=tag))
    return refusals


def test_a_missed_reduce_is_told_to_all_until_a_sync() -> None:
    refusals = missed(5)
    for call in (1, 2):
        assert kind_of(refusals.refuse(waits(call), ME)) is errors.ResyncRequired
    assert refusals.refuse(syncs(3), ME) is None
    refusals.synchronized()
    assert refusals.refuse(waits(4), ME) is None


def test_a_missed_sync_is_not_repeated_before_the_caller_knows_of_it() -> None:
    refusals = missed(SYNC_TAG)
    assert kind_of(refusals.refuse(syncs(1), ME)) is errors.ResyncRequired
    assert refusals.refuse(syncs(2), ME) is None


def test_a_handle_tells_of_a_missed_sync_when_somebody_looks_at_it() -> None:
    refusals = missed(SYNC_TAG)
    assert kind_of(refusals.refuse(launches(1), ME)) is errors.ResyncRequired
    assert kind_of(refusals.refuse(syncs(2), ME)) is errors.ResyncRequired  # nobody has looked
    refusals.claim(1)
    assert refusals.refuse(syncs(3), ME) is None


def test_a_missed_sync_is_told_although_a_reduce_was_missed_after_it() -> None:
    refusals = missed(SYNC_TAG)
    refusals.require_resync(op())
    assert kind_of(refusals.refuse(syncs(1), ME)) is errors.ResyncRequired
    assert refusals.refuse(syncs(2), ME) is None


# -- what is decided about a call ------------------------------------------------------------------

UPDATE, PENDING, OPTIMIZE = RoundKind
ROSTER = roster(1, 1, 1, 2)
ALL_CALLS = (waits(9), syncs(9), *(RoundCall(9, kind) for kind in (UPDATE, OPTIMIZE, PENDING)))


def member() -> PeerMachine:
    return PeerStage().member().machine


def posted(machine: PeerMachine) -> OpenOperation:
    operation = OpenOperation(op(), SUM, ROSTER.ring, call=1)
    machine.operations.open(operation)
    return operation


@pytest.mark.parametrize("event", ALL_CALLS)
def test_a_member_with_nothing_open_may_call_in_the_membership_that_it_sees(
    event: JointCall,
) -> None:
    assert member().calls.decide(event) == CallAllowed(ROSTER, event)


def test_a_broadcast_is_rejected_if_its_root_is_no_rank_of_the_group() -> None:
    calls = [ReduceCall(9, 5, Descriptor.broadcast(DataType.FLOAT, 8, root)) for root in (1, 2)]
    decisions = [member().calls.decide(call) for call in calls]
    assert decisions[0] == CallAllowed(ROSTER, calls[0])
    assert isinstance(decisions[1], CallRejected)
    assert type(decisions[1].error) is ValueError
    assert str(decisions[1].error) == "root must be a rank of the group, from 0 to 1, not 2"


@pytest.mark.parametrize("event", ALL_CALLS)
def test_who_is_no_member_may_not_call(event: JointCall) -> None:
    gone = PeerStage().member()
    gone.do(Close())
    for stage, standing in (
        (PeerStage(), Standing.OUTSIDE),
        (PeerStage().registered(), Standing.PENDING),
        (gone, Standing.CLOSED),
    ):
        assert stage.machine.standing is standing
        decision = stage.machine.calls.decide(event)
        assert isinstance(decision, CallRejected)
        assert kind_of(decision.error) is errors.NotConnected


@pytest.mark.parametrize("event", ALL_CALLS)
def test_a_call_waits_for_what_is_in_doubt(event: JointCall) -> None:
    machine = member()
    operation = posted(machine)
    machine.operations.leave(operation, None, in_doubt=True)
    assert machine.calls.decide(event) == CallDeferred((operation.id,))
    assert list(machine.calls.deferred) == [event]
    operation.withdrawn = "no more time"  # that is answered anyway
    assert machine.calls.decide(event) == CallDeferred()


@pytest.mark.parametrize(
    ("event", "may"), [(event, event in (waits(9), RoundCall(9, PENDING))) for event in ALL_CALLS]
)
def test_what_changes_the_membership_is_rejected_while_operations_are_open(
    event: JointCall, may: bool
) -> None:
    machine = member()
    posted(machine)
    decision = machine.calls.decide(event)
    if may:
        assert decision == CallAllowed(ROSTER, event)
    else:
        assert isinstance(decision, CallRejected)
        assert kind_of(decision.error) is errors.PendingOperations


@pytest.mark.parametrize(
    ("event", "needs_it"),
    [(event, event not in (RoundCall(9, UPDATE), RoundCall(9, PENDING))) for event in ALL_CALLS],
)
def test_what_needs_the_view_of_the_others_waits_for_an_update_that_was_left(
    event: JointCall, needs_it: bool
) -> None:
    machine = member()
    machine.rounds.call(RoundCall(1, UPDATE))
    current = machine.rounds.of_call(1)
    assert current is not None
    machine.rounds.leave(current, "no more time")
    decision = machine.calls.decide(event)
    assert decision == (CallDeferred() if needs_it else CallAllowed(ROSTER, event))
