"""Whatever the links are said to be, the table is one that a master may make, and the best."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.limits import BYTES_PER_S_MAX, RTT_NS_MAX
from pccl.protocol.types import STAR_BYTES_MAX, Algorithm, LinkMeasure, PeerId
from pccl.topology.cost_model import (
    GAIN_MIN,
    SIZES,
    AssumedLinks,
    choose_algorithms,
    mesh_cost,
    ring_cost,
    star_cost,
)
from pccl.topology.ring_order import Pair

ALL = (Algorithm.RING, Algorithm.STAR, Algorithm.MESH)

MEASURES = st.builds(
    LinkMeasure,
    st.sampled_from([0, 1, RTT_NS_MAX]) | st.integers(1_000, 500_000_000),
    st.sampled_from([0, 1, BYTES_PER_S_MAX]) | st.integers(10**5, 10**10),
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[PeerId], dict[tuple[PeerId, PeerId], LinkMeasure]]:
    ring = [PeerId(peer) for peer in draw(st.permutations(range(1, draw(st.integers(2, 9)) + 1)))]
    pairs = [(one, other) for one in ring for other in ring if one != other]
    known = draw(st.lists(st.sampled_from(pairs), unique=True))
    return ring, {pair: draw(MEASURES) for pair in known}


@settings(max_examples=200, deadline=None)
@given(runs())
def test_the_table_is_sound_and_names_the_quickest(
    run: tuple[list[PeerId], dict[tuple[PeerId, PeerId], LinkMeasure]],
) -> None:
    ring, matrix = run
    table = choose_algorithms(ring, matrix, (), ALL)
    assert table.is_sound
    links = AssumedLinks(matrix)
    for size in SIZES:
        times = {
            Algorithm.RING: GAIN_MIN * ring_cost(ring, links).time_s(size),
            Algorithm.MESH: mesh_cost(ring, links).time_s(size),
        }
        if size <= STAR_BYTES_MAX:
            times[Algorithm.STAR] = star_cost(ring, links).time_s(size)
        assert times[table.algorithm_for(size)] == min(times.values())


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


@settings(max_examples=100, deadline=None)
@given(runs(), st.data())
def test_nobody_has_to_talk_to_whom_he_cannot(
    run: tuple[list[PeerId], dict[tuple[PeerId, PeerId], LinkMeasure]], data: st.DataObject
) -> None:
    ring, matrix = run
    pair = data.draw(st.permutations(ring))[:2]
    table = choose_algorithms(ring, matrix, [Pair(pair)], ALL)
    chosen = {*(step.algorithm for step in table.steps), table.beyond}
    assert Algorithm.MESH not in chosen
    assert ring[0] not in pair or Algorithm.STAR not in chosen
