"""Replicas that come, go, are cut off and come back: they stay alike, and no work is lost."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.bindings.diloco.schedule import Schedule, schedule
from tests.property.diloco_twin import Group, Process

AXES = 6
"""Processes in a scenario, at most."""

FAULTS = ("kill", "evict", "evict", "evict", "evict_newcomer", "lose_master", "start", "start")


def live(group: Group, events: int, fault_rate: float) -> None:
    """Whatever may happen next happens, by chance."""
    random = group.random
    group.start()
    for _ in range(events):
        if random.random() < fault_rate:
            getattr(group, random.choice(FAULTS))()
        elif random.random() < 0.3:
            group.decide()
        elif random.random() < 0.3:
            random.choice(group.alive).feed()
        else:
            random.choice(group.alive).train()


def settle(group: Group) -> None:
    """No more faults; all go on until everybody is a member."""
    while not all(
        one in group.members and one.has_joined and one.cut is None for one in group.alive
    ):
        moved = [part for process in group.alive for part in (process.feed(), process.train())]
        assert group.decide() or any(moved), "everybody waits"


def finish(group: Group, fault_rate: float) -> None:
    """All train until the same period has ended, and make their last rounds.

    Meanwhile some are cut off and come back, and others come.
    """
    fragments = group.schedule.fragments
    goal = max(process.trainer.pipeline.number for process in group.alive) // fragments + 3
    goal *= fragments
    began: dict[Process, tuple[int, ...]] = {}
    """What each had given up when it stopped training."""
    faults = round(100 * fault_rate)
    while not is_over(group, began):
        moved = False
        if faults and began and group.random.random() < 0.2:
            faults -= 1
            getattr(group, group.random.choice(("evict", "evict", "start")))()
        for process in group.alive:
            number = process.trainer.pipeline.number
            if not process.has_joined or process.waits or number < goal:
                moved = process.train() or moved
            elif process not in began:
                began[process] = given_up(process)
                if group.schedule.delay in (0, group.schedule.sync_steps):
                    assert not any(began[process]), "a merge threw work away"
                process.do(process.trainer.finish())
                moved = True
            else:  # it was cut off when it had made its last rounds
                moved = process.hear() or moved
            moved = process.feed() or moved
        assert group.decide() or moved or is_over(group, began), "everybody waits"
    group.alive = list(group.members)  # the others would come, or come back, after the end
    for process, before in began.items():
        if process in group.alive:
            assert given_up(process) == before, "a last round threw work away"


def is_over(group: Group, began: Collection[Process]) -> bool:
    """Whether all who are in the run have ended."""
    return bool(group.members) and all(one in began and one.is_idle for one in group.members)


def given_up(process: Process) -> tuple[int, ...]:
    return tuple(part.given_up[process.axis] for part in process.parts)


def check(group: Group) -> None:
    assert len({process.outer.content() for process in group.alive}) == 1, "not alike at the end"
    for process in group.alive:
        every_step = sum(4**step for step in range(process.made))
        work = process.trainer.pipeline.position()["work"]
        for fragment, outer in enumerate(process.outer.values):
            part = process.parts[fragment]
            left = part.work()
            assert not any(left[: process.axis] + left[process.axis + 1 :])
            counted = left[process.axis] + part.given_up[process.axis] - outer[process.axis]
            assert counted == every_step
            replaced = part.given_up[process.axis].bit_count()  # one bit for each step
            applied = group.applied[process.axis][fragment]
            assert applied + work[fragment] + replaced == process.made
            assert not work[fragment] or process.steps_at_entry == process.made, "left over"
            assert bool(work[fragment]) >= bool(any(left))
    for outer in group.alive[0].outer.values:
        assert all(_digits(-axis) <= {"0", "1"} for axis in outer), "twice, or of the dead twice"


def _digits(number: int) -> set[str]:
    """In base 4."""
    assert number >= 0
    found = {"0"}
    while number:
        number, digit = divmod(number, 4)
        found.add(str(digit))
    return found


def schedules() -> st.SearchStrategy[Schedule]:
    return st.integers(1, 5).flatmap(
        lambda steps: st.builds(
            schedule, st.just(steps), st.integers(1, min(steps, 3)), st.integers(0, steps)
        )
    )


@settings(max_examples=500)
@given(
    made=schedules(),
    seed=st.integers(0, 2**32),
    events=st.integers(0, 600),
    fault_rate=st.sampled_from([0.0, 0.02, 0.1]),
    eager=st.booleans(),
)
def test_replicas_stay_alike_and_each_inner_step_counts_once(
    made: Schedule, seed: int, events: int, fault_rate: float, *, eager: bool
) -> None:
    """``eager`` works with every schedule here, though it is of use with one."""
    group = Group(made, AXES, seed, eager=eager)
    live(group, events, fault_rate)
    settle(group)
    finish(group, fault_rate)
    check(group)


@pytest.mark.parametrize("delay", [0, 2, 4])
def test_scenarios_have_everything_in_them(delay: int) -> None:
    """Rounds are shared, newcomers follow open ones, and some are cut off and come back."""
    seen = {"open": 0, "shared": 0, "again": 0}
    for seed in range(20):
        group = Group(schedule(4, 2, delay), AXES, seed)
        live(group, 600, 0.05)
        settle(group)
        seen["shared"] += sum(1 for axis in group.applied if axis[0]) > 1
        seen["again"] += max(process.trainer.entry for process in group.alive) > 1
        seen["open"] += any(process.watched for process in group.alive)
    assert min(seen.values()) >= 5, seen
