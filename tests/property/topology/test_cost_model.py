"""Costs grow with the bytes, the ways and the slowness of links."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.link_messages import LinkMeasure
from pccl.protocol.types import PeerId
from pccl.topology.cost_model import AssumedLinks, mesh_cost, ring_cost, star_cost
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
