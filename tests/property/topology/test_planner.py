"""Whatever the links are said to be, the plan is one that a master may make, and the best."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.link_messages import LinkMeasure
from pccl.protocol.types import STAR_BYTES_MAX, Algorithm, AlgorithmTable, PeerId
from pccl.topology.cost_model import AssumedLinks, mesh_cost, ring_cost, star_cost
from pccl.topology.planner import GAIN_MIN, NOISE_GAIN_MIN, SIZES, plan_view
from pccl.topology.ring_order import Pair
from tests.support.drawn_links import runs


@settings(max_examples=200, deadline=None)
@given(runs())
def test_the_table_is_sound_and_names_the_quickest(
    run: tuple[list[PeerId], dict[tuple[PeerId, PeerId], LinkMeasure]],
) -> None:
    ring, matrix = run
    table = plan_view(ring, AssumedLinks(matrix), ())
    assert table.is_sound_for(len(ring))
    links = AssumedLinks(matrix)
    for size in SIZES:
        times = {
            Algorithm.RING: GAIN_MIN * ring_cost(ring, links).time_s(size),
            Algorithm.MESH: mesh_cost(ring, links, table.mesh).time_s(size),
        }
        if size <= STAR_BYTES_MAX:
            times[Algorithm.STAR] = star_cost(ring, links).time_s(size)
        assert times[table.algorithm_for(size)] == min(times.values())


@settings(max_examples=100, deadline=None)
@given(runs(), st.data())
def test_nobody_has_to_talk_to_whom_he_cannot(
    run: tuple[list[PeerId], dict[tuple[PeerId, PeerId], LinkMeasure]], data: st.DataObject
) -> None:
    ring, matrix = run
    pair = data.draw(st.permutations(ring))[:2]
    table = plan_view(ring, AssumedLinks(matrix), [Pair(pair)])
    chosen = {*(step.algorithm for step in table.steps), table.beyond}
    assert Algorithm.MESH not in chosen
    assert ring[0] not in pair or Algorithm.STAR not in chosen


def time_s(
    ring: list[PeerId], links: AssumedLinks, plan: AlgorithmTable, tensor_bytes: int
) -> float:
    match plan.algorithm_for(tensor_bytes):
        case Algorithm.RING:
            cost = ring_cost(ring, links)
        case Algorithm.STAR:
            cost = star_cost(ring, links)
        case _:
            cost = mesh_cost(ring, links, plan.mesh)
    return cost.time_s(tensor_bytes)


@settings(max_examples=200, deadline=None)
@given(runs(), runs())
def test_a_plan_that_stays_is_never_much_slower(
    before: tuple[list[PeerId], dict[tuple[PeerId, PeerId], LinkMeasure]],
    after: tuple[list[PeerId], dict[tuple[PeerId, PeerId], LinkMeasure]],
) -> None:
    ring, links = min(before[0], after[0], key=len), AssumedLinks(after[1])
    present = plan_view(ring, AssumedLinks(before[1]), ())
    best, found = plan_view(ring, links, ()), plan_view(ring, links, (), present)
    assert found in (present, best)
    assert plan_view(ring, links, (), found) is found
    for size in SIZES:
        gain_min = NOISE_GAIN_MIN if found.mesh.shares and found is not best else GAIN_MIN
        assert gain_min * time_s(ring, links, found, size) <= time_s(ring, links, best, size)
