"""Replicas that come, go, are cut off and come back: they stay alike, and no work is lost."""

from __future__ import annotations

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


def finish(group: Group) -> None:
    """All train until the same round has begun, and make their last ones."""
    goal = max(process.trainee.pipeline.number for process in group.alive) + 2
    flushed: list[Process] = []
    while len(flushed) < len(group.alive) or not all(one.is_idle for one in group.alive):
        moved = False
        for process in group.alive:
            number = process.trainee.pipeline.number
            if process.waits_for is not None or number < goal:
                moved = process.train() or moved
            elif process not in flushed:
                if group.schedule.delay in (0, group.schedule.sync_steps):
                    given_up = [part.given_up[process.axis] for part in process.parts]
                    assert not any(given_up), "a merge threw work away"
                process.do(process.trainee.finish())
                flushed.append(process)
                moved = True
            moved = process.feed() or moved
        assert group.decide() or moved or len(flushed) == len(group.alive), "everybody waits"


def check(group: Group) -> None:
    assert len({process.outer.content() for process in group.alive}) == 1, "not alike at the end"
    for process in group.alive:
        every_step = sum(4**step for step in range(process.made))
        for fragment, outer in enumerate(process.outer.values):
            part = process.parts[fragment]
            assert not any(part.work()), "left over"
            assert -outer[process.axis] + part.given_up[process.axis] == every_step
            assert group.applied[process.axis][fragment] == process.made
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
)
def test_replicas_stay_alike_and_each_inner_step_counts_once(
    made: Schedule, seed: int, events: int, fault_rate: float
) -> None:
    group = Group(made, AXES, seed)
    live(group, events, fault_rate)
    settle(group)
    finish(group)
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
        seen["again"] += max(process.trainee.entry for process in group.alive) > 1
        seen["open"] += any(process.watched for process in group.alive)
    assert min(seen.values()) >= 5, seen
