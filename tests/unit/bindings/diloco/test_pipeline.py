"""What is due after an inner step: pseudo-gradients to take, outcomes to merge, in which order."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.bindings.diloco.pipeline import EARLY_ROUNDS, Launch, Merge, Pipeline, RoundTempo
from pccl.bindings.diloco.schedule import schedule

Due = Launch | Merge


def entered(sync_every: int | str, fragments: int = 1, delay: int = 0, number: int = 0) -> Pipeline:
    pipeline = Pipeline(schedule(sync_every, fragments, delay))
    pipeline.enter(number, 0.0, is_open=False)
    return pipeline


def stepped(pipeline: Pipeline, now_s: float = 0.0, weight: float = 1.0) -> list[Due]:
    """One step; what is to be merged is merged."""
    due = pipeline.step(weight, now_s)
    for action in due:
        if isinstance(action, Merge):
            pipeline.merged(action.number, now_s, kept=1.0)
    return due


def launch(number: int, fragment: int, weight: float) -> Launch:
    return Launch(number=number, fragment=fragment, weight=weight)


def merge(number: int, fragment: int, *, is_taken: bool = True) -> Merge:
    return Merge(number=number, fragment=fragment, is_taken=is_taken)


def test_without_delay_a_round_begins_and_ends_in_one_step() -> None:
    pipeline = entered(3)
    assert [stepped(pipeline) for _ in range(6)] == [
        [],
        [],
        [launch(0, 0, 3.0), merge(0, 0)],
        [],
        [],
        [launch(1, 0, 3.0), merge(1, 0)],
    ]
    assert (pipeline.steps, pipeline.number) == (6, 2)


def test_with_a_delay_it_is_merged_so_many_steps_later() -> None:
    pipeline = entered(3, delay=2)
    assert [stepped(pipeline) for _ in range(8)] == [
        [],
        [],
        [launch(0, 0, 3.0)],
        [],
        [merge(0, 0)],
        [launch(1, 0, 3.0)],
        [],
        [merge(1, 0)],
    ]


def test_with_a_delay_of_a_whole_period_the_next_is_taken_before_it_is_merged() -> None:
    pipeline = entered(2, delay=2)
    assert [stepped(pipeline) for _ in range(6)] == [
        [],
        [launch(0, 0, 2.0)],
        [],
        [launch(1, 0, 2.0), merge(0, 0)],
        [],
        [launch(2, 0, 2.0), merge(1, 0)],
    ]


def test_fragments_take_turns_and_overlap() -> None:
    pipeline = entered(4, fragments=2, delay=3)
    assert [stepped(pipeline) for _ in range(8)] == [
        [],
        [launch(0, 0, 2.0)],
        [],
        [launch(1, 1, 4.0)],
        [merge(0, 0)],
        [launch(2, 0, 4.0)],
        [merge(1, 1)],
        [launch(3, 1, 4.0)],
    ]


def test_each_fragment_counts_the_work_since_its_own_launch() -> None:
    pipeline = entered(2, fragments=2)
    due = [stepped(pipeline, weight=weight)[0] for weight in (1.0, 10.0, 100.0, 1000.0)]
    assert due == [launch(0, 0, 1.0), launch(1, 1, 11.0), launch(2, 0, 110.0), launch(3, 1, 1100.0)]


def test_a_merge_is_due_until_it_is_made() -> None:
    pipeline = entered(2, delay=1)
    assert pipeline.step(1.0, 0.0) == []
    assert pipeline.step(1.0, 0.0) == [launch(0, 0, 2.0)]
    assert pipeline.due_merges() == []
    assert pipeline.step(1.0, 0.0) == [merge(0, 0)]
    assert pipeline.due_merges() == [merge(0, 0)]
    pipeline.merged(0, 0.0, kept=1.0)
    assert pipeline.due_merges() == []


def test_a_flush_names_everything_in_flight_in_order() -> None:
    pipeline = entered(4, fragments=4, delay=3)
    for _ in range(3):
        pipeline.step(1.0, 0.0)
    assert pipeline.due_merges() == []
    assert pipeline.flush() == [merge(0, 0), merge(1, 1), merge(2, 2)]
    assert pipeline.in_flight() == (launch(0, 0, 1.0), launch(1, 1, 2.0), launch(2, 2, 3.0))


# -- last rounds ----------------------------------------------------------------------------------


def finished(pipeline: Pipeline, now_s: float = 0.0) -> list[Due]:
    """The last rounds, and then everything merged."""
    due: list[Due] = []
    last = pipeline.last_number
    while pipeline.number < last:
        due.append(pipeline.launch_early(now_s))
    for action in pipeline.flush():
        due.append(action)
        pipeline.merged(action.number, now_s, kept=1.0)
    return due


def test_after_a_period_last_rounds_take_what_the_other_fragments_have_left() -> None:
    pipeline = entered(6, fragments=3)
    for _ in range(6):
        stepped(pipeline)
    assert finished(pipeline) == [launch(3, 0, 4.0), launch(4, 1, 2.0), merge(3, 0), merge(4, 1)]
    assert (pipeline.run_steps, pipeline.leave_out_work()) == (6, 0.0)
    assert finished(pipeline) == []


def test_with_one_fragment_there_are_no_last_rounds() -> None:
    pipeline = entered(4)
    for _ in range(6):
        stepped(pipeline)
    assert finished(pipeline) == []
    assert pipeline.leave_out_work() == 2.0


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("number", [3, 4])
def test_who_comes_in_the_last_rounds_finds_the_same_end(number: int, *, is_open: bool) -> None:
    """Of members that have begun round 2 when they stopped, in a run of three fragments."""
    pipeline = Pipeline(schedule(6, 3, 0))
    pipeline.enter(number, 0.0, is_open=is_open)
    assert pipeline.last_number == 5


def test_after_last_rounds_the_next_come_where_they_would_have_come() -> None:
    pipeline = entered(4, fragments=2)
    for _ in range(4):
        stepped(pipeline)
    assert finished(pipeline) == [launch(2, 0, 2.0), merge(2, 0)]  # the round of step 6
    due = [stepped(pipeline) for _ in range(6)]
    assert due == [
        [],
        [],
        [],
        [launch(3, 1, 4.0), merge(3, 1)],
        [],
        [launch(4, 0, 6.0), merge(4, 0)],
    ]


def test_a_last_round_is_taken_before_the_one_before_it_is_merged() -> None:
    pipeline = entered(2, fragments=2, delay=2)
    for _ in range(2):
        stepped(pipeline)
    assert finished(pipeline) == [launch(2, 0, 1.0), merge(0, 0), merge(1, 1), merge(2, 0)]


def test_with_a_time_budget_the_next_round_is_a_budget_after_the_last() -> None:
    pipeline = entered("10s", fragments=2)
    stepped(pipeline, 5.0)
    stepped(pipeline, 10.0)
    assert finished(pipeline, 11.0) == [launch(2, 0, 1.0), merge(2, 0)]
    assert stepped(pipeline, 15.9) == []
    assert stepped(pipeline, 16.0) == [launch(3, 1, 2.0), merge(3, 1)]


# -- a time budget -------------------------------------------------------------------------------


def test_a_time_budget_begins_with_the_merge_before() -> None:
    pipeline = Pipeline(schedule("10s", 1, 0))
    pipeline.enter(0, 100.0, is_open=False)
    assert stepped(pipeline, 109.9) == []
    assert pipeline.step(1.0, 110.0) == [launch(0, 0, 2.0), merge(0, 0)]
    pipeline.merged(0, 114.0, kept=1.0)  # others were slower
    assert stepped(pipeline, 123.9) == []
    assert stepped(pipeline, 124.0) == [launch(1, 0, 2.0), merge(1, 0)]


def test_a_time_budget_is_shared_by_fragments() -> None:
    pipeline = entered("10s", fragments=4)
    assert stepped(pipeline, 2.4) == []
    assert stepped(pipeline, 2.5) == [launch(0, 0, 2.0), merge(0, 0)]
    assert stepped(pipeline, 5.0) == [launch(1, 1, 3.0), merge(1, 1)]


def test_in_a_time_budget_a_fragment_is_merged_before_it_is_launched_twice() -> None:
    pipeline = entered("1s", delay=100)
    assert stepped(pipeline, 1.0) == [launch(0, 0, 1.0)]
    assert stepped(pipeline, 2.0) == [launch(1, 0, 1.0), merge(0, 0)]
    assert stepped(pipeline, 3.0) == [launch(2, 0, 1.0), merge(1, 0)]


# -- entering ------------------------------------------------------------------------------------


def test_a_newcomer_counts_from_its_entry() -> None:
    pipeline = entered(4, fragments=2, number=7)
    assert [stepped(pipeline) for _ in range(4)] == [
        [],
        [launch(7, 1, 2.0), merge(7, 1)],
        [],
        [launch(8, 0, 4.0), merge(8, 0)],
    ]


def test_who_enters_an_open_round_merges_what_comes_of_it_and_keeps_its_work() -> None:
    pipeline = Pipeline(schedule(4, 2, 1))
    pipeline.enter(7, 0.0, is_open=True)
    assert pipeline.in_flight() == (launch(7, 1, 0.0),)
    assert pipeline.due_merges() == []
    assert [stepped(pipeline) for _ in range(4)] == [
        [merge(7, 1, is_taken=False)],
        [launch(8, 0, 2.0)],
        [merge(8, 0)],
        [launch(9, 1, 4.0)],  # nothing of fragment 1 went into round 7
    ]


def test_without_delay_an_open_round_is_due_at_once() -> None:
    pipeline = Pipeline(schedule(4, 2, 0))
    pipeline.enter(7, 0.0, is_open=True)
    assert pipeline.due_merges() == [merge(7, 1, is_taken=False)]
    assert pipeline.flush() == [merge(7, 1, is_taken=False)]


def test_what_was_in_flight_is_void_after_an_entry_and_can_be_carried() -> None:
    pipeline = entered(2, delay=2)
    for _ in range(3):
        pipeline.step(1.0, 0.0)
    (lost,) = pipeline.in_flight()
    pipeline.carry(lost)
    pipeline.enter(5, 0.0, is_open=False)
    assert pipeline.in_flight() == ()
    assert pipeline.step(1.0, 0.0) == []
    assert pipeline.step(1.0, 0.0) == [launch(5, 0, 5.0)]  # 2 of them carried


@given(data=st.data(), sync_every=st.integers(1, 12), steps=st.integers(0, 60))
def test_a_resumed_pipeline_goes_on_as_the_other_would(
    data: st.DataObject, sync_every: int, steps: int
) -> None:
    fragments = data.draw(st.integers(1, sync_every))
    delay = data.draw(st.integers(0, sync_every))
    made = schedule(sync_every, fragments, delay)
    one, two = Pipeline(made), Pipeline(made)
    one.enter(data.draw(st.integers(0, 9)), 0.0, is_open=data.draw(st.booleans()))
    for _ in range(steps):
        stepped(one)
    position = one.position()
    two.resume(copy.deepcopy(position), 0.0)
    assert two.position() == position
    assert two.flush() == one.flush()
    for _ in range(3 * sync_every):
        assert stepped(two) == stepped(one)


@given(data=st.data(), sync_every=st.integers(1, 12), number=st.integers(0, 40))
def test_work_is_launched_once_and_each_launch_is_merged_once_and_in_time(
    data: st.DataObject, sync_every: int, number: int
) -> None:
    fragments = data.draw(st.integers(1, sync_every))
    delay = data.draw(st.integers(0, sync_every))
    pipeline = entered(sync_every, fragments, delay, number)
    launched: dict[int, int] = {}
    weight = [0.0] * fragments
    merged: list[int] = []
    steps = 5 * sync_every
    for step in range(1, steps + 1):
        for action in stepped(pipeline):
            if isinstance(action, Launch):
                assert action.fragment == action.number % fragments
                launched[action.number] = step
                weight[action.fragment] += action.weight
            else:
                assert step - launched[action.number] == delay
                merged.append(action.number)
    assert list(launched) == list(range(number, number + len(launched)))
    assert merged == list(launched)[: len(merged)]
    assert [one.number for one in pipeline.in_flight()] == list(launched)[len(merged) :]
    if delay in (0, sync_every):
        assert len(pipeline.in_flight()) <= fragments
    last = {number % fragments: step for number, step in launched.items()}
    assert weight == [float(last.get(fragment, 0)) for fragment in range(fragments)]


def test_work_that_a_merge_gave_up_does_not_count_in_the_next_round() -> None:
    """Steps 5 and 6 come after the launch and before the merge, which keeps a quarter of them."""
    pipeline = entered(4, delay=2)
    launches: list[Due] = []
    for weight in (1.0, 1.0, 1.0, 1.0, 8.0, 4.0, 1.0, 2.0):
        for action in pipeline.step(weight, 0.0):
            if isinstance(action, Merge):
                pipeline.merged(action.number, 0.0, kept=0.25)
            else:
                launches.append(action)
    assert launches == [launch(0, 0, 4.0), launch(1, 0, 0.25 * 12.0 + 3.0)]


def test_other_fragments_keep_their_work_when_one_is_merged() -> None:
    pipeline = entered(4, fragments=2, delay=1)
    launches: list[Due] = []
    for _ in range(8):
        for action in pipeline.step(1.0, 0.0):
            if isinstance(action, Merge):
                pipeline.merged(action.number, 0.0, kept=0.0)
            else:
                launches.append(action)
    assert launches == [launch(0, 0, 2.0), launch(1, 1, 4.0), launch(2, 0, 3.0), launch(3, 1, 3.0)]


def test_what_merges_gave_up_since_the_last_launch_is_left_out_at_the_end() -> None:
    pipeline = entered(4, delay=2)
    for _ in range(7):
        for action in pipeline.step(1.0, 0.0):
            if isinstance(action, Merge):
                pipeline.merged(action.number, 0.0, kept=0.0)
    assert pipeline.leave_out_work() == 3.0
    assert pipeline.leave_out_work() == 0.0


# -- with a quorum ---------------------------------------------------------------------------------


def awaited(pipeline: Pipeline, now_s: float = 0.0) -> list[Due]:
    return pipeline.step(1.0, now_s, is_awaited=True)


def test_an_awaited_replica_launches_after_the_step_with_the_work_that_it_has() -> None:
    pipeline = entered(5, delay=2)
    assert stepped(pipeline) == []
    assert awaited(pipeline) == [launch(0, 0, 2.0)]
    # The next round is a period after this one.
    assert [stepped(pipeline) for _ in range(5)] == [
        [],
        [merge(0, 0)],
        [],
        [],
        [launch(1, 0, 5.0)],
    ]


def test_an_awaited_replica_launches_the_next_fragment() -> None:
    pipeline = entered(4, fragments=2)
    assert awaited(pipeline) == [launch(0, 0, 1.0), merge(0, 0)]
    pipeline.merged(0, 0.0, kept=0.0)
    assert awaited(pipeline) == [launch(1, 1, 2.0), merge(1, 1)]


def test_work_of_a_missed_round_goes_into_the_next_one() -> None:
    pipeline = entered(3)
    for _ in range(2):
        pipeline.step(1.0, 0.0)
    assert pipeline.step(1.0, 0.0) == [launch(0, 0, 3.0), merge(0, 0)]
    pipeline.miss(0)
    pipeline.miss(0)  # it counts once
    pipeline.miss(7)  # nothing was launched
    assert pipeline.merge(0) == merge(0, 0, is_taken=False)
    pipeline.merged(0, 0.0, kept=1.0)
    assert [stepped(pipeline) for _ in range(3)][-1] == [launch(1, 0, 6.0), merge(1, 0)]


def test_a_round_without_own_work_cannot_be_missed() -> None:
    pipeline = entered(3)
    pipeline.enter(4, 0.0, is_open=True)
    pipeline.miss(4)
    assert pipeline.flush() == [merge(4, 0, is_taken=False)]
    pipeline.merged(4, 0.0, kept=1.0)
    assert [stepped(pipeline) for _ in range(3)][-1] == [launch(5, 0, 3.0), merge(5, 0)]


def test_a_later_round_keeps_the_work_that_comes_back_while_it_is_in_flight() -> None:
    """Otherwise its merge would drop the work of the missed round, as steps made meanwhile."""
    pipeline = entered(6, delay=3)
    for _ in range(6):
        pipeline.step(1.0, 0.0)
    assert awaited(pipeline) == [launch(1, 0, 1.0), merge(0, 0)]
    pipeline.miss(0)
    pipeline.merged(0, 0.0, kept=1.0)
    assert [pipeline.step(1.0, 0.0) for _ in range(3)][-1] == [merge(1, 0, is_taken=False)]
    saved = copy.deepcopy(pipeline.position())
    assert saved["watched"] == [1]
    pipeline.merged(1, 0.0, kept=1.0)
    assert awaited(pipeline) == [launch(2, 0, 10.0)]  # six that were late, and four
    resumed = Pipeline(schedule(6, 1, 3))
    resumed.resume(saved, 0.0)
    assert resumed.flush() == [merge(1, 0, is_taken=False)]


def test_only_merges_of_its_fragment_keep_work_that_comes_back() -> None:
    pipeline = entered(4, fragments=2, delay=4)
    for _ in range(2):
        pipeline.step(1.0, 0.0)
    assert awaited(pipeline) == [launch(1, 1, 3.0)]
    pipeline.miss(0)
    assert pipeline.flush() == [merge(0, 0, is_taken=False), merge(1, 1)]


def test_a_launch_takes_the_work_that_came_back() -> None:
    """So the round before it may drop what was not taken, as always."""
    pipeline = entered(2, delay=2)
    for _ in range(3):
        pipeline.step(1.0, 0.0)
    assert pipeline.step(1.0, 0.0) == [launch(1, 0, 2.0), merge(0, 0)]
    pipeline.miss(0)
    pipeline.merged(0, 0.0, kept=1.0)
    assert pipeline.merge(1) == merge(1, 0, is_taken=False)
    pipeline.step(1.0, 0.0)
    assert pipeline.step(1.0, 0.0) == [launch(2, 0, 4.0), merge(1, 0)]


def behind(*rounds: tuple[float, bool], step_s: float = 2.0) -> RoundTempo:
    """Rounds from number 0: when their outcomes were heard, and whether they had own work."""
    tempo = RoundTempo()
    for number, (now_s, took_part) in enumerate(rounds):
        tempo.stepped(now_s - step_s)
        tempo.stepped(now_s)
        tempo.heard(number, now_s, took_part=took_part)
    return tempo


def test_in_time_no_launch_is_early() -> None:
    tempo = behind((10.0, True), (30.0, True))
    assert not tempo.is_next_due(2, 1000.0)


def test_after_a_miss_the_next_launch_is_a_step_before_the_next_round() -> None:
    """Rounds end at 10, 30 and perhaps 50: that is expected. A step lasts 2."""
    tempo = behind((10.0, True), (30.0, True), (51.0, False))
    assert not tempo.is_next_due(3, 67.7)
    assert tempo.is_next_due(3, 67.8), "the next step would end in the tenth of a step before 70"
    assert not tempo.is_next_due(4, 67.8), "round 3 is in flight"


@pytest.mark.parametrize(("heard_s", "due_s"), [(48.0, 65.8), (53.0, 68.8)])
def test_a_round_that_it_missed_ended_at_most_a_step_ago(heard_s: float, due_s: float) -> None:
    tempo = behind((10.0, True), (30.0, True), (heard_s, False))
    assert not tempo.is_next_due(3, due_s - 0.1)
    assert tempo.is_next_due(3, due_s)


def test_the_first_miss_may_have_ended_a_step_ago() -> None:
    """It ended at 28, and a round lasts 18."""
    tempo = behind((10.0, True), (30.0, False))
    assert not tempo.is_next_due(2, 43.7)
    assert tempo.is_next_due(2, 43.9)


def test_a_replica_that_was_late_stays_early_for_some_rounds() -> None:
    tempo = behind((10.0, True), (30.0, True), (50.0, False))
    for number in range(3, 3 + EARLY_ROUNDS):
        assert tempo.is_next_due(number, 20.0 * number + 9.0)
        assert not tempo.is_next_due(number, 20.0 * number + 7.0)
        tempo.heard(number, 20.0 * number + 10.0, took_part=True)
    assert not tempo.is_next_due(3 + EARLY_ROUNDS, 1000.0)


def test_a_slow_replica_stays_early() -> None:
    tempo = behind((10.0, True), (30.0, True), (50.0, False))
    for number in range(3, 3 + 4 * EARLY_ROUNDS):
        assert tempo.is_next_due(number, 20.0 * number + 9.0)
        tempo.launched(is_slow=True)
        tempo.heard(number, 20.0 * number + 10.0, took_part=True)


def test_a_wait_is_no_part_of_a_step() -> None:
    tempo = behind((10.0, True), (30.0, True), (50.0, False))
    tempo.stepped(52.0)
    tempo.waited(60.0)
    tempo.stepped(62.0)
    assert tempo.step_s == 2.0


def test_a_replica_is_slow_if_it_lacks_more_than_a_step() -> None:
    """It launches because it is awaited, in its third and in its second of four steps."""
    for steps, is_slow in ((3, False), (2, True)):
        pipeline = entered(4)
        for _ in range(steps - 1):
            pipeline.step(1.0, 0.0)
        pipeline.step(1.0, 0.0, is_awaited=True)
        pipeline.heard(0, 0.0, took_part=False)
        for number in range(1, 2 + EARLY_ROUNDS):
            pipeline.number = number + 1
            pipeline.heard(number, 10.0 * number, took_part=True)
        assert pipeline.is_behind(1000.0) is is_slow


def test_after_two_misses_the_next_launch_is_due_at_once() -> None:
    tempo = behind((10.0, True), (30.0, False), (50.0, False))
    assert tempo.is_next_due(3, 50.0)
    tempo.heard(3, 60.0, took_part=True)
    assert not tempo.is_next_due(4, 60.0)


def test_without_an_earlier_round_the_next_launch_is_due_at_once() -> None:
    assert behind((10.0, False)).is_next_due(1, 10.0)


def test_rounds_of_which_nothing_was_heard_count_for_the_pace() -> None:
    tempo = behind((10.0, True))
    tempo.heard(4, 52.0, took_part=False)  # one round in 10 seconds, the last ended at 50
    assert not tempo.is_next_due(5, 57.7)
    assert tempo.is_next_due(5, 57.9)


def test_an_entry_ends_what_was_late() -> None:
    pipeline = entered(4)
    pipeline.heard(0, 1.0, took_part=False)
    pipeline.number = 1
    assert pipeline.is_behind(1.0)
    pipeline.enter(1, 1.0, is_open=False)
    assert not pipeline.is_behind(1.0)


# -- without a quorum ------------------------------------------------------------------------------


def hurried(pipeline: Pipeline, now_s: float = 0.0) -> list[Due]:
    return pipeline.step(1.0, now_s, is_awaited=True, has_quorum=False)


def test_a_round_begins_early_for_a_member_that_leaves_and_later_ones_as_ever() -> None:
    pipeline = entered(3, delay=1)
    assert hurried(pipeline) == [launch(0, 0, 1.0)]
    assert (pipeline.run_steps, pipeline.steps) == (1, 1)
    assert [stepped(pipeline) for _ in range(5)] == [
        [merge(0, 0)],
        [],
        [],
        [],
        [launch(1, 0, 5.0)],
    ]
    assert (pipeline.run_steps, pipeline.steps) == (6, 6)


def test_a_round_that_is_due_begins_as_ever_for_a_member_that_leaves() -> None:
    pipeline = entered(2)
    assert stepped(pipeline) == []
    assert hurried(pipeline) == [launch(0, 0, 2.0), merge(0, 0)]
    pipeline.merged(0, 0.0, kept=1.0)
    assert [stepped(pipeline) for _ in range(2)] == [[], [launch(1, 0, 2.0), merge(1, 0)]]


def test_a_time_budget_restarts_with_a_round_that_begins_early() -> None:
    pipeline = entered("10s")
    assert hurried(pipeline, 4.0) == [launch(0, 0, 1.0), merge(0, 0)]
    pipeline.merged(0, 4.0, kept=1.0)
    assert stepped(pipeline, 13.0) == []
    assert stepped(pipeline, 14.0) == [launch(1, 0, 2.0), merge(1, 0)]


def test_work_after_early_rounds_is_in_the_final_rounds() -> None:
    pipeline = entered(4, fragments=2)
    assert pipeline.last_number == 1
    for _ in range(2):
        stepped(pipeline)
    for due in (launch(1, 1, 3.0), launch(2, 0, 2.0)):
        assert hurried(pipeline)[0] == due
        pipeline.merged(due.number, 0.0, kept=1.0)
    assert (pipeline.run_steps, pipeline.number, pipeline.last_number) == (4, 3, 5)
    resumed = Pipeline(schedule(4, 2, 0))
    resumed.resume(pipeline.position(), 0.0)
    assert resumed.last_number == 5
    for _ in range(4):
        stepped(pipeline)
    assert (pipeline.run_steps, pipeline.number, pipeline.last_number) == (8, 4, 6)
    for _ in range(2):
        stepped(pipeline)
    assert (pipeline.run_steps, pipeline.number, pipeline.last_number) == (10, 5, 5)
