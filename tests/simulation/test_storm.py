"""Storms in the simulator: what faults cost a run with a quorum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from pccl.stress.studies.storm.figures import NoFigures, StormFigures, figures_of
from pccl.stress.studies.storm.schedules import make_storm
from pccl.stress.studies.storm.simulated import SimulatedStorm
from pccl.stress.studies.storm.storm import Storm, StormTraining
from pccl.stress.studies.storm.tape import ReplicaDone, TapeEvent
from pccl.stress.studies.storm.work import StormWork
from pccl.stress.timeline import FaultKind, Timeline, TimelineFault

STEP_S = 0.5
ROUND_S = 5.0


def storm(
    *faults: TimelineFault, replicas: int = 4, seconds: float = 30.0, **training: object
) -> Storm:
    settings: dict[str, Any] = {
        "step_s": STEP_S,
        "sync_every": 10,
        "computes": False,
        **training,
    }
    timeline = Timeline(3, replicas, seconds, faults, lanes=1, deadline_s=5.0)
    return Storm(timeline, StormTraining(**settings))


def run(given: Storm) -> list[TapeEvent]:
    return SimulatedStorm(given, StormWork(given.training, given.timeline.seed)).run()


def figures(given: Storm) -> StormFigures:
    found = figures_of(given, run(given))
    assert found.is_equal
    return found


def test_a_storm_is_the_same_each_time() -> None:
    given = storm(TimelineFault(4.0, FaultKind.RESTART, 1, duration_s=0.5), seconds=20.0)
    assert run(given) == run(given)


def test_without_faults_nothing_is_lost() -> None:
    given = storm()
    tape = run(given)
    found = figures_of(given, tape)
    assert found.share_kept > 0.999
    assert found.took_part_min == 1.0
    assert len([one for one in tape if isinstance(one, ReplicaDone)]) == 4


def test_a_new_process_trains_at_once_and_is_in_a_round_soon() -> None:
    """Between two rounds: it need not wait for one, and contributes the steps that it has made."""
    found = figures(storm(TimelineFault(2.0, FaultKind.RESTART, 1, duration_s=0.5), start_s=1.0))
    (again, *_), (commit, *_) = found.training_again_s, found.in_commit_again_s
    assert again < 1.5 + 1.0, "start, and a look of the members for newcomers"
    assert commit < ROUND_S + 5.0, "in the next round, or in the one after if that is too soon"


@pytest.mark.parametrize("kind", [FaultKind.FREEZE, FaultKind.NAP, FaultKind.PARTITION])
def test_who_is_away_costs_the_others_a_grace(kind: FaultKind) -> None:
    fault = TimelineFault(6.0, kind, 2, duration_s=12.0)
    found = figures(storm(fault, grace_s=1.0, seconds=40.0))
    assert found.longest_wait_s < 1.0 + 0.5
    assert all(found.lost_s[index] < 2.0 for index in (0, 1, 3))
    if kind is not FaultKind.PARTITION:  # in which it waits for its round
        assert found.lost_s[2] < 2.0


def test_a_sleeper_loses_none_of_its_steps() -> None:
    drawn = make_storm("sleeper", 3, 70.0, 1)
    found = figures(replace(drawn, training=replace(drawn.training, computes=False)))
    assert all(lost < 2.0 for lost in found.lost_s.values())


def test_a_slow_replica_costs_the_others_nothing() -> None:
    found = figures(storm(paces=(4.0,), seconds=60.0))
    assert found.share_kept > 0.95
    assert found.took_part_min == 1.0, "its work is in every round after the first ones"
    assert all(found.lost_s[index] < 0.5 for index in range(3))


def test_a_link_on_which_a_round_takes_half_a_minute_is_not_broken() -> None:
    """Each direction to another replica carries 4 kB/s, so a segment takes longer than a stall."""
    slow = [TimelineFault(0.0, FaultKind.BANDWIDTH, n, None, 79.0, 4000.0) for n in range(3)]
    found = figures(storm(*slow, replicas=3, seconds=80.0))
    assert found.failures == 0
    assert found.took_part_min == 1.0


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.LEAVE])
def test_a_replica_that_is_gone_could_make_no_steps(kind: FaultKind) -> None:
    found = figures(storm(TimelineFault(6.0, kind, 2), seconds=60.0))
    assert found.share_kept > 0.95
    assert found.took_part > 0.95


def test_without_any_replica_there_are_no_figures() -> None:
    """The processes that come back wait for parameters that no member has."""
    faults = [TimelineFault(1.0, FaultKind.RESTART, n, duration_s=0.5) for n in range(4)]
    given = storm(*faults)
    with pytest.raises(NoFigures, match="if all are killed at once"):
        figures_of(given, run(given))
