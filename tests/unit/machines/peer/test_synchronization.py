"""Scenarios of one peer that synchronizes shared state, with the master's messages written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.machines.peer.events import (
    BeginSync,
    Claim,
    CompareSync,
    ComparisonDone,
    ControlClosed,
    ControlMessage,
    ControlOpened,
    Detach,
    End,
    ForgetEarly,
    JoinCall,
    LeaveCall,
    LeftCommitted,
    PeerEffect,
    PeerEvent,
    PostSync,
    RaiseCall,
    ReduceCall,
    ReduceDone,
    ReturnCall,
    RoundCall,
    Send,
    SyncCall,
    SyncResult,
    SyncStarved,
)
from pccl.machines.peer.machine import PeerMachine
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.shared_state import (
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
    Algorithm,
    Descriptor,
    Member,
    OperationId,
    PeerId,
    ReduceOp,
    Roster,
    RoundKind,
)

RUN = b"the run's own id"
ME = PeerId(2)
ELDER, ME_MEMBER, YOUNGER = (Member(PeerId(n), f"10.0.0.{n}", 4000 + n) for n in (1, 2, 3))
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8, algorithm=Algorithm.RING)
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
VERIFY = replace(OFFER, purpose=SyncPurpose.VERIFY)
ELECTED = Elected(4, b"layout", b"content", (PeerId(1), ME), (), ())
OF_THE_OTHER = replace(ELECTED, sources=(PeerId(1),), behind=(ME,))


def roster(version: int, view: int, *members: Member) -> Roster:
    return Roster(version, 0, view, members, (view,), len(members), 1, len(members))


def sync_operation(n: int = 0, view: int = 1) -> OperationId:
    return OperationId(1, 0, view, SYNC_TAG, n)


def ended(
    what: OperationId, abort: AbortCause | None = None, reason: str = "", version: int = 1
) -> msg.OperationEnded:
    return msg.OperationEnded(what, abort, reason, () if abort else (PeerId(1), ME), version)


class Peer:
    """A member of view 1, of two or three."""

    def __init__(self, *members: Member) -> None:
        self.machine = PeerMachine(Timing(), 0)
        self.do(JoinCall(1, 0, "", 4002, 5))
        self.do(ControlOpened(RUN, 1))
        self.hear(msg.Registered(ME, 1, RUN, b"token"))
        counts = (msg.RoundCount(RoundKind.UPDATE_TOPOLOGY, 1),)
        self.hear(msg.Admitted(roster(1, 1, *(members or (ELDER, ME_MEMBER))), counts))
        assert self.do(RoundCall(2, RoundKind.UPDATE_TOPOLOGY)) == [ReturnCall(2, None)]

    def do(self, event: PeerEvent) -> list[PeerEffect]:
        effects = self.machine.handle(event, 0)
        self.machine.check()
        return effects

    def hear(self, message: msg.Message) -> list[PeerEffect]:
        return self.do(ControlMessage(message))

    def elected(self, offer: Offer = OFFER, elected: Elected = ELECTED) -> None:
        """Call 9 has asked, and something is elected."""
        self.do(SyncCall(9, offer))
        effects = self.hear(msg.SyncStarted(sync_operation(), elected))
        assert effects == [BeginSync(sync_operation(), elected)]


def only_error(effects: list[PeerEffect]) -> errors.PCCLError:
    (error,) = [effect.error for effect in effects if isinstance(effect, RaiseCall)]
    assert isinstance(error, errors.PCCLError)
    return error


def offers(effects: list[PeerEffect]) -> list[Offer]:
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message.offer for message in sent if isinstance(message, msg.SyncRequest)]


def test_from_the_call_to_the_result() -> None:
    peer = Peer()
    assert peer.do(SyncCall(9, OFFER)) == [
        PostSync(9, sync_operation(), (PeerId(1), ME)),
        Send(msg.SyncRequest(sync_operation(), OFFER)),
    ]
    peer.hear(msg.SyncStarted(sync_operation(), ELECTED))
    assert peer.hear(msg.SyncStarted(sync_operation(), ELECTED)) == []  # after a reconnect
    assert peer.do(ReduceDone(sync_operation(), b"content")) == [
        Send(msg.OperationDone(sync_operation(), b"content"))
    ]
    result = SyncResult(sync_operation(), ELECTED, (PeerId(1), ME))
    assert peer.hear(ended(sync_operation())) == [
        End(sync_operation(), True),
        ReturnCall(9, result),
    ]
    assert peer.do(SyncCall(10, OFFER))[0] == PostSync(10, sync_operation(1), (PeerId(1), ME))


def test_what_is_elected_may_change_before_it_is_complete_here() -> None:
    peer = Peer()
    peer.elected()
    other = replace(ELECTED, sources=(ME,))
    assert peer.hear(msg.SyncStarted(sync_operation(), other)) == [
        BeginSync(sync_operation(), other)
    ]
    peer.do(ReduceDone(sync_operation(), b"content"))
    assert peer.hear(msg.SyncStarted(sync_operation(), ELECTED)) == []
    effects = peer.hear(ended(sync_operation()))
    assert ReturnCall(9, SyncResult(sync_operation(), ELECTED, (PeerId(1), ME))) in effects


def test_comparing() -> None:
    peer = Peer()
    peer.do(SyncCall(9, OFFER))
    question = msg.CompareStates(sync_operation(), PeerId(1))
    assert peer.hear(question) == [CompareSync(sync_operation(), PeerId(1))]
    difference = Difference("w", 2, "they differ")
    assert peer.do(ComparisonDone(sync_operation(), difference)) == [
        Send(msg.StatesCompared(sync_operation(), difference))
    ]
    message = replace(
        ended(sync_operation(), AbortCause.STATE_MISMATCH, "conflict"), difference=difference
    )
    error = only_error(peer.hear(message))
    assert isinstance(error, errors.StateMismatch)
    assert (error.tensor, error.piece) == ("w", 2)
    assert peer.hear(question) == []  # it is over


def test_a_question_that_comes_after_the_caller_has_left() -> None:
    """His state is lent no more."""
    peer = Peer()
    peer.do(SyncCall(9, OFFER))
    peer.do(LeaveCall(9, "timeout_s=1 ran out"))
    assert peer.hear(msg.CompareStates(sync_operation(), PeerId(1))) == []


def test_nobody_gives_what_is_missing() -> None:
    peer = Peer()
    peer.do(SyncCall(9, OFFER))
    assert peer.do(SyncStarved(sync_operation(), "why")) == []  # nothing is elected yet
    peer.hear(msg.SyncStarted(sync_operation(), ELECTED))
    assert peer.do(SyncStarved(sync_operation(), "why")) == [
        Send(msg.Withdraw(sync_operation(), "why"))
    ]
    effects = peer.hear(ended(sync_operation(), AbortCause.WITHDRAWN, "peer 2 withdrew: why"))
    error = only_error(effects)
    assert isinstance(error, errors.CollectiveAborted)
    assert "shared state: peer 2 withdrew: why" in str(error)


@pytest.mark.parametrize("detached", [False, True])
def test_operations_of_this_peer_are_open(detached: bool) -> None:
    peer = Peer()
    operation = OperationId(1, 0, 1, 5, 0)
    peer.do(ReduceCall(9, 5, SUM, detached=detached))
    assert isinstance(only_error(peer.do(SyncCall(10, OFFER))), errors.PendingOperations)
    peer.hear(msg.OperationStarted(operation))
    peer.do(ReduceDone(operation, b"digest"))
    peer.hear(ended(operation))
    if detached:  # its outcome is not noticed yet
        assert isinstance(only_error(peer.do(SyncCall(11, OFFER))), errors.PendingOperations)
        peer.do(Claim(9))
    assert len(offers(peer.do(SyncCall(12, OFFER)))) == 1
    assert isinstance(only_error(peer.do(SyncCall(13, OFFER))), errors.PendingOperations)


# -- a state that lacks something ------------------------------------------------------------------


def behind() -> Peer:
    """The others have committed a reduce that it has left."""
    peer = Peer()
    peer.do(LeftCommitted(OperationId(1, 0, 1, 5, 0)))
    assert isinstance(only_error(peer.do(ReduceCall(8, 5, SUM))), errors.ResyncRequired)
    return peer


def test_a_stale_state_is_offered_as_such_and_mended() -> None:
    peer = behind()
    assert offers(peer.do(SyncCall(9, OFFER))) == [replace(OFFER, stale=True)]
    peer.hear(msg.SyncStarted(sync_operation(), ELECTED))
    peer.do(ReduceDone(sync_operation(), b"content"))
    peer.hear(ended(sync_operation()))
    assert not peer.machine.needs_resync
    assert offers(peer.do(SyncCall(10, OFFER))) == [OFFER]


@pytest.mark.parametrize("how", ["aborted", "verified"])
def test_it_is_not_mended(how: str) -> None:
    peer = behind()
    peer.do(SyncCall(9, OFFER if how == "aborted" else VERIFY))
    peer.hear(msg.SyncStarted(sync_operation(), ELECTED))
    if how == "verified":
        peer.do(ReduceDone(sync_operation(), b"content"))
        assert any(isinstance(e, ReturnCall) for e in peer.hear(ended(sync_operation())))
    else:
        peer.hear(ended(sync_operation(), AbortCause.MEMBER_LOST, "gone"))
    assert peer.machine.needs_resync
    assert offers(peer.do(SyncCall(10, OFFER))) == [replace(OFFER, stale=True)]


def test_the_caller_knows_that_it_is_torn() -> None:
    peer = Peer()
    torn = replace(OFFER, stale=True)
    assert offers(peer.do(SyncCall(9, torn))) == [torn]


# -- losses ----------------------------------------------------------------------------------------


def test_the_newest_roster_counts_if_the_view_was_lost() -> None:
    """A reduce would raise once; a synchronization does with whoever is left."""
    peer = Peer(ELDER, ME_MEMBER, YOUNGER)
    peer.hear(msg.RosterChanged(roster(2, 2, ELDER, ME_MEMBER)))
    effects = peer.do(SyncCall(9, OFFER))
    assert effects[0] == PostSync(9, sync_operation(view=2), (PeerId(1), ME))
    assert peer.machine.seen == roster(1, 1, ELDER, ME_MEMBER, YOUNGER)
    peer.hear(msg.SyncStarted(sync_operation(view=2), ELECTED))
    peer.do(ReduceDone(sync_operation(view=2), b"content"))
    peer.hear(ended(sync_operation(view=2), version=2))
    assert peer.machine.seen == roster(2, 2, ELDER, ME_MEMBER)


def test_an_outcome_that_came_before_the_call() -> None:
    """The others failed before this peer called: it fails for the same reason, once."""
    peer = Peer()
    mismatch = ended(sync_operation(), AbortCause.DESCRIPTOR_MISMATCH, "strategies")
    assert peer.hear(mismatch) == [ForgetEarly()]
    assert isinstance(only_error(peer.do(SyncCall(9, OFFER))), errors.DescriptorMismatch)
    withdrawn = ended(sync_operation(1), AbortCause.WITHDRAWN, "peer 1 withdrew")
    peer.hear(withdrawn)
    # Whoever withdrew calls again, or not at all: nothing is to be told of that.
    assert peer.do(SyncCall(10, OFFER))[0] == PostSync(10, sync_operation(2), (PeerId(1), ME))


# -- leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [False, True])
def test_leaving_before_it_is_complete_here(started: bool) -> None:
    peer = Peer()
    if started:
        peer.elected()
    else:
        peer.do(SyncCall(9, OFFER))
    effects = peer.do(LeaveCall(9, "timeout_s=1 ran out"))
    assert effects[:2] == [
        End(sync_operation(), False),
        Send(msg.Withdraw(sync_operation(), "timeout_s=1 ran out")),
    ]
    assert isinstance(only_error(effects), errors.DeadlineExceeded)
    peer.hear(ended(sync_operation(), AbortCause.WITHDRAWN, "peer 2 withdrew"))
    assert not peer.machine.needs_resync
    assert peer.do(SyncCall(10, OFFER))[0] == PostSync(10, sync_operation(1), (PeerId(1), ME))


def left_when_done(offer: Offer = OFFER, elected: Elected = ELECTED) -> Peer:
    peer = Peer()
    peer.elected(offer, elected)
    peer.do(ReduceDone(sync_operation(), b"content"))
    effects = peer.do(LeaveCall(9, "Ctrl-C"))
    assert effects[0] == Detach(sync_operation())
    error = only_error(effects)
    assert isinstance(error, errors.OutcomeUnknown)
    assert "after shared state was complete here" in str(error)
    assert str(SYNC_TAG) not in str(error)
    return peer


def test_left_when_complete_and_committed() -> None:
    peer = left_when_done(elected=OF_THE_OTHER)
    assert peer.do(SyncCall(10, OFFER)) == [Send(msg.OutcomeQuery(sync_operation()))]
    error = only_error(peer.hear(ended(sync_operation())))  # the others have gone on
    assert isinstance(error, errors.ResyncRequired)
    assert offers(peer.do(SyncCall(11, OFFER))) == [replace(OFFER, stale=True)]
    assert peer.machine.needs_resync


def test_left_when_complete_and_committed_and_nothing_was_received() -> None:
    peer = left_when_done()
    assert peer.do(SyncCall(10, OFFER)) == [Send(msg.OutcomeQuery(sync_operation()))]
    result = SyncResult(sync_operation(), ELECTED, (PeerId(1), ME))
    assert peer.hear(ended(sync_operation())) == [
        End(sync_operation(), True),
        ReturnCall(10, result),
    ]
    lineage = Lineage(RUN, sync_operation())
    # It did not return to the caller's state that time either, and is not the next call any more.
    assert offers(peer.do(SyncCall(11, OFFER))) == [replace(OFFER, stale=True, lineage=lineage)]


def test_left_when_complete_and_committed_and_gone_on() -> None:
    peer = left_when_done()
    peer.hear(ended(sync_operation()))
    further = replace(OFFER, revision=5, content=b"further")
    expected = replace(further, lineage=Lineage(RUN, sync_operation()))
    assert offers(peer.do(SyncCall(10, further))) == [expected]


def test_left_when_complete_and_aborted() -> None:
    peer = left_when_done()
    peer.hear(ended(sync_operation(), AbortCause.MEMBER_LOST, "gone"))
    assert not peer.machine.needs_resync
    assert offers(peer.do(SyncCall(10, OFFER))) == [OFFER]


def test_left_a_comparison_that_is_committed() -> None:
    peer = left_when_done(VERIFY)
    peer.hear(ended(sync_operation()))
    assert not peer.machine.needs_resync


def test_why_a_resync_is_required() -> None:
    peer = left_when_done(elected=OF_THE_OTHER)
    peer.hear(ended(sync_operation()))
    error = only_error(peer.do(ReduceCall(10, 5, SUM)))
    assert isinstance(error, errors.ResyncRequired)
    assert "connect() again" in str(error)
    assert str(SYNC_TAG) not in str(error)


# -- reconnecting ----------------------------------------------------------------------------------


def test_after_a_reconnect_everything_is_said_again() -> None:
    peer = Peer()
    peer.elected()
    peer.do(ReduceDone(sync_operation(), b"content"))
    peer.do(ControlClosed("broken"))
    peer.do(ControlOpened(RUN, 1))
    sent = [e.message for e in peer.hear(msg.Resumed(1)) if isinstance(e, Send)]
    assert sent[-2:] == [
        msg.SyncRequest(sync_operation(), OFFER),
        msg.OperationDone(sync_operation(), b"content"),
    ]


def test_what_is_expected_goes_to_the_next_master() -> None:
    peer = Peer()
    assert peer.machine.synchronizations.expected == Expected()
    peer.elected(VERIFY)
    peer.do(ReduceDone(sync_operation(), b"content"))
    peer.hear(ended(sync_operation()))
    assert peer.machine.synchronizations.expected == Expected()
    peer.do(SyncCall(10, OFFER))
    peer.hear(msg.SyncStarted(sync_operation(1), ELECTED))
    peer.do(ReduceDone(sync_operation(1), b"content"))
    peer.hear(ended(sync_operation(1)))
    expected = Expected(5, Lineage(RUN, sync_operation(1)))
    assert peer.machine.synchronizations.expected == expected
    peer.do(ControlClosed("broken"))
    effects = peer.do(ControlOpened(RUN, 2))
    sent = [e.message for e in effects if isinstance(e, Send)]
    returns = [message for message in sent if isinstance(message, msg.Return)]
    assert [message.expected for message in returns] == [expected]
