"""The mesh and the star: what the ranks send each other fits together, and no value is missing."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.collectives.layout import SegmentLayout
from pccl.collectives.schedules.direct import COLLECT, CONTRIBUTE, PUBLISH, DirectSchedule

SITES = st.lists(st.integers(0, 4), min_size=2, max_size=10)


def meshes(sites: list[int], count: int, shares: list[int]) -> list[DirectSchedule]:
    size = len(sites)
    layout = SegmentLayout(count, 1, size, 3, shares=shares if any(shares) else ())
    return [DirectSchedule(rank, size, layout, sites=sites) for rank in range(size)]


@settings(max_examples=80)
@given(SITES, st.integers(0, 60), st.data())
def test_each_contribution_reaches_its_owner_once_and_each_result_all_ranks(
    sites: list[int], count: int, data: st.DataObject
) -> None:
    size = len(sites)
    shares = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    ranks = meshes(sites, count, shares)
    sent = {
        (source, target, hop.step, hop.segment.position)
        for source, schedule in enumerate(ranks)
        for target, route in schedule.outgoing_to.items()
        for hop in route.hops
    }
    awaited = {
        (source, target, hop.step, hop.segment.position)
        for target, schedule in enumerate(ranks)
        for source, route in schedule.incoming_from.items()
        for hop in route.hops
    }
    assert sent == awaited
    for owner, schedule in enumerate(ranks):
        for segment in schedule.owned:
            mine = {hop for hop in sent if hop[3] == segment.position}
            gathered = Counter({rank: 1 for rank in range(size) if rank == owner})
            sums = {target: {target} for _, target, step, _ in mine if step == CONTRIBUTE}
            for source, target, step, _ in sorted(mine, key=lambda hop: hop[2]):
                if step == CONTRIBUTE:
                    sums[target].add(source)
                elif step == COLLECT:
                    gathered.update(sums[source])
            gathered.update(sums.get(owner, set()) - {owner})
            assert gathered == Counter(range(size))
            told = Counter(target for _, target, step, _ in mine if step == PUBLISH)
            assert told == Counter(rank for rank in range(size) if rank != owner)
            across = [hop for hop in mine if sites[hop[0]] != sites[hop[1]]]
            assert len(across) == 2 * (len(set(sites)) - 1)


def test_the_ranks_of_a_site_take_turns() -> None:
    ranks = meshes([0, 0, 1, 1, 1], 45, [])
    sent = Counter(
        hop.segment.position % 3 for hop in ranks[2].outgoing_to[0].hops if hop.step == COLLECT
    )
    assert set(sent) == {0}  # rank 2 is the first of its site, and adds up each third segment
    assert [rank for rank in range(5) if 0 in ranks[rank].outgoing_to] == [1, 2, 3, 4]
