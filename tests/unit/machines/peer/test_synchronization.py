"""Scenarios of one peer that synchronizes shared state, with the master's messages written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.machines.peer import events as ev
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.shared_state import Difference, Elected, Expected, Lineage, Offer, SyncPurpose
from pccl.protocol.types import (
    SYNC_TAG,
    AbortCause,
    Descriptor,
    OperationId,
    PeerId,
    Quorum,
    RoundId,
    RoundKind,
)
from tests.support.offers import offer
from tests.support.peer_stage import BACK, RUN, SUM, PeerStage, ended, raised, sent
from tests.support.scenarios import op, roster

ME = PeerId(2)
OFFER = offer(revision=4)
VERIFY = replace(OFFER, purpose=SyncPurpose.VERIFY)
ELECTED = Elected(4, b"layout", b"content", (PeerId(1), ME), (), ())
OF_THE_OTHER = replace(ELECTED, sources=(PeerId(1),), behind=(ME,))


NOW, NEXT = (op(n, tag=SYNC_TAG) for n in (0, 1))


def elects(offer: Offer = OFFER, elected: Elected = ELECTED) -> PeerStage:
    """A member whose call 9 has asked, and something is elected."""
    peer = PeerStage().member()
    peer.do(ev.SyncCall(9, offer))
    assert peer.do(msg.SyncStarted(NOW, elected)) == [ev.BeginSync(NOW, elected)]
    return peer


def commits(
    peer: PeerStage, what: OperationId = NOW, elected: Elected = ELECTED, version: int = 1
) -> list[ev.PeerEffect]:
    """It begins, is complete here, and then everywhere."""
    peer.do(msg.SyncStarted(what, elected))
    peer.do(ev.ReduceDone(what, elected.content))
    return peer.do(ended(what, version=version))


def offers(effects: list[ev.PeerEffect]) -> list[Offer]:
    return [message.offer for message in sent(effects) if isinstance(message, msg.SyncRequest)]


def test_from_the_call_to_the_result() -> None:
    peer = PeerStage().member()
    assert peer.do(ev.SyncCall(9, OFFER)) == [
        ev.PostSync(9, NOW, (PeerId(1), ME)),
        ev.Send(msg.SyncRequest(NOW, OFFER)),
    ]
    peer.do(msg.SyncStarted(NOW, ELECTED))
    assert peer.do(msg.SyncStarted(NOW, ELECTED)) == []  # after a reconnect
    assert peer.do(ev.ReduceDone(NOW, b"content")) == [ev.Send(msg.OperationDone(NOW, b"content"))]
    result = ev.SyncResult(NOW, ELECTED, (PeerId(1), ME))
    assert peer.do(ended(NOW)) == [ev.End(NOW, True), ev.ReturnCall(9, result)]
    assert peer.do(ev.SyncCall(10, OFFER))[0] == ev.PostSync(10, NEXT, (PeerId(1), ME))


def test_what_is_elected_may_change_before_it_is_complete_here() -> None:
    peer = elects()
    other = replace(ELECTED, sources=(ME,))
    assert peer.do(msg.SyncStarted(NOW, other)) == [ev.BeginSync(NOW, other)]
    peer.do(ev.ReduceDone(NOW, b"content"))
    assert peer.do(msg.SyncStarted(NOW, ELECTED)) == []
    effects = peer.do(ended(NOW))
    assert ev.ReturnCall(9, ev.SyncResult(NOW, ELECTED, (PeerId(1), ME))) in effects


def test_comparing() -> None:
    peer = PeerStage().member()
    peer.do(ev.SyncCall(9, OFFER))
    question = msg.CompareStates(NOW, PeerId(1))
    assert peer.do(question) == [ev.CompareSync(NOW, PeerId(1))]
    difference = Difference("w", 2, "they differ")
    assert peer.do(ev.ComparisonDone(NOW, difference)) == [
        ev.Send(msg.StatesCompared(NOW, difference))
    ]
    message = replace(ended(NOW, AbortCause.STATE_MISMATCH, "conflict"), difference=difference)
    error = raised(peer.do(message), errors.StateMismatch)
    assert (error.tensor, error.piece) == ("w", 2)
    assert peer.do(question) == []  # it is over


def test_a_question_that_comes_after_the_caller_has_left() -> None:
    """His state is lent no more."""
    peer = PeerStage().member()
    peer.do(ev.SyncCall(9, OFFER))
    peer.do(ev.LeaveCall(9, "timeout_s=1 ran out"))
    assert peer.do(msg.CompareStates(NOW, PeerId(1))) == []


def test_nobody_gives_what_is_missing() -> None:
    peer = PeerStage().member()
    peer.do(ev.SyncCall(9, OFFER))
    assert peer.do(ev.SyncStarved(NOW, "why")) == []  # nothing is elected yet
    peer.do(msg.SyncStarted(NOW, ELECTED))
    assert peer.do(ev.SyncStarved(NOW, "why")) == [ev.Send(msg.Withdraw(NOW, "why"))]
    effects = peer.do(ended(NOW, AbortCause.WITHDRAWN, "peer 2 withdrew: why"))
    error = raised(effects, errors.CollectiveAborted)
    assert "shared state: peer 2 withdrew: why" in str(error)


@pytest.mark.parametrize("detached", [False, True])
def test_operations_of_this_peer_are_open(detached: bool) -> None:
    peer = PeerStage().member()
    operation = op()
    peer.do(ev.ReduceCall(9, 5, SUM, detached=detached))
    raised(peer.do(ev.SyncCall(10, OFFER)), errors.PendingOperations)
    peer.do(msg.OperationStarted(operation))
    peer.do(ev.ReduceDone(operation, b"digest"))
    peer.do(ended(operation))
    if detached:  # its outcome is not noticed yet
        raised(peer.do(ev.SyncCall(11, OFFER)), errors.PendingOperations)
        peer.do(ev.Claim(9))
    assert len(offers(peer.do(ev.SyncCall(12, OFFER)))) == 1
    raised(peer.do(ev.SyncCall(13, OFFER)), errors.PendingOperations)


# -- a state that lacks something ------------------------------------------------------------------


def behind() -> PeerStage:
    """The others have committed a reduce that it has left."""
    peer = PeerStage().member()
    peer.do(ev.LeftCommitted(op()))
    raised(peer.do(ev.ReduceCall(8, 5, SUM)), errors.ResyncRequired)
    return peer


def test_a_stale_state_is_offered_as_such_and_mended() -> None:
    peer = behind()
    assert offers(peer.do(ev.SyncCall(9, OFFER))) == [replace(OFFER, stale=True)]
    commits(peer)
    assert not peer.machine.needs_resync
    assert offers(peer.do(ev.SyncCall(10, OFFER))) == [OFFER]


@pytest.mark.parametrize("how", ["aborted", "verified"])
def test_it_is_not_mended(how: str) -> None:
    peer = behind()
    peer.do(ev.SyncCall(9, OFFER if how == "aborted" else VERIFY))
    if how == "verified":
        assert any(isinstance(e, ev.ReturnCall) for e in commits(peer))
    else:
        peer.do(msg.SyncStarted(NOW, ELECTED))
        peer.do(ended(NOW, AbortCause.MEMBER_LOST, "gone"))
    assert peer.machine.needs_resync
    assert offers(peer.do(ev.SyncCall(10, OFFER))) == [replace(OFFER, stale=True)]


def test_the_caller_knows_that_it_is_torn() -> None:
    peer = PeerStage().member()
    torn = replace(OFFER, stale=True)
    assert offers(peer.do(ev.SyncCall(9, torn))) == [torn]


# -- losses ----------------------------------------------------------------------------------------


def test_the_newest_roster_counts_if_the_view_was_lost() -> None:
    """A reduce would raise once; a synchronization does with whoever is left."""
    peer = PeerStage().member(1, 2, 3)
    peer.do(msg.RosterChanged(roster(2, 2, 1, 2)))
    what = op(tag=SYNC_TAG, view=2)
    assert peer.do(ev.SyncCall(9, OFFER))[0] == ev.PostSync(9, what, (PeerId(1), ME))
    assert peer.machine.seen == roster(1, 1, 1, 2, 3)
    commits(peer, what, version=2)
    assert peer.machine.seen == roster(2, 2, 1, 2)


def test_an_outcome_that_came_before_the_call() -> None:
    """The others failed before this peer called: it fails for the same reason, once."""
    peer = PeerStage().member()
    mismatch = ended(NOW, AbortCause.DESCRIPTOR_MISMATCH, "strategies")
    assert peer.do(mismatch) == [ev.ForgetEarly()]
    raised(peer.do(ev.SyncCall(9, OFFER)), errors.DescriptorMismatch)
    withdrawn = ended(NEXT, AbortCause.WITHDRAWN, "peer 1 withdrew")
    peer.do(withdrawn)
    # Whoever withdrew calls again, or not at all: nothing is to be told of that.
    assert peer.do(ev.SyncCall(10, OFFER))[0] == ev.PostSync(
        10, op(2, tag=SYNC_TAG), (PeerId(1), ME)
    )


# -- leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [False, True])
def test_leaving_before_it_is_complete_here(started: bool) -> None:
    peer = elects() if started else PeerStage().member()
    if not started:
        peer.do(ev.SyncCall(9, OFFER))
    effects = peer.do(ev.LeaveCall(9, "timeout_s=1 ran out"))
    assert effects[:2] == [ev.End(NOW, False), ev.Send(msg.Withdraw(NOW, "timeout_s=1 ran out"))]
    raised(effects, errors.DeadlineExceeded)
    peer.do(ended(NOW, AbortCause.WITHDRAWN, "peer 2 withdrew"))
    assert not peer.machine.needs_resync
    assert peer.do(ev.SyncCall(10, OFFER))[0] == ev.PostSync(10, NEXT, (PeerId(1), ME))


def left_when_done(offer: Offer = OFFER, elected: Elected = ELECTED) -> PeerStage:
    peer = elects(offer, elected)
    peer.do(ev.ReduceDone(NOW, b"content"))
    effects = peer.do(ev.LeaveCall(9, "Ctrl-C"))
    assert effects[0] == ev.Detach(NOW)
    error = raised(effects, errors.OutcomeUnknown)
    assert "after shared state was complete here" in str(error)
    assert str(SYNC_TAG) not in str(error)
    return peer


def test_left_when_complete_and_committed() -> None:
    peer = left_when_done(elected=OF_THE_OTHER)
    assert peer.do(ev.SyncCall(10, OFFER)) == [ev.Send(msg.OutcomeQuery(NOW))]
    raised(peer.do(ended(NOW)), errors.ResyncRequired)  # the other members have continued
    assert offers(peer.do(ev.SyncCall(11, OFFER))) == [replace(OFFER, stale=True)]
    assert peer.machine.needs_resync


def test_left_when_complete_and_committed_and_nothing_was_received() -> None:
    peer = left_when_done()
    assert peer.do(ev.SyncCall(10, OFFER)) == [ev.Send(msg.OutcomeQuery(NOW))]
    result = ev.SyncResult(NOW, ELECTED, (PeerId(1), ME))
    assert peer.do(ended(NOW)) == [ev.End(NOW, True), ev.ReturnCall(10, result)]
    lineage = Lineage(RUN, NOW)
    # It did not return to the caller's state that time either, and is not the next call any more.
    assert offers(peer.do(ev.SyncCall(11, OFFER))) == [replace(OFFER, stale=True, lineage=lineage)]


def test_left_when_complete_and_committed_and_gone_on() -> None:
    peer = left_when_done()
    peer.do(ended(NOW))
    further = replace(OFFER, revision=5, content=b"further")
    expected = replace(further, lineage=Lineage(RUN, NOW))
    assert offers(peer.do(ev.SyncCall(10, further))) == [expected]


def test_left_when_complete_and_aborted() -> None:
    peer = left_when_done()
    peer.do(ended(NOW, AbortCause.MEMBER_LOST, "gone"))
    assert not peer.machine.needs_resync
    assert offers(peer.do(ev.SyncCall(10, OFFER))) == [OFFER]


def test_left_a_comparison_that_is_committed() -> None:
    peer = left_when_done(VERIFY)
    peer.do(ended(NOW))
    assert not peer.machine.needs_resync


def test_why_a_resync_is_required() -> None:
    peer = left_when_done(elected=OF_THE_OTHER)
    peer.do(ended(NOW))
    error = raised(peer.do(ev.ReduceCall(10, 5, SUM)), errors.ResyncRequired)
    assert "connect() again" in str(error)
    assert str(SYNC_TAG) not in str(error)


# -- reconnecting ----------------------------------------------------------------------------------


def test_after_a_reconnect_everything_is_said_again() -> None:
    peer = elects()
    peer.do(ev.ReduceDone(NOW, b"content"))
    peer.do(ev.ControlClosed("broken"))
    peer.do(ev.ControlOpened(RUN, 1))
    assert sent(peer.do(msg.Resumed(1)))[-2:] == [
        msg.SyncRequest(NOW, OFFER),
        msg.OperationDone(NOW, b"content"),
    ]


def test_what_is_expected_goes_to_the_next_master() -> None:
    peer = PeerStage().member()
    assert peer.machine.synchronizations.expected == Expected()
    peer.do(ev.SyncCall(9, VERIFY))
    commits(peer)
    assert peer.machine.synchronizations.expected == Expected()
    peer.do(ev.SyncCall(10, OFFER))
    commits(peer, NEXT)
    expected = Expected(5, Lineage(RUN, NEXT))
    assert peer.machine.synchronizations.expected == expected
    peer.do(ev.ControlClosed("broken"))
    said = sent(peer.do(ev.ControlOpened(RUN, 2)))
    returns = [message for message in said if isinstance(message, msg.Return)]
    assert [message.expected for message in returns] == [expected]


# -- late ----------------------------------------------------------------------------------------

QUORUM = Quorum(2, grace_ms=50)
SAME = replace(ELECTED, layout=OFFER.layout, content=OFFER.content, sources=())
"""What the others elected without this peer, and what this peer holds already."""
LATER = replace(SAME, content=b"other contents")


def late(*elected: Elected) -> PeerStage:
    """A member of three, without which the others have synchronized."""
    peer = PeerStage().member(1, 2, 3)
    for n, one in enumerate(elected):
        peer.do(without_me(n, one))
    return peer


def without_me(n: int, elected: Elected) -> msg.OperationEnded:
    return ended(op(n, tag=SYNC_TAG), contributors=(PeerId(1), PeerId(3)), elected=elected)


def test_a_late_call_returns_what_was_elected_without_it() -> None:
    peer = late(SAME)
    result = ev.SyncResult(NOW, SAME, (PeerId(1), PeerId(3)))
    assert peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM)) == [BACK, ev.ReturnCall(9, result)]
    lineage = Lineage(RUN, NOW)
    following = replace(OFFER, revision=5, lineage=lineage)
    post, request = peer.do(ev.SyncCall(10, following, quorum=QUORUM))
    assert post == ev.PostSync(10, NEXT, (PeerId(1), ME, PeerId(3)))
    assert request == ev.Send(msg.SyncRequest(NEXT, following, QUORUM))


def test_a_call_that_waits_is_answered_by_the_outcome_without_it() -> None:
    peer = PeerStage().member(1, 2, 3)
    peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM))
    result = ev.SyncResult(NOW, SAME, (PeerId(1), PeerId(3)))
    assert peer.do(without_me(0, SAME)) == [ev.End(NOW, False), BACK, ev.ReturnCall(9, result)]


def fetch_of(operation: OperationId, elected: Elected) -> ev.FetchResult:
    return ev.FetchResult(9, operation, Descriptor.sync(), elected.content)


def test_a_late_call_with_other_contents_fetches_the_last_ones() -> None:
    peer = PeerStage().member(1, 2, 3)
    peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM))
    assert peer.do(without_me(0, LATER)) == [ev.End(NOW, False), BACK, fetch_of(NOW, LATER)]
    result = ev.SyncResult(NOW, LATER, (PeerId(1), PeerId(3)))
    assert peer.do(ev.ResultFetched(9, True)) == [ev.ReturnCall(9, result)]
    peer = late(LATER, LATER)
    assert peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM)) == [BACK, fetch_of(NEXT, LATER)]


def test_a_late_call_that_had_begun_returns_only_after_a_look_at_its_contents() -> None:
    """What an earlier master elected may have overwritten what this peer had."""
    peer = PeerStage().member(1, 2, 3)
    peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM))
    before = replace(LATER, sources=(PeerId(1),), behind=(ME,))
    assert peer.do(msg.SyncStarted(NOW, before)) == [ev.BeginSync(NOW, before)]
    assert peer.do(without_me(0, SAME)) == [ev.End(NOW, False), BACK, fetch_of(NOW, SAME)]
    result = ev.SyncResult(NOW, SAME, (PeerId(1), PeerId(3)))
    assert peer.do(ev.ResultFetched(9, True)) == [ev.ReturnCall(9, result)]


THIRD = op(2, tag=SYNC_TAG)


def test_of_several_outcomes_the_last_one_counts() -> None:
    """Even if this peer has the contents of an earlier one: so it need not catch up in steps."""
    peer = late(LATER, SAME, LATER)
    assert peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM)) == [BACK, fetch_of(THIRD, LATER)]
    result = ev.SyncResult(THIRD, LATER, (PeerId(1), PeerId(3)))
    assert peer.do(ev.ResultFetched(9, True)) == [ev.ReturnCall(9, result)]
    post, _ = peer.do(ev.SyncCall(10, replace(OFFER, revision=5), quorum=QUORUM))
    assert post == ev.PostSync(10, op(3, tag=SYNC_TAG), (PeerId(1), ME, PeerId(3)))


def test_without_a_source_an_earlier_one_with_the_same_contents_counts() -> None:
    """The next call is for those that follow."""
    peer = PeerStage().member(1, 2, 3)
    for n, elected in enumerate((LATER, SAME, LATER)):
        peer.do(replace(without_me(n, elected), sequence=n + 3))
    peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM))
    result = ev.SyncResult(NEXT, SAME, (PeerId(1), PeerId(3)))
    assert peer.do(ev.ResultFetched(9, False)) == [ev.ReturnCall(9, result)]
    following = replace(OFFER, revision=5, content=b"a step further")
    assert peer.do(ev.SyncCall(9, following, quorum=QUORUM)) == [BACK, fetch_of(THIRD, LATER)]


def test_an_attempt_after_the_last_outcome_makes_no_difference() -> None:
    peer = late(SAME)
    peer.do(ended(NEXT, AbortCause.MEMBER_LOST))
    result = ev.SyncResult(NOW, SAME, (PeerId(1), PeerId(3)))
    assert peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM)) == [BACK, ev.ReturnCall(9, result)]


def test_without_a_source_the_caller_decides_and_then_waits_for_the_next() -> None:
    """Otherwise it would wait for members that may wait for another call of this peer."""
    peer = late(LATER)
    peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM))
    raised(peer.do(ev.ResultFetched(9, False)), errors.ResyncRequired)
    post, request = peer.do(ev.SyncCall(10, OFFER, quorum=QUORUM))
    assert post == ev.PostSync(10, NEXT, (PeerId(1), ME, PeerId(3)))
    assert request == ev.Send(msg.SyncRequest(NEXT, replace(OFFER, stale=True), QUORUM))


def test_who_fetches_waits_for_nobody_and_may_leave() -> None:
    peer = late(LATER)
    peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM))
    assert sent(peer.do(ev.CallersAsked(0, True))) == [msg.BlockedReply(0, False)]
    raised(peer.do(ev.LeaveCall(9, "its time is over")), errors.DeadlineExceeded)
    assert peer.do(ev.ResultFetched(9, True)) == []
    again = replace(fetch_of(NOW, LATER), call=10)
    assert peer.do(ev.SyncCall(10, OFFER, quorum=QUORUM)) == [BACK, again]


def test_it_may_have_been_late_in_a_view_that_its_caller_never_saw() -> None:
    peer = PeerStage().member(1, 2, 3)
    peer.do(msg.RosterChanged(roster(2, 2, 1, 2, 3)))
    missed = op(tag=SYNC_TAG, view=2)
    peer.do(replace(without_me(0, LATER), operation=missed))
    peer.do(msg.RosterChanged(roster(3, 3, 1, 2)))
    assert peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM)) == [BACK, fetch_of(missed, LATER)]


def missed(place: int) -> msg.OperationEnded:
    """The outcome of a reduce without this peer."""
    return ended(op(), contributors=(PeerId(1), PeerId(3)), sequence=place, digest=b"content")


@pytest.mark.parametrize(("place", "is_before"), [(3, True), (9, False)])
def test_a_state_that_arrives_replaces_the_results_before_it(place: int, is_before: bool) -> None:
    peer = PeerStage().member(1, 2, 3)
    peer.do(missed(place))
    peer.do(replace(without_me(0, LATER), sequence=5))
    peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM))
    peer.do(ev.ResultFetched(9, True))
    (effect, *_) = peer.do(ev.ReduceCall(10, 5, SUM))
    assert isinstance(effect, ev.Post if is_before else ev.FetchResult)
    assert effect.operation == op(1 if is_before else 0)


def closed(n: int, sequence: int, version: int = 1) -> msg.RoundClosed:
    return msg.RoundClosed(
        RoundId(RoundKind.UPDATE_TOPOLOGY, n), version, pending=False, sequence=sequence
    )


@pytest.mark.parametrize("content", [SAME, LATER], ids=["same", "fetched"])
def test_a_late_call_places_its_caller_behind_the_joint_calls_before_it(content: Elected) -> None:
    """Otherwise its next update_topology would be one of those, and the reduce in another round."""
    peer = PeerStage().member(1, 2, 3)
    for n, sequence in enumerate((3, 4, 7), start=1):
        peer.do(closed(n, sequence))
    peer.do(replace(without_me(0, content), sequence=5))
    peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM))
    peer.do(ev.ResultFetched(9, True))
    update = ev.RoundCall(10, RoundKind.UPDATE_TOPOLOGY, QUORUM)
    assert peer.do(update) == [BACK, ev.ReturnCall(10, None)]
    following = RoundId(RoundKind.UPDATE_TOPOLOGY, 4)
    (request,) = peer.do(ev.RoundCall(11, RoundKind.UPDATE_TOPOLOGY, QUORUM))
    assert request == ev.Send(msg.RoundRequest(following, QUORUM))


def test_decisions_of_a_new_master_come_after_those_of_the_last_one() -> None:
    """It counts them from the beginning, if the members have kept none."""
    peer = PeerStage().member(1, 2, 3)
    peer.do(replace(without_me(0, SAME), sequence=30))
    peer.do(ev.ControlClosed("broken"))
    peer.do(ev.ControlOpened(RUN, 2))
    peer.do(msg.Resumed(2, b"the next master"))
    peer.do(closed(1, 1))
    peer.do(missed(2))
    _, returned = peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM))
    assert isinstance(returned, ev.ReturnCall)
    update = ev.RoundCall(10, RoundKind.UPDATE_TOPOLOGY, QUORUM)
    assert peer.do(update) == [BACK, ev.ReturnCall(10, None)]
    effect, _ = peer.do(ev.ReduceCall(11, 5, SUM))
    assert isinstance(effect, ev.FetchResult), "it is late for that, too"
    assert effect.operation == op()


def test_a_stale_call_does_not_wait_for_members_that_wait_for_it() -> None:
    peer = late(LATER)
    peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM))
    assert peer.do(msg.BlockedQuery(0)) == [ev.AskCallers(0)]
    raised(peer.do(ev.ResultFetched(9, False)), errors.ResyncRequired)
    peer.do(ev.SyncCall(10, OFFER, quorum=QUORUM))
    end, withdraw, raises, asks = peer.do(msg.BlockedQuery(1))
    assert end == ev.End(NEXT, False)
    assert isinstance(withdraw, ev.Send)
    assert isinstance(withdraw.message, msg.Withdraw)
    assert isinstance(raises, ev.RaiseCall)
    assert isinstance(raises.error, errors.ResyncRequired)
    assert asks == ev.AskCallers(1)


def test_it_may_learn_only_after_its_call_that_it_was_late() -> None:
    peer = PeerStage().member(1, 2, 3)
    peer.do(msg.RosterChanged(roster(2, 2, 1, 2)))
    peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM))
    assert peer.do(without_me(0, LATER)) == []
    raised(peer.do(msg.BlockedQuery(0)), errors.ResyncRequired)


def test_a_newcomer_of_an_earlier_master_needs_only_its_first_synchronization() -> None:
    """Its admission got lost, and the new master does not know what it has missed since.

    A call that needs a state raises. The one that newcomers make first fetches it.
    """
    peer = PeerStage().registered()
    peer.do(ev.ControlClosed("reset"))
    peer.do(ev.ControlOpened(RUN, 2))
    peer.do(msg.Resumed(2, b"other"))
    made = msg.RoundCount(RoundKind.UPDATE_TOPOLOGY, 1)
    effects = peer.do(msg.Admitted(roster(3, 3, 1, 2, 3), (made,)))
    assert ev.ReturnCall(1, None) in effects
    peer.do(ended(op(view=2), version=3, contributors=(PeerId(1), PeerId(3))))
    (asked,) = offers(peer.do(ev.SyncCall(9, OFFER, quorum=QUORUM)))
    assert asked.stale
    now = op(view=3, tag=SYNC_TAG)
    elected = replace(OF_THE_OTHER, sources=(PeerId(1), PeerId(3)))
    effects = commits(peer, now, elected, version=3)
    assert any(isinstance(effect, ev.ReturnCall) for effect in effects)
    update = RoundId(RoundKind.UPDATE_TOPOLOGY, 1)
    assert sent(peer.do(ev.RoundCall(10, RoundKind.UPDATE_TOPOLOGY))) == [msg.RoundRequest(update)]
