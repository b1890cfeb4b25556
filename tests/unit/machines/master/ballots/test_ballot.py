from __future__ import annotations

from itertools import product

import pytest

from pccl.machines.master.ballots.ballot import Abort, Commit, Stall, Start
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.master.ballots.norms import NormHistory
from pccl.protocol.data_type import DataType
from pccl.protocol.guards.contributions import ContributionGuard, FlaggedContribution, GuardAction
from pccl.protocol.messages import OperationStarted, Progress
from pccl.protocol.operation import TRANSITIONS, Phase, name_peers
from pccl.protocol.types import AbortCause, Descriptor, OperationId, PeerId, ReduceOp

OPERATION = OperationId(1, 0, 2, 7, 3)
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8)
AVG = Descriptor(DataType.FLOAT, ReduceOp.AVG, 8)
A, B, C = PeerId(4), PeerId(5), PeerId(9)


def ballot(*, requested: bool = False) -> CollectiveBallot:
    made = CollectiveBallot(OPERATION, (A, B, C), A, 0)
    if requested:
        assert made.request(A, SUM, 0) is None
        assert made.request(B, SUM, 0) is None
        assert made.request(C, SUM, 0) == Start()
    return made


def test_the_life_cycle() -> None:
    requested, started, done, committed, aborted = Phase
    allowed = {
        (requested, started),
        (requested, aborted),
        (started, done),
        (started, aborted),
        (done, committed),
        (done, aborted),
    }
    for before, after in product(Phase, Phase):
        assert (after in TRANSITIONS[before]) == ((before, after) in allowed)
    assert [phase for phase in Phase if phase.ended] == [committed, aborted]


def test_names_of_peers() -> None:
    assert name_peers([C]) == "peer 9"
    assert name_peers([C, A]) == "peers 4, 9"


def test_it_starts_when_the_last_member_has_asked() -> None:
    made = ballot()
    assert made.waiting_for() == [A, B, C]
    assert made.request(B, SUM, 5) is None
    assert made.request(B, AVG, 6) is None  # a second request of the same member changes nothing
    assert made.waiting_for() == [A, C]
    assert made.request(C, SUM, 7) is None
    assert made.request(A, SUM, 8) == Start()
    assert made.waiting_for() == [A, B, C]  # now for their results
    assert made.progress_ns == 8
    assert made.request(A, SUM, 9) is None


def test_it_commits_when_all_results_are_equal() -> None:
    made = ballot(requested=True)
    assert [made.done(peer, b"x", 1) for peer in (B, A, C)] == [None, None, Commit()]
    assert made.phase is Phase.COMMITTED
    assert made.done(A, b"x", 2) is None


def test_a_result_before_the_start_does_not_count() -> None:
    made = ballot()
    assert made.done(A, b"x", 1) is None
    assert made.waiting_for() == [A, B, C]


def test_differing_requests_end_at_once_and_name_who_asked_for_what() -> None:
    made = ballot()
    assert made.request(A, SUM, 0) is None
    assert made.request(C, SUM, 0) is None
    assert made.request(B, AVG, 0) == Abort(
        AbortCause.DESCRIPTOR_MISMATCH,
        "tag 7: peers 4, 9 asked for SUM of 8 x float32; peer 5 asked for AVG of 8 x float32",
    )


@pytest.mark.parametrize(
    ("digests", "minority"),
    [((b"x", b"x", b"y"), "peer 9"), ((b"y", b"x", b"x"), "peer 4"),
     ((b"x", b"y", b"z"), "peers 5, 9")],
)  # fmt: skip
def test_differing_results_name_the_minority(digests: tuple[bytes, ...], minority: str) -> None:
    made = ballot(requested=True)
    decisions = [made.done(peer, d, 0) for peer, d in zip((A, B, C), digests, strict=True)]
    reason = f"results differ: {minority} computed another result than the rest"
    assert decisions == [None, None, Abort(AbortCause.DIGEST_MISMATCH, reason)]


def test_a_loss_before_the_start_aborts() -> None:
    made = ballot()
    assert made.lose([B], "gone", 0) == Abort(AbortCause.MEMBER_LOST, "the run lost peer 5: gone")
    assert made.survivors == [A, C]
    assert made.phase is Phase.ABORTED


def test_a_loss_after_all_survivors_were_done_commits() -> None:
    made = ballot(requested=True)
    made.done(A, b"x", 0)
    made.done(C, b"x", 0)
    assert made.lose([B], "gone", 0) == Commit()
    assert made.members == (A, B, C)


def test_the_last_member_is_lost() -> None:
    made = CollectiveBallot(OPERATION, (A,), A, 0)
    assert made.request(A, SUM, 0) == Start()
    assert made.lose([A], "gone", 0) == Abort(AbortCause.MEMBER_LOST, "the run lost peer 4: gone")
    assert made.survivors == []


def test_a_withdrawal_aborts() -> None:
    made = ballot(requested=True)
    made.done(B, b"x", 0)
    assert made.withdraw(A, "Ctrl-C") == Abort(AbortCause.WITHDRAWN, "peer 4 withdrew: Ctrl-C")


def test_members_that_wait_for_different_things() -> None:
    made = ballot()
    made.request(B, SUM, 0)
    assert made.get_stuck("who waits where") == Abort(AbortCause.LOCKSTEP, "who waits where")
    assert made.phase is Phase.ABORTED


def test_who_has_asked_and_how_they_know_it() -> None:
    made = ballot()
    assert (made.what, made.requested_by()) == ("tag 7", [])
    made.request(C, SUM, 0)
    made.request(A, SUM, 0)
    assert made.what == "tag 7 (SUM of 8 x float32)"
    assert made.requested_by() == [A, C]
    made.lose([A], "gone", 0)
    assert made.requested_by() == [C]


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (Descriptor.barrier(), "tag 7 (a barrier)"),
        (Descriptor.broadcast(DataType.INT8, 3, 2), "tag 7 (broadcast of 3 x int8 from rank 2)"),
    ],
)
def test_other_collectives_are_named_as_well(asked: Descriptor, what: str) -> None:
    made = ballot()
    made.request(A, asked, 0)
    assert made.what == what


def progress(received: int, ready: int) -> Progress:
    return Progress(OPERATION, received, ready, 100 * received)


def test_the_data_is_stuck_where_the_inputs_are_and_the_neighbour_lacks_them() -> None:
    """B has received everything so far and could send 6; C has got 2 of them. The others wait."""
    made = ballot(requested=True)
    made.report(A, progress(2, 4), 0)
    made.report(B, progress(4, 6), 0)
    made.report(C, progress(2, 2), 0)
    assert made.stall(0) == Stall(B, C, 6, 2)
    told = "peer 9 has 2 of the 6 segments that peer 5 could send it"
    assert str(made.stall(0)) == told


def test_the_larger_backlog_is_further_upstream() -> None:
    made = ballot(requested=True)
    made.report(A, progress(5, 8), 0)
    made.report(B, progress(1, 6), 0)  # lacks 7 of A's
    made.report(C, progress(5, 6), 0)  # lacks 1 of B's
    assert made.stall(0) == Stall(A, B, 8, 1)


def test_nothing_is_stuck_without_evidence() -> None:
    made = ballot(requested=True)
    assert made.stall(0) is None
    made.report(A, progress(0, 4), 0)
    assert made.stall(0) is None  # B may have all of it
    made.report(B, progress(4, 4), 0)
    made.report(C, progress(4, 4), 0)
    made.report(A, progress(4, 4), 0)
    assert made.stall(0) is None


def test_who_is_done_lacks_nothing() -> None:
    made = ballot(requested=True)
    made.report(A, progress(0, 9), 0)
    made.report(B, progress(0, 0), 0)
    made.done(B, b"x", 0)
    assert made.stall(0) is None


def test_neither_neighbour_pays_for_a_member_that_has_fallen_silent() -> None:
    """B may have read what A sent it, and sent what C lacks, before or after it spoke last."""
    made = ballot(requested=True)
    made.report(B, progress(2, 4), 10)
    made.report(A, progress(4, 8), 30)
    made.report(C, progress(0, 4), 30)
    assert made.stall(20) is None
    made.report(B, progress(2, 4), 30)
    assert made.stall(20) == Stall(A, B, 8, 2)


def test_only_progress_is_progress() -> None:
    made = ballot(requested=True)
    made.report(A, progress(1, 1), 10)
    made.report(A, progress(1, 2), 20)
    assert made.progress_ns == 10
    made.report(A, progress(2, 2), 30)
    assert made.progress_ns == 30


# -- guarded averages --------------------------------------------------------------------------

GUARD = ContributionGuard(GuardAction.EXCLUDE, GuardAction.EXCLUDE, 4.0, 8)
GUARDED = Descriptor(DataType.FLOAT, ReduceOp.AVG, 8, weighted=True, guard=GUARD)


def guarded(norms: tuple[float | None, ...], history: NormHistory | None = None) -> object:
    """Return the start of an average with these norms, and leave the ballot in ``last``."""
    made = CollectiveBallot(OPERATION, (A, B, C), A, 0, history)
    for peer, norm in zip((A, B), norms[:2], strict=True):
        assert made.request(peer, GUARDED, 0, weight=2.0, norm=norm) is None
    start = made.request(C, GUARDED, 0, weight=3.0, norm=norms[2])
    last.append(made)
    return start


last: list[CollectiveBallot] = []


def test_a_contribution_that_is_not_finite_gets_weight_zero() -> None:
    flagged = (FlaggedContribution(1, None, None, True),)
    assert guarded((1.0, None, 1e30)) == Start((2.0, 0.0, 3.0), flagged)
    assert last[-1].started() == OperationStarted(OPERATION, (2.0, 0.0, 3.0), flagged)
    assert last[-1].trusted_norms == (1.0, 1e30)
    assert last[-1].contributors == (A, B, C)


def test_the_past_of_the_tag_decides_about_outliers() -> None:
    history = NormHistory()
    history.note(OPERATION, 8, (1.0, 1.1, 0.9))
    start = guarded((1.0, 1.0, 70.0), history)
    assert isinstance(start, Start)
    assert start.weights == (2.0, 2.0, 0.0)
    assert [(one.rank, one.norm) for one in start.flagged] == [(2, 70.0)]
    assert last[-1].trusted_norms == (1.0, 1.0)


def test_a_master_trusts_no_norms_that_an_earlier_master_has_judged() -> None:
    """Not all members have returned, and it does not know which of them were flagged."""
    made = CollectiveBallot(OPERATION, (A, B, C), A, 0, NormHistory(), inherited=True)
    for peer, norm in ((A, 1.0), (B, 70.0)):
        assert made.request(peer, GUARDED, 0, weight=2.0, norm=norm) is None
    assert isinstance(made.done(A, b"x", 0), Start)
    assert made.done(B, b"x", 0) is None
    assert isinstance(made.lose([C], "lost", 0), Commit)
    assert made.trusted_norms == ()


def test_a_guard_without_weights_is_ignored() -> None:
    odd = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8, guard=GUARD)
    made = CollectiveBallot(OPERATION, (A, B), A, 0)
    assert made.request(A, odd, 0, norm=None) is None
    assert made.request(B, odd, 0, norm=1.0) == Start()
    assert made.trusted_norms == ()
