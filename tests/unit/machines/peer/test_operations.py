"""Outcomes of operations without this peer: how many are kept, and what becomes of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.machines.peer import events as ev
from pccl.protocol import errors
from pccl.protocol.messages import (
    OperationDone,
    OperationEnded,
    OperationNarrowed,
    OperationStarted,
    OutcomeQuery,
    Proposed,
    RosterChanged,
)
from pccl.protocol.operation import LATE_BYTES_MAX
from pccl.protocol.types import SYNC_TAG, AbortCause, Descriptor, OperationId, PeerId
from tests.support.peer_stage import BACK, QUORATE, PeerStage, ended, raised, sent
from tests.support.scenarios import op, roster, subset

KEPT = 16
OTHERS = (PeerId(1), PeerId(3))


DIGEST = b"digest of the values"


def late(operation: OperationId, digest: bytes = DIGEST) -> OperationEnded:
    """The outcome of an operation that has left this peer out."""
    return ended(operation, contributors=OTHERS, digest=digest)


def missing(count: int, tag: int = 5) -> PeerStage:
    """A member that so many reduces have gone on without."""
    peer = PeerStage().member(1, 2, 3)
    for n in range(count):
        peer.do(late(op(n, tag=tag)))
    return peer


def test_as_many_results_as_are_kept_reach_their_calls_in_order() -> None:
    peer = missing(KEPT)
    for n in range(KEPT):
        assert peer.do(ev.ReduceCall(10 + n, 5, QUORATE)) == [
            ev.FetchResult(10 + n, op(n), QUORATE, DIGEST),
            BACK,
        ]
        peer.do(ev.ResultFetched(10 + n, has_arrived=True))
    post, request = peer.do(ev.ReduceCall(99, 5, QUORATE))
    assert isinstance(post, ev.Post)
    assert post.operation == op(KEPT)
    assert isinstance(request, ev.Send)


def test_one_more_requires_a_resync() -> None:
    error = raised(missing(KEPT + 1).do(ev.ReduceCall(9, 5, QUORATE)), errors.ResyncRequired)
    assert "tag 5, without this peer, which was late" in str(error)


def test_each_tag_keeps_its_own() -> None:
    peer = missing(KEPT)
    for n in range(KEPT):
        peer.do(late(op(n, tag=6)))
    for tag in (5, 6):
        assert peer.do(ev.ReduceCall(tag, tag, QUORATE)) == [
            ev.FetchResult(tag, op(tag=tag), QUORATE, DIGEST),
            BACK,
        ]


def test_aborts_that_are_forgotten_lack_nothing() -> None:
    peer = PeerStage().member(1, 2, 3)
    for n in range(KEPT + 1):
        peer.do(ended(op(n), AbortCause.WITHDRAWN, "peer 1 withdrew"))
    raised(peer.do(ev.ReduceCall(9, 5, QUORATE)), errors.CollectiveAborted)


def test_synchronizations_that_are_forgotten_lack_nothing() -> None:
    """The next one brings all that the members have."""
    peer = missing(KEPT + 1, SYNC_TAG)
    post, _ = peer.do(ev.ReduceCall(9, 5, QUORATE))
    assert isinstance(post, ev.Post)


def test_calls_wait_for_a_proposed_outcome_that_this_peer_may_lack() -> None:
    """It returned to a later view, and the master tells one outcome after the other."""
    peer, missed = PeerStage().member(1, 2, 3), late(op())
    peer.do(RosterChanged(roster(2, 2, 2, 3)))
    peer.do(Proposed(1, missed, None))
    assert sent(peer.do(ev.ReduceCall(9, 5, QUORATE))) == [OutcomeQuery(op())]
    assert peer.do(missed) == [ev.FetchResult(9, op(), QUORATE, DIGEST), BACK]


@pytest.mark.parametrize(
    "proposed",
    [
        ended(op(), AbortCause.WITHDRAWN, "peer 1 withdrew"),
        ended(op(), contributors=(PeerId(1), PeerId(2), PeerId(3))),
        late(op(group=1)),
        late(op(tag=subset(1, 3).operation_tag)),
    ],
    ids=["aborted", "with this peer", "of another group", "of others among themselves"],
)
def test_other_proposals_delay_no_call(proposed: OperationEnded) -> None:
    peer = PeerStage().member(1, 2, 3)
    peer.do(RosterChanged(roster(2, 2, 2, 3)))
    peer.do(Proposed(1, proposed, None))
    raised(peer.do(ev.ReduceCall(9, 5, QUORATE)), errors.CollectiveAborted)


@pytest.mark.parametrize("is_pending", [True, False])
def test_a_newcomer_waits_for_no_outcome_from_before_its_admission(*, is_pending: bool) -> None:
    """The master proposes it to all peers, in case it needs a majority."""
    peer, before = PeerStage(), Proposed(1, late(op(view=0)), None)
    if is_pending:
        peer.registered().do(before)
    peer.member(1, 2, 3)
    if not is_pending:
        peer.do(before)
    (post, _) = peer.do(ev.ReduceCall(9, 5, QUORATE))
    assert isinstance(post, ev.Post)


# -- what participants keep for late members -----------------------------------------------------


def narrowed(asked: Descriptor = QUORATE) -> PeerStage:
    """A participant whose operation goes on without peer 3, and has started."""
    peer = PeerStage().member(1, 2, 3)
    peer.do(ev.ReduceCall(9, 5, asked))
    peer.do(OperationNarrowed(op(), b"\x03"))
    peer.do(OperationStarted(op()))
    return peer


def test_a_participant_is_done_when_it_has_hashed_what_it_keeps() -> None:
    peer = narrowed()
    assert peer.do(ev.ReduceDone(op(), b"checksum")) == [ev.KeepResult(op(), QUORATE)]
    effects = peer.do(ev.ReduceDone(op(), DIGEST, is_kept=True))
    assert sent(effects) == [OperationDone(op(), DIGEST)]


@pytest.mark.parametrize("count", [LATE_BYTES_MAX // 4, LATE_BYTES_MAX // 4 + 1])
def test_a_result_that_is_too_large_is_not_kept(count: int) -> None:
    asked = replace(QUORATE, count=count)
    effects = narrowed(asked).do(ev.ReduceDone(op(), b"checksum"))
    if count * 4 <= LATE_BYTES_MAX:
        assert effects == [ev.KeepResult(op(), asked)]
    else:
        assert sent(effects) == [OperationDone(op(), b"checksum")]


def test_nothing_is_kept_if_nobody_was_late() -> None:
    peer = PeerStage().member(1, 2, 3)
    peer.do(ev.ReduceCall(9, 5, QUORATE))
    peer.do(OperationStarted(op()))
    effects = peer.do(ev.ReduceDone(op(), b"checksum"))
    assert sent(effects) == [OperationDone(op(), b"checksum")]


def test_a_caller_that_leaves_while_its_result_is_hashed_withdraws() -> None:
    peer = narrowed()
    peer.do(ev.ReduceDone(op(), b"checksum"))
    effects = peer.do(ev.LeaveCall(9, "cancelled"))
    assert ev.End(op(), committed=False) in effects
    raised(effects, errors.OutcomeUnknown)
    assert peer.do(ev.ReduceDone(op(), DIGEST, is_kept=True)) == []


@pytest.mark.parametrize("has_called", [True, False])
def test_a_result_that_nobody_keeps_requires_a_resync(*, has_called: bool) -> None:
    peer = PeerStage().member(1, 2, 3)
    if has_called:
        peer.do(ev.ReduceCall(9, 5, QUORATE))
        peer.do(OperationNarrowed(op(), b"\x05"))
    effects = peer.do(late(op(), b""))
    if not has_called:
        effects = peer.do(ev.ReduceCall(9, 5, QUORATE))
    raised(effects, errors.ResyncRequired)
