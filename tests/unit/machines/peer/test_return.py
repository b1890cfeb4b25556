"""A peer that finds another master than the one it has followed, with the messages written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.machines.peer import events as ev
from pccl.machines.peer.machine import Standing
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.handshake.opening import NO_RUN
from pccl.protocol.limits import Timing
from pccl.protocol.shared_state import Expected, Lineage
from pccl.protocol.types import SYNC_TAG, AbortCause, PeerId, RoundId, RoundKind
from tests.support.peer_stage import RUN, SUM, PeerStage, ended, raised, sent
from tests.support.scenarios import op, roster

MASTER, NEXT = b"master A", b"master B"
UPDATE, PENDING, _ = RoundKind
STANDBY = msg.MasterAddress("10.0.0.9", 9)


def member(*standbys: msg.MasterAddress, timing: Timing | None = None) -> PeerStage:
    return PeerStage(timing).registered(MASTER, *standbys).member()


def header(
    version: int, update: int, pending: int = 0, *, term: int = 1, incumbent: bytes = MASTER
) -> msg.Return:
    rounds = tuple(map(msg.RoundCount, RoundKind, (update, pending, 0)))
    registration = msg.Register(0, "", 4002)
    return msg.Return(PeerId(2), RUN, term, registration, version, rounds, incumbent)


def finds_another(peer: PeerStage) -> list[msg.PeerMessage]:
    """Its master is gone, and it says all to another one."""
    peer.do(ev.ControlClosed("reset"))
    return sent(peer.do(ev.ControlOpened(NO_RUN, 0)))


def follows_another(*standbys: msg.MasterAddress) -> PeerStage:
    """A member that has gone on with the next master, of term 2."""
    peer = member()
    finds_another(peer)
    peer.do(msg.Resumed(2, NEXT, standbys))
    return peer


# -- the report ------------------------------------------------------------------------------


def test_everything_that_another_master_has_to_know() -> None:
    peer = member()
    peer.do(ev.LinkChanged(PeerId(1), None))
    peer.do(ev.ReduceCall(8, 5, SUM))
    peer.do(msg.OperationStarted(op()))
    peer.do(ev.ReduceDone(op(), b"digest"))
    outcome = ended(op(), sequence=3)
    assert peer.do(outcome)[-1] == ev.ReturnCall(8, ev.ReduceResult(op(), (PeerId(1), PeerId(2))))
    peer.do(ev.RoundCall(9, PENDING))
    answer = msg.RoundClosed(RoundId(PENDING, 0), 1, False, sequence=4)
    assert peer.do(answer) == [ev.ReturnCall(9, False)]
    grown = roster(2, 2, 1, 2, 3, open_views=(1, 2))
    peer.do(msg.RosterChanged(grown))
    peer.do(ev.ReduceCall(10, 6, SUM))
    peer.do(ev.RoundCall(11, PENDING))
    assert peer.do(ev.ControlClosed("reset")) == [ev.DialControl(20_000_000)]
    assert sent(peer.do(ev.ControlOpened(NO_RUN, 0))) == [
        header(2, 1, 1),
        msg.KnownRoster(roster(1, 1, 1, 2)),
        msg.KnownRoster(grown),
        msg.KnownOutcome(outcome),
        msg.KnownAnswer(answer),
        msg.LinkReport(PeerId(1), True, ""),
        msg.RoundRequest(RoundId(PENDING, 1)),
        msg.OperationRequest(op(tag=6), SUM),
        msg.Reported(),
    ]


def test_what_a_newcomer_was_told_of_the_shared_state() -> None:
    expected = Expected(41, Lineage(RUN, op(tag=SYNC_TAG)))
    peer = PeerStage().registered(MASTER)
    counts = (msg.RoundCount(UPDATE, 1), msg.RoundCount(PENDING, 0))
    peer.do(msg.Admitted(roster(1, 1, 1, 2), counts, expected=expected))
    assert finds_another(peer)[0] == replace(header(1, 1), expected=expected)


def test_to_the_same_master_it_only_resumes() -> None:
    peer = member()
    peer.do(ev.ControlClosed("reset"))
    assert sent(peer.do(ev.ControlOpened(RUN, 1))) == [msg.Resume(PeerId(2), 1)]


@pytest.mark.parametrize(("run", "term"), [(NO_RUN, 0), (RUN, 2)])
def test_whoever_does_not_show_the_same_run_and_term_is_another_one(run: bytes, term: int) -> None:
    peer = member()
    peer.do(ev.ControlClosed("reset"))
    assert sent(peer.do(ev.ControlOpened(run, term)))[0] == header(1, 1)


def test_who_was_not_admitted_says_so() -> None:
    peer = PeerStage().registered(MASTER)
    assert finds_another(peer) == [header(0, 0), msg.Reported()]
    peer.do(msg.Resumed(2, NEXT))
    rounds = (msg.RoundCount(UPDATE, 1),)
    newest = roster(9, 9, 1, 2, term=2)
    assert peer.do(msg.Admitted(newest, rounds))[-1] == ev.ReturnCall(1, None)


def test_a_report_that_broke_off_is_repeated() -> None:
    peer = member()
    first = finds_another(peer)
    assert finds_another(peer) == first


# -- what is kept for it ---------------------------------------------------------------------


def test_outcomes_and_answers_are_kept_until_they_are_settled() -> None:
    peer = member()
    for n, sequence in ((0, 3), (1, 4)):
        peer.do(ev.ReduceCall(10 + n, 5, SUM))
        peer.do(ended(op(n), AbortCause.WITHDRAWN, sequence=sequence))
    peer.do(ev.RoundCall(20, PENDING))
    answer = msg.RoundClosed(RoundId(PENDING, 0), 1, False, sequence=5)
    peer.do(answer)
    second = msg.KnownOutcome(ended(op(1), AbortCause.WITHDRAWN, sequence=4))
    peer.do(msg.MasterHeartbeat(0, 4))
    kept = [m for m in finds_another(peer) if "Known" in type(m).__name__]
    assert kept[1:] == [second, msg.KnownAnswer(answer)]
    peer.do(msg.Resumed(2, NEXT))
    peer.do(msg.MasterHeartbeat(0, 6))
    assert not [m for m in finds_another(peer) if isinstance(m, msg.KnownOutcome | msg.KnownAnswer)]


def test_another_master_may_use_the_places_of_settled_decisions_again() -> None:
    """It may die after it has told a decision to this peer only."""
    peer = member()
    peer.do(ev.ReduceCall(9, 5, SUM))
    peer.do(msg.MasterHeartbeat(0, 7))
    finds_another(peer)
    peer.do(msg.Resumed(2, NEXT))
    told = ended(op(), AbortCause.WITHDRAWN, sequence=1)
    peer.do(told)
    assert msg.KnownOutcome(told) in finds_another(peer)


def test_a_decision_takes_nothing_over_from_another_one_at_its_place() -> None:
    peer = member()
    peer.do(ev.ReduceCall(9, 5, SUM))
    peer.do(ended(op(), AbortCause.WITHDRAWN, sequence=1))
    finds_another(peer)
    peer.do(msg.Resumed(2, NEXT))
    later = ended(op(1), AbortCause.WITHDRAWN, sequence=1)
    peer.do(msg.Proposed(1, later, None))
    assert msg.KnownOutcome(later, told=False) in finds_another(peer)


def test_what_a_closed_view_has_decided_is_not_kept() -> None:
    peer = member()
    peer.do(ev.ReduceCall(10, 5, SUM))
    peer.do(ended(op(), AbortCause.VIEW_CLOSED, sequence=0))
    assert not [m for m in finds_another(peer) if isinstance(m, msg.KnownOutcome)]


# -- the next master -------------------------------------------------------------------------


def test_it_follows_the_next_master_and_repeats_what_is_open() -> None:
    peer = member()
    peer.do(ev.ReduceCall(9, 5, SUM))
    finds_another(peer)
    assert sent(peer.do(msg.Resumed(2, NEXT))) == [msg.OperationRequest(op(), SUM)]
    assert peer.machine.term == 2
    peer.do(ev.ControlClosed("reset"))
    assert sent(peer.do(ev.ControlOpened(RUN, 2))) == [msg.Resume(PeerId(2), 1)]
    assert finds_another(peer)[0] == header(1, 1, term=2, incumbent=NEXT)


def test_operations_carry_the_term_of_their_view() -> None:
    peer = follows_another()
    peer.do(msg.RosterChanged(roster(9, 1, 1, 2)))
    assert sent(peer.do(ev.ReduceCall(9, 5, SUM))) == [msg.OperationRequest(op(), SUM)]
    peer.do(ended(op(), AbortCause.WITHDRAWN, sequence=3))
    peer.do(msg.RosterChanged(roster(10, 12, 1, 2, term=2)))
    peer.do(ev.ReduceCall(10, 5, SUM))  # raises, and shows the new view
    later = op(view=12, term=2)
    assert sent(peer.do(ev.ReduceCall(11, 5, SUM))) == [msg.OperationRequest(later, SUM)]


def test_a_master_of_the_past_is_none() -> None:
    peer = member()
    finds_another(peer)
    peer.do(msg.Resumed(5, NEXT))
    with pytest.raises(errors.RemoteProtocolError, match="invalid or outdated Resumed"):
        peer.do(msg.Resumed(4, MASTER))


def test_with_a_standby_each_roster_is_acknowledged_at_once() -> None:
    newest = roster(2, 2, 2)
    quiet = member()
    assert sent(quiet.do(msg.RosterChanged(newest))) == []
    peer = member(STANDBY)
    assert sent(peer.do(msg.RosterChanged(newest))) == [msg.Heartbeat(roster_version=2)]
    assert sent(peer.do(msg.RosterChanged(newest))) == []  # told twice


def test_who_hears_of_a_standby_later_acknowledges_from_then_on() -> None:
    peer = follows_another(STANDBY)
    assert sent(peer.do(msg.RosterChanged(roster(2, 2, 2)))) == [msg.Heartbeat(roster_version=2)]


# -- no master -------------------------------------------------------------------------------


def test_a_master_that_answers_and_never_goes_on_is_lost_too() -> None:
    """It is a minority's: it takes reports, sends signs of life, and lacks the others."""
    peer = member(timing=Timing(master_lost_s=6.0))
    peer.do(ev.ReduceCall(9, 5, SUM))
    finds_another(peer)
    assert peer.wait(5.75, hears=msg.MasterHeartbeat()) == []
    effects = peer.wait(0.25, hears=msg.MasterHeartbeat())
    error = raised(effects, errors.MasterLost)
    assert error.reason.startswith(
        "no message from the master for 6 s (the master that answered waits for more members)"
    )
    assert effects == [
        ev.CloseControl(error.reason), ev.End(op(), False), ev.RaiseCall(9, error), ev.SetLinks(()),
    ]  # fmt: skip
    assert peer.machine.standing is Standing.LOST


def test_connections_that_come_and_go_do_not_put_off_the_end() -> None:
    peer = member(timing=Timing(master_lost_s=6.0))
    peer.do(ev.ReduceCall(9, 5, SUM))
    peer.do(ev.ControlClosed("reset"))
    effects: list[ev.PeerEffect] = []
    for _ in range(12):
        peer.do(ev.ControlOpened(NO_RUN, 0))
        effects += peer.wait(0.5, hears=msg.MasterHeartbeat())
        effects += peer.do(ev.ControlClosed("this master has lost the majority of the members"))
    raised(effects, errors.MasterLost)


def test_a_word_of_the_master_that_goes_on_begins_the_time_anew() -> None:
    peer = member(timing=Timing(master_lost_s=6.0))
    finds_another(peer)
    peer.wait(5, hears=msg.MasterHeartbeat())
    peer.do(msg.Resumed(2, NEXT))
    assert peer.wait(30, hears=msg.MasterHeartbeat()) == []
    assert peer.machine.standing is Standing.MEMBER


def test_a_late_tick_puts_off_the_end() -> None:
    peer = member(timing=Timing(master_lost_s=6.0))
    peer.do(ev.ControlClosed("reset"))
    peer.wait(5.5)
    peer.sleep(100)
    peer.do(ev.Tick())
    assert peer.machine.standing is Standing.MEMBER
    raised([*peer.wait(0.5), *peer.do(ev.RoundCall(9, PENDING))], errors.MasterLost)
