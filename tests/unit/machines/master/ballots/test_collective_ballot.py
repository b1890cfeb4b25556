"""A collective with a quorum: whom it goes on without, and what counts from then on.

And one with a root: whose links it needs, and what is lost with it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.machines.master.ballots.arrivals import Arrivals
from pccl.machines.master.ballots.ballot import Abort, Commit, Decision, Start
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.repair import Tell
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.guards.contributions import ContributionGuard, FlaggedContribution, GuardAction
from pccl.protocol.messages import HoldingsQuery, OperationNarrowed, OperationStarted
from pccl.protocol.operation import LATE_BYTES_MAX, BlockLengths, Phase, of_ranks, to_ranks
from pccl.protocol.types import (
    AbortCause,
    Collective,
    Descriptor,
    OperationId,
    PeerId,
    Quorum,
    ReduceOp,
)

OPERATION = OperationId(1, 0, 2, 7, 3)
MS = 1_000_000
QUORUM = Quorum(2, grace_ms=50)
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8, quorum=QUORUM)
OTHER = replace(SUM, op=ReduceOp.MAX)
MEAN = replace(SUM, op=ReduceOp.AVG, weighted=True)
GUARDED = replace(MEAN, guard=ContributionGuard(GuardAction.EXCLUDE, GuardAction.WARN, 8.0, 8))
A, B, C, D = PeerId(4), PeerId(5), PeerId(9), PeerId(11)
RING = (A, B, C, D)
A_C, A_B_C = b"\x05", b"\x07"
"""The ranks of A and C among the four, and those of A, B and C."""


def ballot(*asking: PeerId, asked: Descriptor = SUM, inherited: bool = False) -> CollectiveBallot:
    """One of four members, of which these have asked."""
    made = CollectiveBallot(OPERATION, RING, asking[0], 0, inherited=inherited)
    for peer in asking:
        assert made.request(peer, asked, 0) is None
    return made


def narrowed(
    *asking: PeerId, asked: Descriptor = SUM, posted: bool = False, inherited: bool = False
) -> CollectiveBallot:
    """One that goes on with these; ``posted``: it has started."""
    made = ballot(*asking, asked=asked, inherited=inherited)
    tells(made.go_on())
    if posted:
        ranks = to_ranks(asking, RING)
        decisions = [made.request(peer, asked, 1, participants=ranks) for peer in asking]
        assert [type(one) for one in decisions] == [*[type(None)] * (len(asking) - 1), Start]
    return made


def tells(decision: Decision | None) -> tuple[tuple[PeerId, ...], bytes]:
    """Who is told which participants."""
    assert isinstance(decision, Tell)
    assert isinstance(decision.message, OperationNarrowed)
    assert decision.message.operation == OPERATION
    return decision.peers, decision.message.participants


def aborts(decision: Decision | None) -> tuple[AbortCause, str]:
    assert isinstance(decision, Abort)
    return decision.cause, decision.reason


def test_ranks_as_bits() -> None:
    ring = tuple(map(PeerId, range(1, 11)))
    assert to_ranks((PeerId(1), PeerId(3), PeerId(10)), ring) == b"\x05\x02"
    assert of_ranks(b"\x05\x02", ring) == (1, 3, 10)
    assert of_ranks(b"\x05", ring) is None
    assert of_ranks(b"\x05\x04", ring) is None  # there is no eleventh
    assert of_ranks(b"\x05\x02\x00", ring) is None


# -- when it goes on -----------------------------------------------------------------------------


def test_it_waits_for_the_quorum_and_then_for_the_grace() -> None:
    made, arrivals = CollectiveBallot(OPERATION, RING, A, 0), Arrivals()
    assert made.goes_on_ns(arrivals) is None
    made.request(A, SUM, 0)
    assert made.goes_on_ns(arrivals) is None
    made.request(C, SUM, 70 * MS)
    assert made.goes_on_ns(arrivals) == 120 * MS
    made.request(B, SUM, 110 * MS)
    assert made.goes_on_ns(arrivals) == 120 * MS  # another request does not begin it anew
    tells(made.go_on())
    assert made.goes_on_ns(arrivals) is None
    assert made.go_on() is None


def test_the_time_that_the_master_slept_is_no_grace() -> None:
    made, arrivals = ballot(A, C), Arrivals()
    assert made.goes_on_ns(arrivals) == 50 * MS
    made.shift(30 * MS, 40 * MS)
    assert made.goes_on_ns(arrivals) == 80 * MS
    made = ballot(A, C)
    made.shift(5000 * MS, 5000 * MS)  # before it was known that enough have asked
    assert made.goes_on_ns(arrivals) == 5050 * MS


@pytest.mark.parametrize(
    ("quorum", "needed"),
    [(Quorum(2), 2), (Quorum(3), 3), (Quorum(9), 4), (Quorum(share=0.3), 2),
     (Quorum(share=0.5), 2), (Quorum(share=0.51), 3), (Quorum(share=1.0), 4)],
)  # fmt: skip
def test_how_many_are_enough(quorum: Quorum, needed: int) -> None:
    made = CollectiveBallot(OPERATION, RING, A, 0)
    enough: list[bool] = []
    for peer in RING[:3]:
        made.request(peer, replace(SUM, quorum=quorum), 0)
        enough.append(made.goes_on_ns(Arrivals()) is not None)
    assert enough == [count >= needed for count in (1, 2, 3)]


def test_without_a_quorum_it_waits_for_all() -> None:
    made = ballot(A, B, C, asked=replace(SUM, quorum=None))
    assert made.goes_on_ns(Arrivals()) is None
    assert made.request(D, replace(SUM, quorum=None), 9) == Start()


def test_all_come_in_time() -> None:
    made = ballot(A, B, C)
    assert made.request(D, SUM, 9) == Start()
    assert (made.participants, made.left_out, made.contributors) == (RING, [], RING)
    assert made.goes_on_ns(Arrivals()) is None
    assert made.lags_ns == [0, 0, 0, 9]


# -- whom it goes on without -----------------------------------------------------------------------


def test_it_goes_on_with_the_members_that_have_asked() -> None:
    made = ballot(C, A)
    assert tells(made.go_on()) == (RING, A_C)  # all learn it
    assert made.phase is Phase.REQUESTED
    assert (made.participants, made.survivors, made.left_out) == ((A, C), [A, C], [B, D])
    assert made.concerned == list(RING)  # all must learn the outcome
    assert made.waiting_for() == [A, C]  # they have yet to post their buffers
    assert made.wait().missing == ()  # and make no further call for that
    assert made.request(C, SUM, 5, participants=A_C) is None
    assert made.waiting_for() == [A]
    assert made.request(A, SUM, 6, participants=A_C) == Start()
    assert made.lags_ns == [None, None, 0, 0]


def test_a_repeated_request_gets_what_it_has_missed() -> None:
    made = narrowed(A, C)
    assert tells(made.request(C, SUM, 5)) == ((C,), A_C)  # it was away
    assert list(made.owed_to(C)) == [OperationNarrowed(OPERATION, A_C)]
    assert list(made.owed_to(B)) == [OperationNarrowed(OPERATION, A_C)]
    made.request(C, SUM, 6, participants=A_C)
    assert list(made.owed_to(C)) == []
    assert made.request(C, SUM, 7, participants=A_C) is None
    assert made.request(C, SUM, 8) is None  # an old one, after the new one
    assert made.request(A, SUM, 9, participants=A_C) == Start()
    assert list(made.owed_to(C)) == [OperationStarted(OPERATION)]
    assert made.request(A, SUM, 10, participants=A_C) is None


def test_only_the_participants_need_the_same_result() -> None:
    made = narrowed(A, C, posted=True)
    assert made.done(B, b"y", 2) is None
    assert made.done(A, b"x", 2) is None
    assert made.done(C, b"x", 3) == Commit()
    assert made.contributors == (A, C)
    assert made.concerned == list(RING)


def test_participants_that_differ_are_the_minority_among_themselves() -> None:
    made = narrowed(A, B, C, posted=True)
    made.done(A, b"x", 2)
    made.done(B, b"y", 2)
    cause, reason = aborts(made.done(C, b"x", 2))
    assert cause is AbortCause.DIGEST_MISMATCH
    assert reason.startswith("results differ: peer 5 ")


def test_a_mismatch_before_it_goes_on_is_one_of_all_that_have_asked() -> None:
    made = ballot(A)
    cause, reason = aborts(made.request(C, OTHER, 1))
    assert cause is AbortCause.DESCRIPTOR_MISMATCH
    assert "peer 4 asked for SUM" in reason
    assert "peer 9 asked for MAX" in reason


def test_different_quorums_do_not_fit() -> None:
    made = ballot(A)
    asked = replace(SUM, quorum=Quorum(3, grace_ms=50))
    assert aborts(made.request(C, asked, 1))[0] is AbortCause.DESCRIPTOR_MISMATCH


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(b"\x04", id="itself only"),
        pytest.param(b"\x0a", id="others"),
        pytest.param(b"\x15", id="a member that does not exist"),
        pytest.param(b"\x05\x00", id="too long"),
    ],
)
def test_participants_that_cannot_be_are_refused(ranks: bytes) -> None:
    made = narrowed(A, C)
    with pytest.raises(RemoteProtocolError, match="for other peers"):
        made.request(C, SUM, 2, participants=ranks)
    assert made.waiting_for() == [A, C]


def test_participants_that_no_master_has_named_end_it() -> None:
    made = ballot(A, B)
    assert aborts(made.request(C, SUM, 2, participants=A_C))[0] is AbortCause.MEMBER_LOST
    made = narrowed(A, C)
    assert aborts(made.request(C, SUM, 2, participants=A_B_C))[0] is AbortCause.MEMBER_LOST


# -- weights and norms -----------------------------------------------------------------------------


def test_weights_are_those_of_the_participants_in_ring_order() -> None:
    made = CollectiveBallot(OPERATION, RING, D, 0)
    made.request(D, MEAN, 0, weight=2.5)
    made.request(B, MEAN, 0, weight=7.0)
    made.go_on()
    ranks = to_ranks((B, D), RING)
    assert made.request(B, MEAN, 1, participants=ranks) is None
    # What a member repeats does not change its weight.
    assert made.request(D, MEAN, 1, weight=9.0, participants=ranks) == Start((7.0, 2.5))
    assert made.started() == OperationStarted(OPERATION, (7.0, 2.5))


def test_the_guard_judges_the_participants_only() -> None:
    norms = {A: 1.0, B: None, C: 2.0}
    made = CollectiveBallot(OPERATION, RING, A, 0)
    for peer, norm in norms.items():
        made.request(peer, GUARDED, 0, weight=1.0, norm=norm)
    made.go_on()
    made.request(A, GUARDED, 1, participants=A_B_C)
    made.request(B, GUARDED, 1, participants=A_B_C)
    flagged = (FlaggedContribution(1, None, None, True),)
    assert made.request(C, GUARDED, 1, participants=A_B_C) == Start((1.0, 0.0, 1.0), flagged)
    assert made.trusted_norms == (1.0, 2.0)


def test_late_members_learn_the_digest_of_a_result_that_is_kept() -> None:
    made = narrowed(A, C, posted=True)
    made.done(A, b"x", 3)
    made.done(C, b"x", 3)
    assert made.kept_digest == b"x"
    made.lose([B, D], "gone", 4)
    assert made.kept_digest == b"", "nobody fetches it"


@pytest.mark.parametrize("count", [LATE_BYTES_MAX // 4, LATE_BYTES_MAX // 4 + 1])
def test_a_result_that_is_too_large_has_no_digest(count: int) -> None:
    large = replace(SUM, count=count)
    made = CollectiveBallot(OPERATION, RING, A, 0)
    for peer in (A, C):
        made.request(peer, large, 0)
    made.go_on()
    for peer in (A, C):
        made.request(peer, large, 1, participants=A_C)
        made.done(peer, b"x", 2)
    made.done(A, b"x", 3)
    assert made.phase is Phase.COMMITTED
    assert made.kept_digest == (b"x" if count * 4 <= LATE_BYTES_MAX else b"")


@pytest.mark.parametrize(
    ("asked", "digest"), [(SUM, b"x"), (MEAN, b"x"), (GUARDED, b"")], ids=["sum", "mean", "guarded"]
)
def test_a_new_master_does_not_know_which_weights_a_guard_has_set_to_zero(
    asked: Descriptor, digest: bytes
) -> None:
    made = CollectiveBallot(OPERATION, RING, A, 0, inherited=True)
    for peer in (A, C):
        made.request(peer, asked, 1, weight=1.0, norm=None, participants=A_C)
        made.done(peer, b"x", 1)
    assert made.phase is Phase.COMMITTED
    assert made.kept_digest == digest


def test_a_new_master_knows_the_weights_only_of_those_that_have_asked() -> None:
    made = CollectiveBallot(OPERATION, RING, A, 0, inherited=True)
    made.request(A, MEAN, 1, weight=1.0, participants=A_C)
    made.done(A, b"x", 1)
    made.lose([C], "gone", 1)
    assert made.phase is Phase.COMMITTED
    assert made.kept_digest == b""


# -- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [A, B])
def test_a_loss_before_the_start_ends_it(lost: PeerId) -> None:
    """The view is closed then; all that have asked call again in the next one."""
    made = narrowed(A, C)
    expected = (AbortCause.MEMBER_LOST, f"the run lost peer {lost}: gone")
    assert aborts(made.lose([lost], "gone", 2)) == expected
    assert made.concerned == [peer for peer in RING if peer != lost]


def test_a_member_without_which_it_goes_on_is_lost_after_the_start() -> None:
    made = narrowed(A, C, posted=True)
    assert made.lose([B], "gone", 2) is None
    assert (made.left_out, made.survivors, made.concerned) == ([D], [A, C], [A, C, D])
    assert not made.outlives_view  # nothing has to be repaired
    made.done(A, b"x", 3)
    assert made.done(C, b"x", 3) == Commit()
    assert made.contributors == (A, C)


def test_a_participant_is_lost_after_the_start_and_its_data_is_repaired() -> None:
    made = narrowed(A, B, C, posted=True)
    made.done(A, b"x", 2)
    asked = made.lose([B], "gone", 3)
    assert isinstance(asked, Tell)
    assert asked.peers == (C,)  # the member behind the gap of the narrowed ring
    assert asked.message == HoldingsQuery(OPERATION, (B,))
    assert made.outlives_view
    assert made.holdings(C, 1, complete=True) is not None
    assert made.done(C, b"x", 4) == Commit()
    assert made.contributors == (A, B, C)  # its contribution is in the result


def test_the_rest_was_done_when_a_participant_and_another_member_are_lost() -> None:
    made = narrowed(A, B, C, posted=True)
    made.done(A, b"x", 2)
    made.done(C, b"x", 2)
    assert made.lose([B, D], "gone", 3) == Commit()
    assert made.concerned == [A, C]


# -- another master --------------------------------------------------------------------------------


def test_another_master_adopts_the_participants() -> None:
    made = ballot(A, inherited=True)
    # C brings them; A, which has asked already, has yet to hear of them.
    assert tells(made.request(C, SUM, 1, participants=A_C)) == ((A, B, D), A_C)
    assert (made.participants, made.left_out) == ((A, C), [B, D])
    assert made.request(A, SUM, 2, participants=A_C) == Start()
    assert made.done(A, b"x", 3) is None
    assert made.done(C, b"x", 3) == Commit()


def test_a_participant_that_asks_another_master_anew_hears_of_the_others() -> None:
    made = CollectiveBallot(OPERATION, RING, C, 0, inherited=True)
    assert tells(made.request(C, SUM, 1, participants=A_C)) == ((A, B, D), A_C)
    assert tells(made.request(A, SUM, 2)) == ((A,), A_C)
    assert made.request(A, SUM, 3, participants=A_C) == Start()


def test_another_master_adopts_the_participants_although_all_members_have_asked() -> None:
    """The last request completes the view. But its member has posted for the participants only."""
    made = ballot(A, B, D, inherited=True)
    assert tells(made.request(C, SUM, 1, participants=A_C)) == ((A, B, D), A_C)
    assert (made.participants, made.left_out) == ((A, C), [B, D])
    assert made.request(A, SUM, 2, participants=A_C) == Start()


def test_a_participant_was_done_under_the_master_before() -> None:
    made = CollectiveBallot(OPERATION, RING, A, 0, inherited=True)
    made.request(A, SUM, 1, participants=A_C)
    assert made.done(A, b"x", 1) == Start()
    assert made.phase is Phase.STARTED
    assert made.request(C, SUM, 2, participants=A_C) is None
    assert list(made.owed_to(C)) == [OperationStarted(OPERATION)]
    assert made.done(C, b"x", 2) == Commit()
    assert made.contributors == (A, C)


def test_two_masters_have_chosen_different_participants() -> None:
    made = CollectiveBallot(OPERATION, RING, A, 0, inherited=True)
    tells(made.request(A, SUM, 1, participants=A_C))
    expected = (AbortCause.MEMBER_LOST, "masters chose other participants")
    assert aborts(made.request(C, SUM, 1, participants=A_B_C)) == expected
    made = narrowed(A, B, C, inherited=True)  # this master itself has chosen
    assert aborts(made.request(C, SUM, 1, participants=A_C)) == expected


def test_a_root_that_the_group_does_not_have_breaks_the_protocol() -> None:
    made = CollectiveBallot(OPERATION, RING, A, 0)
    gather = Descriptor.direct(Collective.GATHER, DataType.FLOAT, root=4)
    with pytest.raises(RemoteProtocolError, match="has no rank 4"):
        made.request(A, gather, 0, blocks=BlockLengths((0,) * 4, (0,) * 4))


def test_a_gather_needs_the_links_of_its_root_only() -> None:
    made = CollectiveBallot(OPERATION, RING, A, 0)
    gather = Descriptor.direct(Collective.GATHER, DataType.FLOAT, root=2)
    for peer in RING:
        made.request(peer, gather, 0, blocks=BlockLengths((0,) * 4, (0,) * 4))
    broken = [frozenset((A, B)), frozenset((C, D)), frozenset((A, C))]
    assert made.separated(broken) == [frozenset((A, C)), frozenset((C, D))]


@pytest.mark.parametrize("collective", [Collective.GATHER, Collective.REDUCE])
def test_a_result_that_is_lost_with_its_root_is_not_committed(collective: Collective) -> None:
    made = CollectiveBallot(OPERATION, RING, A, 0)
    what = Descriptor.direct(collective, DataType.FLOAT, root=2, count=8)
    blocks = BlockLengths((0,) * 4, (0,) * 4) if what.is_exchange else None
    for peer in RING:
        made.request(peer, what, 0, blocks=blocks)
    assert [made.done(peer, b"", 1) for peer in (A, B, D)] == [None] * 3
    decision = made.lose([C], "gone", 2)
    assert isinstance(decision, Abort)
    assert decision.cause is AbortCause.MEMBER_LOST


def test_a_root_that_was_done_may_be_lost_before_the_others_are() -> None:
    made = CollectiveBallot(OPERATION, RING, A, 0)
    what = Descriptor.direct(Collective.REDUCE, DataType.FLOAT, root=2, count=8)
    for peer in RING:
        made.request(peer, what, 0)
    for peer in (A, B, C):
        assert made.done(peer, b"", 1) is None
    assert made.lose([C, D], "gone", 2) == Commit()
