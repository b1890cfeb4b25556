"""The master's ballot over shared state, and what the master makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from pccl.machines.master.ballots.arrivals import Arrivals
from pccl.machines.master.ballots.ballot import Abort, Commit, Decision, Expel
from pccl.machines.master.ballots.sync_ballot import SyncBallot
from pccl.machines.master.events import CloseConnection, MasterEffect
from pccl.machines.repair import Tell
from pccl.protocol import messages as msg
from pccl.protocol.limits import Timing
from pccl.protocol.messages import CompareStates, Progress, SyncStarted
from pccl.protocol.operation import Phase
from pccl.protocol.shared_state import (
    NOTHING_EXPECTED,
    Difference,
    Elected,
    Expected,
    Lineage,
    Offer,
    ResumePolicy,
    SharedStateSyncStrategy,
    SyncPurpose,
)
from pccl.protocol.types import (
    SYNC_TAG,
    AbortCause,
    OperationId,
    PeerId,
    Quorum,
    RemovalCause,
    RoundKind,
)
from tests.support import offers
from tests.support.master_stage import NEW_RUN, RUN, SECOND, SUM, MasterStage, closed, sent, told
from tests.support.scenarios import op

POPULAR, RECEIVE_ONLY, SEND_ONLY = SharedStateSyncStrategy
OPERATION = OperationId(1, 0, 2, SYNC_TAG, 3)
BEFORE = Lineage(RUN, OperationId(1, 0, 2, SYNC_TAG, 2))
EXPECTED = Expected(7, BEFORE)
A, B, C = PeerId(4), PeerId(5), PeerId(9)
TIMING = Timing()


def offer(content: bytes = b"x", **changes: Any) -> Offer:
    return offers.offer(content, **{"revision": 7, "lineage": BEFORE, **changes})


NEW: dict[str, Any] = {"revision": 0, "lineage": None}


def ballot(
    *offers: Offer, expected: Expected = EXPECTED, inherited: bool = False
) -> tuple[SyncBallot, Decision | None]:
    """One in which the first members have asked; with the last decision."""
    made = SyncBallot(OPERATION, (A, B, C), A, 0, lambda: (expected, 0), inherited=inherited)
    decision: Decision | None = None
    for peer, offered in zip((A, B, C), offers, strict=False):
        assert decision is None
        decision = made.request(peer, offered, 0)
    return made, decision


def aborts(decision: Decision | None) -> Abort:
    assert isinstance(decision, Abort)
    return decision


def expels(decision: Decision | None) -> Expel:
    assert isinstance(decision, Expel)
    return decision


def elects(decision: Decision | None) -> Elected:
    assert isinstance(decision, Tell)
    assert isinstance(decision.message, SyncStarted)
    assert decision.message.operation == OPERATION
    return decision.message.elected


# -- the start -----------------------------------------------------------------------------------


def test_it_starts_when_the_last_member_has_offered() -> None:
    made, decision = ballot(offer(), offer(b"y"))
    assert decision is None
    assert made.request(A, offer(b"z"), 5) is None  # a second one changes nothing
    assert (made.waiting_for(), made.requested_by(), made.phase) == ([C], [A, B], Phase.REQUESTED)
    assert made.done(A, b"x", 6) is None  # before the start it does not count
    decision = made.request(C, offer(), 7)
    assert isinstance(decision, Tell)
    assert decision.peers == (A, B, C)
    elected = elects(decision)
    assert (elected.content, elected.revision) == (b"x", 7)
    assert (elected.sources, elected.behind, elected.outdated) == ((A, C), (B,), ())
    assert (made.phase, made.waiting_for(), made.progress_ns) == (Phase.STARTED, [A, B, C], 7)
    assert list(made.owed_to(B)) == [SyncStarted(OPERATION, elected)]
    assert list(made.owed_to(PeerId(77))) == []
    assert made.request(B, offer(), 8) is None


def test_it_commits_when_all_hold_what_is_elected() -> None:
    made, _ = ballot(offer(), offer(b"y"), offer())
    assert [made.done(peer, b"x", 9) for peer in (C, A, A)] == [None, None, None]
    assert made.done(B, b"x", 10) == Commit()
    assert made.expected_after(RUN) == Expected(8, Lineage(RUN, OPERATION))


def test_members_that_end_with_different_contents() -> None:
    made, _ = ballot(offer(), offer(b"y"), offer())
    made.done(A, b"x", 0)
    made.done(B, b"y", 0)
    reason = "results differ: peer 5 computed another result than the rest"
    assert made.done(C, b"x", 0) == Abort(AbortCause.DIGEST_MISMATCH, reason)


def test_verifying_leaves_what_is_expected_alone() -> None:
    asked = [offer(purpose=SyncPurpose.VERIFY, revision=revision) for revision in (1, 2, 3)]
    made, decision = ballot(*asked)
    assert elects(decision).revision == 7
    assert made.what == "verify"
    for peer in (A, B):
        made.done(peer, b"x", 0)
    assert made.done(C, b"x", 0) == Commit()
    assert made.expected_after(RUN) is None


# -- what it comes to nothing for ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (offer(strategy=SEND_ONLY), "sync_shared_state(SEND_ONLY)"),
        (offer(purpose=SyncPurpose.VERIFY), "verify"),
        (offer(resume=ResumePolicy.HIGHEST), "sync_shared_state(ENFORCE_POPULAR, resume=highest)"),
    ],
)
def test_calls_that_do_not_go_together(asked: Offer, words: str) -> None:
    _, decision = ballot(offer(), asked, offer())
    reason = f"peers 4, 9 asked for sync_shared_state(ENFORCE_POPULAR); peer 5 asked for {words}"
    assert decision == Abort(AbortCause.DESCRIPTOR_MISMATCH, reason)


def test_senders_and_receivers_go_together() -> None:
    _, decision = ballot(
        offer(strategy=SEND_ONLY), offer(b"y", strategy=RECEIVE_ONLY), offer(strategy=SEND_ONLY)
    )
    assert elects(decision).behind == (B,)


def test_nothing_to_go_on_with() -> None:
    made, decision = ballot(*(offer(revision=3) for _ in range(3)))
    assert isinstance(decision, Abort)
    assert decision.cause is AbortCause.STATE_UNAVAILABLE
    assert "peers 4, 5, 9: revision 3" in decision.reason
    assert made.phase is Phase.ABORTED
    assert made.request(A, offer(), 0) is None


def test_a_withdrawal_ends_it() -> None:
    made, _ = ballot(offer(), offer(b"y"), offer())
    assert made.withdraw(B, "Ctrl-C") == Abort(AbortCause.WITHDRAWN, "peer 5 withdrew: Ctrl-C")


# -- conflicts -------------------------------------------------------------------------------------

DIFFERENCE = Difference("w", 3, "tensor 'w' differs first in piece 3")


def conflicting(*layouts: bytes) -> tuple[SyncBallot, Decision | None]:
    return ballot(*(offer(layout=layout) for layout in layouts))


def test_who_differs_is_asked_how_and_expelled_by_a_majority() -> None:
    made, decision = conflicting(b"l", b"m", b"l")
    assert decision == Tell((B,), CompareStates(OPERATION, A))
    assert made.waiting_for() == [B]
    assert list(made.owed_to(B)) == [CompareStates(OPERATION, A)]
    assert list(made.owed_to(C)) == []
    assert made.compared(A, DIFFERENCE, 0) is None  # was not asked
    decision = expels(made.compared(B, DIFFERENCE, 0))
    assert (decision.peers, decision.cause) == ((B,), RemovalCause.STATE_CONFLICT)
    assert "peers 4, 9 differ from those of peer 5" in decision.reason
    assert DIFFERENCE.text in decision.reason
    assert made.compared(B, DIFFERENCE, 0) is None
    assert elects(made.lose([B], decision.reason, 5)).sources == (A, C)  # they go on at once


def test_without_a_majority_all_are_told_what_differs() -> None:
    made, decision = conflicting(b"l", b"m", b"n")
    assert decision == Tell((B, C), CompareStates(OPERATION, A))
    assert made.compared(C, Difference("", None, "no link"), 0) is None
    assert made.compared(C, DIFFERENCE, 0) is None  # has answered
    assert made.waiting_for() == [B]
    decision = aborts(made.compared(B, DIFFERENCE, 0))
    assert (decision.cause, decision.difference) == (AbortCause.STATE_MISMATCH, DIFFERENCE)
    assert DIFFERENCE.text in decision.reason


def test_each_set_of_members_is_told_its_own_difference() -> None:
    made, _ = conflicting(b"l", b"m", b"n")
    other = Difference("v", None, "tensor 0 is 'v' on one side, missing on the other")
    made.compared(B, DIFFERENCE, 0)
    decision = aborts(made.compared(C, other, 0))
    assert decision.difference == DIFFERENCE
    assert f"; peer 5: {DIFFERENCE.text}; peer 9: {other.text}; " in decision.reason


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"layout": b"m"}, "give all members the same tensors in the same order"),
        ({"purpose": SyncPurpose.VERIFY}, "sync_shared_state makes them equal"),
        ({"strategy": SEND_ONLY}, "make members with other contents RECEIVE_ONLY"),
        ({"unchanged": True}, "sync_shared_state without expect_unchanged makes them equal"),
    ],
    ids=["layouts", "verify", "senders", "unchanged"],
)
def test_who_is_told_of_a_conflict_is_told_what_to_do(asked: dict[str, Any], remedy: str) -> None:
    offers = [offer(b"x", **asked), offer(b"y", **asked | {"layout": b"layout"})]
    made = SyncBallot(OPERATION, (A, B), A, 0, lambda: (EXPECTED, 0))
    assert made.request(A, offers[0], 0) is None
    made.request(B, offers[1], 0)
    decision = aborts(made.compared(B, DIFFERENCE, 0))
    assert decision.reason.endswith(f"those of peer 5; {DIFFERENCE.text}; {remedy}")


def test_a_comparison_is_no_call_that_members_have_to_make() -> None:
    """Members whose processes compare are not stuck, although all their callers wait."""
    made, _ = ballot(offer())
    assert made.wait().missing == (B, C)
    made, _ = conflicting(b"l", b"m", b"n")
    assert (made.waiting_for(), made.wait().missing) == ([B, C], ())


def test_answers_that_do_not_come_are_not_waited_for_long() -> None:
    made, _ = conflicting(b"l", b"m", b"n")
    made.compared(B, DIFFERENCE, 0)
    assert made.look(TIMING, 10 * SECOND - 1) is None
    made.shift(5 * SECOND, 10 * SECOND)  # the master slept
    assert made.look(TIMING, 14 * SECOND) is None
    decision = aborts(made.look(TIMING, 15 * SECOND))
    assert decision.difference == DIFFERENCE


def test_nobody_answers() -> None:
    made, _ = conflicting(b"l", b"m", b"n")
    decision = aborts(made.look(TIMING, 10 * SECOND))
    assert decision.difference is not None
    assert (decision.difference.tensor, decision.difference.piece) == ("", None)


def test_a_loss_ends_a_conflict_or_begins_another() -> None:
    made, _ = conflicting(b"l", b"m", b"n")
    made.compared(B, DIFFERENCE, 0)
    decision = made.lose([A], "gone", 3)
    assert decision == Tell((C,), CompareStates(OPERATION, B))
    assert made.waiting_for() == [C]
    assert elects(made.lose([C], "gone", 4)).sources == (B,)


# -- losses ----------------------------------------------------------------------------------------


def test_a_loss_before_all_others_have_offered() -> None:
    made, _ = ballot(offer())
    assert made.lose([C], "gone", 0) == Abort(AbortCause.MEMBER_LOST, "the run lost peer 9: gone")


def test_a_loss_when_all_others_have_offered() -> None:
    made, _ = ballot(offer(b"y"), offer())
    assert not made.outlives_view
    decision = made.lose([C], "gone", 6)
    assert made.outlives_view
    assert isinstance(decision, Tell)
    assert decision.peers == (A, B)
    assert elects(decision).sources == (A,)
    assert made.progress_ns == 6


def test_a_source_is_lost_and_another_one_has_it() -> None:
    made, _ = ballot(offer(), offer(b"y"), offer())
    assert made.lose([A], "gone", 0) is None
    assert made.waiting_for() == [B, C]
    made.done(C, b"x", 0)
    assert made.done(B, b"x", 0) == Commit()


def test_the_only_source_is_lost() -> None:
    made, _ = ballot(offer(**NEW), offer(b"y"), offer(**NEW))
    assert made.lose([B], "gone", 0) == Abort(AbortCause.MEMBER_LOST, "the run lost peer 5: gone")


def test_the_only_source_is_lost_after_one_has_got_it() -> None:
    made, _ = ballot(offer(**NEW), offer(b"y"), offer(**NEW))
    made.done(A, b"y", 0)
    again = elects(made.lose([B], "gone", 0))
    assert (again.sources, again.extra, again.extra_sources) == ((A,), b"extra", (A,))
    assert again.behind == (A, C)
    assert made.done(C, b"y", 0) == Commit()


def test_the_last_who_lacks_it_is_lost() -> None:
    made, _ = ballot(offer(), offer(b"y"), offer())
    made.done(A, b"x", 0)
    made.done(C, b"x", 0)
    assert made.lose([B], "gone", 0) == Commit()


def test_everybody_is_lost() -> None:
    made, _ = ballot(offer(), offer(b"y"), offer())
    decision = made.lose([A, B, C], "gone", 0)
    assert decision == Abort(AbortCause.MEMBER_LOST, "the run lost peers 4, 5, 9: gone")


def test_what_may_differ_comes_from_another_one_if_its_holder_is_lost() -> None:
    made, decision = ballot(offer(extra=b"a"), offer(extra=b"b"), offer(b"z", extra=b"c", **NEW))
    elected = elects(decision)
    assert (elected.outdated, elected.extra, elected.extra_sources) == ((C,), b"a", (A,))
    again = elects(made.lose([A], "gone", 0))
    assert (again.extra, again.extra_sources) == (b"b", (B,))
    assert again.content == elected.content
    assert list(made.owed_to(C)) == [SyncStarted(OPERATION, again)]


def test_newcomers_that_are_done_have_what_may_differ_too() -> None:
    made, _ = ballot(offer(extra=b"a"), offer(b"z", **NEW), offer(b"z", **NEW))
    made.done(B, b"x", 0)
    again = elects(made.lose([A], "gone", 0))
    assert (again.sources, again.extra, again.extra_sources) == ((B,), b"a", (B,))
    assert made.done(C, b"x", 0) == Commit()


def test_nobody_is_left_who_has_what_may_differ() -> None:
    """Who is done had the contents, and has not received the rest; another one does without."""
    made, _ = ballot(
        offer(extra=b"a", strategy=SEND_ONLY),
        offer(b"y", extra=b"b", strategy=RECEIVE_ONLY),
        offer(b"z", strategy=RECEIVE_ONLY, **NEW),
    )
    made.done(B, b"x", 0)
    again = elects(made.lose([A], "gone", 0))
    assert (again.sources, again.extra, again.extra_sources) == ((B,), b"b", (B,))
    assert made.done(C, b"x", 0) == Commit()


# -- time ------------------------------------------------------------------------------------------


def test_newcomers_hold_up_the_others_for_so_long_only() -> None:
    timing = Timing(hold_s=20.0)
    made, _ = ballot(offer(), offer(), offer(b"z", **NEW))
    made.done(A, b"x", 0)
    for second in range(20):
        moved = Progress(OPERATION, second, 0, second)
        made.report(C, moved, second * SECOND)
    assert made.look(timing, 20 * SECOND) is None  # another one is not done either
    made.done(B, b"x", 0)
    assert made.look(timing, 20 * SECOND - 1) is None
    decision = expels(made.look(timing, 20 * SECOND))
    assert (decision.peers, decision.cause) == ((C,), RemovalCause.TOO_SLOW)
    assert "20 s" in decision.reason
    assert made.lose([C], "slow", 0) == Commit()


def test_a_master_that_slept_gives_newcomers_their_time() -> None:
    made, _ = ballot(offer(), offer(), offer(b"z", **NEW))
    made.done(A, b"x", 0)
    made.done(B, b"x", 0)
    made.shift(25 * SECOND, 40 * SECOND)
    assert made.look(TIMING, 54 * SECOND) is None
    assert isinstance(made.look(TIMING, 55 * SECOND), Expel)


def test_sources_are_awaited_while_nothing_comes_from_them() -> None:
    """One that stands still is removed at the deadline, before those who wait for its pieces."""
    made, decision = ballot(offer(), offer(b"y", **NEW), offer(b"z", **NEW))
    assert elects(decision).sources == (A,)
    made.done(A, b"x", 0)
    made.progress_ns = 100
    assert made.awaited(99) == [B, C]
    assert made.awaited(100) == [A, B, C]
    made.done(B, b"x", 150)
    assert made.awaited(120) == [C]


def test_members_of_old_may_take_as_long_as_they_move() -> None:
    made, _ = ballot(offer(), offer(), offer(b"z"))
    made.done(A, b"x", 0)
    made.done(B, b"x", 0)
    made.report(C, Progress(OPERATION, 1, 0, 100), 50 * SECOND)
    made.report(C, Progress(OPERATION, 1, 0, 100), 70 * SECOND)  # no progress
    assert made.look(TIMING, 80 * SECOND - 1) is None
    decision = expels(made.look(TIMING, 80 * SECOND))
    assert (decision.peers, decision.cause) == ((C,), RemovalCause.NO_PROGRESS)
    assert "30.0 s" in decision.reason


def test_if_nobody_moves_nobody_is_to_blame() -> None:
    made, _ = ballot(offer(b"y"), offer(**NEW), offer(**NEW))
    made.report(B, Progress(OPERATION, 0, 0, 0), 0)
    assert made.look(TIMING, 1000 * SECOND) is None


# -- after a restart -------------------------------------------------------------------------------


def test_it_goes_on_under_another_master() -> None:
    """Who was done says so again, perhaps before all have offered."""
    made, _ = ballot(offer(), offer(b"y"), inherited=True)
    assert made.done(A, b"x", 0) is None
    decision = made.request(C, offer(), 0)
    assert elects(decision).behind == (B,)
    assert made.waiting_for() == [B, C]
    made.done(C, b"x", 0)
    assert made.done(B, b"x", 0) == Commit()


def test_all_were_done_under_the_master_before() -> None:
    made, _ = ballot(offer(), offer(b"y"), inherited=True)
    for peer in (A, B, C):
        assert made.done(peer, b"x", 0) is None
    assert made.request(C, offer(), 0) == Commit()
    assert made.expected_after(RUN) == Expected(8, Lineage(RUN, OPERATION))


def test_the_master_before_has_elected_something_else() -> None:
    """Nobody is told that he holds what he does not hold."""
    made, _ = ballot(offer(), offer(b"y"), inherited=True)
    for peer in (A, B, C):
        assert made.done(peer, b"y", 0) is None
    decision = aborts(made.request(C, offer(), 0))
    assert decision.cause is AbortCause.MEMBER_LOST  # all call again


def test_a_member_is_lost_with_the_master() -> None:
    """Others may be elected without it than those that some are done with."""
    made, _ = ballot(offer(**NEW), offer(), inherited=True)
    made.done(A, b"x", 0)
    decision = made.lose([C], "gone", 0)
    assert decision == Abort(AbortCause.MEMBER_LOST, "the run lost peer 9: gone")


# -- the master ------------------------------------------------------------------------------------

NOW, REDUCE = op(tag=SYNC_TAG, view=2), op(view=2)


def sync(master: MasterStage, n: int, *offers: Offer) -> msg.OperationEnded:
    """All members synchronize and are done; return the last message to the first of them."""
    what = replace(NOW, n=n)
    effects: list[MasterEffect] = []
    for peer, offered in enumerate(offers, 1):
        effects = master.hear(peer, msg.SyncRequest(what, offered))
    if told(effects, SyncStarted):
        for peer in range(1, len(offers) + 1):
            effects = master.hear(peer, msg.OperationDone(what, offers[0].content))
    return told(effects, msg.OperationEnded)[0][1]


@pytest.mark.parametrize(
    "message", [msg.OperationRequest(NOW, SUM), msg.SyncRequest(REDUCE, offer(**NEW))]
)
def test_the_tag_of_shared_state_is_for_shared_state_only(message: msg.PeerMessage) -> None:
    (closing,) = MasterStage().new(2).hear(1, message)
    assert isinstance(closing, CloseConnection)
    assert closing.connection == 1
    assert "for shared state" in closing.reason


def test_answers_that_nobody_asked_for() -> None:
    master = MasterStage().new(2)
    assert master.hear(1, msg.OperationRequest(REDUCE, SUM)) == []
    assert master.hear(1, msg.StatesCompared(REDUCE, DIFFERENCE)) == []
    master.hear(1, msg.SyncRequest(NOW, offer(**NEW)))
    assert master.hear(1, msg.StatesCompared(NOW, DIFFERENCE)) == []
    assert closed(master.hear(1, msg.StatesCompared(replace(NOW, n=9), DIFFERENCE))) == [1]


def test_the_master_expects_what_follows_the_last_synchronization() -> None:
    master = MasterStage().new(2)
    outcome = sync(master, 0, offer(revision=40, lineage=None), offer(**NEW))
    assert (outcome.abort, outcome.contributors) == (None, (1, 2))
    lineage = Lineage(NEW_RUN, NOW)
    outcome = sync(master, 1, *(offer(revision=40, lineage=lineage) for _ in range(2)))
    assert outcome.abort is AbortCause.STATE_UNAVAILABLE
    assert "push_revision()" in outcome.reason
    outcome = sync(master, 2, *(offer(revision=41, lineage=lineage) for _ in range(2)))
    assert outcome.abort is None


def test_a_newcomer_is_told_what_is_expected() -> None:
    """If all others are gone, it is the only one that can tell a later master."""
    master = MasterStage().new(2)
    sync(master, 0, offer(revision=40, lineage=None), offer(**NEW))
    master.register(3)
    for peer in (1, 2):
        master.link(3, peer)
        master.link(peer, 3)
    admitted = told(master.round(RoundKind.UPDATE_TOPOLOGY, 1, 1, 2), msg.Admitted)
    expected = Expected(41, Lineage(NEW_RUN, NOW))
    assert [(peer, message.expected) for peer, message in admitted] == [(3, expected)]


def test_the_highest_revision_that_there_is() -> None:
    """One more would be too large a number for anybody."""
    master = MasterStage().new(2)
    highest = offer(revision=2**64 - 1, lineage=None)
    sync(master, 0, highest, highest)
    known = master.machine.ballots.expected[0]
    assert known.revision == 2**64 - 1
    again = replace(highest, lineage=known.lineage)
    assert sync(master, 1, again, again).abort is None


def test_a_conflict_that_is_told_to_everybody() -> None:
    master = MasterStage().new(2)
    asked = [offer(**NEW), offer(**NEW | {"layout": b"other"})]
    assert master.hear(1, msg.SyncRequest(NOW, asked[0])) == []
    question = (2, CompareStates(NOW, PeerId(1)))
    assert sent(master.hear(2, msg.SyncRequest(NOW, asked[1]))) == [question]
    ends = told(master.hear(2, msg.StatesCompared(NOW, DIFFERENCE)), msg.OperationEnded)
    cause = AbortCause.STATE_MISMATCH
    assert [(peer, m.abort, m.difference) for peer, m in ends] == [
        (peer, cause, DIFFERENCE) for peer in (1, 2)
    ]
    assert master.machine.ballots.expected.get(0, NOTHING_EXPECTED) == NOTHING_EXPECTED


def one_is_done(master: MasterStage, *offers: Offer) -> Iterator[list[MasterEffect]]:
    """The first member holds what is elected; the other one moves on, second by second."""
    for peer, offered in enumerate(offers, 1):
        master.hear(peer, msg.SyncRequest(NOW, offered))
    assert sent(master.hear(1, msg.OperationDone(NOW, b"x"))) == []
    while True:
        moved = Progress(NOW, 0, 0, master.now_ns // SECOND)
        master.hear(2, msg.Heartbeat(progress=(moved,)))
        yield master.wait(1, 1, 2)


def test_nobody_is_a_newcomer_in_the_first_synchronization_of_a_group() -> None:
    master = MasterStage().new(2)
    seconds = one_is_done(master, offer(revision=3, lineage=None), offer(b"z", **NEW))
    assert not any(closed(effects) for effects in islice(seconds, 100))


def test_a_slow_newcomer_is_removed_and_the_others_go_on() -> None:
    master, before = MasterStage().new(2), Lineage(NEW_RUN, NOW)
    master.machine.ballots.expected[0] = Expected(3, before)
    seconds = one_is_done(master, offer(revision=3, lineage=before), offer(b"z", **NEW))
    effects = next(effects for effects in islice(seconds, 32) if closed(effects))
    assert master.now_ns >= 30 * SECOND
    ends = [m for peer, m in told(effects, msg.OperationEnded) if peer == 1]
    assert [(m.abort, m.contributors) for m in ends] == [(None, (1,))]
    refused = [m for peer, m in told(effects, msg.Refused) if peer == 2]
    assert [m.cause for m in refused] == [RemovalCause.TOO_SLOW]


# -- a quorum --------------------------------------------------------------------------------------

QUORUM = Quorum(2, grace_ms=50)
MS = 1_000_000


def asked(*asking: PeerId, content: bytes = b"x", quorum: Quorum | None = QUORUM) -> SyncBallot:
    made, _ = ballot()
    for peer in asking:
        made.request(peer, offer(content), 0, quorum)
    return made


def test_members_synchronize_without_one_that_is_late() -> None:
    made, arrivals = asked(A), Arrivals()
    assert made.goes_on_ns(arrivals) is None
    assert made.request(C, offer(b"y"), 20 * MS, QUORUM) is None
    assert made.goes_on_ns(arrivals) == 70 * MS
    elected = elects(made.go_on())
    assert {*elected.sources, *elected.behind} == {A, C}
    assert (made.left_out, made.concerned, made.waiting_for()) == ([B], [A, B, C], [A, C])
    assert made.goes_on_ns(arrivals) is None
    made.done(A, elected.content, 80 * MS)
    assert made.done(C, elected.content, 90 * MS) == Commit()
    assert made.contributors == (A, C)
    assert made.lags_ns == [None, 0, 0], "the second made the quorum"


def test_who_was_late_hears_what_was_elected_but_not_from_whom() -> None:
    made = asked(A, C)
    assert made.elected_without_all is None  # nothing is elected
    elected = elects(made.go_on())
    told = made.elected_without_all
    assert told is not None
    assert (told.content, told.layout, told.revision) == (
        elected.content, elected.layout, elected.revision
    )  # fmt: skip
    assert (told.sources, told.behind, told.outdated, told.extra_sources) == ((), (), (), ())
    assert list(made.owed_to(B)) == []


def test_all_came_in_time() -> None:
    made = asked(A, B, C)
    assert made.phase is Phase.STARTED
    assert (made.left_out, made.elected_without_all) == ([], None)
    assert made.goes_on_ns(Arrivals()) is None


@pytest.mark.parametrize(
    "quorums", [(QUORUM, None), (None, QUORUM), (QUORUM, Quorum(3, grace_ms=50))]
)
def test_members_that_name_different_quorums_wait_for_all(
    quorums: tuple[Quorum | None, ...],
) -> None:
    made, _ = ballot()
    for peer, quorum in zip((A, B), quorums, strict=True):
        made.request(peer, offer(), 0, quorum)
    assert made.goes_on_ns(Arrivals()) is None
    elects(made.request(C, offer(), 9, QUORUM))


def test_without_the_expected_state_members_wait_for_all() -> None:
    """Whoever has not offered may hold it."""
    made, arrivals = ballot()[0], Arrivals()
    newcomer = offer(b"new", revision=9, lineage=None)
    for peer in (A, C):
        made.request(peer, newcomer, 0, QUORUM)
    assert made.goes_on_ns(arrivals) is None
    assert made.wait().missing == (B,)
    elected = elects(made.request(B, offer(), 5, QUORUM))
    assert (elected.content, elected.behind) == (b"x", (A, C))


def test_whoever_compares_its_state_is_not_late() -> None:
    """All have offered. The grace is for members that have not."""
    made, _ = ballot()
    made.request(A, offer(layout=b"1"), 0, QUORUM)
    made.request(B, offer(layout=b"2"), 0, QUORUM)
    decision = made.request(C, offer(layout=b"2"), 0, QUORUM)
    assert isinstance(decision, Tell)
    assert isinstance(decision.message, CompareStates)
    assert made.goes_on_ns(Arrivals()) is None
    assert (made.left_out, made.participants) == ([], (A, B, C))


def test_a_conflict_among_those_that_were_in_time() -> None:
    made, _ = ballot()
    made.request(A, offer(layout=b"1"), 0, QUORUM)
    made.request(B, offer(layout=b"2"), 0, QUORUM)
    decision = made.go_on()
    assert isinstance(decision, Tell)
    assert isinstance(decision.message, CompareStates)
    assert made.left_out == [C]
    difference = Difference("weights", 3, "element 3 differs")
    (asked,) = decision.peers
    assert aborts(made.compared(asked, difference, 1)).cause is AbortCause.STATE_MISMATCH


def test_a_newcomer_that_is_left_alone_elects_nothing() -> None:
    """The member that is late may hold the state of the group."""
    made, _ = ballot()
    made.request(A, offer(layout=b"1"), 0, QUORUM)
    made.request(B, offer(layout=b"2", **NEW), 0, QUORUM)
    assert isinstance(made.go_on(), Tell)
    assert made.left_out == [C]
    assert aborts(made.lose([A], "gone", 1)).cause is AbortCause.MEMBER_LOST


def test_who_was_late_is_lost() -> None:
    made = asked(A, C)
    elected = elects(made.go_on())
    assert made.lose([B], "gone", 1) is None
    assert (made.left_out, made.concerned, made.outlives_view) == ([], [A, C], True)
    made.done(A, elected.content, 2)
    assert made.done(C, elected.content, 2) == Commit()


def test_who_was_in_time_is_lost_and_the_rest_goes_on() -> None:
    made = asked(A, C)
    elected = elects(made.go_on())
    made.done(A, elected.content, 1)
    assert made.lose([C], "gone", 2) == Commit()
    assert (made.contributors, made.concerned) == ((A,), [A, B])


def test_a_loss_before_enough_have_offered_ends_it() -> None:
    made = asked(A)
    assert aborts(made.lose([C], "gone", 1)).cause is AbortCause.MEMBER_LOST
