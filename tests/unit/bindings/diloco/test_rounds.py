"""The joint calls of one replica, one by one: what it asks for, and what it tells the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pccl.bindings.data.sample_ledger import SampleLedger
from pccl.bindings.diloco.ledger import Ledger
from pccl.bindings.diloco.rounds import (
    Average,
    Connect,
    Contribution,
    Effect,
    Entered,
    Members,
    NewcomersWait,
    Pause,
    Reduce,
    ReduceBuffers,
    RoundCommitted,
    Rounds,
    Sync,
    Take,
    Update,
)
from pccl.bindings.diloco.schedule import schedule
from pccl.errors import (
    CollectiveAborted,
    Evicted,
    MasterLost,
    NotAdmitted,
    PCCLError,
    ResyncRequired,
    StateUnavailable,
    TooFewPeers,
)
from pccl.inquiry import RemovalCause

MINE = 3
"""This replica's id."""


class Outer:
    """One number for each fragment; the outer step subtracts the average."""

    samples: SampleLedger | None = None

    def __init__(self, fragments: int) -> None:
        self.record = np.zeros(Ledger.SIZE, np.int64)
        self.ledger = Ledger(self.record)
        self.values = [100] * fragments
        self.touched: list[int | None] = []
        self.buffers: list[list[int]] = []
        """With buffers: what was loaded; the last fragment's rounds sum them."""
        self.has_buffers = False
        self.offers = 0

    def nothing(self, fragment: int) -> list[int]:
        return [0]

    def offer(self) -> None:
        self.offers += 1

    def no_buffers(self, fragment: int) -> list[int] | None:
        return [0] if self.has_buffers else None

    def apply(
        self, fragment: int, average: list[int], buffers: list[int] | None
    ) -> tuple[float, float]:
        if buffers is not None:
            self.buffers.append(list(buffers))
        self.values[fragment] -= average[0]
        return float(abs(average[0])), float(abs(average[0]))

    def common_buffers(self) -> list[int]:
        return self.buffers[-1]

    def copy(self, fragment: int, target: list[int]) -> None:
        target[0] = self.values[fragment]

    def touch(self, fragment: int | None) -> None:
        self.touched.append(fragment)


class Script:
    """A replica whose calls this test answers."""

    def __init__(
        self,
        fragments: int = 1,
        min_peers: int = 1,
        *,
        has_quorum: bool = False,
        samples: SampleLedger | None = None,
    ) -> None:
        self.outer = Outer(fragments)
        self.outer.samples = samples
        self.told: list[Any] = []
        made = schedule(10, fragments, 0)
        rounds = Rounds(made, self.outer, self.told.append, min_peers, has_quorum=has_quorum)
        self.steps = rounds.run()
        self.effect: Effect | None = next(self.steps)
        self.fragments = fragments

    def send(self, outcome: object = None) -> Effect | None:
        """Answer what it waits for; return what it asks for next."""
        return self._advance(self.steps.send, outcome)

    def throw(self, error: Exception) -> Effect | None:
        return self._advance(self.steps.throw, error)

    def _advance(self, way: Callable[[Any], Effect], what: object) -> Effect | None:
        try:
            self.effect = way(what)
        except StopIteration:
            self.effect = None
        return self.effect

    def answer(self, *outcomes: object) -> Effect | None:
        """Several in a row; exceptions are thrown."""
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                self.throw(outcome)
            else:
                self.send(outcome)
        return self.effect

    def news(self) -> list[Any]:
        """What it was told since this was asked last, without news of members."""
        seen = [notice for notice in self.told if not isinstance(notice, Members)]
        self.told.clear()
        return seen

    def contribution(self, number: int, value: int, entry: int = 1) -> Contribution:
        return Contribution(number, number % self.fragments, 1.0, [value], entry)


def evicted(cause: RemovalCause) -> Evicted:
    error = Evicted()
    error.cause = cause
    return error


def members(*ids: int, mine: int = MINE, run: bytes = b"") -> Members:
    return Members(mine, ids, run=run)


def state(script: Script, number: int, value: int, *, is_open: bool = False) -> None:
    """What a synchronization does here: the others' state."""
    script.outer.record[:2] = number, is_open
    script.outer.values[:] = [value] * script.fragments


def started(
    ids: tuple[int, ...] = (MINE, 5),
    fragments: int = 1,
    min_peers: int = 1,
    *,
    has_quorum: bool = False,
) -> Script:
    """Entered before round 0, and about to take a pseudo-gradient."""
    script = Script(fragments, min_peers, has_quorum=has_quorum)
    assert script.effect == Connect()
    assert script.answer(members(*ids), members(*ids)) == Take(has_quorum)
    assert script.news() == [Entered(entry=1, number=0, is_open=False, applied=())]
    return script


# -- the usual way -------------------------------------------------------------------------------


def test_a_replica_connects_synchronizes_and_waits_for_work() -> None:
    script = Script()
    assert script.effect == Connect()
    assert script.send(members(MINE)) == Sync()
    assert script.told == [members(MINE)]
    assert script.send(members(MINE)) == Take()
    assert script.told == [members(MINE), Entered(entry=1, number=0, is_open=False, applied=())]


def test_a_round_is_update_reduce_apply_sync() -> None:
    script = started()
    mine = script.contribution(0, 8)
    assert script.send(mine) == Update()
    assert script.send(members(MINE, 5)) == Reduce(mine)
    mine.values[0] = 6  # the average
    average = Average((MINE, 5), 2.0, 10, 20)
    assert script.send(average) == Sync()
    assert script.news() == [RoundCommitted(mine, average, (6.0, 6.0))]
    assert mine.values == [94]
    assert script.outer.values == [94]
    assert script.outer.touched == [0]
    assert script.send(members(MINE, 5)) == Take()
    ledger = script.outer.ledger
    assert (ledger.number, ledger.is_open) == (1, False)
    assert ledger.has_applied(0, MINE, b"")
    assert ledger.has_applied(0, 5, b"")
    assert not ledger.has_applied(0, 4, b"")


def test_no_more_work_ends_it() -> None:
    script = started()
    assert script.send(None) is None


def test_newcomers_are_synchronized_before_the_reduce_and_learn_of_the_round() -> None:
    script = started((MINE,))
    mine = script.contribution(0, 8)
    assert script.answer(mine, members(MINE, 6)) == Sync()
    assert script.outer.ledger.is_open
    assert script.outer.touched == [None]
    assert script.send(members(MINE, 6)) == Reduce(mine)
    script.send(Average((MINE, 6), 1.0))
    assert not script.outer.ledger.is_open


def test_who_is_gone_needs_no_synchronization() -> None:
    script = started((MINE, 5, 6))
    mine = script.contribution(0, 8)
    assert script.answer(mine, members(MINE, 6)) == Reduce(mine)


def test_news_of_members_comes_when_they_change() -> None:
    script = started((MINE, 5))
    script.answer(script.contribution(0, 8), members(MINE, 5, 6), members(MINE, 5, 6))
    script.answer(Average((MINE, 5), 2.0), members(MINE, 5))
    assert [notice for notice in script.told if isinstance(notice, Members)] == [
        members(MINE, 5, 6),
        members(MINE, 5),
    ]


def test_alone_the_own_work_is_the_average() -> None:
    script = started((MINE,))
    mine = script.contribution(0, 8)
    assert script.answer(mine, members(MINE), TooFewPeers()) == Sync()
    assert script.news() == [
        RoundCommitted(mine, Average((MINE,), 1.0, shares=((MINE, 1.0),)), (8.0, 8.0))
    ]
    assert script.outer.values == [92]
    assert script.outer.ledger.has_applied(0, MINE, b"")


def test_a_round_in_which_nobody_has_worked_changes_nothing_but_its_number() -> None:
    script = started((MINE,))
    idle = Contribution(0, 0, 0.0, [8], 1)
    assert script.answer(idle, members(MINE), TooFewPeers()) == Sync()
    assert script.outer.values == [100]
    assert script.outer.ledger.number == 1
    assert script.news() == [
        RoundCommitted(idle, Average((MINE,), 0.0, shares=((MINE, 0.0),)), (0.0, 0.0))
    ]


def test_rounds_wait_for_min_peers() -> None:
    script = started(min_peers=2)
    mine = script.contribution(0, 8)
    assert script.answer(mine, members(MINE)) == Pause(0.5)
    assert script.send(None) == Update()
    assert script.send(members(MINE)) == Pause(0.5)
    assert script.answer(None, members(MINE, 9)) == Sync()
    assert script.send(members(MINE, 9)) == Reduce(mine)


def test_who_is_to_stop_does_not_wait_for_peers_any_longer() -> None:
    script = started(min_peers=2)
    assert script.answer(script.contribution(0, 8), members(MINE)) == Pause(0.5)
    assert script.send(True) == Take()
    assert script.outer.values == [100]
    assert script.send(None) is None


# -- entering ------------------------------------------------------------------------------------


def test_who_enters_an_open_round_contributes_nothing_and_follows() -> None:
    script = Script(fragments=2)
    script.send(members(1, MINE))
    state(script, 7, 50, is_open=True)
    reduce = script.send(members(1, MINE))
    nothing = Contribution(7, 1, 0.0, [0], 1)
    assert reduce == Reduce(nothing)
    assert script.news() == [Entered(entry=1, number=7, is_open=True, applied=())]
    assert isinstance(reduce, Reduce)
    reduce.contribution.values[0] = 20
    average = Average((1,), 4.0)
    assert script.send(average) == Sync()
    assert script.outer.values == [50, 30]
    (committed,) = script.news()
    assert committed == RoundCommitted(reduce.contribution, average, (20.0, 20.0))
    assert committed.contribution.values == [30]
    assert script.send(members(1, MINE)) == Take()


def test_a_master_that_is_not_there_at_first_ends_it() -> None:
    script = Script()
    with pytest.raises(MasterLost):
        script.throw(MasterLost())


def test_a_master_lost_once_connected_is_looked_for_again() -> None:
    script = Script()
    assert script.send(members(MINE)) == Sync()
    assert script.throw(MasterLost()) == Update()
    assert script.answer(members(MINE), members(MINE)) == Take()
    assert script.news() == [Entered(entry=1, number=0, is_open=False, applied=())]


def test_a_newcomer_that_is_cut_off_joins_again() -> None:
    script = Script()
    script.send(members(MINE))
    assert script.throw(Evicted()) == Update()
    assert script.throw(Evicted()) == Update()
    assert script.answer(members(MINE), members(MINE)) == Take()


# -- cut off -------------------------------------------------------------------------------------

CUT_OFF = [Evicted(), evicted(RemovalCause.CONTROL_LOST), MasterLost()]


@pytest.mark.parametrize("error", CUT_OFF, ids=["evicted", "control", "master"])
def test_cut_off_before_the_reduce_nothing_is_applied(error: PCCLError) -> None:
    script = started()
    assert script.answer(script.contribution(0, 8), error) == Update()
    assert script.send(members(4, 5, mine=4)) == Sync()
    state(script, 3, 60)
    assert script.send(members(4, 5, mine=4)) == Take()
    assert script.news() == [Entered(entry=2, number=3, is_open=False, applied=())]
    assert script.outer.values == [60]


@pytest.mark.parametrize("error", CUT_OFF, ids=["evicted", "control", "master"])
def test_cut_off_in_the_synchronization_with_newcomers_nothing_is_applied(error: PCCLError) -> None:
    script = started((MINE,))
    assert script.answer(script.contribution(0, 8), members(MINE, 6), error) == Update()
    assert script.send(members(MINE)) == Sync()
    reduce = script.send(members(MINE))  # alone, in the round that it had opened
    assert reduce == Reduce(Contribution(0, 0, 0.0, [0], 2))
    assert script.news() == [Entered(entry=2, number=0, is_open=True, applied=())]
    assert script.answer(TooFewPeers(), members(MINE)) == Take()
    assert script.outer.values == [100]
    assert script.outer.ledger.number == 1


@pytest.mark.parametrize("error", CUT_OFF, ids=["evicted", "control", "master"])
@pytest.mark.parametrize("contributors", [(MINE, 5), (5,)], ids=["with", "without"])
def test_cut_off_in_the_reduce_the_ledger_decides(
    error: PCCLError, contributors: tuple[int, ...]
) -> None:
    script = started()
    mine = script.contribution(0, 8)
    assert script.answer(mine, members(MINE, 5), error) == Update()
    assert script.send(members(5, 9, mine=9)) == Sync()
    script.outer.ledger.close(contributors)  # as the others have written
    assert script.send(members(5, 9, mine=9)) == Take()
    applied = (0,) if MINE in contributors else ()
    entered = Entered(entry=2, number=1, is_open=False, applied=applied, corrected=applied)
    assert script.news() == [entered]


@pytest.mark.parametrize("made_in", [b"old run", b"new run"])
def test_the_id_of_this_replica_may_be_anothers_in_the_next_run(made_in: bytes) -> None:
    """A new master has lost all data: its run counts ids and rounds from the beginning."""
    script = Script()
    old, new = members(MINE, 5, run=b"old run"), members(MINE, 5, 9, mine=9, run=b"new run")
    script.answer(old, old, script.contribution(0, 8), old, MasterLost(), new)
    script.outer.ledger.run = made_in  # as the sources of the synchronization have written
    script.outer.ledger.close((MINE, 5))
    assert script.send(new) == Take()
    applied = (0,) if made_in == b"old run" else ()
    assert script.news()[-1].applied == applied


def test_cut_off_in_a_reduce_that_is_not_over_it_was_not_applied() -> None:
    script = started()
    script.answer(script.contribution(0, 8), members(MINE, 5), Evicted())
    assert script.answer(members(9, mine=9), members(9, mine=9)) == Take()
    assert script.news() == [Entered(entry=2, number=0, is_open=False, applied=())]


@pytest.mark.parametrize("error", CUT_OFF, ids=["evicted", "control", "master"])
def test_cut_off_after_the_reduce_it_was_applied(error: PCCLError) -> None:
    script = started()
    mine = script.contribution(0, 8)
    script.answer(mine, members(MINE, 5), Average((MINE, 5), 2.0))
    (committed,) = script.news()
    assert committed.contribution is mine
    assert script.throw(error) == Update()
    assert script.answer(members(MINE, 5), members(MINE, 5)) == Take()
    assert script.news() == [Entered(entry=2, number=1, is_open=False, applied=(0,))]
    assert script.outer.values == [92]


def test_a_round_that_the_run_does_not_know_was_not_applied() -> None:
    script = started((MINE,))
    script.answer(script.contribution(0, 8), members(MINE), TooFewPeers())
    assert script.throw(Evicted()) == Update()
    assert script.send(members(5, 9, mine=9)) == Sync()
    state(script, 0, 100)  # of newcomers, who have begun anew after it was evicted
    script.outer.ledger.close((5,))
    assert script.send(members(5, 9, mine=9)) == Take()
    assert script.news()[-1] == Entered(2, 1, is_open=False, applied=(), corrected=(0,))


def test_a_doubt_is_settled_once() -> None:
    script = started()
    script.answer(script.contribution(0, 8), members(MINE, 5), Evicted(), members(5, 9, mine=9))
    script.outer.ledger.close((MINE, 5))
    script.send(members(5, 9, mine=9))
    script.news()
    again = script.contribution(1, 8, entry=2)
    assert script.answer(again, Evicted(), members(5, 10, mine=10)) == Sync()
    script.send(members(5, 10, mine=10))
    assert script.news() == [Entered(entry=3, number=1, is_open=False, applied=())]


def test_who_follows_an_open_round_twice_has_nothing_in_it() -> None:
    script = started()
    script.answer(script.contribution(0, 8), members(MINE, 5), Evicted(), members(5, 9, mine=9))
    state(script, 4, 60, is_open=True)
    assert isinstance(script.send(members(5, 9, mine=9)), Reduce)
    assert script.throw(Evicted()) == Update()
    state(script, 5, 50)
    script.answer(members(5, 10, mine=10), members(5, 10, mine=10))
    first, second = script.news()
    # The first one is long ago, and in doubt.
    assert first == Entered(entry=2, number=4, is_open=True, applied=(0,), corrected=(0,))
    assert second == Entered(entry=3, number=5, is_open=False, applied=())


def test_all_rounds_that_may_wait_for_their_merge_are_remembered() -> None:
    """With a delay of a whole period a fragment is launched before it is merged."""
    script = started(fragments=2)
    for number in range(3):
        script.answer(script.contribution(number, 1), members(MINE, 5))
        assert script.answer(Average((MINE, 5), 2.0), members(MINE, 5)) == Take()
    script.news()
    script.answer(script.contribution(3, 1), Evicted(), members(MINE, 5), members(MINE, 5))
    assert script.news() == [Entered(entry=2, number=3, is_open=False, applied=(0, 1, 2))]


def test_work_of_an_entry_before_does_not_count() -> None:
    script = started()
    assert script.answer(script.contribution(0, 8), Evicted()) == Update()
    assert script.answer(members(MINE), members(MINE)) == Take()
    assert script.send(script.contribution(1, 8, entry=1)) == Take()
    mine = script.contribution(0, 8, entry=2)
    assert script.answer(mine, members(MINE)) == Reduce(mine)


def test_another_state_that_is_elected_is_an_entry() -> None:
    """A newcomer with a later checkpoint."""
    script = started((MINE,))
    assert script.answer(script.contribution(0, 8), members(MINE, 6)) == Sync()
    state(script, 40, 60)
    assert script.send(members(MINE, 6)) == Take()
    assert script.news() == [Entered(entry=2, number=40, is_open=False, applied=())]


def test_another_state_before_the_same_round_is_an_entry_too() -> None:
    """Whoever brought it is not in the round."""
    script = started((MINE,))
    assert script.answer(script.contribution(0, 8), members(MINE, 6)) == Sync()
    state(script, 0, 60)
    assert script.send(members(MINE, 6)) == Take()
    assert script.news() == [Entered(entry=2, number=0, is_open=False, applied=())]


def test_a_state_that_conflicts_ends_it() -> None:
    script = started()
    script.answer(script.contribution(0, 8), members(MINE, 5), Average((MINE, 5), 2.0))
    with pytest.raises(Evicted):
        script.throw(evicted(RemovalCause.STATE_CONFLICT))


def test_a_state_that_conflicts_ends_it_at_the_entry() -> None:
    script = Script()
    script.send(members(MINE))
    with pytest.raises(Evicted):
        script.throw(evicted(RemovalCause.STATE_CONFLICT))


def test_a_master_lost_three_times_in_a_row_ends_it() -> None:
    script = started()
    assert script.answer(script.contribution(0, 8), MasterLost()) == Update()
    assert script.throw(MasterLost()) == Update()
    with pytest.raises(MasterLost):
        script.throw(MasterLost())


def test_a_refusal_at_first_ends_it() -> None:
    script = Script()
    with pytest.raises(NotAdmitted):
        script.throw(NotAdmitted())


def test_a_replica_that_is_refused_when_it_comes_back_tries_again() -> None:
    script = started()
    assert script.answer(script.contribution(0, 8), Evicted()) == Update()
    assert script.throw(NotAdmitted()) == Update()
    assert script.throw(NotAdmitted()) == Update()
    assert script.answer(members(MINE), members(MINE)) == Take()
    assert script.news() == [Entered(entry=2, number=0, is_open=False, applied=())]


def test_three_refusals_in_a_row_end_it() -> None:
    script = started()
    script.answer(script.contribution(0, 8), Evicted(), NotAdmitted(), NotAdmitted())
    with pytest.raises(NotAdmitted):
        script.throw(NotAdmitted())


def test_a_state_that_nobody_gives_now_is_asked_for_again() -> None:
    script = Script()
    assert script.send(members(MINE, 5)) == Sync()
    for _ in range(39):
        assert script.throw(StateUnavailable(reason="no link")) == Pause(0.5, "no link")
        assert script.send(False) == Sync()
    assert script.send(members(MINE, 5)) == Take()


def test_a_state_that_no_source_gives_forty_times_ends_it() -> None:
    script = Script()
    script.send(members(MINE, 5))
    for _ in range(39):
        script.answer(StateUnavailable(), False)
    with pytest.raises(StateUnavailable):
        script.throw(StateUnavailable())


def test_a_replica_that_lacks_the_state_may_give_up() -> None:
    script = Script()
    script.answer(members(MINE, 5), StateUnavailable())
    assert script.send(True) == Take()
    assert script.send(None) is None


def nobody_has_it() -> StateUnavailable:
    error = StateUnavailable(reason="nobody has it")
    error.is_for_all = True
    return error


def test_a_state_that_nobody_has_is_waited_for() -> None:
    """For ten minutes: who has it joins again as soon as it can, and must be let in."""
    script = Script()
    script.send(members(MINE, 5))
    for _ in range(1200):
        assert script.throw(nobody_has_it()) == Pause(0.5, "nobody has it")
        assert script.send(False) == Update()
        assert script.send(members(MINE, 5)) == Sync()
    state(script, 7, 30)
    assert script.answer(members(MINE, 5, 6)) == Take()
    assert script.news() == [Entered(entry=1, number=7, is_open=False, applied=())]


def test_a_state_that_nobody_has_for_ten_minutes_ends_it() -> None:
    script = Script()
    script.send(members(MINE))
    for _ in range(1200):
        script.answer(nobody_has_it(), False, members(MINE))
    with pytest.raises(StateUnavailable, match="nobody has it"):
        script.throw(nobody_has_it())


@pytest.mark.parametrize("gives_up", ["in the pause", "for want of peers"])
def test_whoever_waits_for_a_state_may_give_up(gives_up: str) -> None:
    script = Script(min_peers=2)
    assert script.answer(members(MINE, 5), nobody_has_it()) == Pause(0.5, "nobody has it")
    if gives_up == "for want of peers":
        assert script.answer(False, members(MINE)) == Pause(0.5)
    assert script.send(True) == Take()
    assert script.send(None) is None
    assert script.news() == []


def test_a_state_that_is_lost_in_a_round_is_waited_for() -> None:
    script = started()
    mine = script.contribution(0, 8)
    assert script.answer(mine, members(MINE, 5, 6)) == Sync()
    assert script.throw(nobody_has_it()) == Pause(0.5, "nobody has it")
    assert script.answer(False, members(MINE, 5, 6), members(MINE, 5, 6)) == Reduce(mine)
    again = started()
    again.answer(again.contribution(0, 8), members(MINE, 5, 6), nobody_has_it())
    assert again.send(True) == Take()


def test_a_master_that_is_back_is_not_held_to_its_past() -> None:
    script = started()
    for entry in range(1, 6):
        lost = script.contribution(0, 8, entry)
        assert script.answer(lost, members(MINE), MasterLost()) == Update()
        assert script.answer(members(MINE), members(MINE)) == Take()


@pytest.mark.parametrize("at", ["update", "reduce", "sync"])
def test_what_joining_again_does_not_mend_ends_it(at: str) -> None:
    script = started()
    script.send(script.contribution(0, 8))
    if at != "update":
        script.send(members(MINE, 5))
    if at == "sync":
        script.send(Average((MINE, 5), 2.0))
    with pytest.raises(CollectiveAborted):
        script.throw(CollectiveAborted())


def with_buffers(script: Script) -> Contribution:
    script.outer.has_buffers = True
    return replace(script.contribution(0, 8), buffers=[3])


@pytest.mark.parametrize(("others", "leads"), [((5, 9), True), ((1, 5), False)])
def test_buffers_are_summed_before_the_average(others: tuple[int, ...], *, leads: bool) -> None:
    """The member with the lowest id gives what is not averaged: it is no newcomer."""
    script = started((MINE, *others))
    mine = with_buffers(script)
    assert script.answer(mine, members(MINE, *others)) == ReduceBuffers([3], leads=leads)
    mine.buffers[:] = [7]
    assert script.send() == Reduce(mine)
    assert script.outer.buffers == []  # a reduce that fails has changed nothing
    assert script.send(Average((MINE, *others), 3.0)) == Sync()
    assert script.outer.buffers == [[7]]
    (committed,) = script.news()
    assert committed.contribution.buffers == [7]


def test_alone_the_buffers_are_the_own_ones() -> None:
    script = started((MINE,))
    mine = with_buffers(script)
    script.answer(mine, members(MINE))
    assert script.effect == ReduceBuffers([3], leads=True)
    assert script.answer(TooFewPeers(), TooFewPeers()) == Sync()
    assert script.outer.buffers == [[3]]


def test_cut_off_between_the_buffers_and_the_average() -> None:
    script = started()
    script.answer(with_buffers(script), members(MINE, 5), None, Evicted())
    assert script.answer(members(5, 9, mine=9), members(5, 9, mine=9)) == Take()
    assert script.news() == [Entered(entry=2, number=0, is_open=False, applied=())]
    assert script.outer.buffers == []


def test_before_its_average_began_no_work_is_in_doubt() -> None:
    """However long this replica was away: nobody can have applied the work."""
    script = started()
    script.answer(with_buffers(script), members(MINE, 5), Evicted())
    for _ in range(20):
        script.outer.ledger.close([5])
    assert script.answer(members(5, 9, mine=9), members(5, 9, mine=9)) == Take()
    assert script.news() == [Entered(entry=2, number=20, is_open=False, applied=())]


def test_a_newcomer_adds_no_buffers_to_an_open_round() -> None:
    script = Script()
    script.outer.has_buffers = True
    script.send(members(1, MINE))
    script.outer.ledger.open()
    assert script.send(members(1, MINE)) == ReduceBuffers([0], leads=False)


def test_the_state_of_inner_optimizers_is_offered_to_newcomers() -> None:
    script = started()
    script.answer(script.contribution(0, 8), members(MINE, 5))
    assert script.outer.offers == 0
    script.answer(Average((MINE, 5), 2.0), members(MINE, 5))
    assert script.answer(script.contribution(1, 8), members(MINE, 5, 9)) == Sync()
    assert script.outer.offers == 1


def test_an_offer_stays_for_a_newcomer_that_was_too_slow() -> None:
    """It comes again with pieces of the offer, which would be useless for another one."""
    script = started()
    script.answer(script.contribution(0, 8), members(MINE, 5, 9), members(MINE, 5))
    script.answer(Average((MINE, 5), 2.0), members(MINE, 5))
    script.answer(script.contribution(1, 8), members(MINE, 5, 10), members(MINE, 5, 10))
    assert script.outer.offers == 1
    script.answer(Average((MINE, 5), 2.0), members(MINE, 5, 10))
    script.answer(script.contribution(2, 8), members(MINE, 5, 10, 11))
    assert script.outer.offers == 2


def test_a_replica_that_the_guard_excludes_enters_anew_without_its_work() -> None:
    script = started()
    mine = script.contribution(0, 8)
    assert script.answer(mine, members(MINE, 5)) == Reduce(mine)
    assert script.send(Average((5,), 3.0, is_excluded=True)) == Sync()
    assert script.outer.ledger.number == 1
    assert not script.outer.ledger.has_applied(0, MINE, b"")
    assert script.news() == []
    assert script.send(members(MINE, 5)) == Take()
    anew = Entered(entry=2, number=1, is_open=False, applied=(), is_reset=True)
    assert script.news() == [anew]
    late = script.contribution(1, 4)  # it was taken before the replica knew, and is dropped
    assert script.send(late) == Take()
    again = script.contribution(1, 4, entry=2)
    assert script.answer(again, members(MINE, 5)) == Reduce(again)


# -- with a quorum ---------------------------------------------------------------------------------


def late(*contributors: int, weight: float = 2.0) -> Average:
    """The average of a round that went on without this replica."""
    return Average(contributors, weight, took_part=False)


def test_a_late_replica_takes_the_outer_step_of_a_round_without_its_work() -> None:
    script = started((MINE, 5, 6))
    mine = script.contribution(0, 8)
    script.answer(mine, members(MINE, 5, 6))
    mine.values[0] = 6  # the average of the others
    assert script.send(late(5, 6)) == Sync()
    assert script.news() == [RoundCommitted(replace(mine, weight=0.0), late(5, 6), (6.0, 6.0))]
    assert script.outer.values == [94]
    assert not script.outer.ledger.has_applied(0, MINE, b"")
    assert script.send(members(MINE, 5, 6)) == Take()


def test_work_of_a_missed_round_is_not_in_doubt() -> None:
    """Nor does the ledger correct it after a cut, so the residual stays."""
    script = started((MINE, 5, 6))
    script.answer(script.contribution(0, 8), members(MINE, 5, 6), late(5, 6))
    script.news()
    assert script.answer(Evicted()) == Update()
    script.answer(members(4, 5, mine=4))
    state(script, 3, 60)
    assert script.send(members(4, 5, mine=4)) == Take()
    assert script.news() == [Entered(entry=2, number=3, is_open=False, applied=())]


LACKS = ResyncRequired()


@pytest.mark.parametrize("before", [0, 1, 2], ids=["update", "reduce", "sync"])
def test_a_replica_that_was_away_for_too_long_synchronizes(before: int) -> None:
    script = started((MINE, 5, 6))
    script.answer(script.contribution(0, 8), *[members(MINE, 5, 6), late(5, 6)][:before])
    script.news()
    assert script.throw(LACKS) == Sync()
    state(script, 20, 60)
    assert script.send(members(MINE, 5, 6)) == Take()
    assert script.news() == [Entered(entry=2, number=20, is_open=False, applied=())]
    assert script.send(script.contribution(1, 8)) == Take(), "it is of the entry before"
    mine = script.contribution(20, 8, entry=2)
    assert script.answer(mine, members(MINE, 5, 6)) == Reduce(mine)


def test_it_may_come_back_in_an_open_round() -> None:
    script = started((MINE, 5, 6))
    script.answer(script.contribution(0, 8))
    assert script.throw(LACKS) == Sync()
    state(script, 20, 60, is_open=True)
    nothing = Contribution(20, 0, 0.0, [0], 2)
    assert script.send(members(MINE, 5, 6)) == Reduce(nothing)
    assert script.news() == [Entered(entry=2, number=20, is_open=True, applied=())]
    assert script.answer(Average((5, 6), 2.0), members(MINE, 5, 6)) == Take()
    assert script.outer.ledger.number == 21


def test_if_no_member_offers_the_state_it_leaves_and_joins_again() -> None:
    script = started((MINE, 5, 6))
    script.answer(script.contribution(0, 8))
    assert script.throw(LACKS) == Sync()
    assert script.throw(LACKS) == Connect(again=True)
    assert script.send(members(4, 5, mine=4)) == Sync()
    state(script, 20, 60)
    assert script.send(members(4, 5, mine=4)) == Take()
    assert script.news() == [Entered(entry=2, number=20, is_open=False, applied=())]


def test_that_may_take_several_attempts() -> None:
    script = started((MINE, 5, 6))
    script.answer(script.contribution(0, 8))
    script.throw(LACKS)
    script.throw(LACKS)
    assert script.throw(NotAdmitted()) == Update()
    assert script.answer(members(4, 5, mine=4)) == Sync()
    assert script.throw(LACKS) == Connect(again=True)
    assert script.throw(MasterLost()) == Update()
    assert script.answer(members(4, 5, mine=4), members(4, 5, mine=4)) == Take()


def test_a_newcomer_that_lacks_results_joins_again() -> None:
    script = Script()
    assert script.answer(members(MINE, 5)) == Sync()
    assert script.throw(LACKS) == Connect(again=True)
    assert script.answer(members(4, 5, mine=4), members(4, 5, mine=4)) == Take()


def test_a_late_synchronization_may_lead_over_several_rounds() -> None:
    """Its next call would be that of the next round, so the replica enters there."""
    script = started((MINE, 5, 6))
    assert script.answer(script.contribution(0, 8), members(MINE, 5, 6), late(5, 6)) == Sync()
    script.news()
    state(script, 17, 60)
    assert script.send(members(MINE, 5, 6)) == Take()
    assert script.news() == [Entered(entry=2, number=17, is_open=False, applied=())]


def test_it_may_lead_into_an_open_round() -> None:
    script = started((MINE, 5, 6))
    script.answer(script.contribution(0, 8), members(MINE, 5, 6), late(5, 6))
    script.news()
    state(script, 1, 60, is_open=True)
    nothing = Contribution(1, 0, 0.0, [0], 2)
    assert script.send(members(MINE, 5, 6)) == Reduce(nothing)
    assert script.news() == [Entered(entry=2, number=1, is_open=True, applied=())]
    assert script.answer(late(5, 6), members(MINE, 5, 6)) == Take()


def test_it_may_lead_there_several_times() -> None:
    script = started((MINE, 5, 6))
    script.answer(script.contribution(0, 8), members(MINE, 5, 6), late(5, 6))
    for number in (3, 9):
        state(script, number, 60, is_open=True)
        assert isinstance(script.send(members(MINE, 5, 6)), Reduce)
        assert script.send(late(5, 6)) == Sync()
    assert script.send(members(MINE, 5, 6)) == Take()
    assert [one.number for one in script.news() if isinstance(one, Entered)] == [3, 9]


def test_a_replica_that_is_to_stop_does_not_catch_up() -> None:
    script = started((MINE, 5, 6))
    script.answer(script.contribution(0, 8))
    assert script.throw(LACKS) == Sync()
    why = StateUnavailable(reason="why")
    assert script.throw(why) == Pause(0.5, "why")
    assert script.send(True) == Take()
    assert script.send(None) is None


# -- admissions between rounds, with a quorum ------------------------------------------------------

WITH_NEWCOMER = members(MINE, 5, 6)


def test_newcomers_are_admitted_between_two_rounds() -> None:
    """They learn that no round is open, so they train for the next one."""
    script = started(has_quorum=True)
    assert script.send(NewcomersWait()) == Update()
    assert script.send(WITH_NEWCOMER) == Sync()
    assert not script.outer.ledger.is_open
    assert script.outer.offers == 1
    assert script.send(WITH_NEWCOMER) == Take(or_newcomers=True)
    mine = script.contribution(0, 8)
    assert script.answer(mine, WITH_NEWCOMER) == Reduce(mine)


def test_a_round_begins_with_an_update_that_brings_no_newcomers() -> None:
    """All members see the same newcomers, so all begin the round after the same update."""
    script = started(has_quorum=True)
    mine = script.contribution(0, 8)
    assert script.answer(mine, WITH_NEWCOMER) == Sync()
    assert not script.outer.ledger.is_open
    assert script.send(WITH_NEWCOMER) == Update()
    assert script.answer(members(MINE, 5, 6, 7)) == Sync()
    assert script.send(members(MINE, 5, 6, 7)) == Update()
    assert script.send(members(MINE, 5, 6, 7)) == Reduce(mine)
    assert script.answer(Average((MINE, 5), 2.0), members(MINE, 5)) == Take(or_newcomers=True)


def test_an_update_that_finds_no_newcomers_begins_the_round() -> None:
    """Other members may have made it for their contributions: this one comes without another."""
    script = started(has_quorum=True)
    assert script.answer(NewcomersWait(), members(MINE, 5)) == Take()
    mine = script.contribution(0, 8)
    assert script.send(mine) == Reduce(mine)
    script.answer(Average((MINE, 5), 2.0), members(MINE, 5))
    assert script.send(script.contribution(1, 8)) == Update()


def test_another_state_elected_with_newcomers_is_an_entry() -> None:
    """The next update waits for work of the new entry: others would wait for it in the reduce."""
    script = started(has_quorum=True)
    mine = script.contribution(0, 8)
    script.answer(mine, WITH_NEWCOMER)
    state(script, 3, 60)
    assert script.send(WITH_NEWCOMER) == Take(or_newcomers=True)
    assert script.news() == [Entered(entry=2, number=3, is_open=False, applied=())]
    mine = script.contribution(3, 8, entry=2)
    assert script.answer(mine, WITH_NEWCOMER) == Reduce(mine)


def test_a_begun_round_does_not_outlast_a_cut() -> None:
    script = started(has_quorum=True)
    script.answer(NewcomersWait(), members(MINE, 5))
    script.answer(script.contribution(0, 8), Evicted(), members(4, 5, mine=4))
    assert script.send(members(4, 5, mine=4)) == Take(or_newcomers=True)
    assert script.send(script.contribution(0, 8, entry=2)) == Update()


# -- samples -------------------------------------------------------------------------------------


def sample_ledger(lease: int = 10) -> SampleLedger:
    return SampleLedger(np.zeros(SampleLedger.SIZE, np.int64), lease)


def test_newcomers_get_samples_before_the_synchronization_with_them() -> None:
    script = Script(samples=sample_ledger())
    samples = script.outer.samples
    assert samples is not None
    assert script.send(members(MINE, 5)) == Sync()
    assert samples.lease(MINE) == [(0, 10)]
    assert samples.lease(5) == [(10, 20)]
    assert script.outer.touched
    script.send(members(MINE, 5))
    assert script.answer(script.contribution(0, 8), members(MINE, 5, 9)) == Sync()
    assert samples.lease(9) == [(20, 30)]


@pytest.mark.parametrize("has_quorum", [False, True])
def test_the_first_fragments_rounds_say_what_is_done(*, has_quorum: bool) -> None:
    """Without a quorum, the samples of a member that is not in a round go to others."""
    script = Script(2, has_quorum=has_quorum, samples=sample_ledger())
    samples = script.outer.samples
    assert samples is not None
    both = members(MINE, 5)
    script.answer(both, both)
    script.answer(script.contribution(0, 8), both)
    script.answer(Average((MINE, 5), 6.0, shares=((MINE, 4.0), (5, 2.0))), both)
    assert samples.done == 6
    script.answer(script.contribution(1, 8), both)
    script.answer(Average((MINE, 5), 6.0, shares=((MINE, 4.0), (5, 2.0))), both)
    assert samples.done == 6
    script.answer(script.contribution(2, 8), both)
    script.answer(Average((MINE,), 1.0, shares=((MINE, 1.0),)), both)
    assert samples.done == 7
    assert bool(samples.lease(5)) is has_quorum
    assert (12, 20) in samples.rest


def test_alone_the_own_samples_are_done() -> None:
    script = Script(samples=sample_ledger())
    samples = script.outer.samples
    assert samples is not None
    script.answer(members(MINE), members(MINE))
    script.answer(script.contribution(0, 8), members(MINE), TooFewPeers())
    assert samples.done == 1
