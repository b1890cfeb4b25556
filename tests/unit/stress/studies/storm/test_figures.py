"""The figures of storms whose tapes are written by hand, so each can be counted on paper."""

from __future__ import annotations

from typing import Any

import pytest

from pccl.stress.studies.storm.figures import (
    Presence,
    at_equal_steps,
    figures_of,
    loss_curve,
    rounds_of,
    seconds_in,
    without,
)
from pccl.stress.studies.storm.storm import Storm, StormTraining
from pccl.stress.studies.storm.tape import (
    HeldOutLoss,
    ReplicaAway,
    ReplicaDone,
    ReplicaKilled,
    ReplicaStarted,
    ReplicaSynced,
    ReplicaTrains,
    RoundDone,
    StormBegan,
    TapeEvent,
)
from pccl.stress.timeline import Timeline

BEGAN = 100.0


def storm(replicas: int = 3, seconds: float = 50.0, **training: float) -> Storm:
    """Steps of 1 s, 10 in a round."""
    settings: dict[str, Any] = {"step_s": 1.0, "sync_every": 10, **training}
    return Storm(Timeline(1, replicas, seconds), StormTraining(**settings))


def done(at: float, number: int, peers: tuple[int, ...], weight: float) -> list[TapeEvent]:
    """A round, as each of its contributors reports it, one after the other. Peer n is replica n."""
    return [
        RoundDone(
            at + 0.01 * place, peer % 10, "run", number, peers, weight, weight / len(peers), 8
        )
        for place, peer in enumerate(peers)
    ]


def trains(at: float, *peers: int) -> list[TapeEvent]:
    return [ReplicaTrains(at, peer % 10, peer) for peer in peers]


def tape(*parts: list[TapeEvent]) -> list[TapeEvent]:
    return [StormBegan(BEGAN), *(event for part in parts for event in part)]


WHOLE = tape(
    trains(90, 0, 1, 2),
    done(99, 0, (0, 1, 2), 30.0),
    *[done(109 + 10 * n, n + 1, (0, 1, 2), 30.0) for n in range(5)],
)


def test_nothing_is_lost_without_faults() -> None:
    """The measured part lies between two rounds: 109 s and 149 s."""
    found = figures_of(storm(), WHOLE)
    assert (found.rounds, found.seconds, found.steps) == (4, 40.0, 120.0)
    assert (found.steps_possible, found.share_kept) == (120.0, 1.0)
    assert (found.took_part, found.took_part_min, found.longest_wait_s) == (1.0, 1.0, 0.0)
    assert found.lost_s == {0: 0.0, 1: 0.0, 2: 0.0}
    assert found.tx_bytes == 6 * 3 * 8


def test_a_kill_costs_the_steps_since_the_last_round_and_the_start() -> None:
    """Killed at 114 s with 5 steps; back at 116, trains at 120; peer 12 is the same replica."""
    events = tape(
        trains(90, 0, 1, 2),
        done(109, 1, (0, 1, 2), 30.0),
        [ReplicaKilled(114, 2), ReplicaStarted(116, 2)],
        done(119, 2, (0, 1), 20.0),
        trains(120, 12),
        done(129, 3, (0, 1, 12), 29.0),
        done(139, 4, (0, 1, 12), 30.0),
    )
    found = figures_of(storm(), events)
    assert found.steps == 79.0
    assert found.steps_possible == 88.0, "two seconds nobody could train in replica 2"
    assert found.share_kept == 79 / 88
    assert found.training_again_s == (6.0, 6.0, 6.0)
    assert found.in_commit_again_s == (15.0, 15.0, 15.0)
    # At 119 it runs again, but has not joined.
    assert [one.took_part for one in rounds_of(storm(), events)[1:]] == [
        {0, 1},
        {0, 1, 2},
        {0, 1, 2},
    ]
    assert found.took_part == pytest.approx((2 / 3 + 2) / 3)
    assert found.took_part_min == 2 / 3


def test_who_cannot_be_reached_could_have_made_no_steps() -> None:
    """Replica 2 freezes at 115 s for 12 s: it was late to a round, and has 8 steps less."""
    events = tape(
        trains(90, 0, 1, 2),
        done(109, 1, (0, 1, 2), 30.0),
        [ReplicaAway(115, 2, 127, "freeze", computes=False)],
        done(119, 2, (0, 1), 20.0),
        done(129, 3, (0, 1, 2), 28.0),
    )
    found = figures_of(storm(), events)
    assert (found.steps, found.steps_possible, found.share_kept) == (48.0, 20 + 20 + 8, 1.0)
    assert [one.available for one in rounds_of(storm(), events)] == [{0, 1, 2}, {0, 1}, {0, 1, 2}]


@pytest.mark.parametrize(
    ("brought", "possible"),
    [(12.0, 52.0), (8.0, 48.0), (6.0, 48.0), (99.0, 60.0)],
    ids=["all", "those outside", "fewer", "more than there was time for"],
)
def test_steps_in_a_partition_are_possible_if_they_are_in_the_model(
    brought: float, possible: float
) -> None:
    """Cut off from 115 s to 127 s. It made 4 steps there, and 8 outside."""
    rounds: list[TapeEvent] = [
        RoundDone(119.0, 0, "run", 2, (0, 1), 20.0, 10.0, 8),
        RoundDone(119.1, 1, "run", 2, (0, 1), 20.0, 10.0, 8),
        *(
            RoundDone(129.0, n, "run", 3, (0, 1, 2), 20.0 + brought, own, 8)
            for n, own in enumerate((10.0, 10.0, brought))
        ),
    ]
    away: list[TapeEvent] = [ReplicaAway(115, 2, 127, "partition", computes=True)]
    events = tape(trains(90, 0, 1, 2), done(109, 1, (0, 1, 2), 30.0), away, rounds)
    found = figures_of(storm(), events)
    assert (found.steps, found.steps_possible) == (40.0 + brought, possible)
    assert found.lost_s[2] == 20.0 - brought


def test_a_slow_replica_could_have_made_fewer_steps() -> None:
    events = tape(trains(90, 0, 1, 2), *[done(99 + 10 * n, n, (0, 1, 2), 22.0) for n in range(6)])
    slow = Storm(storm().timeline, StormTraining(step_s=1.0, sync_every=10, paces=(5.0,)))
    found = figures_of(slow, events)
    assert found.steps_possible == 40 + 40 + 8
    assert found.share_kept == 1.0


def test_a_wait_is_what_a_gap_lasts_longer_than_usual() -> None:
    events = tape(
        trains(90, 0, 1, 2),
        *[done(at, n, (0, 1, 2), 30.0) for n, at in enumerate((100, 110, 120, 133, 143))],
    )
    assert figures_of(storm(), events).longest_wait_s == 3.0


def test_a_run_that_stops_waits_until_the_end_of_the_storm() -> None:
    assert figures_of(storm(seconds=100.0), WHOLE).longest_wait_s == 200.0 - 149.0 - 10.0


def test_steps_in_a_fragment_count_for_its_part() -> None:
    """Each step is in the rounds of all fragments."""
    events = tape(trains(90, 0, 1, 2), *[done(99 + 5 * n, n, (0, 1, 2), 30.0) for n in range(11)])
    found = figures_of(storm(fragments=2), events)
    assert (found.rounds, found.seconds, found.steps) == (9, 45.0, 135.0)
    assert found.share_kept == 1.0
    assert found.lost_s == {0: 0.0, 1: 0.0, 2: 0.0}


def test_an_error_that_ends_a_replica_is_no_excuse() -> None:
    """Both could have trained all the time. Replica 2 comes back, replica 1 does not."""
    failed: list[TapeEvent] = [
        ReplicaKilled(114, 2, by_itself=True),
        ReplicaStarted(116, 2),
        ReplicaKilled(141, 1, by_itself=True),
    ]
    events = [*WHOLE, *failed, *trains(126, 12), *done(145, 9, (0, 12), 5.0)]
    found = figures_of(storm(), events)
    assert (found.failures, found.never_again) == (2, 1)
    assert found.steps_possible == 120.0
    assert found.training_again_s == (12.0, 12.0, 12.0)
    assert found.in_commit_again_s == (31.0, 31.0, 31.0)


def test_errors_after_the_storm_do_not_count() -> None:
    found = figures_of(storm(), [*WHOLE, ReplicaKilled(151, 2, by_itself=True)])
    assert (found.failures, found.never_again) == (0, 0)


def test_a_storm_must_last_for_two_rounds() -> None:
    with pytest.raises(ValueError, match="make it longer"):
        figures_of(storm(), tape(done(99, 0, (0,), 1.0), done(109, 1, (0,), 1.0)))


@pytest.mark.parametrize(
    ("ended", "equal"),
    [
        ([(5, "a"), (5, "a"), (6, "b")], True),
        ([(5, "a"), (5, "b")], False),
        ([(5, "a"), (6, "b")], False),
        ([], False),
    ],
)
def test_replicas_that_end_after_the_same_round_are_equal(
    ended: list[tuple[int, str]], *, equal: bool
) -> None:
    ends: list[TapeEvent] = [ReplicaDone(160, n, *one) for n, one in enumerate(ended)]
    assert figures_of(storm(), [*WHOLE, *ends]).is_equal is equal


@pytest.mark.parametrize(
    ("synced", "equal"),
    [
        ([(0, "run", 4, "a"), (1, "run", 4, "a"), (1, "run", 5, "b")], True),
        ([(0, "run", 4, "a"), (1, "run", 4, "b")], False),
        ([(0, "run", 4, "a"), (1, "run", 4, "a"), (1, "run", 4, "b")], False),
        ([(0, "run", 4, "a"), (1, "another", 4, "b"), (1, "run", 5, "c")], False),
    ],
    ids=["equal", "different", "one changed", "nothing to compare"],
)
def test_replicas_are_equal_after_the_same_synchronization(
    synced: list[tuple[int, str, int, str]], *, equal: bool
) -> None:
    """Although each ends after another round."""
    events: list[TapeEvent] = [ReplicaSynced(120, *one) for one in synced]
    events += [ReplicaDone(160, n, n, f"{n}") for n in range(3)]
    assert figures_of(storm(), [*WHOLE, *events]).is_equal is equal


def test_the_loss_stands_beside_the_steps_in_the_model() -> None:
    losses: list[TapeEvent] = [HeldOutLoss(119, 2, 2.5), HeldOutLoss(99, 0, 3.0)]
    assert loss_curve(storm(), [*WHOLE, *losses]) == [(30.0, 3.0), (90.0, 2.5)]
    assert figures_of(storm(), [*WHOLE, *losses]).loss == 2.5


def test_losses_are_compared_at_equal_steps() -> None:
    curve = [(30.0, 3.0), (90.0, 2.5)]
    assert at_equal_steps(curve, 60.0) == 2.75
    assert at_equal_steps(curve, 90.0) == 2.5
    assert at_equal_steps(curve, 91.0) is None


def test_a_replica_may_die_while_it_is_away() -> None:
    events: list[TapeEvent] = [
        ReplicaAway(10, 0, 30, "freeze", False),
        ReplicaKilled(20, 0),
        ReplicaStarted(25, 0),
    ]
    presence = Presence(events, 1, 100.0)
    assert presence.alive == {0: [(0.0, 20), (25, 100.0)]}
    assert presence.spans(0, reachable=False) == [(0.0, 10), (30, 100.0)]
    assert [presence.is_available(0, at) for at in (5, 15, 22, 27, 30)] == [
        True,
        False,
        False,
        False,
        True,
    ]


def test_spans() -> None:
    assert without([(0, 10)], [(2, 3), (9, 12)]) == [(0, 2), (3, 9)]
    assert without([(0, 10), (20, 30)], [(5, 25)]) == [(0, 5), (25, 30)]
    assert seconds_in([(0, 10), (20, 30)], 5, 21) == 6
