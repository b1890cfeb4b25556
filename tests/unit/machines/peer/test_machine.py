"""Scenarios of one peer, with the master's messages written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.machines.peer.events import (
    AskCallers,
    Begin,
    CallersAsked,
    Claim,
    Close,
    CloseControl,
    CloseGap,
    ControlClosed,
    ControlMessage,
    ControlOpened,
    Detach,
    DialControl,
    End,
    Forget,
    ForgetEarly,
    HoldingsKnown,
    JoinCall,
    LeaveCall,
    LeftAdmitted,
    LeftAnswered,
    LeftCommitted,
    LinkChanged,
    PeerEffect,
    PeerEvent,
    Post,
    RaiseCall,
    ReduceCall,
    ReduceDone,
    ReduceResult,
    ReportWait,
    ReturnCall,
    RoundCall,
    Send,
    SendAcross,
    SetLinks,
    Tick,
)
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.operation import Phase
from pccl.protocol.types import (
    AbortCause,
    Algorithm,
    Descriptor,
    Member,
    OperationId,
    PeerId,
    ReduceOp,
    RemovalCause,
    Roster,
    RoundId,
    RoundKind,
)

MS = 1_000_000
SECOND = 1000 * MS
RUN = b"the run's own id"
ME = PeerId(2)
ELDER, ME_MEMBER, YOUNGER = (Member(PeerId(n), f"10.0.0.{n}", 4000 + n) for n in (1, 2, 3))
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8, algorithm=Algorithm.RING)
BROADCAST = Descriptor.broadcast(DataType.FLOAT, 8, 0)
UPDATE, PENDING = RoundKind.UPDATE_TOPOLOGY, RoundKind.PEERS_PENDING
OPTIMIZE = RoundKind.OPTIMIZE_TOPOLOGY


def roster(
    version: int, view: int, *members: Member, views: tuple[int, ...] | None = None
) -> Roster:
    size = len(members)
    return Roster(version, 0, view, members, views or (view,), size, 1, size)


def operation(n: int = 0, *, view: int = 1, tag: int = 5) -> OperationId:
    return OperationId(1, 0, view, tag, n)


def ended(
    what: OperationId, abort: AbortCause | None = None, reason: str = "", version: int = 1
) -> msg.OperationEnded:
    return msg.OperationEnded(what, abort, reason, () if abort else (PeerId(1), ME), version)


class Peer:
    """A machine, and the clock that it is told."""

    def __init__(self) -> None:
        self.machine = PeerMachine(Timing(), 0)
        self.now_ns = 0

    def do(self, event: PeerEvent) -> list[PeerEffect]:
        effects = self.machine.handle(event, self.now_ns)
        self.machine.check()
        return effects

    def hear(self, message: msg.Message) -> list[PeerEffect]:
        return self.do(ControlMessage(message))

    def wait(self, seconds: float, step_s: float = 0.25) -> list[PeerEffect]:
        """Let time pass, with a tick at every step; give all effects but heartbeats."""
        effects: list[PeerEffect] = []
        end_ns = self.now_ns + int(seconds * SECOND)
        while self.now_ns < end_ns:
            self.now_ns += int(step_s * SECOND)
            effects += self.do(Tick())
        return [
            e for e in effects if not (isinstance(e, Send) and isinstance(e.message, msg.Heartbeat))
        ]


def registered() -> Peer:
    peer = Peer()
    peer.do(JoinCall(1, 0, "", 4002, 5))
    peer.do(ControlOpened(RUN, 1))
    peer.hear(msg.Registered(ME, 1, RUN, b"token"))
    return peer


def member(*members: Member) -> Peer:
    """A member of view 1 whose first update_topology is used up."""
    peer = registered()
    counts = (msg.RoundCount(UPDATE, 1), msg.RoundCount(PENDING, 0))
    peer.hear(msg.Admitted(roster(1, 1, *(members or (ELDER, ME_MEMBER))), counts))
    assert peer.do(RoundCall(2, UPDATE)) == [ReturnCall(2, None)]
    return peer


def only_error(effects: list[PeerEffect]) -> errors.PCCLError:
    (error,) = [effect.error for effect in effects if isinstance(effect, RaiseCall)]
    assert isinstance(error, errors.PCCLError)
    return error


def running(call: int = 9, *, done: bool = False) -> Peer:
    peer = member()
    peer.do(ReduceCall(call, 5, SUM))
    peer.hear(msg.OperationStarted(operation()))
    if done:
        peer.do(ReduceDone(operation(), b"digest"))
    return peer


# -- joining -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "token"), [(RUN, b""), (b"short", b"token"), (b"", b"")])
def test_a_registration_that_cannot_be_resumed_is_refused(run: bytes, token: bytes) -> None:
    """It would count as none after a reconnect, when this peer is a member already."""
    peer = Peer()
    peer.do(JoinCall(1, 0, "", 4002, 5))
    peer.do(ControlOpened(RUN, 1))
    with pytest.raises(errors.RemoteProtocolError, match="a registration out of place"):
        peer.hear(msg.Registered(ME, 1, run, token))


def test_join_alone() -> None:
    peer = Peer()
    assert peer.do(JoinCall(1, 0, "", 4002, 5)) == [DialControl(0)]
    assert peer.do(ControlOpened(RUN, 1)) == [Send(msg.Register(0, "", 4002))]
    assert peer.hear(msg.Registered(ME, 1, RUN, b"token")) == []
    assert peer.hear(msg.LinkPlan(())) == []
    assert peer.machine.standing.name == "PENDING"
    assert peer.hear(msg.Admitted(roster(1, 1, ME_MEMBER), ())) == [
        ForgetEarly(),
        ReturnCall(1, None),
    ]
    assert peer.machine.standing is Standing.MEMBER
    assert peer.machine.seen == roster(1, 1, ME_MEMBER)
    assert (peer.machine.peer, peer.machine.term, peer.machine.run) == (ME, 1, RUN)


def test_join_a_run() -> None:
    peer = registered()
    assert peer.hear(msg.LinkPlan((ELDER,))) == [SetLinks((ELDER,))]
    assert peer.do(LinkChanged(PeerId(1), "refused")) == [
        Send(msg.LinkReport(PeerId(1), False, "refused"))
    ]
    assert peer.do(LinkChanged(PeerId(1), "refused")) == []
    assert peer.do(LinkChanged(PeerId(1), None)) == [Send(msg.LinkReport(PeerId(1), True, ""))]
    assert peer.hear(msg.Admitted(roster(2, 2, ELDER, ME_MEMBER), ())) == [
        ForgetEarly(),
        ReturnCall(1, None),
    ]


def test_the_round_that_admitted_a_newcomer_satisfies_its_first_update() -> None:
    peer = registered()
    counts = (msg.RoundCount(UPDATE, 7), msg.RoundCount(PENDING, 3))
    peer.hear(msg.Admitted(roster(1, 1, ELDER, ME_MEMBER), counts))
    assert peer.do(RoundCall(2, UPDATE)) == [ReturnCall(2, None)]
    assert peer.do(RoundCall(3, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 7)))]
    assert peer.do(RoundCall(4, PENDING)) == [Send(msg.RoundRequest(RoundId(PENDING, 3)))]


def test_a_member_that_comes_back_by_an_update_has_had_that_update() -> None:
    peer = Peer()
    peer.do(JoinCall(1, 3, "me", 4002, 5, 7, True))
    assert peer.do(ControlOpened(RUN, 1)) == [Send(msg.Register(3, "me", 4002, 7))]
    peer.hear(msg.Registered(ME, 1, RUN, b"token"))
    counts = (msg.RoundCount(UPDATE, 7), msg.RoundCount(OPTIMIZE, 2))
    assert peer.hear(msg.Admitted(roster(1, 1, ELDER, ME_MEMBER), counts))[-1] == ReturnCall(
        1, None
    )
    assert peer.do(RoundCall(2, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 7)))]
    assert peer.do(RoundCall(3, OPTIMIZE)) == [Send(msg.RoundRequest(RoundId(OPTIMIZE, 2)))]


def test_who_knows_of_its_loss() -> None:
    peer = member()
    assert not peer.machine.knows_its_loss
    peer.hear(msg.Refused(RemovalCause.SILENT, "silent"))
    assert not peer.machine.knows_its_loss
    assert isinstance(only_error(peer.do(RoundCall(9, UPDATE))), errors.Evicted)
    assert peer.machine.knows_its_loss
    told = running()
    told.hear(msg.Refused(RemovalCause.SILENT, "silent"))
    assert told.machine.knows_its_loss
    closed = member()
    closed.do(Close())
    assert not closed.machine.knows_its_loss


@pytest.mark.parametrize(
    "first", [RoundCall(2, PENDING), ReduceCall(2, 5, SUM)], ids=["pending", "reduce"]
)
def test_another_joint_call_uses_the_admission_up(first: PeerEvent) -> None:
    peer = registered()
    peer.hear(msg.Admitted(roster(1, 1, ELDER, ME_MEMBER), (msg.RoundCount(UPDATE, 7),)))
    peer.do(first)
    if isinstance(first, ReduceCall):
        peer.hear(ended(operation(), AbortCause.WITHDRAWN, "peer 1 withdrew: x"))
    assert peer.do(RoundCall(3, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 7)))]


def test_no_master() -> None:
    peer = Peer()
    peer.do(JoinCall(1, 0, "", 4002, 3))
    assert peer.do(ControlClosed("refused")) == [DialControl(SECOND)]
    assert peer.do(ControlClosed("refused")) == [DialControl(SECOND)]
    effects = peer.do(ControlClosed("refused"))
    error = only_error(effects)
    assert isinstance(error, errors.MasterLost)
    assert error.result == 6
    assert error.reason == "no master after 3 attempts: refused; is it running there?"
    assert peer.machine.standing is Standing.LOST


def test_a_master_that_accepts_and_says_nothing_costs_an_attempt() -> None:
    peer = Peer()
    peer.do(JoinCall(1, 0, "", 4002, 2))
    peer.do(ControlOpened(RUN, 1))
    assert peer.wait(4.75) == []
    assert peer.wait(0.25) == [CloseControl("the master is silent"), DialControl(SECOND)]
    error = only_error(peer.do(ControlClosed("refused")))
    assert isinstance(error, errors.MasterLost)
    # both reasons are told: the first may say more than the last
    assert "does not answer as a master does; refused" in error.reason


def test_refused_newcomer() -> None:
    peer = registered()
    effects = peer.hear(msg.Refused(RemovalCause.UNREACHABLE, "open its port"))
    error = only_error(effects)
    assert isinstance(error, errors.NotAdmitted)
    assert error.reason == "refused by the master: open its port; then call connect() again"
    assert effects == [CloseControl(error.reason), RaiseCall(1, error), SetLinks(())]


def test_a_second_join() -> None:
    error = only_error(member().do(JoinCall(8, 0, "", 4002, 5)))
    assert (error.result, error.reason) == (4, "this communicator is connected already")


# -- rounds ------------------------------------------------------------------------------------


def test_a_round_shows_the_membership_that_its_answer_names() -> None:
    peer = member(ELDER, ME_MEMBER)
    peer.do(RoundCall(3, UPDATE))
    grown = roster(2, 2, ELDER, ME_MEMBER, YOUNGER, views=(1, 2))
    assert peer.hear(msg.RosterChanged(grown)) == [
        ForgetEarly(),
        SetLinks((ELDER, YOUNGER)),
    ]
    assert peer.machine.seen == roster(1, 1, ELDER, ME_MEMBER)
    assert peer.machine.newest == grown
    lost = roster(3, 3, ELDER, ME_MEMBER)
    peer.hear(msg.RosterChanged(lost))
    assert peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 2, True)) == [ReturnCall(3, None)]
    assert peer.machine.seen == grown


def test_peers_pending_changes_nothing_that_the_caller_sees() -> None:
    peer = member()
    peer.do(RoundCall(3, PENDING))
    peer.hear(msg.RosterChanged(roster(2, 2, ELDER, ME_MEMBER, YOUNGER)))
    assert peer.hear(msg.RoundClosed(RoundId(PENDING, 0), 2, True)) == [ReturnCall(3, True)]
    assert peer.machine.seen == roster(1, 1, ELDER, ME_MEMBER)
    assert peer.do(RoundCall(4, PENDING)) == [Send(msg.RoundRequest(RoundId(PENDING, 1)))]


def test_the_next_caller_takes_over_a_round_that_was_left() -> None:
    peer = member()
    peer.do(RoundCall(3, PENDING))
    error = only_error(peer.do(LeaveCall(3, "0.5 s are over")))
    assert isinstance(error, errors.DeadlineExceeded)
    assert not peer.machine.in_round
    assert peer.do(RoundCall(4, PENDING)) == []  # the request stands
    assert peer.machine.in_round
    peer.do(LeaveCall(4, "again"))
    assert peer.hear(msg.RoundClosed(RoundId(PENDING, 0), 1, True)) == []
    assert peer.do(RoundCall(5, PENDING)) == [ReturnCall(5, True)]


def test_two_threads_in_one_round() -> None:
    peer = member()
    peer.do(RoundCall(3, UPDATE))
    error = only_error(peer.do(RoundCall(4, UPDATE)))
    assert isinstance(error, errors.PendingOperations)
    assert "another thread" in error.reason


def test_no_update_while_a_reduce_is_open() -> None:
    peer = running()
    error = only_error(peer.do(RoundCall(10, UPDATE)))
    assert isinstance(error, errors.PendingOperations)
    assert error.result == 10
    assert peer.do(RoundCall(11, PENDING)) == [Send(msg.RoundRequest(RoundId(PENDING, 0)))]


def test_optimize_topology_keeps_what_the_caller_sees() -> None:
    peer = member()
    assert peer.do(RoundCall(3, OPTIMIZE)) == [Send(msg.RoundRequest(RoundId(OPTIMIZE, 0)))]
    peer.hear(msg.RosterChanged(roster(2, 2, ELDER, ME_MEMBER, YOUNGER, views=(1, 2))))
    assert peer.hear(msg.RoundClosed(RoundId(OPTIMIZE, 0), 2, True)) == [ReturnCall(3, None)]
    assert peer.machine.seen == roster(1, 1, ELDER, ME_MEMBER)
    assert peer.do(RoundCall(4, OPTIMIZE)) == [Send(msg.RoundRequest(RoundId(OPTIMIZE, 1)))]


def test_there_is_nothing_to_optimize_alone() -> None:
    error = only_error(member(ME_MEMBER).do(RoundCall(3, OPTIMIZE)))
    assert type(error) is errors.TooFewPeers
    assert error.result == 4
    assert error.reason == "alone in the run; wait for others with update_topology()"


def test_optimizing_counts_other_groups() -> None:
    peer = registered()
    alone_in_its_group = Roster(1, 0, 1, (ME_MEMBER,), (1,), 3, 2, 2)
    peer.hear(msg.Admitted(alone_in_its_group, ()))
    assert peer.do(RoundCall(3, OPTIMIZE)) == [Send(msg.RoundRequest(RoundId(OPTIMIZE, 0)))]


def test_optimizing_uses_the_admission_up() -> None:
    peer = registered()
    peer.hear(msg.Admitted(roster(1, 1, ELDER, ME_MEMBER), (msg.RoundCount(UPDATE, 7),)))
    peer.do(RoundCall(2, OPTIMIZE))
    assert peer.do(RoundCall(3, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 7)))]


def test_no_optimizing_while_a_reduce_is_open() -> None:
    error = only_error(running().do(RoundCall(10, OPTIMIZE)))
    assert isinstance(error, errors.PendingOperations)
    assert error.result == 10


@pytest.mark.parametrize("kind", RoundKind)
def test_members_that_waited_for_different_things_in_a_round(kind: RoundKind) -> None:
    peer = member()
    n = 1 if kind is UPDATE else 0
    peer.do(RoundCall(3, kind))
    closed = msg.RoundClosed(RoundId(kind, n), 1, False, "who waits where")
    effects = peer.hear(closed)
    error = only_error(effects)
    assert effects == [RaiseCall(3, error)]
    assert type(error) is errors.LockstepError
    assert (error.result, error.reason) == (4, "who waits where")
    assert peer.do(RoundCall(4, kind)) == [Send(msg.RoundRequest(RoundId(kind, n + 1)))]


def test_a_round_without_an_answer_that_was_never_asked_for_is_skipped() -> None:
    peer = member()
    assert peer.hear(msg.RoundClosed(RoundId(PENDING, 0), 1, False, "who waits where")) == []
    assert peer.do(RoundCall(3, PENDING)) == [Send(msg.RoundRequest(RoundId(PENDING, 1)))]


def test_a_round_that_ended_while_an_older_answer_waited_for_a_caller() -> None:
    """The run may go on to a round that ends without us, as stuck ones do; ours must not be 1."""
    peer = member()
    peer.do(RoundCall(3, PENDING))
    peer.do(LeaveCall(3, "x"))
    peer.hear(msg.RoundClosed(RoundId(PENDING, 0), 1, True))
    peer.hear(msg.RoundClosed(RoundId(PENDING, 1), 1, False, "who waits where"))
    assert peer.do(RoundCall(4, PENDING)) == [ReturnCall(4, True)]
    assert peer.do(RoundCall(5, PENDING)) == [Send(msg.RoundRequest(RoundId(PENDING, 2)))]


def test_leaving_a_round_tells_whom_it_waited_for() -> None:
    peer = member()
    peer.do(RoundCall(3, UPDATE))
    waits = msg.RoundWaits(RoundId(UPDATE, 1), 5, "peer 1 (in no call)")
    assert peer.hear(waits) == [ReportWait("update_topology waits for peer 1 (in no call)", 5)]
    error = only_error(peer.do(LeaveCall(3, "timeout_s=6 ran out")))
    assert type(error) is errors.DeadlineExceeded
    assert error.result == 8
    assert error.reason == (
        "timeout_s=6 ran out; it waited for peer 1 (in no call); the request stands: "
        "call update_topology() again before anything else"
    )


def test_leaving_a_round_of_which_nothing_is_known() -> None:
    peer = member()
    peer.do(RoundCall(3, UPDATE))
    assert only_error(peer.do(LeaveCall(3, "timeout_s=1 ran out"))).reason == (
        "timeout_s=1 ran out; the request stands: call update_topology() again before anything else"
    )


def test_waits_of_rounds_that_nobody_here_is_in() -> None:
    peer = member()
    for strange in (RoundId(UPDATE, 1), RoundId(PENDING, 0), RoundId(OPTIMIZE, 7)):
        assert peer.hear(msg.RoundWaits(strange, 5, "peer 1")) == []
    peer.do(RoundCall(3, UPDATE))
    assert peer.hear(msg.RoundWaits(RoundId(UPDATE, 2), 5, "peer 1")) == []
    peer.do(LeaveCall(3, "x"))
    assert peer.hear(msg.RoundWaits(RoundId(UPDATE, 1), 5, "peer 1")) == []


# -- reduces -----------------------------------------------------------------------------------


def test_a_reduce() -> None:
    peer = member()
    ring = (PeerId(1), ME)
    assert peer.do(ReduceCall(9, 5, SUM)) == [
        Post(9, operation(), SUM, ring),
        Send(msg.OperationRequest(operation(), SUM)),
    ]
    assert peer.machine.phase_of(operation()) is Phase.REQUESTED
    assert peer.hear(msg.OperationStarted(operation())) == [Begin(operation())]
    assert peer.hear(msg.OperationStarted(operation())) == []
    assert peer.do(ReduceDone(operation(), b"digest")) == [
        Send(msg.OperationDone(operation(), b"digest"))
    ]
    assert peer.hear(ended(operation())) == [
        End(operation(), True),
        ReturnCall(9, ReduceResult(operation(), ring)),
    ]
    assert peer.hear(ended(operation())) == []  # told twice
    assert peer.machine.phase_of(operation()) is None
    assert peer.do(ReduceCall(10, 5, SUM))[0] == Post(10, operation(1), SUM, ring)


WEIGHTED = replace(SUM, op=ReduceOp.AVG, weighted=True)


def test_a_weighted_average() -> None:
    peer = member()
    ring = (PeerId(1), ME)
    assert peer.do(ReduceCall(9, 5, WEIGHTED, weight=2.5)) == [
        Post(9, operation(), WEIGHTED, ring),
        Send(msg.OperationRequest(operation(), WEIGHTED, weight=2.5)),
    ]
    started = msg.OperationStarted(operation(), weights=(0.0, 2.5))
    assert peer.hear(started) == [Begin(operation(), weights=(0.0, 2.5))]
    assert peer.hear(msg.OperationStarted(operation())) == []  # of a master that lacks weights
    peer.do(ReduceDone(operation(), b"digest"))
    again = peer.hear(ended(operation(), AbortCause.DIGEST_MISMATCH, "results differ"))
    assert again[-1] == Send(msg.OperationRequest(operation(1), WEIGHTED, weight=2.5))
    peer.hear(msg.OperationStarted(operation(1), weights=(0.0, 2.5)))
    peer.do(ReduceDone(operation(1), b"digest"))
    result = ReduceResult(operation(1), ring, 2, weights=(0.0, 2.5))
    assert peer.hear(ended(operation(1)))[-1] == ReturnCall(9, result)


@pytest.mark.parametrize(
    ("what", "weights"), [(WEIGHTED, ()), (WEIGHTED, (1.0,) * 3), (SUM, (1.0, 1.0))]
)
def test_a_start_with_wrong_weights_is_no_start(
    what: Descriptor, weights: tuple[float, ...]
) -> None:
    peer = member()
    peer.do(ReduceCall(9, 5, what))
    with pytest.raises(errors.RemoteProtocolError, match="wrong weights"):
        peer.hear(msg.OperationStarted(operation(), weights=weights))
    assert peer.machine.phase_of(operation()) is Phase.REQUESTED


def test_data_may_be_faster_than_the_start() -> None:
    peer = member()
    peer.do(ReduceCall(9, 5, SUM))
    peer.do(ReduceDone(operation(), b"digest"))
    assert peer.hear(msg.OperationStarted(operation())) == []
    assert peer.hear(ended(operation()))[0] == End(operation(), True)


def test_an_outcome_that_was_not_asked_for_uses_its_number_up() -> None:
    peer = member()
    assert peer.machine.collectives.may_come(operation())
    assert peer.hear(ended(operation(), AbortCause.LOCKSTEP, "in a circle")) == [ForgetEarly()]
    assert not peer.machine.collectives.may_come(operation())
    effects = peer.do(ReduceCall(9, 5, SUM))
    assert effects[1] == Send(msg.OperationRequest(operation(1), SUM))


def test_who_comes_after_another_one_withdrew_is_told_and_stays_in_step() -> None:
    peer = member()
    withdrawn = ended(operation(), AbortCause.WITHDRAWN, "peer 1 withdrew: x")
    assert peer.hear(withdrawn) == [ForgetEarly()]
    assert peer.hear(withdrawn) == []
    error = only_error(peer.do(ReduceCall(9, 5, SUM)))
    assert isinstance(error, errors.CollectiveAborted)
    assert error.reason == "tag 5: peer 1 withdrew: x; inputs are intact, call again"
    effects = peer.do(ReduceCall(10, 5, SUM))
    assert effects[1] == Send(msg.OperationRequest(operation(1), SUM))


def test_what_may_come() -> None:
    peer = member()
    may_come = peer.machine.collectives.may_come
    assert may_come(operation(7, tag=99))
    assert not may_come(operation(view=2))
    assert not may_come(OperationId(2, 0, 1, 5, 0))
    assert not may_come(OperationId(1, 1, 1, 5, 0))
    peer.do(ReduceCall(9, 5, SUM))
    assert not may_come(operation())
    assert may_come(operation(1))
    peer.hear(msg.RosterChanged(roster(2, 2, ELDER, ME_MEMBER)))
    assert not may_come(operation(1))
    assert not Peer().machine.collectives.may_come(operation())


def test_one_open_collective_per_tag() -> None:
    peer = running()
    error = only_error(peer.do(ReduceCall(10, 5, SUM)))
    assert error.result == 3
    assert "tag 5 is in use" in error.reason
    other = peer.do(ReduceCall(11, 6, SUM))
    assert other[1] == Send(msg.OperationRequest(operation(tag=6), SUM))


def test_alone() -> None:
    error = only_error(member(ME_MEMBER).do(ReduceCall(9, 5, SUM)))
    assert isinstance(error, errors.TooFewPeers)
    assert error.result == 5


@pytest.mark.parametrize("what", [BROADCAST, Descriptor.barrier()], ids=["broadcast", "barrier"])
def test_alone_there_is_nobody_to_wait_for(what: Descriptor) -> None:
    peer = member(ME_MEMBER)
    alone = ReduceResult(operation(), (ME,))
    for call in (9, 10):  # nobody counts these: the numbers are free
        assert peer.do(ReduceCall(call, 5, what)) == [ReturnCall(call, alone)]


@pytest.mark.parametrize("what", [BROADCAST, Descriptor.barrier()], ids=["broadcast", "barrier"])
def test_among_others_they_are_operations(what: Descriptor) -> None:
    peer = member()
    assert peer.do(ReduceCall(9, 5, what)) == [
        Post(9, operation(), what, (PeerId(1), ME)),
        Send(msg.OperationRequest(operation(), what)),
    ]


def test_an_unseen_death_raises_exactly_once_and_then_proceeds() -> None:
    peer = member(ELDER, ME_MEMBER, YOUNGER)
    peer.hear(msg.RosterChanged(roster(2, 2, ELDER, ME_MEMBER)))
    assert peer.machine.seen == roster(1, 1, ELDER, ME_MEMBER, YOUNGER)
    effects = peer.do(ReduceCall(9, 5, SUM))
    error = only_error(effects)
    assert effects == [RaiseCall(9, error)]
    assert isinstance(error, errors.CollectiveAborted)
    assert error.result == 8
    assert error.reason == (
        "the run lost peer 3 before this call; the world size is now 2; call again"
    )
    assert peer.machine.seen == roster(2, 2, ELDER, ME_MEMBER)
    again = peer.do(ReduceCall(10, 5, SUM))
    assert again[0] == Post(10, operation(view=2), SUM, (PeerId(1), ME))


def test_a_view_that_admissions_left_behind_names_nobody() -> None:
    peer = member(ELDER, ME_MEMBER)
    peer.hear(msg.RosterChanged(roster(4, 3, ELDER, ME_MEMBER, YOUNGER, views=(2, 3))))
    error = only_error(peer.do(ReduceCall(9, 5, SUM)))
    assert error.reason == (
        "the run went on to another view before this call; the world size is now 3; call again"
    )


def test_a_death_during_the_reduce() -> None:
    peer = running()
    peer.hear(msg.RosterChanged(roster(2, 2, ME_MEMBER)))
    effects = peer.hear(ended(operation(), AbortCause.MEMBER_LOST, "peer 1 lost: gone", version=2))
    error = only_error(effects)
    assert effects == [End(operation(), False), RaiseCall(9, error)]
    assert type(error) is errors.CollectiveAborted
    assert error.reason == "tag 5: peer 1 lost: gone; inputs are intact, call again"
    assert peer.machine.seen == roster(2, 2, ME_MEMBER)


def running_among_three(*, done: bool = False) -> Peer:
    peer = member(ELDER, ME_MEMBER, YOUNGER)
    peer.do(ReduceCall(9, 5, SUM))
    peer.hear(msg.OperationStarted(operation()))
    if done:
        peer.do(ReduceDone(operation(), b"digest"))
    return peer


@pytest.mark.parametrize("done", [False, True])
def test_behind_a_gap(done: bool) -> None:
    peer = running_among_three(done=done)
    effects = peer.hear(msg.HoldingsQuery(operation(), (PeerId(1),)))
    assert effects == [CloseGap(operation(), 1, upstream=PeerId(3), size=1)]
    answer = msg.Holdings(operation(), 1, True)
    assert peer.do(HoldingsKnown(operation(), 1, complete=True)) == [Send(answer)]


def test_before_a_gap() -> None:
    peer = running_among_three()
    effects = peer.hear(msg.Repair(operation(), (PeerId(3),)))
    assert effects == [SendAcross(operation(), downstream=PeerId(1), size=1)]
    assert peer.hear(msg.Repair(operation(), (PeerId(1),))) == []  # it is not before that gap


def test_a_repair_is_committed_with_those_who_were_lost() -> None:
    peer = running_among_three()
    left = roster(2, 2, ME_MEMBER, YOUNGER)
    peer.hear(msg.RosterChanged(left))
    peer.hear(msg.HoldingsQuery(operation(), (PeerId(1),)))
    peer.do(HoldingsKnown(operation(), 1, complete=True))
    peer.do(ReduceDone(operation(), b"digest"))
    contributors = (PeerId(1), ME, PeerId(3))
    effects = peer.hear(msg.OperationEnded(operation(), None, "", contributors, 2))
    assert effects == [
        End(operation(), committed=True),
        ReturnCall(9, ReduceResult(operation(), contributors)),
    ]
    assert peer.machine.seen == left


def test_who_takes_no_part_in_an_operation_has_nothing_for_its_repair() -> None:
    peer = running_among_three()
    answer = msg.Holdings(operation(), 1, complete=False)
    peer.do(LeaveCall(9, "Ctrl-C"))
    assert peer.hear(msg.HoldingsQuery(operation(), (PeerId(1),))) == [Send(answer)]
    assert peer.hear(msg.Repair(operation(), (PeerId(3),))) == []
    unknown = operation(7)
    answer = msg.Holdings(unknown, 1, complete=False)
    assert peer.hear(msg.HoldingsQuery(unknown, (PeerId(1),))) == [Send(answer)]
    assert peer.hear(msg.Repair(unknown, (PeerId(3),))) == []


def test_different_descriptors() -> None:
    peer = running()
    effects = peer.hear(ended(operation(), AbortCause.DESCRIPTOR_MISMATCH, "tag 5: who: what"))
    error = only_error(effects)
    assert isinstance(error, errors.DescriptorMismatch)
    assert error.result == 3
    assert error.reason == "tag 5: who: what; make the calls agree"


def test_different_digests_are_tried_once_more_and_then_raised() -> None:
    peer = running(done=True)
    first = ended(operation(), AbortCause.DIGEST_MISMATCH, "results differ: peer 1 computed ...")
    assert peer.hear(first) == [
        End(operation(), False),
        Post(9, operation(1), SUM, (PeerId(1), ME)),
        Send(msg.OperationRequest(operation(1), SUM)),
    ]
    peer.hear(msg.OperationStarted(operation(1)))
    peer.do(ReduceDone(operation(1), b"other"))
    second = ended(operation(1), AbortCause.DIGEST_MISMATCH, "results differ: peer 1 computed ...")
    effects = peer.hear(second)
    error = only_error(effects)
    assert effects == [End(operation(1), False), RaiseCall(9, error)]
    assert error.result == 2
    assert error.reason == (
        "tag 5: results differ: peer 1 computed ..., twice in a row; inputs are intact"
    )


def test_the_second_try_counts() -> None:
    peer = running(done=True)
    peer.hear(ended(operation(), AbortCause.DIGEST_MISMATCH, "results differ"))
    peer.hear(msg.OperationStarted(operation(1)))
    peer.do(ReduceDone(operation(1), b"digest"))
    ring = (PeerId(1), ME)
    assert peer.hear(ended(operation(1)))[-1] == ReturnCall(9, ReduceResult(operation(1), ring, 2))


def test_members_that_waited_for_different_things() -> None:
    peer = member()
    peer.do(ReduceCall(9, 5, SUM))
    effects = peer.hear(ended(operation(), AbortCause.LOCKSTEP, "who waits where"))
    error = only_error(effects)
    assert effects == [End(operation(), False), RaiseCall(9, error)]
    assert type(error) is errors.LockstepError
    assert (error.result, error.reason) == (4, "who waits where")
    again = peer.do(ReduceCall(10, 5, SUM))
    assert again[1] == Send(msg.OperationRequest(operation(1), SUM))


def test_the_second_try_stays_in_the_view_of_the_first() -> None:
    """Another call may have shown the caller a newer view meanwhile, but not on every member."""
    peer = member()
    peer.do(RoundCall(3, UPDATE))
    peer.do(ReduceCall(9, 5, SUM))
    peer.hear(msg.RosterChanged(roster(2, 2, ELDER, ME_MEMBER, YOUNGER, views=(1, 2))))
    peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 2, True))
    effects = peer.hear(ended(operation(), AbortCause.DIGEST_MISMATCH, "results differ", 2))
    assert effects[1] == Post(9, operation(1), SUM, (PeerId(1), ME))


def test_no_second_try_in_a_closed_view() -> None:
    peer = running(done=True)
    peer.hear(msg.RosterChanged(roster(2, 2, ELDER, ME_MEMBER)))
    effects = peer.hear(ended(operation(), AbortCause.DIGEST_MISMATCH, "results differ: x", 2))
    error = only_error(effects)
    assert error.reason == "tag 5: results differ: x; inputs are intact"
    assert peer.do(ReduceCall(10, 5, SUM))[0] == Post(
        10, operation(view=2), SUM, (PeerId(1), ME)
    )  # fmt: skip


def test_a_commit_of_what_is_not_done_costs_the_master_its_connection() -> None:
    peer = running()
    with pytest.raises(errors.RemoteProtocolError, match="a commit of what is not done"):
        peer.hear(ended(operation()))
    assert peer.machine.phase_of(operation()) is Phase.STARTED


# -- detached operations -----------------------------------------------------------------------


def launched(call: int = 9, *, detached: bool = True) -> Peer:
    """A member whose own part of an operation is done."""
    peer = member(ELDER, ME_MEMBER, YOUNGER)
    peer.do(ReduceCall(call, 5, SUM, detached))
    peer.hear(msg.OperationStarted(operation()))
    peer.do(ReduceDone(operation(), b"digest"))
    return peer


BEFORE = roster(1, 1, ELDER, ME_MEMBER, YOUNGER)
AFTER = roster(2, 2, ELDER, ME_MEMBER)


def test_a_detached_outcome_is_seen_when_it_is_claimed() -> None:
    peer = launched()
    peer.hear(msg.RosterChanged(AFTER))
    members = (PeerId(1), ME, PeerId(3))
    committed = msg.OperationEnded(operation(), None, "", members, 2)
    result = ReduceResult(operation(), members)
    assert peer.hear(committed) == [End(operation(), True), ReturnCall(9, result)]
    assert peer.machine.seen == BEFORE
    assert peer.do(Claim(9)) == []
    assert peer.machine.seen == AFTER
    assert peer.do(Claim(9)) == []


def test_a_detached_failure_is_seen_when_it_is_claimed() -> None:
    peer = launched()
    peer.hear(msg.RosterChanged(AFTER))
    effects = peer.hear(ended(operation(), AbortCause.MEMBER_LOST, "peer 3 lost", version=2))
    assert effects == [End(operation(), False), RaiseCall(9, only_error(effects))]
    assert peer.machine.seen == BEFORE
    peer.do(Claim(9))
    assert peer.machine.seen == AFTER


@pytest.mark.parametrize("kind", [UPDATE, OPTIMIZE])
def test_membership_calls_wait_for_handles(kind: RoundKind) -> None:
    peer = launched()
    words = "collectives of this peer are still open; wait for them (and their handles) first"

    def refusal(call: int) -> tuple[type[errors.PCCLError], int, str]:
        error = only_error(peer.do(RoundCall(call, kind)))
        return type(error), error.result, error.reason

    assert refusal(20) == (errors.PendingOperations, 10, words)  # undecided
    peer.hear(ended(operation()))
    assert refusal(21) == (errors.PendingOperations, 10, words)  # decided, and not looked at
    peer.do(Claim(9))
    n = 1 if kind is UPDATE else 0
    assert peer.do(RoundCall(22, kind)) == [Send(msg.RoundRequest(RoundId(kind, n)))]


def test_handles_do_not_keep_anybody_from_asking_for_newcomers() -> None:
    peer = launched()
    assert peer.do(RoundCall(20, PENDING)) == [Send(msg.RoundRequest(RoundId(PENDING, 0)))]
    peer.hear(ended(operation()))
    peer.hear(msg.RoundClosed(RoundId(PENDING, 0), 1, False))
    assert peer.do(RoundCall(21, PENDING)) == [Send(msg.RoundRequest(RoundId(PENDING, 1)))]


def test_outcomes_may_be_claimed_in_any_order() -> None:
    peer = launched()
    peer.do(ReduceCall(10, 6, SUM, True))
    peer.hear(msg.RosterChanged(AFTER))
    peer.hear(msg.RosterChanged(roster(3, 3, ME_MEMBER)))
    peer.hear(ended(operation(), AbortCause.MEMBER_LOST, "peer 3 lost", version=2))
    peer.hear(ended(operation(tag=6), AbortCause.MEMBER_LOST, "peer 1 lost", version=3))
    peer.do(Claim(10))
    assert peer.machine.seen == roster(3, 3, ME_MEMBER)
    peer.do(Claim(9))  # older: the caller knows more by now
    assert peer.machine.seen == roster(3, 3, ME_MEMBER)


def test_an_unclaimed_outcome_does_not_hide_the_roster_that_it_names() -> None:
    """Another call of the caller may show him a newer one first, and the claim comes late."""
    peer = launched()
    peer.do(ReduceCall(10, 6, SUM))
    peer.hear(msg.RosterChanged(AFTER))
    peer.hear(ended(operation(), AbortCause.MEMBER_LOST, "peer 3 lost", version=2))
    peer.hear(ended(operation(tag=6), AbortCause.MEMBER_LOST, "peer 3 lost", version=2))
    assert peer.machine.seen == AFTER
    peer.do(Claim(9))
    assert peer.machine.seen == AFTER


def test_a_detached_call_after_an_unseen_death() -> None:
    peer = member(ELDER, ME_MEMBER, YOUNGER)
    peer.hear(msg.RosterChanged(AFTER))
    assert "lost peer 3" in only_error(peer.do(ReduceCall(9, 5, SUM, True))).reason
    assert peer.machine.seen == BEFORE
    peer.do(Claim(9))
    assert peer.machine.seen == AFTER


def test_a_detached_call_gets_a_mismatch_that_was_missed() -> None:
    peer = member()
    peer.hear(ended(operation(), AbortCause.DESCRIPTOR_MISMATCH, "tag 5: who: what"))
    assert isinstance(only_error(peer.do(ReduceCall(9, 5, SUM, True))), errors.DescriptorMismatch)
    assert isinstance(only_error(peer.do(RoundCall(10, UPDATE))), errors.PendingOperations)
    peer.do(Claim(9))
    assert peer.do(RoundCall(11, UPDATE)) != []


def test_a_detached_call_that_ran_out_of_time_names_no_membership() -> None:
    peer = member()
    peer.do(ReduceCall(9, 5, SUM, True))
    assert isinstance(only_error(peer.do(LeaveCall(9, "x"))), errors.DeadlineExceeded)
    assert peer.do(RoundCall(10, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 1)))]


def test_the_second_try_of_a_detached_call_is_detached_too() -> None:
    peer = launched()
    peer.hear(ended(operation(), AbortCause.DIGEST_MISMATCH, "results differ"))
    peer.hear(msg.RosterChanged(AFTER))
    peer.hear(ended(operation(1), AbortCause.MEMBER_LOST, "peer 3 lost", version=2))
    assert peer.machine.seen == BEFORE


def test_after_a_loss_there_is_nothing_to_claim() -> None:
    peer = launched()
    peer.hear(ended(operation()))
    peer.hear(msg.Refused(RemovalCause.SILENT, "silent"))
    assert peer.do(Claim(9)) == []
    assert peer.machine.seen == BEFORE
    assert isinstance(only_error(peer.do(RoundCall(10, UPDATE))), errors.Evicted)
    assert peer.machine.knows_its_loss


def test_a_loss_that_only_a_handle_tells_is_not_known_yet() -> None:
    peer = launched()
    effects = peer.hear(msg.Refused(RemovalCause.SILENT, "silent"))
    assert isinstance(only_error(effects), errors.Evicted)
    assert not peer.machine.knows_its_loss  # nobody has looked
    peer.do(Claim(9))
    assert peer.machine.knows_its_loss
    assert isinstance(only_error(peer.do(RoundCall(10, UPDATE))), errors.NotConnected)


def test_a_loss_that_a_handle_tells_too_late() -> None:
    peer = launched()
    peer.hear(msg.Refused(RemovalCause.SILENT, "silent"))
    assert isinstance(only_error(peer.do(RoundCall(10, UPDATE))), errors.Evicted)
    assert peer.machine.knows_its_loss
    peer.do(Claim(9))
    assert peer.machine.knows_its_loss


def test_a_loss_that_only_a_deferred_handle_tells_is_not_known_yet() -> None:
    peer = member()
    peer.do(RoundCall(3, UPDATE))
    peer.do(LeaveCall(3, "x"))
    assert peer.do(ReduceCall(9, 5, SUM, True)) == []
    assert isinstance(only_error(peer.hear(msg.Refused(RemovalCause.SILENT, "x"))), errors.Evicted)
    assert not peer.machine.knows_its_loss
    peer.do(Claim(9))
    assert peer.machine.knows_its_loss


# -- handles that are dropped ------------------------------------------------------------------


def test_a_handle_that_is_dropped_shows_nothing_before_the_next_call() -> None:
    peer = launched()
    peer.hear(msg.RosterChanged(AFTER))
    peer.hear(ended(operation(), AbortCause.MEMBER_LOST, "peer 3 lost", version=2))
    assert peer.do(Forget(9)) == []
    assert peer.machine.seen == BEFORE
    assert peer.do(Claim(9)) == []
    assert peer.machine.seen == BEFORE
    assert peer.do(RoundCall(10, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 1)))]
    assert peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 1, False)) == [ReturnCall(10, None)]
    assert peer.machine.seen == AFTER, "a call has returned, and the outcome named that roster"


def test_a_handle_that_is_dropped_before_its_outcome() -> None:
    """The engine forgets it once more when it has one."""
    peer = launched()
    assert peer.do(Forget(9)) == []
    assert peer.do(RoundCall(10, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 1)))]
    peer.hear(msg.RosterChanged(AFTER))
    peer.hear(ended(operation(), AbortCause.MEMBER_LOST, "peer 3 lost", version=2))
    assert peer.machine.seen == BEFORE
    assert peer.do(Forget(9)) == []
    assert peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 2, False)) == [ReturnCall(10, None)]
    assert peer.do(RoundCall(11, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 2)))]


def test_another_handle_is_still_open() -> None:
    peer = launched()
    peer.do(ReduceCall(10, 6, SUM, True))
    peer.do(Forget(9))
    assert isinstance(only_error(peer.do(RoundCall(11, UPDATE))), errors.PendingOperations)
    peer.do(Forget(10))
    assert peer.do(RoundCall(12, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 1)))]


def test_the_second_try_of_a_forgotten_call_is_forgotten_too() -> None:
    peer = launched()
    peer.do(Forget(9))
    peer.hear(ended(operation(), AbortCause.DIGEST_MISMATCH, "results differ"))
    assert peer.machine.phase_of(operation(1)) is Phase.REQUESTED
    assert peer.do(RoundCall(10, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 1)))]


def test_the_tag_of_a_forgotten_call_is_in_use_until_its_outcome() -> None:
    peer = launched()
    peer.do(Forget(9))
    assert "tag 5 is in use" in only_error(peer.do(ReduceCall(10, 5, SUM))).reason
    peer.hear(ended(operation()))
    peer.do(Forget(9))
    assert peer.do(ReduceCall(11, 5, SUM))[-1] == Send(msg.OperationRequest(operation(1), SUM))


@pytest.mark.parametrize("first", ["the handle is dropped", "the member is lost"])
def test_a_loss_that_only_a_dropped_handle_was_told_is_raised_by_the_next_call(first: str) -> None:
    peer = launched()
    steps: list[PeerEvent] = [
        Forget(9),
        ControlMessage(msg.Refused(RemovalCause.SILENT, "silent")),
    ]
    for step in steps if first == "the handle is dropped" else reversed(steps):
        peer.do(step)
    peer.do(Forget(9))
    assert not peer.machine.knows_its_loss
    assert isinstance(only_error(peer.do(RoundCall(10, UPDATE))), errors.Evicted)
    assert peer.machine.knows_its_loss
    assert isinstance(only_error(peer.do(RoundCall(11, UPDATE))), errors.NotConnected)


# -- who is blocked ----------------------------------------------------------------------------


def is_blocked(peer: Peer, *, callers: bool = True) -> bool:
    """What the peer answers; the next sign of life must say the same at once."""
    assert peer.hear(msg.BlockedQuery(77)) == [AskCallers(77)]
    (answer,) = peer.do(CallersAsked(77, callers))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, msg.BlockedReply)
    assert answer.message.query == 77
    peer.now_ns += 250 * MS
    for effect in peer.do(Tick((), callers)):
        assert isinstance(effect, Send)
        assert isinstance(effect.message, msg.Heartbeat)
        assert effect.message.blocked is answer.message.blocked
    return answer.message.blocked


def test_in_a_round_it_is_blocked_if_its_callers_are() -> None:
    peer = member()
    assert not is_blocked(peer, callers=False)
    peer.do(RoundCall(3, UPDATE))
    assert not is_blocked(peer, callers=False)
    assert is_blocked(peer)


def test_in_an_operation_it_is_blocked_until_the_start() -> None:
    peer = member()
    peer.do(ReduceCall(9, 5, SUM))
    assert is_blocked(peer)
    peer.hear(msg.OperationStarted(operation()))
    assert not is_blocked(peer)


def test_a_detached_operation_leaves_it_free_until_it_is_claimed() -> None:
    peer = launched()
    peer.do(ReduceCall(10, 6, SUM))
    assert not is_blocked(peer)
    peer.hear(ended(operation()))
    assert not is_blocked(peer)
    peer.do(Claim(9))
    assert is_blocked(peer)


def test_a_handle_leaves_it_free_also_before_the_start() -> None:
    peer = member()
    peer.do(ReduceCall(9, 5, SUM, True))
    assert not is_blocked(peer)
    peer.do(RoundCall(10, PENDING))
    assert not is_blocked(peer)


def test_an_outcome_that_is_due_leaves_it_free() -> None:
    peer = running()
    peer.do(LeaveCall(9, "x"))
    peer.do(ReduceCall(10, 6, SUM))
    assert not is_blocked(peer)  # the withdrawn one will be heard of
    peer.hear(ended(operation(), AbortCause.WITHDRAWN, "peer 2 withdrew: x"))
    assert is_blocked(peer)


def test_only_members_are_blocked() -> None:
    assert not is_blocked(registered())


def test_news_of_the_callers_is_sent_with_the_next_tick_and_once() -> None:
    peer = member()
    peer.do(RoundCall(3, UPDATE))
    for blocked in (True, False, True):
        peer.now_ns += 250 * MS
        assert peer.do(Tick((), blocked)) == [Send(msg.Heartbeat((), (), (), blocked, 1))]
        assert peer.do(Tick((), blocked)) == []
    peer.now_ns += SECOND
    assert peer.do(Tick((), True)) == [Send(msg.Heartbeat((), (), (), True, 1))]


def test_no_answer_without_a_connection() -> None:
    peer = member()
    peer.hear(msg.BlockedQuery(1))
    peer.do(ControlClosed("reset"))
    assert peer.do(CallersAsked(1, True)) == []


# -- leaving a call ----------------------------------------------------------------------------


def test_withdraw() -> None:
    peer = running()
    effects = peer.do(LeaveCall(9, "Ctrl-C"))
    error = only_error(effects)
    assert effects == [
        End(operation(), False),
        Send(msg.Withdraw(operation(), "Ctrl-C")),
        RaiseCall(9, error),
    ]
    assert type(error) is errors.DeadlineExceeded
    assert error.result == 8
    assert error.reason == (
        "Ctrl-C; the operation is withdrawn for everybody, and the input is what it was"
    )
    again = peer.do(ReduceCall(10, 5, SUM))  # need not wait for the outcome
    assert again[1] == Send(msg.OperationRequest(operation(1), SUM))
    assert peer.hear(ended(operation(), AbortCause.WITHDRAWN, "peer 2 withdrew: Ctrl-C")) == []
    assert peer.machine.phase_of(operation(1)) is Phase.REQUESTED


def test_leave_after_done_then_committed() -> None:
    peer = running(done=True)
    effects = peer.do(LeaveCall(9, "Ctrl-C"))
    error = only_error(effects)
    assert effects == [Detach(operation()), RaiseCall(9, error)]
    assert isinstance(error, errors.OutcomeUnknown)
    assert error.result == 8
    assert error.reason == (
        "Ctrl-C after tag 5 was complete here; the others may commit it, and the next joint call "
        "says so; the input is what it was"
    )
    # the next call waits for the outcome, and asks for it
    assert peer.do(ReduceCall(10, 5, SUM)) == [Send(msg.OutcomeQuery(operation()))]
    assert peer.do(RoundCall(11, UPDATE)) == [Send(msg.OutcomeQuery(operation()))]
    gave_up = only_error(peer.do(LeaveCall(11, "no more time")))
    assert isinstance(gave_up, errors.DeadlineExceeded)
    effects = peer.hear(ended(operation()))
    resync = only_error(effects)
    assert effects == [
        End(operation(), True),
        RaiseCall(10, resync),
    ]  # nobody needs its data any more
    assert isinstance(resync, errors.ResyncRequired)
    assert "tag 5" in resync.reason
    for number, event in ((12, ReduceCall(12, 6, SUM)), (13, RoundCall(13, UPDATE))):
        effects = peer.do(event)
        assert effects == [RaiseCall(number, only_error(effects))]
        assert isinstance(only_error(effects), errors.ResyncRequired)


def test_a_handle_that_is_left_before_it_could_be_asked_for_is_withdrawn_for_all() -> None:
    """Others have asked for it, and wait; its caller believes that it has failed."""
    peer = running(done=True)
    peer.do(LeaveCall(9, "Ctrl-C"))
    peer.do(ReduceCall(10, 6, SUM, True))
    gave_up = only_error(peer.do(LeaveCall(10, "no more time")))
    assert isinstance(gave_up, errors.DeadlineExceeded)
    assert peer.do(ReduceCall(11, 6, SUM)) == [Send(msg.OutcomeQuery(operation()))]
    unasked, again = operation(0, tag=6), operation(1, tag=6)
    assert peer.hear(ended(operation(), AbortCause.WITHDRAWN, "peer 1 withdrew: x")) == [
        End(operation(), False),
        Send(msg.Withdraw(unasked, "no more time")),
        Post(11, again, SUM, (PeerId(1), ME)),
        Send(msg.OperationRequest(again, SUM)),
    ]
    assert peer.hear(ended(unasked, AbortCause.WITHDRAWN, "peer 2 withdrew: no more time")) == []
    assert peer.machine.phase_of(again) is Phase.REQUESTED


def test_what_the_others_have_given_up_is_not_asked_for_to_withdraw_it() -> None:
    peer = running(done=True)
    peer.do(LeaveCall(9, "Ctrl-C"))
    peer.do(ReduceCall(10, 6, SUM, True))
    peer.do(LeaveCall(10, "no more time"))
    missed = ended(operation(0, tag=6), AbortCause.WITHDRAWN, "peer 1 withdrew: y")
    assert peer.hear(missed) == [ForgetEarly()]
    assert peer.hear(ended(operation(), AbortCause.WITHDRAWN, "peer 1 withdrew: x")) == [
        End(operation(), False)
    ]


def launched_after_one_in_doubt(*, leaves: bool = False) -> Peer:
    """Of three handles the second was left when it was done here, so the third has to wait."""
    peer = launched()
    peer.do(ReduceCall(10, 6, SUM, True))
    peer.hear(msg.OperationStarted(operation(tag=6)))
    peer.do(ReduceDone(operation(tag=6), b"digest"))
    peer.do(LeaveCall(10, "no more time"))
    assert peer.do(ReduceCall(11, 7, SUM, True)) == [Send(msg.OutcomeQuery(operation(tag=6)))]
    if leaves:
        peer.do(LeaveCall(11, "no more time"))
    return peer


def test_a_handle_that_had_to_wait_is_none_of_a_later_view() -> None:
    """The others have launched it when he did; it would wait for calls that nobody makes."""
    peer = launched_after_one_in_doubt()
    peer.hear(msg.RosterChanged(AFTER))
    peer.hear(ended(operation(), AbortCause.MEMBER_LOST, "peer 3 lost", version=2))
    peer.do(Claim(9))
    assert peer.machine.seen == AFTER
    effects = peer.hear(ended(operation(tag=6), AbortCause.MEMBER_LOST, "peer 3 lost", version=2))
    error = only_error(effects)
    assert effects == [End(operation(tag=6), False), RaiseCall(11, error)]
    assert isinstance(error, errors.CollectiveAborted)
    assert "the run lost peer 3 before this call" in error.reason
    assert peer.do(ReduceCall(12, 7, SUM))[0] == Post(
        12, operation(view=2, tag=7), SUM, (PeerId(1), ME)
    )


def test_a_handle_that_had_to_wait_is_of_the_view_that_its_caller_saw() -> None:
    peer = launched_after_one_in_doubt()
    fourth = Member(PeerId(4), "10.0.0.4", 4004)
    newer = roster(2, 2, ELDER, ME_MEMBER, YOUNGER, fourth, views=(1, 2))
    peer.hear(msg.RosterChanged(newer))
    peer.hear(ended(operation(), AbortCause.WITHDRAWN, "peer 1 withdrew: x", version=2))
    peer.do(Claim(9))
    assert peer.machine.seen == newer
    withdrawn = ended(operation(tag=6), AbortCause.WITHDRAWN, "peer 1 withdrew: x", version=2)
    assert peer.hear(withdrawn) == [
        End(operation(tag=6), False),
        Post(11, operation(tag=7), SUM, (PeerId(1), ME, PeerId(3))),
        Send(msg.OperationRequest(operation(tag=7), SUM)),
    ]


def test_a_handle_that_was_left_while_it_waited_is_withdrawn_from_no_later_view() -> None:
    peer = launched_after_one_in_doubt(leaves=True)
    peer.hear(msg.RosterChanged(AFTER))
    peer.hear(ended(operation(), AbortCause.MEMBER_LOST, "peer 3 lost", version=2))
    peer.do(Claim(9))
    lost = ended(operation(tag=6), AbortCause.MEMBER_LOST, "peer 3 lost", version=2)
    assert peer.hear(lost) == [End(operation(tag=6), False)]


def test_calls_that_had_to_wait_see_what_a_round_has_brought_that_was_left_before() -> None:
    peer = member()
    peer.do(RoundCall(8, UPDATE))
    peer.do(ReduceCall(9, 5, SUM))  # of another thread
    peer.hear(msg.OperationStarted(operation()))
    peer.do(ReduceDone(operation(), b"digest"))
    peer.do(LeaveCall(8, "no more time"))
    peer.do(LeaveCall(9, "no more time"))
    for call in (10, 11):
        peer.do(ReduceCall(call, call, SUM))
    withdrawn = ended(operation(), AbortCause.WITHDRAWN, "peer 1 withdrew: x")
    assert peer.hear(withdrawn) == [End(operation(), False)]
    peer.hear(msg.RosterChanged(roster(3, 2, ELDER, ME_MEMBER, YOUNGER, views=(1, 2))))
    effects = peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 3, True))
    posted = [effect.operation for effect in effects if isinstance(effect, Post)]
    assert posted == [operation(view=2, tag=10), operation(view=2, tag=11)]


def test_a_place_that_is_lost_is_not_told_to_a_deferred_call_that_was_left() -> None:
    peer = running(done=True)
    peer.do(LeaveCall(9, "Ctrl-C"))
    peer.do(ReduceCall(10, 6, SUM))
    peer.do(LeaveCall(10, "no more time"))
    effects = peer.hear(msg.Refused(RemovalCause.SILENT, "silent"))
    assert [effect for effect in effects if isinstance(effect, RaiseCall)] == []
    assert isinstance(only_error(peer.do(RoundCall(11, UPDATE))), errors.Evicted)


def test_leave_after_done_then_aborted() -> None:
    peer = running(done=True)
    peer.do(LeaveCall(9, "Ctrl-C"))
    peer.do(ReduceCall(10, 5, SUM))
    effects = peer.hear(ended(operation(), AbortCause.WITHDRAWN, "peer 1 withdrew: x"))
    assert effects == [
        End(operation(), False),
        Post(10, operation(1), SUM, (PeerId(1), ME)),
        Send(msg.OperationRequest(operation(1), SUM)),
    ]


def test_a_loss_ends_what_was_left_after_it_was_done() -> None:
    peer = running(done=True)
    peer.do(LeaveCall(9, "Ctrl-C"))
    effects = peer.hear(msg.Refused(RemovalCause.SILENT, "silent"))
    assert [type(effect) for effect in effects] == [CloseControl, End, SetLinks]
    assert effects[1] == End(operation(), False)


def test_a_loss_ends_what_was_withdrawn_only_once() -> None:
    peer = running()
    assert peer.do(LeaveCall(9, "Ctrl-C"))[0] == End(operation(), False)
    effects = peer.hear(msg.Refused(RemovalCause.SILENT, "silent"))
    assert [type(effect) for effect in effects] == [CloseControl, SetLinks]


def test_an_empty_reason_to_leave_is_still_a_withdrawal() -> None:
    peer = running()
    peer.do(LeaveCall(9, ""))
    assert peer.do(ReduceCall(10, 5, SUM)) != []


def test_leave_while_joining() -> None:
    peer = registered()
    effects = peer.do(LeaveCall(1, "no time"))
    error = only_error(effects)
    assert type(error) is errors.DeadlineExceeded
    assert error.result == 6
    reason = "no time before this peer was admitted; it waited for the members' update_topology()"
    assert error.reason == reason
    assert effects == [
        Send(msg.Goodbye()), CloseControl(reason), RaiseCall(1, error), SetLinks(()),
    ]  # fmt: skip


def test_leave_while_joining_a_run_that_is_too_small() -> None:
    peer = registered()
    whom = "4 members; with this one there are 2"
    assert peer.hear(msg.AdmissionWaits(5, whom)) == [ReportWait(f"connect waits for {whom}", 5)]
    error = only_error(peer.do(LeaveCall(1, "no time")))
    assert error.reason == f"no time before this peer was admitted; it waited for {whom}"


def test_leave_while_no_master_answers() -> None:
    peer = Peer()
    peer.do(JoinCall(1, 0, "", 4002, 5))
    peer.do(ControlClosed("refused"))
    effects = peer.do(LeaveCall(1, "no time"))
    error = only_error(effects)
    assert (type(error), error.result) == (errors.DeadlineExceeded, 6)
    assert effects == [CloseControl(error.reason), RaiseCall(1, error), SetLinks(())]


def test_leaving_an_operation_tells_whom_it_waited_for() -> None:
    peer = member()
    peer.do(ReduceCall(9, 5, SUM))
    assert peer.hear(msg.OperationWaits(operation(), 5, "peer 1 (in no call)")) == [
        ReportWait("tag 5 (SUM of 8 x float32) waits for peer 1 (in no call)", 5)
    ]
    error = only_error(peer.do(LeaveCall(9, "timeout_s=6 ran out")))
    assert error.reason == (
        "timeout_s=6 ran out; it waited for peer 1 (in no call); the operation is withdrawn for "
        "everybody, and the input is what it was"
    )


def test_after_the_start_nobody_is_waited_for() -> None:
    peer = member()
    peer.do(ReduceCall(9, 5, SUM))
    peer.hear(msg.OperationWaits(operation(), 5, "peer 1 (in no call)"))
    peer.hear(msg.OperationStarted(operation()))
    assert "peer 1" not in only_error(peer.do(LeaveCall(9, "x"))).reason


def test_waits_of_operations_that_nobody_here_is_in() -> None:
    peer = member()
    assert peer.hear(msg.OperationWaits(operation(), 5, "peer 1")) == []
    peer.do(ReduceCall(9, 5, SUM))
    peer.do(LeaveCall(9, "x"))
    assert peer.hear(msg.OperationWaits(operation(), 5, "peer 1")) == []


def test_leaving_a_call_that_has_returned_changes_nothing() -> None:
    assert member().do(LeaveCall(1, "late")) == []


# -- the connection ----------------------------------------------------------------------------


def test_a_lost_connection_is_resumed_and_unanswered_requests_are_repeated() -> None:
    peer = running(done=True)
    peer.do(LinkChanged(PeerId(1), None))
    peer.do(ReduceCall(10, 6, SUM))
    peer.do(RoundCall(11, PENDING))
    assert peer.do(ControlClosed("reset")) == [DialControl(20 * MS)]
    assert peer.do(ReduceCall(12, 7, SUM)) == [Post(12, operation(tag=7), SUM, (PeerId(1), ME))]
    assert peer.do(LeaveCall(12, "x"))[0] == End(operation(tag=7), False)
    assert peer.do(LinkChanged(PeerId(1), "reset")) == []
    assert peer.do(ControlOpened(RUN, 1)) == [Send(msg.Resume(ME, b"token", 1))]
    assert peer.hear(msg.Resumed(1)) == [
        Send(msg.LinkReport(PeerId(1), False, "reset")),
        Send(msg.RoundRequest(RoundId(PENDING, 0))),
        Send(msg.OperationRequest(operation(), SUM)),
        Send(msg.OperationDone(operation(), b"digest")),
        Send(msg.OperationRequest(operation(tag=6), SUM)),
        Send(msg.Withdraw(operation(tag=7), "x")),
    ]
    assert peer.hear(ended(operation()))[0] == End(operation(), True)


def test_attempts_to_reconnect_become_rarer_until_the_master_speaks() -> None:
    peer = member()
    delays = [effect for _ in range(7) for effect in peer.do(ControlClosed("reset"))]
    assert delays == [DialControl(ms * MS) for ms in (20, 40, 80, 160, 320, 500, 500)]
    peer.do(ControlOpened(RUN, 1))
    assert peer.do(ControlClosed("reset")) == [DialControl(500 * MS)]
    peer.do(ControlOpened(RUN, 1))
    peer.hear(msg.Resumed(1))
    assert peer.do(ControlClosed("reset")) == [DialControl(20 * MS)]


def test_master_lost_restores_before_it_raises() -> None:
    peer = running(done=True)
    peer.do(ControlClosed("reset"))
    assert peer.wait(59.75) == []
    effects = peer.wait(0.25)
    error = only_error(effects)
    assert isinstance(error, errors.MasterLost)
    assert error.result == 8
    assert error.reason.startswith("no word from the master for 60.0 s (reset); buffers")
    assert effects == [
        CloseControl(error.reason), End(operation(), False), RaiseCall(9, error), SetLinks(()),
    ]  # fmt: skip
    assert peer.machine.standing is Standing.LOST
    assert isinstance(only_error(peer.do(RoundCall(20, UPDATE))), errors.NotConnected)


def test_a_frozen_master_is_lost_too_although_its_kernel_accepts_connections() -> None:
    peer = running()
    effects: list[PeerEffect] = []
    for _ in range(10):
        effects += peer.wait(10)
        if peer.machine.standing is Standing.LOST:
            break
        assert effects[-2:] == [CloseControl("the master is silent"), effects[-1]]
        peer.do(ControlOpened(RUN, 1))
    assert isinstance(only_error(effects), errors.MasterLost)
    assert 60 <= peer.now_ns / SECOND <= 70


def test_a_loss_that_nobody_waited_for_is_raised_by_the_next_call_once() -> None:
    peer = member()
    reason = "silent for 10.0 s while awaited"
    effects = peer.hear(msg.Refused(RemovalCause.SILENT, reason, 7000, 7500))
    assert [type(effect) for effect in effects] == [CloseControl, SetLinks]
    error = only_error(peer.do(ReduceCall(9, 5, SUM)))
    assert isinstance(error, errors.Evicted)
    assert error.reason == (
        "the run has gone on without this peer for 0.5 s: silent for 10.0 s while awaited "
        "[SILENT]; update_topology() or connect() rejoins it"
    )
    assert (error.cause, error.ago_s) == (RemovalCause.SILENT, 0.5)
    assert isinstance(only_error(peer.do(ReduceCall(10, 5, SUM))), errors.NotConnected)


def test_whose_state_conflicts_is_not_asked_to_come_back_as_it_is() -> None:
    peer = member()
    peer.hear(msg.Refused(RemovalCause.STATE_CONFLICT, "tensor 'w' differs", 7000, 7500))
    error = only_error(peer.do(ReduceCall(9, 5, SUM)))
    assert error.reason == (
        "the run has gone on without this peer for 0.5 s: tensor 'w' differs [STATE_CONFLICT]; "
        "mend the program first, or it is removed again; then update_topology() or connect() "
        "rejoins it"
    )


def evicted_by(peer: Peer, message: msg.Refused) -> errors.Evicted:
    peer.hear(message)
    error = only_error(peer.do(ReduceCall(9, 5, SUM)))
    assert isinstance(error, errors.Evicted)
    return error


def test_a_peer_that_slept_knows_how_long_it_has_been_out() -> None:
    """The refusal was on its way when it fell asleep; the master's clock has gone on."""
    peer = member()
    peer.now_ns = 3 * SECOND
    peer.hear(msg.MasterHeartbeat(500_000))
    peer.now_ns = 63 * SECOND
    peer.hear(msg.MasterHeartbeat(501_000))  # also from before
    error = evicted_by(peer, msg.Refused(RemovalCause.SILENT, "silent", 504_000, 504_000))
    assert error.ago_s == 56.0


def test_the_clock_of_an_older_connection_says_nothing_of_a_removal() -> None:
    peer = member()
    peer.hear(msg.MasterHeartbeat(500_000))
    peer.do(ControlClosed("reset"))
    peer.do(ControlOpened(RUN, 2))  # to a master that began anew
    error = evicted_by(peer, msg.Refused(RemovalCause.CONTROL_LOST, "not resumed", 1000, 3000))
    assert error.ago_s == 2.0


def test_evicted_while_it_waits() -> None:
    peer = running()
    peer.do(ControlClosed("reset"))
    peer.do(ControlOpened(RUN, 1))
    effects = peer.hear(msg.Refused(RemovalCause.CONTROL_LOST, "not resumed"))
    error = only_error(effects)
    assert isinstance(error, errors.Evicted)
    assert effects[1:3] == [End(operation(), False), RaiseCall(9, error)]


def test_another_master_answers() -> None:
    error = only_error(running().hear(msg.Refused(None, "this master does not know you")))
    assert isinstance(error, errors.MasterLost)


def test_a_silent_master_is_only_left_while_somebody_waits() -> None:
    peer = member()
    assert peer.wait(30) == []
    peer.do(RoundCall(3, UPDATE))
    assert peer.wait(0.25) == [CloseControl("the master is silent"), DialControl(20 * MS)]
    peer.do(ControlOpened(RUN, 1))
    assert peer.wait(9.75) == []  # each connection has the whole deadline to bring something
    assert peer.wait(0.25) == [CloseControl("the master is silent"), DialControl(40 * MS)]


def test_a_late_tick_blames_nobody() -> None:
    peer = running()
    assert peer.wait(9.5) == []
    assert peer.wait(20, step_s=20) == []
    assert peer.wait(0.25) == []
    assert peer.wait(0.25) == [CloseControl("the master is silent"), DialControl(20 * MS)]


def test_signs_of_life_are_sent_also_by_a_starved_process() -> None:
    peer = member()
    for _ in range(4):
        peer.now_ns += 2 * SECOND
        assert [type(effect) for effect in peer.do(Tick())] == [Send]


def test_heartbeats_carry_progress_and_acknowledgements() -> None:
    peer = running()
    peer.do(RoundCall(3, PENDING))
    peer.hear(msg.RoundClosed(RoundId(PENDING, 0), 1, False))
    peer.hear(ended(operation(4, tag=8), AbortCause.VIEW_CLOSED, "x"))
    report = msg.Progress(operation(), 1, 2, 3)
    peer.now_ns = SECOND
    assert peer.do(Tick((report,))) == [
        Send(msg.Heartbeat((report,), (operation(4, tag=8),), (RoundId(PENDING, 0),), False, 1))
    ]
    peer.now_ns += 250 * MS
    assert peer.do(Tick((report,))) == []
    peer.now_ns = 2 * SECOND
    assert peer.do(Tick()) == [Send(msg.Heartbeat(roster_version=1))]


def test_a_full_batch_of_acknowledgements_does_not_wait() -> None:
    peer = member()
    outcomes = [ended(operation(n), AbortCause.WITHDRAWN, "x") for n in range(64)]
    effects = [effect for outcome in outcomes for effect in peer.hear(outcome)]
    assert [effect for effect in effects if effect != ForgetEarly()] == [
        Send(msg.Heartbeat((), tuple(operation(n) for n in range(64)), (), False, 1))
    ]


# -- closing -----------------------------------------------------------------------------------


def test_close_says_goodbye_and_fails_what_is_open() -> None:
    peer = running()
    peer.do(RoundCall(10, PENDING))
    effects = peer.do(Close())
    reason = "the communicator was closed"
    assert [effect for effect in effects if not isinstance(effect, RaiseCall)] == [
        Send(msg.Goodbye()), CloseControl(reason), End(operation(), False), SetLinks(()),
    ]  # fmt: skip
    raised = [effect for effect in effects if isinstance(effect, RaiseCall)]
    assert [(r.call, type(r.error)) for r in raised] == [
        (9, errors.NotConnected), (10, errors.NotConnected),
    ]  # fmt: skip
    assert all(reason in str(r.error) for r in raised)
    assert peer.machine.standing is Standing.CLOSED
    assert peer.do(Close()) == []
    assert peer.hear(msg.MasterHeartbeat()) == []
    assert peer.do(ControlOpened(RUN, 1)) == [CloseControl("not needed any more")]
    assert peer.wait(100) == []
    assert isinstance(only_error(peer.do(RoundCall(11, UPDATE))), errors.NotConnected)


def test_a_master_that_speaks_like_a_peer() -> None:
    with pytest.raises(errors.RemoteProtocolError, match="the master sent Goodbye"):
        member().hear(msg.Goodbye())


def test_a_reduce_that_waits_for_a_left_update_goes_on_whoever_takes_that_over() -> None:
    peer = member()
    peer.do(RoundCall(9, UPDATE))
    peer.do(LeaveCall(9, "no more time"))
    assert peer.do(ReduceCall(10, 5, SUM)) == []
    assert peer.do(RoundCall(11, UPDATE)) == []  # of another thread
    assert peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 1, False)) == [
        ReturnCall(11, None),
        Post(10, operation(), SUM, (PeerId(1), ME)),
        Send(msg.OperationRequest(operation(), SUM)),
    ]


def test_optimizing_after_a_left_update_sees_what_the_others_see() -> None:
    peer = member(ME_MEMBER)
    peer.do(RoundCall(9, UPDATE))
    peer.do(LeaveCall(9, "no more time"))
    assert peer.do(RoundCall(10, OPTIMIZE)) == []  # it may not be alone by now
    newer = roster(2, 2, ELDER, ME_MEMBER, views=(1, 2))
    peer.hear(msg.RosterChanged(newer))
    assert peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 2, True)) == [
        Send(msg.RoundRequest(RoundId(OPTIMIZE, 0)))
    ]
    assert peer.machine.seen == newer


def test_so_many_collectives_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.peer.collectives.OPERATIONS_OPEN_MAX", 3)
    peer = member()
    for tag in (0, 1, 2):
        assert len(peer.do(ReduceCall(tag + 10, tag, SUM))) == 2
    error = only_error(peer.do(ReduceCall(13, 3, SUM)))
    assert error.result == 4
    assert "collectives are open already; wait for some of them first" in error.reason
    peer.hear(ended(operation(tag=1), AbortCause.WITHDRAWN, "x"))
    assert len(peer.do(ReduceCall(14, 3, SUM))) == 2


def test_a_reduce_after_a_left_update_that_failed_for_all() -> None:
    peer = member()
    peer.do(RoundCall(9, UPDATE))
    peer.do(LeaveCall(9, "no more time"))
    assert peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 1, False, "who waits where")) == []
    assert peer.do(ReduceCall(10, 5, SUM))[0] == Post(10, operation(), SUM, (PeerId(1), ME))
    assert peer.do(LeaveCall(10, "x"))[0] == End(operation(), False)
    assert peer.do(RoundCall(11, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 2)))]


def test_a_reduce_after_a_left_update_sees_what_the_others_see() -> None:
    peer = member()
    peer.do(RoundCall(9, UPDATE))
    assert isinstance(only_error(peer.do(LeaveCall(9, "no more time"))), errors.DeadlineExceeded)
    assert peer.do(ReduceCall(10, 5, SUM)) == []  # the others return with the answer, not before
    newer = roster(3, 2, ELDER, ME_MEMBER, YOUNGER, views=(1, 2))
    peer.hear(msg.RosterChanged(newer))
    assert peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 3, True)) == [
        Post(10, operation(view=2), SUM, (PeerId(1), ME, PeerId(3))),
        Send(msg.OperationRequest(operation(view=2), SUM)),
    ]
    assert peer.machine.seen == newer


FROM_THE_THIRD = Descriptor.broadcast(DataType.FLOAT, 8, 2)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_broadcast_that_waited_for_a_group_without_its_root(leaves: bool) -> None:
    peer = member(ELDER, ME_MEMBER, YOUNGER)
    peer.do(RoundCall(9, UPDATE))
    peer.do(LeaveCall(9, "no more time"))
    assert peer.do(ReduceCall(10, 5, FROM_THE_THIRD)) == []
    if leaves:
        assert isinstance(only_error(peer.do(LeaveCall(10, "x"))), errors.DeadlineExceeded)
    peer.hear(msg.RosterChanged(roster(2, 2, ELDER, ME_MEMBER)))
    effects = peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 2, False))
    if leaves:
        assert effects == []  # the others have not made it either: there is nothing to withdraw
    else:
        ((call, error),) = [(e.call, e.error) for e in effects if isinstance(e, RaiseCall)]
        assert (call, type(error)) == (10, ValueError)
        assert str(error) == "root must be a rank of the group, from 0 to 1, not 2"
    assert peer.do(ReduceCall(11, 5, BROADCAST))[0] == Post(
        11, operation(view=2), BROADCAST, (PeerId(1), ME)
    )


def test_a_broadcast_that_waited_may_come_from_a_member_that_joined_meanwhile() -> None:
    peer = member()
    peer.do(RoundCall(9, UPDATE))
    peer.do(LeaveCall(9, "no more time"))
    assert peer.do(ReduceCall(10, 5, FROM_THE_THIRD)) == []
    peer.hear(msg.RosterChanged(roster(3, 2, ELDER, ME_MEMBER, YOUNGER, views=(1, 2))))
    assert peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 3, True))[0] == Post(
        10, operation(view=2), FROM_THE_THIRD, (PeerId(1), ME, PeerId(3))
    )


def test_acknowledgements_never_replace_a_heartbeat_with_progress() -> None:
    peer = running()
    beats: list[msg.Heartbeat] = []
    for n in range(2000):  # 100 small reduces a second for 20 s, beside a large one
        peer.now_ns += 10 * MS
        effects = peer.hear(ended(operation(n, tag=77), AbortCause.WITHDRAWN, "x"))
        if n % 25 == 0:
            progress = msg.Progress(operation(), n, n, n)
            effects += peer.do(Tick((progress,)))
        sent = [effect.message for effect in effects if isinstance(effect, Send)]
        beats += [message for message in sent if isinstance(message, msg.Heartbeat)]
    with_progress = [beat for beat in beats if beat.progress]
    assert len(with_progress) >= 18
    assert len(beats) > len(with_progress) + 10  # batches of acknowledgements in between


def test_a_caller_who_left_without_noticing_the_commit_must_resync() -> None:
    peer = running(done=True)
    assert peer.hear(ended(operation()))[-1] == ReturnCall(
        9, ReduceResult(operation(), (PeerId(1), ME))
    )
    assert peer.do(LeftCommitted(operation())) == []
    assert peer.machine.needs_resync
    assert isinstance(only_error(peer.do(ReduceCall(10, 5, SUM))), errors.ResyncRequired)


# -- callers who left without noticing an answer -----------------------------------------------


ANSWERS = {
    UPDATE: (1, None),
    PENDING: (0, True),
    OPTIMIZE: (0, None),
}
"""By kind: the number of a member's first round, and what a call of the kind returns."""


@pytest.mark.parametrize("kind", RoundKind)
def test_an_answer_that_the_caller_has_not_noticed_is_for_the_next_call(kind: RoundKind) -> None:
    n, value = ANSWERS[kind]
    peer = member()
    peer.do(RoundCall(3, kind))
    assert peer.hear(msg.RoundClosed(RoundId(kind, n), 1, True)) == [ReturnCall(3, value)]
    assert peer.do(LeftAnswered(kind)) == []
    assert not peer.machine.in_round
    assert peer.do(RoundCall(4, kind)) == [ReturnCall(4, value)], "in the round that the others had"
    assert peer.do(LeftAnswered(kind)) == []
    assert peer.do(RoundCall(5, kind)) == [ReturnCall(5, value)], "as often as it takes"
    assert peer.do(RoundCall(6, kind)) == [Send(msg.RoundRequest(RoundId(kind, n + 1)))]


def test_other_calls_do_not_touch_an_answer_that_was_put_back() -> None:
    peer = member()
    peer.do(RoundCall(3, PENDING))
    peer.hear(msg.RoundClosed(RoundId(PENDING, 0), 1, True))
    peer.do(LeftAnswered(PENDING))
    assert peer.do(RoundCall(4, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 1)))]
    assert peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 1, False)) == [ReturnCall(4, None)]
    assert peer.do(RoundCall(5, PENDING)) == [ReturnCall(5, True)]


def test_a_reduce_sees_the_update_whose_answer_was_put_back() -> None:
    """The others reduce in the new view, so this one does not wait for another update."""
    peer = member()
    peer.do(RoundCall(3, UPDATE))
    grown = roster(2, 2, ELDER, ME_MEMBER, YOUNGER)
    peer.hear(msg.RosterChanged(grown))
    peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 2, False))
    peer.do(LeftAnswered(UPDATE))
    effects = peer.do(ReduceCall(4, 5, SUM))
    assert effects[-1] == Send(msg.OperationRequest(operation(view=2), SUM))
    peer.hear(ended(operation(view=2), AbortCause.WITHDRAWN, "peer 1 withdrew: x", version=2))
    assert peer.do(RoundCall(5, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 2)))]


def test_an_update_that_the_admission_satisfied_without_being_noticed() -> None:
    peer = registered()
    peer.hear(msg.Admitted(roster(1, 1, ELDER, ME_MEMBER), (msg.RoundCount(UPDATE, 7),)))
    for call in (2, 3):
        assert peer.do(RoundCall(call, UPDATE)) == [ReturnCall(call, None)]
        assert peer.do(LeftAnswered(UPDATE)) == []
    assert peer.do(RoundCall(4, UPDATE)) == [ReturnCall(4, None)]
    assert peer.do(RoundCall(5, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 7)))]


def test_an_update_that_rejoined_without_being_noticed() -> None:
    peer = Peer()
    peer.do(JoinCall(1, 0, "", 4002, 5, 1, True))
    peer.do(ControlOpened(RUN, 1))
    peer.hear(msg.Registered(ME, 1, RUN, b"token"))
    peer.hear(msg.Admitted(roster(1, 1, ELDER, ME_MEMBER), (msg.RoundCount(UPDATE, 7),)))
    peer.do(LeftAnswered(UPDATE))
    assert peer.do(RoundCall(2, UPDATE)) == [ReturnCall(2, None)]
    assert peer.do(RoundCall(3, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 7)))]


def test_another_thread_has_gone_on_to_the_next_round() -> None:
    peer = member()
    peer.do(RoundCall(3, UPDATE))
    peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 1, False))
    peer.do(RoundCall(4, UPDATE))
    peer.do(LeftAnswered(UPDATE))
    assert peer.machine.in_round
    assert peer.hear(msg.RoundClosed(RoundId(UPDATE, 2), 1, False)) == [ReturnCall(4, None)]
    assert peer.do(RoundCall(5, UPDATE)) == [Send(msg.RoundRequest(RoundId(UPDATE, 3)))]


def test_an_answer_is_lost_with_the_membership() -> None:
    peer = member()
    peer.do(RoundCall(3, UPDATE))
    peer.hear(msg.RoundClosed(RoundId(UPDATE, 1), 1, False))
    peer.hear(msg.Refused(RemovalCause.SILENT, "silent"))
    assert peer.do(LeftAnswered(UPDATE)) == []
    assert isinstance(only_error(peer.do(RoundCall(4, UPDATE))), errors.Evicted)


def test_a_caller_who_left_without_noticing_his_admission_is_no_member() -> None:
    peer = registered()
    peer.hear(msg.Admitted(roster(1, 1, ELDER, ME_MEMBER), ()))
    effects = peer.do(LeftAdmitted())
    assert effects[0] == Send(msg.Goodbye())
    assert [type(effect) for effect in effects[1:]] == [CloseControl, SetLinks]
    assert peer.machine.standing is Standing.LOST
    closed = registered()
    closed.hear(msg.Admitted(roster(1, 1, ELDER, ME_MEMBER), ()))
    closed.do(Close())
    assert closed.do(LeftAdmitted()) == []
    assert closed.machine.standing is Standing.CLOSED


def test_a_caller_between_two_attempts_is_told_of_the_loss_that_another_was_told() -> None:
    peer = member()
    error = evicted_by(peer, msg.Refused(RemovalCause.SILENT, "silent", 1000, 1000))
    assert peer.do(ReduceCall(12, 6, SUM, begun_by=peer.machine.peer)) == [RaiseCall(12, error)]
    assert isinstance(only_error(peer.do(ReduceCall(13, 6, SUM))), errors.NotConnected)


def test_all_handles_of_a_step_are_told_of_the_loss_those_launched_after_it_too() -> None:
    """Two buckets are on their way when the peer is removed; backward makes two more."""
    peer = member(ELDER, ME_MEMBER, YOUNGER)
    for call in (10, 11):
        peer.do(ReduceCall(call, call, SUM, True))
    told = peer.hear(msg.Refused(RemovalCause.SILENT, "silent"))
    for call in (12, 13):
        told += peer.do(ReduceCall(call, call, SUM, True))
    raised = {effect.call: effect.error for effect in told if isinstance(effect, RaiseCall)}
    assert {call: type(error) for call, error in raised.items()} == dict.fromkeys(
        (10, 11, 12, 13), errors.Evicted
    )
    assert len(set(map(id, raised.values()))) == 1
    assert not peer.machine.knows_its_loss
    peer.do(Claim(10))
    assert peer.machine.knows_its_loss


def test_an_update_while_another_one_joins_again() -> None:
    peer = Peer()
    peer.do(JoinCall(1, 0, "", 4002, 5, rejoins=True))
    assert isinstance(only_error(peer.do(RoundCall(2, UPDATE))), errors.PendingOperations)
    assert isinstance(only_error(peer.do(RoundCall(3, PENDING))), errors.NotConnected)


# -- a run with a standby ------------------------------------------------------------------------


def running_with_standby() -> Peer:
    peer = running()
    address = msg.MasterAddress("b", 2)
    peer.hear(msg.Resumed(1, b"", (address,)))
    return peer


def test_with_a_standby_a_caller_that_leaves_early_does_not_know_the_outcome() -> None:
    peer = running_with_standby()
    effects = peer.do(LeaveCall(9, "its time is over"))
    assert End(operation(), False) in effects
    assert Send(msg.Withdraw(operation(), "its time is over")) in effects
    error = only_error(effects)
    assert isinstance(error, errors.OutcomeUnknown)
    assert "a majority of the members has to confirm" in error.reason
    # The next call waits for the outcome, and then takes the next number.
    assert peer.do(ReduceCall(10, 5, SUM)) == []
    told = peer.hear(ended(operation(), AbortCause.WITHDRAWN, "peer 2 withdrew"))
    asked = [e.message for e in told if isinstance(e, Send)]
    assert asked == [msg.OperationRequest(operation(1), SUM)]


def test_what_is_proposed_is_stored_at_once_and_is_nobodys_outcome() -> None:
    peer = running_with_standby()
    outcome = replace(ended(operation(), AbortCause.WITHDRAWN, "peer 1 withdrew"), sequence=4)
    effects = peer.hear(msg.Proposed(3, outcome, None))
    assert [beat.proposed for beat in beats(effects)] == [3]
    assert not [e for e in effects if isinstance(e, End | RaiseCall | ReturnCall)]
    assert peer.machine.phase_of(operation()) is Phase.STARTED
    peer.do(ControlClosed("reset"))
    words = [e.message for e in peer.do(ControlOpened(RUN, 2)) if isinstance(e, Send)]
    assert msg.KnownOutcome(outcome, told=False) in words


def beats(effects: list[PeerEffect]) -> list[msg.Heartbeat]:
    words = [effect.message for effect in effects if isinstance(effect, Send)]
    return [word for word in words if isinstance(word, msg.Heartbeat)]


def test_what_another_term_has_proposed_does_not_count_in_this_one() -> None:
    peer = running_with_standby()
    outcome = replace(ended(operation(), AbortCause.WITHDRAWN, "peer 1 withdrew"), sequence=4)
    peer.hear(msg.Proposed(3, outcome, None))
    effects = peer.hear(msg.Resumed(2, b"another"))
    assert [(beat.term, beat.proposed) for beat in beats(effects)] == [(2, 0)]


def test_a_told_outcome_stays_told_when_it_is_proposed_again() -> None:
    peer = running_with_standby()
    outcome = replace(ended(operation(), AbortCause.WITHDRAWN, "peer 1 withdrew"), sequence=4)
    peer.hear(outcome)
    peer.hear(msg.Proposed(3, outcome, None))
    peer.do(ControlClosed("reset"))
    words = [e.message for e in peer.do(ControlOpened(RUN, 2)) if isinstance(e, Send)]
    assert msg.KnownOutcome(outcome) in words


def test_a_proposal_of_nothing_costs_the_master_its_connection() -> None:
    peer = running_with_standby()
    with pytest.raises(errors.RemoteProtocolError, match="proposes not one thing"):
        peer.hear(msg.Proposed(3, None, None))
