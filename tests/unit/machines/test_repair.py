"""Gaps in a ring, and what the master makes of them."""

from __future__ import annotations

import pytest

from pccl.machines.master.ballots.ballot import Abort, Commit, Stall
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.repair import Gap, Tell, find_gaps
from pccl.protocol.data_type import DataType
from pccl.protocol.messages import HoldingsQuery, OperationStarted, Progress, Repair
from pccl.protocol.types import AbortCause, Descriptor, OperationId, PeerId, ReduceOp

OPERATION = OperationId(1, 0, 2, 7, 3)
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8)
A, B, C, D, E = (PeerId(n) for n in (2, 3, 5, 7, 11))
RING = (A, B, C, D, E)


def started(ring: tuple[PeerId, ...] = RING) -> CollectiveBallot:
    ballot = CollectiveBallot(OPERATION, ring, A, 0)
    for peer in ring:
        ballot.request(peer, SUM, 0)
    return ballot


@pytest.mark.parametrize(
    ("lost", "gaps"),
    [
        ((), []),
        ((C,), [Gap(B, D, 1)]),
        ((A,), [Gap(E, B, 1)]),
        ((C, B), [Gap(A, D, 2)]),
        ((E, A), [Gap(D, B, 2)]),
        ((B, D), [Gap(A, C, 1), Gap(C, E, 1)]),
        ((A, B, D, E), [Gap(C, C, 4)]),
        (RING, []),
        ((PeerId(99),), []),
    ],
)
def test_gaps(lost: tuple[PeerId, ...], gaps: list[Gap]) -> None:
    assert find_gaps(RING, lost) == gaps


def test_those_behind_a_gap_are_asked_and_then_those_before_it_are_told() -> None:
    ballot = started()
    assert ballot.lose([B], "gone", 5) == Tell((C,), HoldingsQuery(OPERATION, (B,)))
    assert ballot.progress_ns == 5  # the others get their time anew
    asked = HoldingsQuery(OPERATION, (B, D))
    assert ballot.lose([D], "gone", 6) == Tell((C, E), asked)
    assert ballot.holdings(C, 1, complete=True) is None  # an answer to the first question
    assert ballot.holdings(A, 2, complete=False) is None  # was not asked
    assert ballot.holdings(E, 2, complete=True) is None
    assert ballot.holdings(C, 2, complete=True) == Tell((A, C), Repair(OPERATION, (B, D)))
    assert ballot.holdings(C, 2, complete=False) is None  # it has said yes
    assert ballot.survivors == [A, C, E]
    decisions = [ballot.done(peer, b"x", 7) for peer in (C, A, E)]
    assert decisions == [None, None, Commit()]
    assert ballot.members == RING


def test_one_no_ends_it() -> None:
    ballot = started()
    ballot.lose([B], "gone", 0)
    ballot.lose([D], "frozen", 0)
    ballot.holdings(C, 2, complete=True)
    ended = Abort(AbortCause.MEMBER_LOST, "the run lost peer 7: frozen")
    assert ballot.holdings(E, 2, complete=False) == ended
    assert ballot.holdings(E, 2, complete=True) is None


def test_who_is_done_is_not_asked_and_needs_nothing() -> None:
    ballot = started()
    ballot.done(C, b"x", 0)
    assert ballot.lose([B], "gone", 0) is None
    asked = Tell((E,), HoldingsQuery(OPERATION, (B, D)))
    assert ballot.lose([D], "gone", 0) == asked
    told = Tell((C,), Repair(OPERATION, (B, D)))
    assert ballot.holdings(E, 2, complete=True) == told


def test_who_is_done_before_it_answers_has_agreed() -> None:
    ballot = started()
    ballot.lose([B], "gone", 0)
    ballot.lose([D], "gone", 0)
    ballot.holdings(C, 2, complete=True)
    assert ballot.done(E, b"x", 0) == Tell((A,), Repair(OPERATION, (B, D)))
    assert ballot.holdings(E, 2, complete=False) is None
    assert ballot.done(C, b"x", 0) is None
    assert ballot.done(A, b"x", 0) == Commit()


def test_results_that_differ_after_a_repair() -> None:
    ballot = started((A, B, C))
    ballot.lose([B], "gone", 0)
    ballot.holdings(C, 1, complete=True)
    ballot.done(A, b"x", 0)
    decision = ballot.done(C, b"y", 0)
    assert isinstance(decision, Abort)
    assert decision.cause is AbortCause.DIGEST_MISMATCH


def test_what_is_owed_to_whom() -> None:
    ballot = started()
    begun = OperationStarted(OPERATION)
    assert list(ballot.owed_to(C)) == [begun]
    ballot.lose([B], "gone", 0)
    asked, repair = HoldingsQuery(OPERATION, (B,)), Repair(OPERATION, (B,))
    owed = {peer: list(ballot.owed_to(peer)) for peer in RING}
    assert owed == {A: [begun], B: [], C: [begun, asked], D: [begun], E: [begun]}
    ballot.holdings(C, 1, complete=True)
    owed = {peer: list(ballot.owed_to(peer)) for peer in RING}
    assert owed == {A: [begun, repair], B: [], C: [begun], D: [begun], E: [begun]}


def test_lack_of_progress_is_charged_to_those_that_are_left() -> None:
    """C lacks what A, before the gap, could send; what B could have sent counts no longer."""
    ballot = started((A, B, C))
    for peer, received, ready in ((A, 4, 6), (B, 4, 9), (C, 3, 5)):
        ballot.report(peer, Progress(OPERATION, received, ready, received), 0)
    assert ballot.stall(0) == Stall(B, C, ready=9, received=3)
    ballot.lose([B], "gone", 0)
    assert ballot.stall(0) == Stall(A, C, ready=6, received=3)
