"""Lanes that are silent: they are asked, and then replaced."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from pccl.protocol.types import NS_PER_S
from pccl.topology.lane_watch import LaneStep, LaneWatch, needs_facts
from pccl.topology.segment_limit import LARGE_BYTES, LaneFacts, Proof, StuckLane, Way

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


FULL = 1448
SENT = LaneFacts(FULL, 300, 300, unacknowledged=12, retransmits=4, ack_ago_ns=0)
"""A new lane with a large write of which nothing is acknowledged."""
WAITS = LaneFacts(FULL, 400, 300, unacknowledged=0, retransmits=0, ack_ago_ns=0)
"""A new lane to which nothing comes, although its question was acknowledged."""


def judged(
    facts: LaneFacts,
    *,
    heard_s: float,
    other: int,
    suspects: Proof | None = None,
    dials: bool = True,
) -> tuple[StuckLane | None, float]:
    """What a lane is that moves nothing, and when it is replaced.

    ``heard_s``: when the other system has last acknowledged something; ``other``: bytes that
    another lane of the link has sent or received since this one was asked.
    """
    watch, found = LaneWatch(STALL_NS, 0, 0), None
    beside = replace(SENT, acked_bytes=1 << 20, arrived_bytes=1 << 20)
    for now_ns in range(0, 2 * STALL_NS, TICK_NS):
        steps = watch.look(0, 0, now_ns, owes=True, may_judge=True, suspects=suspects, dials=dials)
        if LaneStep.REPLACE in steps:
            return found, now_ns / NS_PER_S
        ago_ns = max(0, now_ns - round(heard_s * NS_PER_S))
        lanes = {3: replace(facts, ack_ago_ns=ago_ns), 5: beside}
        watch.judge(3, lanes, now_ns)
        if now_ns == STALL_NS // 2:
            moved = beside.acked_bytes + other, beside.arrived_bytes + other
            beside = replace(beside, acked_bytes=moved[0], arrived_bytes=moved[1])
        found = watch.stuck
    raise AssertionError("it is never replaced")


@pytest.mark.parametrize(
    ("facts", "heard_s", "other", "way", "proof"),
    [
        (SENT, 0.0, 0, Way.OUT, Proof.OPENED),  # the handshake has passed, and nothing since
        (replace(SENT, acked_bytes=1 << 20), 5.0, 0, Way.OUT, Proof.STUCK),  # packets come, no more
        (replace(SENT, acked_bytes=1 << 20), 0.0, 56, Way.OUT, Proof.STUCK),  # on other lanes
        (replace(SENT, acked_bytes=1 << 20), 0.9, 0, Way.OUT, Proof.NONE),  # perhaps an outage
        (replace(SENT, retransmits=0), 5.0, 56, None, Proof.NONE),  # it was sent just now
        (SENT, 5.0, LARGE_BYTES - 1, Way.OUT, Proof.STUCK),
        (SENT, 5.0, LARGE_BYTES, None, Proof.NONE),  # full segments pass on another lane
        (WAITS, 0.9, 0, Way.IN, Proof.OPENED),
        (WAITS, 5.0, 0, Way.IN, Proof.STUCK),  # its question was acknowledged
        (replace(WAITS, arrived_bytes=1 << 20), 5.0, 56, Way.IN, Proof.STUCK),
        (replace(WAITS, arrived_bytes=1 << 20), 5.0, 0, Way.IN, Proof.NONE),  # perhaps stopped
        (WAITS, 5.0, LARGE_BYTES, None, Proof.NONE),
    ],
)
def test_a_lane_on_which_only_large_packets_vanish(
    facts: LaneFacts, heard_s: float, other: int, way: Way | None, proof: Proof
) -> None:
    stuck = None if way is None else StuckLane(way, FULL, 5 * NS_PER_S, proof)
    judge = partial(judged, facts, heard_s=heard_s, other=other)
    assert judge() == judge(dials=False) == (stuck, 10.0)
    for least in (Proof.OPENED, Proof.STUCK):
        assert judge(suspects=least) == (stuck, 5.5 if proof >= least else 10.0)
        assert judge(suspects=least, dials=False) == (stuck, 15.0)


def test_whoever_has_sent_all_finds_out_when_the_other_side_asks() -> None:
    """This side owes nothing, so it does not replace the lane. But the lane is stuck."""
    watch = LaneWatch(STALL_NS, 0, 0)

    def look(seconds: int, asks: int, facts: LaneFacts) -> StuckLane | None:
        now_ns = seconds * NS_PER_S
        # A small question came just now.
        steps = watch.look(seconds, 0, now_ns, owes=False, may_judge=True, asks=asks)
        assert steps == []
        watch.judge(0, {0: facts}, now_ns)
        return watch.stuck

    assert look(1, 0, SENT) is None
    assert look(2, 1, SENT) is None
    stuck = StuckLane(Way.OUT, FULL, 2 * NS_PER_S, Proof.OPENED)
    assert [look(seconds, 1, SENT) for seconds in range(3, 20)] == [stuck] * 17
    more = replace(SENT, acked_bytes=SENT.acked_bytes + 5000)
    assert [look(seconds, 1, more) for seconds in (20, 21)] == [None, None]
    assert look(22, 2, WAITS) is None, "all was acknowledged, and nothing is expected"
    assert look(23, 2, WAITS) is None
    assert not needs_facts([watch], suspects=None)


def test_what_moves_is_not_stuck() -> None:
    watch = LaneWatch(STALL_NS, 0, 0)
    for seconds in range(8):
        watch.look(0, 0, seconds * NS_PER_S, owes=True, may_judge=True)
        watch.judge(0, {0: SENT}, seconds * NS_PER_S)
    assert watch.stuck is not None
    watch.look(1, 0, 8 * NS_PER_S, owes=True, may_judge=True)
    watch.judge(0, {0: SENT}, 8 * NS_PER_S)
    assert watch.stuck is None
    watch.look(1, 0, 13 * NS_PER_S, owes=True, may_judge=True)
    watch.judge(0, {0: SENT, 1: SENT}, 13 * NS_PER_S)
    more = replace(SENT, acked_bytes=SENT.acked_bytes + 8000)
    watch.judge(0, {0: more, 1: more}, 14 * NS_PER_S)
    assert watch.stuck is None, "the other side acknowledges what was sent, though slowly"


def test_a_lane_of_which_the_kernel_says_nothing_is_not_stuck() -> None:
    watch = LaneWatch(STALL_NS, 0, 0)
    watch.look(0, 0, STALL_NS // 2, owes=True, may_judge=True)
    for lanes in ({}, {1: SENT}, {0: SENT, 1: SENT}):
        watch.judge(0, lanes, STALL_NS // 2)
        assert watch.stuck is None


def test_a_kernel_that_says_nothing_is_asked_once() -> None:
    watch = LaneWatch(STALL_NS, 0, 0)
    watch.look(0, 0, 1, owes=False, may_judge=True, asks=1)
    assert needs_facts([watch], suspects=None)
    watch.judge(0, {}, 1)
    assert not needs_facts([watch], suspects=None)


@pytest.mark.parametrize("suspects", Proof)
def test_a_small_packet_that_is_lost_once_proves_nothing(suspects: Proof) -> None:
    """The answer to a question, on a healthy lane that is idle after another one was stuck."""
    watch = LaneWatch(STALL_NS, 0, 0)
    for tick in range(1, 8):
        now_ns = tick * TICK_NS
        assert not watch.look(0, 0, now_ns, owes=True, may_judge=True, asks=1, suspects=suspects)
        lost = replace(SENT, unacknowledged=1, retransmits=min(tick // 2, 2))
        watch.judge(0, {0: lost}, now_ns)
        assert watch.stuck is None


@pytest.mark.parametrize("facts", [SENT, WAITS])
@pytest.mark.parametrize("age_s", [9, 11])
def test_an_old_lane_that_has_carried_little_was_idle(facts: LaneFacts, age_s: int) -> None:
    """So it shows nothing: it may be an outage, or a process that stands still."""
    watch = LaneWatch(STALL_NS, age_s * NS_PER_S, 0)  # it has moved a sign of life
    watch.pinged, watch.moved_bytes = True, 1
    for seconds in (age_s, age_s + 5):
        watch.judge(0, {0: replace(facts, ack_ago_ns=seconds * NS_PER_S)}, seconds * NS_PER_S)
    assert watch.stuck is not None
    assert watch.stuck.proof is (Proof.OPENED if age_s < 10 else Proof.NONE)


def test_the_kernel_is_asked_while_a_lane_is_silent_or_others_were_stuck() -> None:
    watch = LaneWatch(STALL_NS, 0, 0)
    assert not needs_facts([watch], suspects=None)
    assert needs_facts([watch], suspects=Proof.OPENED)
    watch.look(0, 0, STALL_NS // 2, owes=True, may_judge=True)
    assert needs_facts([LaneWatch(STALL_NS, 0, 0), watch], suspects=None)
