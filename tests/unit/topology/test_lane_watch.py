"""Lanes that are silent: they are asked, and then replaced."""

from __future__ import annotations

from pccl.protocol.types import NS_PER_S
from pccl.topology.lane_watch import LaneStep, LaneWatch

STALL_NS, TICK_NS = 10 * NS_PER_S, NS_PER_S // 4


def looks(watch: LaneWatch, *, owes: bool = True, may_judge: bool = True) -> dict[float, LaneStep]:
    """What ticks lead to until the lane is replaced, by time, while nothing moves."""
    found: dict[float, LaneStep] = {}
    for now_ns in range(0, 2 * STALL_NS, TICK_NS):
        for step in watch.look(0, 0, now_ns, owes=owes, may_judge=may_judge):
            found[now_ns / NS_PER_S] = step
            if step is LaneStep.REPLACE:
                return found
    return found


def test_a_silent_lane_is_asked_and_then_replaced() -> None:
    assert looks(LaneWatch(STALL_NS, 0, 0)) == {5.0: LaneStep.PING, 10.0: LaneStep.REPLACE}


def test_a_lane_that_owes_nothing_is_left_alone() -> None:
    assert looks(LaneWatch(STALL_NS, 0, 0), owes=False) == {}


def test_a_process_that_has_not_read_what_came_judges_nobody() -> None:
    assert looks(LaneWatch(STALL_NS, 0, 0), may_judge=False) == {5.0: LaneStep.PING}


def test_a_lane_that_moves_something_has_its_time_again() -> None:
    watch = LaneWatch(STALL_NS, 0, 0)
    for seconds in range(100):
        moved = seconds // 9
        steps = watch.look(moved, 0, seconds * NS_PER_S, owes=True, may_judge=True)
        assert steps == ([LaneStep.PING] if seconds % 9 == 5 else [])


def test_a_receiver_says_what_has_arrived_from_time_to_time() -> None:
    watch = LaneWatch(STALL_NS, 0, 0)
    told: list[float] = []
    for tick in range(80):
        arrived = min(tick, 40)
        steps = watch.look(arrived, arrived, tick * TICK_NS, owes=False, may_judge=True)
        told += [tick * TICK_NS / NS_PER_S] * (steps == [LaneStep.PONG])
    assert told == [2.5, 5.0, 7.5, 10.0]
