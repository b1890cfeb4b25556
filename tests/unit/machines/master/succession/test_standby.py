"""Which run a standby may take up: what its masters have said, and nobody else."""

from __future__ import annotations

from pccl.machines.master.succession.standby import StandbyWatch
from pccl.protocol import messages as msg
from pccl.protocol.handshake.opening import NO_RUN
from pccl.protocol.limits import TERM_MAX, Timing

SECOND = 1_000_000_000
RUN, OTHER = b"the run of these", b"quite other runs"


def says(run: bytes, term: int = 1, *, settled: bool = True) -> msg.RunIs:
    return msg.RunIs(run, term, settled)


def watch(*masters: str, run: bytes | None = None) -> StandbyWatch:
    return StandbyWatch(Timing(heartbeat_s=1.0), masters or ("a",), run)


def test_masters_are_asked_at_every_tick_until_one_has_said_which_run_it_is() -> None:
    """One that dies before that has no successor."""
    standby = watch("a", "b")
    assert standby.due(0) == [0, 1]
    standby.answered(0, says(NO_RUN, 0))
    assert standby.due(1) == [0]
    standby.failed(0, "refused")
    standby.failed(1, "refused")
    assert standby.due(2) == [0, 1]


def test_each_master_is_asked_every_heartbeat_and_never_twice_at_once() -> None:
    standby = watch("a", "b", run=RUN)
    assert standby.due(0) == [0, 1]
    assert standby.due(5 * SECOND) == []
    standby.answered(0, says(RUN))
    assert standby.due(5 * SECOND) == [0]
    standby.failed(0, "refused")
    standby.failed(1, "refused")
    assert standby.due(6 * SECOND - 1) == [1]
    assert standby.due(6 * SECOND) == [0]


def test_it_learns_a_run_and_the_highest_term_of_it() -> None:
    standby = watch()
    assert standby.answered(0, says(RUN, 4))
    assert not standby.answered(0, says(RUN, 3))
    assert (standby.run, standby.term) == (RUN, 4)


def test_a_master_that_coordinates_nothing_changes_nothing() -> None:
    standby = watch()
    for nothing in (says(NO_RUN, 0), says(b"short"), says(RUN, 0), says(RUN, TERM_MAX)):
        assert not standby.answered(0, nothing)
        assert standby.run is None
    assert standby.answered(0, says(RUN))
    assert not standby.answered(0, says(NO_RUN, 0))
    assert standby.run == RUN


def test_a_master_that_is_gone_has_said_what_it_has_said() -> None:
    standby = watch()
    standby.answered(0, says(RUN))
    standby.failed(0, "connection refused")
    assert standby.run == RUN


def test_a_run_that_began_later_counts_when_its_master_would_not_give_it_up_any_more() -> None:
    standby = watch()
    standby.answered(0, says(RUN))
    assert not standby.answered(0, says(OTHER, settled=False))
    assert standby.run == RUN
    assert standby.answered(0, says(OTHER))
    assert standby.run == OTHER


def test_a_young_run_is_better_than_none_and_gives_way() -> None:
    standby = watch()
    assert standby.answered(0, says(OTHER, settled=False))
    assert standby.run == OTHER
    assert standby.answered(0, says(RUN))
    assert standby.run == RUN


def test_a_run_stays_as_long_as_one_of_several_masters_has_it() -> None:
    standby = watch("a", "b")
    standby.answered(1, says(RUN))
    assert not standby.answered(0, says(OTHER))
    assert standby.run == RUN
    standby.failed(1, "gone")
    assert standby.answered(0, says(OTHER))
    assert standby.run == OTHER


def test_what_was_learnt_before_a_restart_holds_until_a_master_says_otherwise() -> None:
    standby = watch(run=RUN)
    assert (standby.run, standby.waits_for()) == (RUN, "")
    standby.answered(0, says(OTHER))
    assert standby.run == OTHER


def test_why_it_takes_up_nothing_is_said_with_names() -> None:
    standby = watch("192.0.2.1:7", "192.0.2.2:7")
    assert standby.failed(0, "connection refused")
    assert not standby.failed(0, "connection refused")
    assert standby.waits_for() == (
        "it is a standby, and continues no run until one of its masters has named the run: "
        "192.0.2.1:7: connection refused; 192.0.2.2:7"
    )
