"""Links on which large packets vanish: when their segments get smaller, and when that is said."""

from __future__ import annotations

from dataclasses import replace

from pccl.topology.segment_limit import LaneFacts, Proof, SegmentLimit, StuckLane, Way

FULL, MEMORY_NS = 1448, 100
PASSED = LaneFacts(1188, 1 << 20, 300, unacknowledged=0, retransmits=0, ack_ago_ns=0)


def stuck(asked_ns: int, segment_bytes: int = FULL, way: Way = Way.OUT) -> StuckLane:
    return StuckLane(way, segment_bytes, asked_ns)


def narrowed() -> SegmentLimit:
    """After two lanes in a row, at 10 and at 20."""
    limit = SegmentLimit(MEMORY_NS)
    assert not limit.stuck(stuck(5), 10)
    assert limit.suspects(10) is Proof.OPENED
    assert limit.segment_bytes == 0
    assert limit.stuck(stuck(15, way=Way.IN), 20)
    assert limit.suspects(20) is Proof.OPENED
    assert limit.segment_bytes == 1200
    return limit


def test_segments_get_smaller_and_stay_so() -> None:
    limit = narrowed()
    assert not limit.carried(replace(PASSED, arrived_bytes=1 << 20), 19), "it was opened before"
    assert not limit.carried(PASSED, 21), "this has passed in the other direction"
    assert limit.carried(replace(PASSED, arrived_bytes=1 << 20), 21)
    assert limit.suspects(21) is None
    assert not limit.carried(replace(PASSED, arrived_bytes=1 << 21), 21), "it is known"
    assert limit.segment_bytes == 1200


def test_lanes_that_are_stuck_at_the_same_time_count_once() -> None:
    limit = SegmentLimit(MEMORY_NS)
    assert not any(limit.stuck(stuck(5), 10) for _ in range(16))
    assert not limit.stuck(stuck(9), 19)
    assert limit.segment_bytes == 0


def test_what_may_be_an_outage_counts_once_and_never_last() -> None:
    limit, outage = SegmentLimit(MEMORY_NS), replace(stuck(5), proof=Proof.NONE)
    assert not limit.stuck(outage, 10)
    assert limit.suspects(10) is Proof.STUCK, "it may be an outage, which may come again"
    assert not limit.stuck(replace(outage, asked_ns=15), 20)
    assert not limit.stuck(replace(outage, asked_ns=25), 30)
    assert limit.segment_bytes == 0
    assert limit.stuck(stuck(35), 40)
    assert limit.segment_bytes == 1200
    assert not limit.stuck(replace(stuck(45, 1188), proof=Proof.NONE), 50)
    assert limit.segment_bytes == 1200
    assert limit.stuck(stuck(55, 1188), 60)


def test_one_that_was_stuck_long_ago_does_not_count() -> None:
    limit = SegmentLimit(MEMORY_NS)
    assert not limit.stuck(stuck(5), 10)
    assert not limit.stuck(stuck(105), 111)
    assert limit.stuck(stuck(205), 211)


def test_a_large_packet_that_passes_ends_the_suspicion() -> None:
    limit = SegmentLimit(MEMORY_NS)
    assert not limit.stuck(stuck(5), 10)
    assert not limit.carried(replace(PASSED, acked_bytes=8000), 11)
    assert limit.suspects(11) is Proof.OPENED
    assert not limit.carried(replace(PASSED, segment_bytes=FULL), 11)
    assert limit.suspects(11) is None
    assert not limit.stuck(stuck(15), 20)


def test_the_smallest_segments_come_at_once_and_are_the_last() -> None:
    limit = narrowed()
    assert not limit.stuck(stuck(25), 30), "a lane from before the decision"
    assert limit.stuck(stuck(35, 1188), 40)
    assert limit.segment_bytes == 536
    assert not limit.stuck(stuck(45, 524), 50)
    assert limit.carried(replace(PASSED, segment_bytes=524), 51)
    assert limit.segment_bytes == 536


def test_a_large_segment_that_passes_proves_the_decision_wrong() -> None:
    limit = narrowed()
    wide = replace(PASSED, segment_bytes=FULL, arrived_bytes=1 << 20)
    assert not limit.carried(wide, 21)
    assert (limit.segment_bytes, limit.suspects(21)) == (0, None)


def test_a_suspicion_ends_with_time() -> None:
    limit = SegmentLimit(MEMORY_NS)
    assert not limit.stuck(stuck(5), 10)
    assert limit.suspects(10 + MEMORY_NS) is Proof.OPENED
    assert limit.suspects(11 + MEMORY_NS) is None


def test_segments_that_have_passed_get_smaller_only_after_two_lanes_in_a_row() -> None:
    limit = narrowed()
    assert limit.carried(replace(PASSED, arrived_bytes=1 << 20), 21)
    assert not limit.stuck(stuck(1000, 1188), 1010)
    assert limit.segment_bytes == 1200
    assert limit.stuck(stuck(1020, 1188), 1030)
    assert limit.segment_bytes == 536


def test_a_limit_that_does_not_help_ends() -> None:
    limit = narrowed()
    assert limit.stuck(stuck(35, 1188), 40)
    assert not limit.stuck(stuck(45, 524), 50)
    assert limit.segment_bytes == 536
    assert not limit.stuck(stuck(55, 524), 60)
    assert (limit.segment_bytes, limit.suspects(60)) == (0, None)
    assert not limit.stuck(stuck(65), 70), "it begins anew"
    assert limit.stuck(stuck(75), 80)
    assert limit.segment_bytes == 1200
