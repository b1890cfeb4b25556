"""A peer that finds another master than the one it has followed, with the messages written out."""

from __future__ import annotations

import pytest

from pccl.machines.peer.events import (
    CloseControl,
    ControlClosed,
    ControlMessage,
    ControlOpened,
    DialControl,
    End,
    JoinCall,
    LinkChanged,
    PeerEffect,
    PeerEvent,
    RaiseCall,
    ReduceCall,
    ReduceDone,
    ReduceResult,
    ReturnCall,
    RoundCall,
    Send,
    SetLinks,
    Tick,
)
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.handshake import NO_RUN
from pccl.protocol.limits import Timing
from pccl.protocol.types import (
    AbortCause,
    Algorithm,
    Descriptor,
    Member,
    OperationId,
    PeerId,
    ReduceOp,
    Roster,
    RoundId,
    RoundKind,
)

MS = 1_000_000
SECOND = 1000 * MS
RUN = b"the run's own id"
MASTER, NEXT = b"master A", b"master B"
ME = PeerId(2)
ELDER, ME_MEMBER, YOUNGER = (Member(PeerId(n), f"10.0.0.{n}", 4000 + n) for n in (1, 2, 3))
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8, algorithm=Algorithm.RING)
UPDATE, PENDING = RoundKind.UPDATE_TOPOLOGY, RoundKind.PEERS_PENDING
OPTIMIZE = RoundKind.OPTIMIZE_TOPOLOGY
STANDBY = msg.MasterAddress("10.0.0.9", 9)


def roster(version: int, view: int, *members: Member, term: int = 1) -> Roster:
    size = len(members)
    return Roster(version, 0, view, members, (view,), size, 1, size, term)


def operation(n: int = 0, *, tag: int = 5, view: int = 1, term: int = 1) -> OperationId:
    return OperationId(term, 0, view, tag, n)


def ended(what: OperationId, sequence: int, abort: AbortCause | None = None) -> msg.OperationEnded:
    return msg.OperationEnded(what, abort, "", () if abort else (PeerId(1), ME), 1, sequence)


class Peer:
    """A machine, and the clock that it is told."""

    def __init__(self, timing: Timing | None = None) -> None:
        self.machine = PeerMachine(timing or Timing(), 0)
        self.now_ns = 0

    def do(self, event: PeerEvent) -> list[PeerEffect]:
        effects = self.machine.handle(event, self.now_ns)
        self.machine.check()
        return effects

    def hear(self, message: msg.Message) -> list[PeerEffect]:
        return self.do(ControlMessage(message))

    def wait(self, seconds: float, word: msg.Message | None = None) -> list[PeerEffect]:
        """Let time pass with punctual ticks, and perhaps a word of the master before each."""
        effects: list[PeerEffect] = []
        end_ns = self.now_ns + int(seconds * SECOND)
        while self.now_ns < end_ns:
            self.now_ns += 250 * MS
            if word is not None:
                effects += self.hear(word)
            effects += self.do(Tick())
        return [
            e for e in effects if not (isinstance(e, Send) and isinstance(e.message, msg.Heartbeat))
        ]


def member(
    *members: Member, timing: Timing | None = None, standbys: tuple[msg.MasterAddress, ...] = ()
) -> Peer:
    """A member of view 1 whose first update_topology is used up."""
    peer = Peer(timing)
    peer.do(JoinCall(1, 0, "", 4002, 5))
    peer.do(ControlOpened(RUN, 1))
    peer.hear(msg.Registered(ME, 1, RUN, b"token", MASTER, standbys))
    rounds = (msg.RoundCount(UPDATE, 1), msg.RoundCount(PENDING, 0))
    peer.hear(msg.Admitted(roster(1, 1, *(members or (ELDER, ME_MEMBER))), rounds))
    assert peer.do(RoundCall(2, UPDATE)) == [ReturnCall(2, None)]
    return peer


def header(
    version: int, update: int, pending: int = 0, *, term: int = 1, incumbent: bytes = MASTER
) -> msg.Return:
    rounds = (
        msg.RoundCount(UPDATE, update),
        msg.RoundCount(PENDING, pending),
        msg.RoundCount(OPTIMIZE, 0),
    )
    registration = msg.Register(0, "", 4002)
    return msg.Return(ME, b"token", RUN, term, registration, version, rounds, incumbent)


def sent(effects: list[PeerEffect]) -> list[msg.PeerMessage]:
    return [e.message for e in effects if isinstance(e, Send)]


def only_error(effects: list[PeerEffect]) -> errors.PCCLError:
    (error,) = [effect.error for effect in effects if isinstance(effect, RaiseCall)]
    assert isinstance(error, errors.PCCLError)
    return error


# -- the report ------------------------------------------------------------------------------


def test_everything_that_another_master_has_to_know() -> None:
    peer = member()
    peer.do(LinkChanged(PeerId(1), None))
    peer.do(ReduceCall(8, 5, SUM))
    peer.hear(msg.OperationStarted(operation()))
    peer.do(ReduceDone(operation(), b"digest"))
    outcome = ended(operation(), 3)
    assert peer.hear(outcome)[-1] == ReturnCall(8, ReduceResult(operation(), (PeerId(1), ME)))
    peer.do(RoundCall(9, PENDING))
    answer = msg.RoundClosed(RoundId(PENDING, 0), 1, False, sequence=4)
    assert peer.hear(answer) == [ReturnCall(9, False)]
    grown = roster(2, 2, ELDER, ME_MEMBER, YOUNGER)
    grown = Roster(2, 0, 2, grown.members, (1, 2), 3, 1, 3)
    peer.hear(msg.RosterChanged(grown))
    peer.do(ReduceCall(10, 6, SUM))
    peer.do(RoundCall(11, PENDING))
    assert peer.do(ControlClosed("reset")) == [DialControl(20 * MS)]
    assert sent(peer.do(ControlOpened(NO_RUN, 0))) == [
        header(2, 1, 1),
        msg.KnownRoster(roster(1, 1, ELDER, ME_MEMBER)),
        msg.KnownRoster(grown),
        msg.KnownOutcome(outcome),
        msg.KnownAnswer(answer),
        msg.LinkReport(PeerId(1), True, ""),
        msg.RoundRequest(RoundId(PENDING, 1)),
        msg.OperationRequest(operation(tag=6), SUM),
        msg.Reported(),
    ]


def test_to_the_same_master_it_only_resumes() -> None:
    peer = member()
    peer.do(ControlClosed("reset"))
    assert sent(peer.do(ControlOpened(RUN, 1))) == [msg.Resume(ME, b"token", 1)]


@pytest.mark.parametrize(("run", "term"), [(NO_RUN, 0), (RUN, 2)])
def test_whoever_does_not_show_the_same_run_and_term_is_another_one(run: bytes, term: int) -> None:
    peer = member()
    peer.do(ControlClosed("reset"))
    assert sent(peer.do(ControlOpened(run, term)))[0] == header(1, 1)


def test_who_was_not_admitted_says_so() -> None:
    peer = Peer()
    peer.do(JoinCall(1, 0, "", 4002, 5))
    peer.do(ControlOpened(RUN, 1))
    peer.hear(msg.Registered(ME, 1, RUN, b"token", MASTER))
    peer.do(ControlClosed("reset"))
    assert sent(peer.do(ControlOpened(NO_RUN, 0))) == [header(0, 0), msg.Reported()]
    peer.hear(msg.Resumed(2, NEXT))
    rounds = (msg.RoundCount(UPDATE, 1),)
    newest = roster(9, 9, ELDER, ME_MEMBER, term=2)
    assert peer.hear(msg.Admitted(newest, rounds))[-1] == ReturnCall(1, None)


def test_a_report_that_broke_off_is_repeated() -> None:
    peer = member()
    peer.do(ControlClosed("reset"))
    first = sent(peer.do(ControlOpened(NO_RUN, 0)))
    peer.do(ControlClosed("reset"))
    assert sent(peer.do(ControlOpened(NO_RUN, 0))) == first


# -- what is kept for it ---------------------------------------------------------------------


def test_outcomes_and_answers_are_kept_until_they_are_settled() -> None:
    peer = member()
    for n, sequence in ((0, 3), (1, 4)):
        peer.do(ReduceCall(10 + n, 5, SUM))
        peer.hear(ended(operation(n), sequence, AbortCause.WITHDRAWN))
    peer.do(RoundCall(20, PENDING))
    answer = msg.RoundClosed(RoundId(PENDING, 0), 1, False, sequence=5)
    peer.hear(answer)
    second = msg.KnownOutcome(ended(operation(1), 4, AbortCause.WITHDRAWN))
    peer.hear(msg.MasterHeartbeat(0, 4))
    peer.do(ControlClosed("reset"))
    kept = [m for m in sent(peer.do(ControlOpened(NO_RUN, 0))) if "Known" in type(m).__name__]
    assert kept[1:] == [second, msg.KnownAnswer(answer)]
    peer.hear(msg.Resumed(2, NEXT))
    peer.hear(msg.MasterHeartbeat(0, 6))
    peer.do(ControlClosed("reset"))
    again = sent(peer.do(ControlOpened(NO_RUN, 0)))
    assert not [m for m in again if isinstance(m, msg.KnownOutcome | msg.KnownAnswer)]


def test_what_a_closed_view_has_decided_is_not_kept() -> None:
    peer = member()
    peer.do(ReduceCall(10, 5, SUM))
    peer.hear(ended(operation(), 0, AbortCause.VIEW_CLOSED))
    peer.do(ControlClosed("reset"))
    words = sent(peer.do(ControlOpened(NO_RUN, 0)))
    assert not [m for m in words if isinstance(m, msg.KnownOutcome)]


# -- the next master -------------------------------------------------------------------------


def test_it_follows_the_next_master_and_repeats_what_is_open() -> None:
    peer = member()
    peer.do(ReduceCall(9, 5, SUM))
    peer.do(ControlClosed("reset"))
    peer.do(ControlOpened(NO_RUN, 0))
    assert sent(peer.hear(msg.Resumed(2, NEXT))) == [msg.OperationRequest(operation(), SUM)]
    assert peer.machine.term == 2
    peer.do(ControlClosed("reset"))
    assert sent(peer.do(ControlOpened(RUN, 2))) == [msg.Resume(ME, b"token", 1)]
    peer.do(ControlClosed("reset"))
    assert sent(peer.do(ControlOpened(NO_RUN, 0)))[0] == header(1, 1, term=2, incumbent=NEXT)


def test_operations_carry_the_term_of_their_view() -> None:
    peer = member()
    peer.do(ControlClosed("reset"))
    peer.do(ControlOpened(NO_RUN, 0))
    peer.hear(msg.Resumed(2, NEXT))
    open_still = Roster(9, 0, 1, (ELDER, ME_MEMBER), (1,), 2, 1, 2, 1)
    peer.hear(msg.RosterChanged(open_still))
    assert sent(peer.do(ReduceCall(9, 5, SUM))) == [msg.OperationRequest(operation(), SUM)]
    peer.hear(ended(operation(), 3, AbortCause.WITHDRAWN))
    peer.hear(msg.RosterChanged(roster(10, 12, ELDER, ME_MEMBER, term=2)))
    peer.do(ReduceCall(10, 5, SUM))  # raises, and shows the new view
    later = operation(view=12, term=2)
    assert sent(peer.do(ReduceCall(11, 5, SUM))) == [msg.OperationRequest(later, SUM)]


def test_a_master_of_the_past_is_none() -> None:
    peer = member()
    peer.do(ControlClosed("reset"))
    peer.do(ControlOpened(NO_RUN, 0))
    peer.hear(msg.Resumed(5, NEXT))
    with pytest.raises(errors.RemoteProtocolError, match="Resumed with an older term"):
        peer.hear(msg.Resumed(4, MASTER))


def test_with_a_standby_each_roster_is_acknowledged_at_once() -> None:
    newest = roster(2, 2, ME_MEMBER)
    quiet = member(standbys=())
    assert sent(quiet.hear(msg.RosterChanged(newest))) == []
    peer = member(standbys=(STANDBY,))
    assert sent(peer.hear(msg.RosterChanged(newest))) == [msg.Heartbeat(roster_version=2)]
    assert sent(peer.hear(msg.RosterChanged(newest))) == []  # told twice


def test_who_hears_of_a_standby_later_acknowledges_from_then_on() -> None:
    peer = member()
    peer.do(ControlClosed("reset"))
    peer.do(ControlOpened(NO_RUN, 0))
    peer.hear(msg.Resumed(2, NEXT, (STANDBY,)))
    assert sent(peer.hear(msg.RosterChanged(roster(2, 2, ME_MEMBER)))) == [
        msg.Heartbeat(roster_version=2)
    ]


# -- no master -------------------------------------------------------------------------------


def test_a_master_that_answers_and_never_goes_on_is_lost_too() -> None:
    """It is a minority's: it takes reports, sends signs of life, and lacks the others."""
    peer = member(timing=Timing(master_lost_s=6.0))
    peer.do(ReduceCall(9, 5, SUM))
    peer.do(ControlClosed("reset"))
    peer.do(ControlOpened(NO_RUN, 0))
    assert peer.wait(5.75, msg.MasterHeartbeat()) == []
    effects = peer.wait(0.25, msg.MasterHeartbeat())
    error = only_error(effects)
    assert isinstance(error, errors.MasterLost)
    assert error.reason.startswith(
        "no word from the master for 6.0 s (the master that answers waits for more members)"
    )
    assert effects == [
        CloseControl(error.reason), End(operation(), False), RaiseCall(9, error), SetLinks(()),
    ]  # fmt: skip
    assert peer.machine.standing is Standing.LOST


def test_connections_that_come_and_go_do_not_put_off_the_end() -> None:
    peer = member(timing=Timing(master_lost_s=6.0))
    peer.do(ReduceCall(9, 5, SUM))
    peer.do(ControlClosed("reset"))
    effects: list[PeerEffect] = []
    for _ in range(12):
        peer.do(ControlOpened(NO_RUN, 0))
        effects += peer.wait(0.5, msg.MasterHeartbeat())
        effects += peer.do(ControlClosed("this master has lost the majority of the members"))
    assert isinstance(only_error(effects), errors.MasterLost)


def test_a_word_of_the_master_that_goes_on_begins_the_time_anew() -> None:
    peer = member(timing=Timing(master_lost_s=6.0))
    peer.do(ControlClosed("reset"))
    peer.do(ControlOpened(NO_RUN, 0))
    peer.wait(5, msg.MasterHeartbeat())
    peer.hear(msg.Resumed(2, NEXT))
    assert peer.wait(30, msg.MasterHeartbeat()) == []
    assert peer.machine.standing is Standing.MEMBER


def test_a_late_tick_puts_off_the_end() -> None:
    peer = member(timing=Timing(master_lost_s=6.0))
    peer.do(ControlClosed("reset"))
    peer.wait(5.5)
    peer.now_ns += 100 * SECOND
    peer.do(Tick())
    assert peer.machine.standing is Standing.MEMBER
    assert isinstance(
        only_error([*peer.wait(0.5), *peer.do(RoundCall(9, PENDING))]), errors.MasterLost
    )
