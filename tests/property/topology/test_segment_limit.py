"""Whatever lanes do, segments get smaller for a reason only, and large packets are given up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pccl.topology.segment_limit import (
    LARGE_BYTES,
    SEGMENTS_BYTES,
    SMALL_BYTES,
    STILL_BYTES,
    LaneFacts,
    Proof,
    SegmentLimit,
    StuckLane,
    Way,
    stuck_way,
)

FULL, MEMORY_NS = 1448, 40

SIZES = st.sampled_from([0, 300, SMALL_BYTES, SMALL_BYTES + 1, LARGE_BYTES, 1 << 40])
FACTS = st.builds(
    LaneFacts,
    st.sampled_from([FULL, 1188, 524]), SIZES, SIZES,
    st.integers(0, 3), st.integers(0, 3), st.integers(0, 10**10),
)  # fmt: skip
STEPS = st.lists(
    st.tuples(
        st.integers(0, 30), st.integers(0, 30), FACTS, st.sampled_from(Way), st.booleans(),
        st.sampled_from(Proof),
    )
)  # fmt: skip


@given(STEPS)
def test_segments_get_smaller_for_a_reason_only(
    steps: list[tuple[int, int, LaneFacts, Way, bool, Proof]],
) -> None:
    limit, now_ns, struck = SegmentLimit(MEMORY_NS), 0, 0
    for pause_ns, age_ns, facts, way, ends, proof in steps:
        now_ns += pause_ns
        before = limit.segment_bytes
        if ends:
            struck += 1
            lane = StuckLane(way, facts.segment_bytes, now_ns - age_ns, proof)
            changed = limit.stuck(lane, now_ns)
            gives_up = (before, limit.segment_bytes) == (SEGMENTS_BYTES[-1], 0)
            assert changed == (limit.segment_bytes != before and not gives_up)
            if changed:
                assert struck >= 2
                assert proof
                assert before == 0 or limit.segment_bytes < before
        elif limit.carried(facts, now_ns - age_ns):
            assert limit.segment_bytes == before
            assert facts.segment_bytes <= before
            assert max(facts.acked_bytes, facts.arrived_bytes) >= LARGE_BYTES
        else:
            assert limit.segment_bytes in (before, 0)
        assert limit.segment_bytes in (0, *SEGMENTS_BYTES)


@given(st.sampled_from([1300, 1000]), st.sampled_from(Way), st.integers(1, 16))
def test_a_black_hole_is_left_after_three_lanes_at_most(longest: int, way: Way, lanes: int) -> None:
    """Each round, some lanes are stuck at the same time, until their segments fit."""
    limit, now_ns, rounds = SegmentLimit(MEMORY_NS), 0, 0
    while (segment := limit.segment_bytes or FULL) + 52 > longest:
        now_ns += 10
        for _ in range(lanes):
            limit.stuck(StuckLane(way, segment - 12, now_ns - 5), now_ns)
        rounds += 1
        assert rounds <= 3
    assert limit.segment_bytes == (1200 if longest == 1300 else 536)
    passed = LaneFacts(limit.segment_bytes - 12, LARGE_BYTES, LARGE_BYTES, 0, 0, 0)
    assert limit.carried(passed, now_ns + 1)


@given(FACTS, FACTS)
def test_what_is_acknowledged_or_arrives_is_not_stuck(before: LaneFacts, now: LaneFacts) -> None:
    way = stuck_way(before, now)
    if way is Way.OUT:
        assert now.unacknowledged
        assert now.retransmits
        assert now.acked_bytes - before.acked_bytes <= STILL_BYTES
    if way is Way.IN:
        assert not now.unacknowledged
        assert now.arrived_bytes - before.arrived_bytes <= STILL_BYTES
