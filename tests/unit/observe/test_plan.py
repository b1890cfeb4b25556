"""The plan of a group as ``pccl plan`` explains it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pccl.inquiry import to_json
from pccl.observe import plan as plans
from pccl.protocol.link_messages import LinkMeasure
from pccl.protocol.types import Algorithm, AlgorithmStep, AlgorithmTable, PeerId
from pccl.protocol.vocabulary.mesh_plan import SHARE_UNITS, MeshPlan
from tests.support.statuses import SAMPLE, ended

MB = 1_000_000
MESH = AlgorithmTable(
    (AlgorithmStep(1 << 16, Algorithm.STAR),),
    Algorithm.MESH,
    Algorithm.MESH,
    MeshPlan((SHARE_UNITS // 2, SHARE_UNITS // 2, 0)),
)


def three(slow: int = 25 * MB) -> dict[str, Any]:
    """Three members; the link between 1 and 2 has another speed than the other two."""
    speeds = {(1, 2): slow, (1, 3): 25 * MB, (2, 3): 25 * MB}
    return {
        "members": [{"peer": peer, "uplink_bytes_per_s": 10**9} for peer in (1, 2, 3)],
        "links": [
            {"peer": one, "other": other, "rtt_us": 80_000, "bytes_per_s": speed}
            for (one, other), speed in speeds.items()
        ],
    }


def test_a_status_has_what_a_plan_depends_on() -> None:
    known = plans.of_status(SAMPLE, 0)
    assert known is not None
    assert known.ring == (1, 3, 2, 4)  # by rank
    assert known.names[PeerId(3)] == "carol"
    assert known.links.measured[PeerId(2), PeerId(1)] == LinkMeasure(1_800_000, 12_400_000)
    assert known.is_complete
    assert plans.of_status(SAMPLE, 1) is None
    unplanned = replace(SAMPLE.groups[0], plan=None)
    assert plans.of_status(replace(SAMPLE, groups=(unplanned,)), 0) is None
    cut = plans.of_status(replace(SAMPLE, link_count=5), 0)
    assert cut is not None
    assert not cut.is_complete


def test_of_a_group_that_is_shown_in_part_the_shares_are_unknown() -> None:
    group = replace(SAMPLE.groups[0], plan=replace(MESH, mesh=MeshPlan((SHARE_UNITS // 4,) * 4)))
    known = plans.of_status(replace(SAMPLE, groups=(group,), members=SAMPLE.members[:3]), 0)
    assert known is not None
    assert not known.is_complete
    assert [one.chosen for one in plans.predictions(known, known.plan, [1 << 20])] == [
        Algorithm.MESH
    ]
    assert len(plans.shares(known, known.plan)) == len(known.ring)


def test_the_json_of_a_status_gives_the_same_links() -> None:
    known, read = (
        plans.of_status(SAMPLE, 0),
        plans.of_json(json.loads(json.dumps(to_json(SAMPLE))), 0),
    )
    assert known is not None
    assert (read.ring, read.names, read.links) == (known.ring, known.names, known.links)


def test_times_follow_the_shares() -> None:
    known = replace(plans.of_json(three(5 * MB), 0), plan=MESH)
    small, large = plans.predictions(known, known.plan, [1000, 100 * MB])
    assert (small.chosen, large.chosen) == (Algorithm.STAR, Algorithm.MESH)
    # All of it goes over the slow link; with equal shares two thirds.
    assert large.times_s[Algorithm.MESH] == pytest.approx(20, rel=0.02)
    assert large.equal_mesh_s == pytest.approx(13.3, rel=0.02)
    assert large.times_s[Algorithm.RING] == pytest.approx(4 / 3 * 20, rel=0.02)
    assert (large.measured_s, large.measured_count) == (None, 0)
    assert plans.shares(known, known.plan) == {1: 0.5, 2: 0.5, 3: 0}
    best = plans.renewed(known)
    (faster,) = plans.predictions(known, best, [100 * MB])
    assert faster.times_s[Algorithm.MESH] == pytest.approx(100 / 27.5, rel=0.04)


def test_calls_of_the_same_size_are_the_measured_times() -> None:
    known = plans.of_json(three(), 0)
    calls = (
        ended(took_us=3_000_000, late_us=1_000_000, tensor_bytes=100),
        ended(took_us=5_000_000, late_us=1_000_000, tensor_bytes=100),
        ended(took_us=7_000_000, late_us=4_000_000, tensor_bytes=100),
        ended(took_us=9_000_000, late_us=0, tensor_bytes=99),
    )
    (found,) = plans.predictions(replace(known, ended=calls), known.plan, [100])
    assert (found.measured_s, found.measured_count) == (3.0, 3)


def test_equal_shares_are_shown_too() -> None:
    known = plans.of_json(three(), 0)
    assert known.plan.mesh.shares == ()
    assert plans.shares(known, known.plan) == pytest.approx({1: 1 / 3, 2: 1 / 3, 3: 1 / 3})


REFUSED: list[tuple[Any, str]] = [
    ([], 'there must be a list "members"'),
    ({"members": 1}, 'there must be a list "members"'),
    ({"members": [1]}, r"members\[0\] must be an object"),
    ({"members": [{}, {}], "links": []}, '"peer" of a member must be a whole number'),
    ({"members": [{"peer": 1}], "links": []}, "at least 2 members"),
    ({"members": [{"peer": 1}, {"peer": 1}], "links": []}, "each of them once"),
    ({"members": [{"peer": 1}, {"peer": 2}]}, 'there must be a list "links"'),
    ({"members": [{"peer": 1, "name": "\x1b[31m"}, {"peer": 2}], "links": []}, "name of peer 1"),
    ({**three(), "links": [{"peer": 1}]}, '"other" of link 0 must be a whole number'),
    ({**three(), "links": [{"peer": True, "other": 2}]}, '"peer" of link 0'),
    ({**three(), "links": [{"peer": 1, "other": 2, "bytes_per_s": -1}]}, "at least 0"),
]


@pytest.mark.parametrize(("data", "reason"), REFUSED)
def test_other_json_is_refused_in_words(data: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plans.of_json(data, 0)
