"""Costs grow with the bytes, the ways and the slowness of links."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.collectives.layout import SegmentLayout
from pccl.collectives.schedules.direct import DirectSchedule
from pccl.protocol.link_messages import LinkMeasure
from pccl.protocol.types import PeerId
from pccl.topology.cost_model import AssumedLinks, mesh_cost, mesh_s_per_byte, ring_cost, star_cost
from tests.support.drawn_links import runs


@settings(max_examples=200, deadline=None)
@given(runs(), st.integers(1, 1 << 32), st.integers(1, 1 << 32), st.data())
def test_more_bytes_longer_ways_and_slower_links_never_take_less_time(
    run: tuple[list[PeerId], dict[tuple[PeerId, PeerId], LinkMeasure]],
    one: int,
    other: int,
    data: st.DataObject,
) -> None:
    ring, matrix = run
    complete = {
        (a, b): matrix.get((a, b), LinkMeasure(10**6, 10**8)) for a in ring for b in ring if a != b
    }
    complete = {
        pair: LinkMeasure(max(known.rtt_ns, 1), max(known.bytes_per_s, 2))
        for pair, known in complete.items()
    }
    ends = data.draw(st.sampled_from(sorted(complete)))
    known = complete[ends]
    worse = dict(complete)
    worse[ends] = worse[ends[1], ends[0]] = LinkMeasure(
        max(known.rtt_ns, complete[ends[1], ends[0]].rtt_ns) * 2,
        min(known.bytes_per_s, complete[ends[1], ends[0]].bytes_per_s) // 2,
    )
    small, large = sorted((one, other))
    for cost in (ring_cost, mesh_cost, star_cost):
        now, then = cost(ring, AssumedLinks(complete)), cost(ring, AssumedLinks(worse))
        assert now.fixed_s > 0
        assert now.per_byte_s > 0
        assert now.time_s(small) <= now.time_s(large)
        assert now.fixed_s <= then.fixed_s
        if len(ring) == 2 or cost is ring_cost:
            assert now.per_byte_s <= then.per_byte_s


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=3, max_size=6), st.data())
def test_a_mesh_loads_each_link_and_port_with_what_its_ranks_send(
    sites: list[int], data: st.DataObject
) -> None:
    """A unit of a share is 60 segments of one byte; the ranks of a site collect as many each."""
    size = len(sites)
    shares = data.draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
    one, other = sorted(data.draw(st.permutations(range(size)))[:2])
    count = 60 * sum(shares)
    layout = SegmentLayout(count, 1, size, 1, shares=shares)
    routes = DirectSchedule(one, size, layout, sites=sites).outgoing_to
    sent = {target: sum(hop.segment.length for hop in each.hops) for target, each in routes.items()}
    free = [[1e30] * size for _ in range(size)]
    slow = [list(row) for row in free]
    slow[one][other] = 1.0
    found = mesh_s_per_byte(shares, slow, [1e30] * size, sites) * count
    assert found == pytest.approx(sent.get(other, 0))
    ports = [1.0 if rank == one else 1e30 for rank in range(size)]
    found = mesh_s_per_byte(shares, free, ports, sites) * count
    assert found == pytest.approx(sum(sent[rank] for rank in sent if sites[rank] != sites[one]))
