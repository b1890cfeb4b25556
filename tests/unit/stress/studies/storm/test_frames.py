from __future__ import annotations

import pytest

from pccl.stress.studies.storm.figures import figures_of
from pccl.stress.studies.storm.frames import (
    STATE_OF,
    ReplicaState,
    StateSpan,
    frame_at,
    frames_of,
    joined,
    overlap,
    state_at,
    states_of,
)
from pccl.stress.studies.storm.storm import Storm, StormTraining
from pccl.stress.studies.storm.tape import (
    AWAY,
    HeldOutLoss,
    ReplicaAway,
    ReplicaKilled,
    ReplicaStarted,
    ReplicaTrains,
    RoundDone,
    StormBegan,
    TapeEvent,
)
from pccl.stress.timeline import FaultKind, Timeline, TimelineFault

TRAINS, STARTS = ReplicaState.TRAINS, ReplicaState.STARTS
CUT_OFF, STOPPED = ReplicaState.CUT_OFF, ReplicaState.STOPPED

FAULTS = (
    TimelineFault(0.0, FaultKind.BANDWIDTH, 0, None, 40.0, 1e6),
    TimelineFault(12.0, FaultKind.RESTART, 1, duration_s=0.5),
    TimelineFault(20.0, FaultKind.PARTITION, 2, duration_s=8.0),
)
STORM = Storm(Timeline(1, 3, 40.0, FAULTS), StormTraining(step_s=0.5, sync_every=10))


def done(at: float, number: int, *peers: int) -> RoundDone:
    return RoundDone(at, peers[0], "run", number, peers, 10.0 * len(peers), 10.0, 100)


def tape() -> list[TapeEvent]:
    """The storm begins at 10 s; replica 1 returns as peer 3."""
    return [
        StormBegan(10.0),
        *(ReplicaTrains(1.0, index, index) for index in range(3)),
        done(5.0, 0, 0, 1, 2),
        HeldOutLoss(5.0, 0, 3.0),
        done(10.0, 1, 0, 1, 2),
        done(15.0, 2, 0, 1, 2),
        done(20.0, 3, 0, 1, 2),
        ReplicaKilled(22.0, 1),
        ReplicaStarted(22.5, 1),
        done(25.0, 4, 0, 2),
        HeldOutLoss(25.0, 4, 2.5),
        ReplicaTrains(27.0, 1, 3),
        ReplicaAway(30.0, 2, 38.0, "partition", computes=True),
        done(30.0, 5, 0, 2, 3),
        done(35.0, 6, 0, 3),
        done(40.0, 7, 0, 3, 2),
    ]


def test_each_fault_that_takes_a_replica_away_has_a_state() -> None:
    assert set(STATE_OF) == set(AWAY)


def test_states_follow_the_tape_without_gaps() -> None:
    assert states_of(reversed(tape()), 3, 50.0) == [
        [StateSpan(1.0, 50.0, TRAINS)],
        [
            StateSpan(1.0, 22.0, TRAINS),
            StateSpan(22.0, 22.5, STARTS),
            StateSpan(22.5, 27.0, STARTS),
            StateSpan(27.0, 50.0, TRAINS),
        ],
        [
            StateSpan(1.0, 30.0, TRAINS),
            StateSpan(30.0, 38.0, CUT_OFF),
            StateSpan(38.0, 50.0, TRAINS),
        ],
    ]


def test_a_replica_whose_process_ends_while_it_is_away_is_away() -> None:
    events: list[TapeEvent] = [
        ReplicaTrains(0.0, 0, 0),
        ReplicaAway(2.0, 0, 30.0, "freeze", computes=False),
        ReplicaKilled(5.0, 0),
        ReplicaTrains(31.0, 0, 1),
    ]
    assert states_of(events, 1, 40.0) == [
        [
            StateSpan(0.0, 2.0, TRAINS),
            StateSpan(2.0, 30.0, STOPPED),
            StateSpan(30.0, 31.0, STARTS),
            StateSpan(31.0, 40.0, TRAINS),
        ]
    ]
    assert states_of(events, 1, 10.0)[0][-1] == StateSpan(2.0, 10.0, STOPPED)


def test_a_fault_lingers() -> None:
    spans = states_of(tape(), 3, 50.0)[1]
    assert [state_at(spans, at) for at in (21.9, 22.0, 26.9, 27.0, 50.0, 99.0)] == [
        TRAINS, STARTS, STARTS, TRAINS, TRAINS, TRAINS
    ]  # fmt: skip
    assert state_at(spans, 27.9, linger_s=1.0) is STARTS
    assert state_at(spans, 28.0, linger_s=1.0) is TRAINS
    assert state_at(spans, 21.9, linger_s=1.0) is TRAINS  # not before it begins


def test_spans_are_joined_and_overlap() -> None:
    assert joined([(0, 1), (1, 3), (2, 2.5), (4, 5)]) == [(0, 3), (4, 5)]
    assert overlap([(0, 3), (4, 6)], [(2, 5)]) == [(2, 3), (4, 5)]
    assert overlap([(0, 1)], [(1, 2)]) == []


def test_a_frame_holds_what_is_known_at_its_time() -> None:
    first = frame_at(STORM, tape(), 10.0)
    assert (first.at_s, first.faults, first.rounds, first.share_kept) == (0.0, 0, 1, None)
    assert first.states == (TRAINS, TRAINS, TRAINS)
    assert first.took_part == {0, 1, 2}
    assert first.losses == ((0.0, 3.0),)
    later = frame_at(STORM, tape(), 26.0)
    assert (later.at_s, later.faults, later.rounds) == (16.0, 1, 4)
    assert later.states == (TRAINS, STARTS, TRAINS)
    assert later.took_part == {0, 2}
    assert later.losses == ((0.0, 3.0), (15.0, 2.5))
    # since 10 s; no process of replica 1 ran for 0.5 s
    assert later.share_kept == pytest.approx(80 / 89)
    last = frame_at(STORM, tape(), 50.0)
    assert last.faults == 2
    assert last.took_part == {0, 1, 2}
    assert last.share_kept == figures_of(STORM, tape()).share_kept


def test_before_all_rounds_a_frame_is_empty() -> None:
    frame = frame_at(STORM, tape(), 2.0)
    assert (frame.took_part, frame.rounds, frame.losses) == (frozenset(), 0, ())


def test_frames_show_each_fault() -> None:
    frames = frames_of(STORM, tape(), 5)
    assert [frame.at_s for frame in frames] == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert [frame.states[1] for frame in frames] == [TRAINS, TRAINS, STARTS, TRAINS, TRAINS]
    assert [frame.states[2] for frame in frames] == [TRAINS, TRAINS, CUT_OFF, CUT_OFF, TRAINS]
