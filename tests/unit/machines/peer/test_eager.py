"""Going ahead of the start: the account of it, the peer that does, the ballot that allows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pccl.machines.master.ballots.ballot import Abort, Commit, Start
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.peer import events as ev
from pccl.machines.peer.eager import EagerBudget, fingerprint
from pccl.machines.repair import Tell
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import EARLY_STORE_BYTES_MAX
from pccl.protocol.operation import Eager, Phase
from pccl.protocol.types import (
    AbortCause,
    Collective,
    Descriptor,
    Member,
    PeerId,
    Quorum,
    ReduceOp,
)
from tests.support.peer_stage import SUM, PeerStage, ended
from tests.support.scenarios import op, tag_of

A, B, C = PeerId(1), PeerId(2), PeerId(3)
RING = (A, B, C)


# -- fingerprints ------------------------------------------------------------------------------


def test_what_differs_has_another_fingerprint() -> None:
    alike = replace(SUM)
    others = [
        replace(SUM, dtype=DataType.INT32),
        replace(SUM, op=ReduceOp.AVG),
        replace(SUM, op=ReduceOp.AVG, weighted=True),
        replace(SUM, count=9),
        Descriptor.broadcast(DataType.FLOAT, 8, 0),
        Descriptor.broadcast(DataType.FLOAT, 8, 1),
        Descriptor.barrier(),
    ]
    ring, fewer = (PeerId(1), PeerId(2), PeerId(3)), (PeerId(1), PeerId(3))
    assert fingerprint(alike, ring) == fingerprint(SUM, fewer)
    assert len({fingerprint(what, ring) for what in [SUM, *others]}) == 8
    assert all(0 < fingerprint(what, ring) < 1 << 32 for what in [SUM, *others])
    with_quorum = replace(SUM, quorum=Quorum(2))
    assert fingerprint(with_quorum, ring) != fingerprint(with_quorum, fewer)


# -- the account -------------------------------------------------------------------------------

COST = 32 + (3 + 1) * 56
"""Of 8 floats among three: the tensor, a header for each rank's segment, and a question."""


def part(collective: Collective, count: int) -> Descriptor:
    return Descriptor.direct(collective, DataType.FLOAT, count=count)


def budget(bytes_max: int = 3 * COST) -> EagerBudget:
    """In view 1 all have asked for something."""
    made = EagerBudget(64, bytes_max=bytes_max)
    made.all_asked(op(tag=99))
    return made


def test_a_subset_proves_nothing_about_the_other_members() -> None:
    made = EagerBudget(64, bytes_max=9 * COST)
    pair, other = tag_of(1, 2), tag_of(2, 3)
    made.all_asked(op(tag=pair))
    assert made.take(op(), SUM, 3) is Eager.NOTHING
    assert made.take(op(tag=other), SUM, 2) is Eager.NOTHING
    assert made.take(op(1, tag=pair), SUM, 2) is Eager.SEGMENTS
    assert made.take(op(2, tag=pair, view=2), SUM, 2) is Eager.NOTHING
    made.close_views((2,), 2)
    made.all_asked(op(tag=pair, view=2))
    assert made.free_bytes < 9 * COST, "the others may not know that the view is closed"
    made.all_asked(op(view=2))
    assert made.free_bytes == 9 * COST
    assert made.take(op(tag=other, view=2), SUM, 2) is Eager.SEGMENTS


def test_who_says_nothing_never_goes_ahead() -> None:
    made = EagerBudget()
    made.all_asked(op())
    assert not made.take(op(1), SUM, 2)


@pytest.mark.parametrize(
    ("what", "eager"),
    [
        (SUM, Eager.SEGMENTS),
        (replace(SUM, count=16), Eager.SEGMENTS),
        (replace(SUM, count=16, near=True), Eager.SEGMENTS),
        (replace(SUM, count=17), Eager.NOTHING),
        (replace(SUM, count=17, near=True), Eager.ANNOUNCEMENTS),
        (replace(SUM, op=ReduceOp.AVG, weighted=True), Eager.NOTHING),  # the start tells weights
        (replace(SUM, count=0, near=True), Eager.NOTHING),  # done before others have asked
        (Descriptor.broadcast(DataType.FLOAT, 8, 0), Eager.NOTHING),
        (Descriptor.barrier(), Eager.NOTHING),
        (part(Collective.REDUCE, 3), Eager.SEGMENTS),
        (part(Collective.REDUCE, 2), Eager.NOTHING),  # one has nothing to add up
        (part(Collective.REDUCE_SCATTER, 16), Eager.SEGMENTS),
        (part(Collective.REDUCE_SCATTER, 2), Eager.NOTHING),
        (part(Collective.ALL_GATHER, 8), Eager.NOTHING),  # a member may give nothing
    ],
)
def test_what_goes_ahead(what: Descriptor, eager: Eager) -> None:
    assert budget(bytes_max=10_000).take(op(), what, 3) is eager


def test_an_announcement_costs_the_longest_one() -> None:
    near = replace(SUM, count=3 << 20, near=True)  # chunks of 4 MiB
    made = budget(bytes_max=EARLY_STORE_BYTES_MAX)
    assert made.take(op(), near, 3) is Eager.ANNOUNCEMENTS
    segments = 3 + 6  # a chunk of more than 4 MiB would have segments of at least 2 MiB
    assert EARLY_STORE_BYTES_MAX - made.free_bytes == 56 + segments * (56 + 16 + 64 * 16)
    made.all_asked(op())
    assert made.free_bytes == EARLY_STORE_BYTES_MAX


def test_a_tensor_that_would_be_pulled_for_long_waits() -> None:
    made = budget(bytes_max=EARLY_STORE_BYTES_MAX)
    assert made.take(op(), replace(SUM, count=4 << 20, near=True), 2)
    assert not made.take(op(1), replace(SUM, count=(4 << 20) + 1, near=True), 2)


def test_none_is_announced_early_if_none_is_sent_early() -> None:
    made = EagerBudget(0)
    made.all_asked(op(tag=99))
    assert not made.take(op(), replace(SUM, count=17, near=True), 3)


def test_nothing_goes_ahead_in_a_view_that_others_may_not_know() -> None:
    made = budget()
    assert not made.take(op(view=2), SUM, 3)
    made.all_asked(op(view=2))
    assert made.take(op(1, view=2), SUM, 3)


def test_what_is_out_is_bounded() -> None:
    made = budget()
    taken = [bool(made.take(op(tag=tag), SUM, 3)) for tag in range(4)]
    assert taken == [True, True, True, False]
    assert made.free_bytes == 0
    made.all_asked(op(tag=1))
    assert made.free_bytes == COST
    assert made.take(op(tag=7), SUM, 3)


def test_small_segments_cost_more_headers() -> None:
    made = EagerBudget(64, segment_bytes=8, bytes_max=1000)
    made.all_asked(op(tag=99))
    assert made.take(op(), SUM, 3)
    assert made.free_bytes == 1000 - 32 - (3 + 4 + 1) * 56


def test_an_abort_proves_nothing() -> None:
    """Until the others have asked for a later one of the same tag they may keep what came."""
    made = budget()
    assert made.take(op(), SUM, 3)
    made.all_asked(op(tag=6))
    assert made.free_bytes == 2 * COST
    made.all_asked(op(1))
    assert made.free_bytes == 3 * COST


def test_an_earlier_operation_proves_nothing() -> None:
    made = budget()
    assert made.take(op(1), SUM, 3)
    made.all_asked(op(0))
    made.all_asked(op(2, view=2))
    assert made.free_bytes == 2 * COST


def test_a_closed_view_is_forgotten_by_whoever_enters_the_one_after_it() -> None:
    made = budget()
    made.all_asked(op(view=2))
    assert made.take(op(), SUM, 3)
    made.close_views((3,), 3)
    assert not made.take(op(1, view=2), SUM, 3)  # nobody may ask there any more
    made.all_asked(op(1, view=2))  # asked for before its view was closed
    assert made.free_bytes == 2 * COST
    made.close_views((3, 4), 4)
    made.all_asked(op(view=3))
    assert made.free_bytes == 3 * COST


# -- a peer that goes ahead --------------------------------------------------------------------


def entered(**others: Any) -> PeerStage:
    """Peer 2 of 3, in view 1: the first operation in it has waited for its start."""
    peer, first = PeerStage(eager=EagerBudget(64)).member(*RING, **others), op(tag=99)
    what = replace(SUM, near=bool(others))
    assert peer.do(ev.ReduceCall(2, 99, SUM)) == [
        ev.Post(2, first, what, RING),
        ev.Send(msg.OperationRequest(first, what)),
    ]
    peer.do(msg.OperationStarted(first))
    peer.do(ev.ReduceDone(first, b"d"))
    peer.do(ended(first, contributors=RING))
    return peer


ASKED = ev.Send(msg.OperationRequest(op(), SUM, eager=Eager.SEGMENTS))


def test_the_second_operation_of_a_view_goes_ahead() -> None:
    peer = entered()
    post = ev.Post(3, op(), SUM, RING)
    assert peer.do(ev.ReduceCall(3, 5, SUM)) == [post, ev.Begin(op(), eager=Eager.SEGMENTS), ASKED]
    assert peer.machine.phase_of(op()) is Phase.REQUESTED
    assert peer.do(ev.ReduceDone(op(), b"d")) == [
        ev.Begin(op()), ev.Send(msg.OperationDone(op(), b"d"))
    ]  # fmt: skip
    assert peer.machine.phase_of(op()) is Phase.DONE
    assert peer.do(msg.OperationStarted(op())) == []
    assert peer.do(ended(op(), contributors=RING))[0] == ev.End(op(), True)


def test_of_a_large_tensor_near_members_announce_the_second_operation_ahead() -> None:
    peer = entered(members=tuple(Member(peer, "10.0.0.1", 7000 + peer, 5) for peer in RING))
    large = replace(SUM, count=17)
    asked = replace(large, near=True)
    assert peer.do(ev.ReduceCall(3, 5, large)) == [
        ev.Post(3, op(), asked, RING),
        ev.Begin(op(), Eager.ANNOUNCEMENTS),
        ev.Send(msg.OperationRequest(op(), asked, Eager.ANNOUNCEMENTS)),
    ]
    assert peer.do(msg.OperationStarted(op())) == [ev.Begin(op())]


def test_it_may_be_told_of_the_start_later() -> None:
    peer = entered()
    peer.do(ev.ReduceCall(3, 5, SUM))
    assert peer.do(msg.OperationStarted(op())) == [ev.Begin(op())]
    assert peer.do(ev.ReduceDone(op(), b"d")) == [ev.Send(msg.OperationDone(op(), b"d"))]


def test_it_repeats_that_it_has_gone_ahead() -> None:
    peer = entered()
    peer.do(ev.ReduceCall(3, 5, SUM))
    peer.do(ev.ReduceDone(op(), b"d"))
    effects = peer.do(msg.Resumed(1))
    assert effects == [ASKED, ev.Send(msg.OperationDone(op(), b"d"))]


def test_before_it_is_done_its_caller_may_withdraw() -> None:
    peer = entered()
    peer.do(ev.ReduceCall(3, 5, SUM))
    effects = peer.do(ev.LeaveCall(3, "no time"))
    assert effects[:2] == [ev.End(op(), False), ev.Send(msg.Withdraw(op(), "no time"))]
    assert not peer.machine.collectives.may_come(op())


def test_whoever_is_behind_a_gap_goes_on_though_it_was_not_told_of_the_start() -> None:
    peer = entered()
    peer.do(ev.ReduceCall(3, 5, SUM))
    assert peer.do(msg.HoldingsQuery(op(), (A,))) == [ev.CloseGap(op(), 1, upstream=C, size=1)]


def test_another_attempt_after_differing_results_goes_ahead_anew() -> None:
    peer = entered()
    peer.do(ev.ReduceCall(3, 5, SUM))
    peer.do(ev.ReduceDone(op(), b"d"))
    effects = peer.do(ended(op(), AbortCause.DIGEST_MISMATCH))
    assert effects == [
        ev.End(op(), False),
        ev.Post(3, op(1), SUM, RING),
        ev.Begin(op(1), eager=Eager.SEGMENTS),
        ev.Send(msg.OperationRequest(op(1), SUM, eager=Eager.SEGMENTS)),
    ]


# -- the ballot --------------------------------------------------------------------------------


def ballot(*eager: PeerId, inherited: bool = False, what: Descriptor = SUM) -> CollectiveBallot:
    made = CollectiveBallot(op(), RING, A, 0, inherited=inherited)
    for peer in eager:
        assert made.request(peer, what, 0, eager=Eager.SEGMENTS) is None
    return made


def test_whoever_only_announces_ahead_waits_for_the_start() -> None:
    made = ballot(A)
    assert made.request(B, SUM, 0, eager=Eager.ANNOUNCEMENTS) is None
    assert made.request(C, SUM, 0, eager=Eager.ANNOUNCEMENTS) == Start()
    assert made.wait_for_start() == [B, C]
    assert made.take_untold() == [A]


def test_whoever_only_announces_ahead_may_be_done_before_the_others_have_asked() -> None:
    made = ballot(A)
    made.request(B, SUM, 0, eager=Eager.ANNOUNCEMENTS)
    assert made.done(B, b"x", 5) == Start()
    assert made.wait_for_start() == [B, C]


@pytest.mark.parametrize(
    "what",
    [
        Descriptor.broadcast(DataType.FLOAT, 8, 0),
        Descriptor.barrier(),
        replace(SUM, op=ReduceOp.AVG, weighted=True),
        replace(SUM, count=0),
        replace(SUM, count=1 << 20),
        part(Collective.REDUCE, 2),
        part(Collective.REDUCE_SCATTER, 2),
    ],
)
def test_a_report_before_the_start_proves_nothing_where_none_may_go_ahead(what: Descriptor) -> None:
    made = CollectiveBallot(op(), RING, A, 0)
    assert made.request(A, what, 0, eager=Eager.SEGMENTS) is None
    assert made.done(A, b"x", 5) is None
    assert made.phase is Phase.REQUESTED


def test_nobody_waits_for_the_start_of_what_has_gone_ahead() -> None:
    made = ballot(A, B)
    assert made.request(C, SUM, 0, eager=Eager.SEGMENTS) == Start()
    assert made.wait_for_start() == []
    assert made.take_untold() == [A, B, C]
    assert made.take_untold() == []


def test_only_those_who_wait_are_told_at_once() -> None:
    made = ballot(A, B)
    assert made.take_untold() == []
    assert made.request(C, SUM, 0) == Start()
    assert made.wait_for_start() == [C]
    assert made.take_untold() == [A, B]


def test_who_is_done_shows_that_all_have_asked() -> None:
    made = ballot(A, B)
    assert made.done(B, b"x", 5) == Start()
    assert (made.phase, made.progress_ns) == (Phase.STARTED, 5)
    assert made.waiting_for() == [A, C]
    assert made.request(C, SUM, 6, eager=Eager.SEGMENTS) is None
    assert [made.done(peer, b"x", 7) for peer in (A, C)] == [None, Commit()]


@pytest.mark.parametrize("collective", [Collective.REDUCE, Collective.REDUCE_SCATTER])
def test_who_has_its_part_shows_that_all_have_asked(collective: Collective) -> None:
    assert ballot(A, B, what=part(collective, 3)).done(B, b"x", 5) == Start()


def test_without_having_asked_nobody_is_done() -> None:
    made = ballot(A)
    assert made.done(B, b"x", 5) is None
    assert made.phase is Phase.REQUESTED
    assert made.done(A, b"x", 5) == Start()
    assert made.done(B, b"x", 5) is None
    assert made.waiting_for() == [B, C]


def test_who_waits_for_the_start_is_not_done_before() -> None:
    made = ballot(A)
    assert made.request(B, SUM, 0) is None
    assert [made.done(peer, b"x", 5) for peer in (A, B)] == [None, None]
    assert made.phase is Phase.REQUESTED


def test_who_is_done_with_something_else() -> None:
    """Fingerprints of 32 bits may be alike by chance, and members may lie."""
    made = ballot(A, B)
    assert made.done(A, b"x", 5) == Start()
    decision = made.request(C, replace(SUM, op=ReduceOp.MAX), 6, eager=Eager.SEGMENTS)
    assert isinstance(decision, Abort)
    assert decision.cause is AbortCause.DESCRIPTOR_MISMATCH
    assert "peer 3 asked for MAX" in decision.reason


def test_a_member_is_lost_whose_request_never_came() -> None:
    """It has given all that it had to give: the others hold the result."""
    made = ballot(A, B)
    made.done(B, b"x", 5)
    assert made.lose([C], "gone", 6) == Tell((A,), msg.HoldingsQuery(op(), (C,)))
    assert made.done(A, b"x", 7) == Commit()


def test_a_member_is_lost_before_anybody_is_done() -> None:
    made = ballot(A, B)
    decision = made.lose([C], "gone", 6)
    assert isinstance(decision, Abort)
    assert made.phase is Phase.ABORTED


def test_another_master_takes_it_up() -> None:
    made = ballot(A, inherited=True)
    assert made.done(A, b"x", 5) == Start()
    assert made.wait_for_start() == [B, C]
    assert made.request(B, SUM, 6, eager=Eager.SEGMENTS) is None
    assert [made.done(peer, b"x", 7) for peer in (B, C)] == [None, Commit()]
