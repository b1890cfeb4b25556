"""The cost model, against times that were worked out by hand."""

from __future__ import annotations

from itertools import permutations

import pytest

from pccl.protocol.link_messages import LinkMeasure
from pccl.protocol.types import PeerId
from pccl.protocol.vocabulary.mesh_plan import MeshPlan
from pccl.topology.cost_model import AssumedLinks, Cost, mesh_cost, ring_cost, speeds_of, star_cost
from tests.support.link_matrices import LAN, MS, US, peers, uniform


def approx(fixed_s: float, per_byte_s: float) -> object:
    return pytest.approx((fixed_s, per_byte_s))


def parts(cost: Cost) -> tuple[float, float]:
    return cost.fixed_s, cost.per_byte_s


# One message costs 25 us at each end, and one for every 512 KiB: 25e-6 / 524288 = 4.7683716e-11.
O_S, O_PER_BYTE_S = 25e-6, 4.76837158203125e-11


def test_a_ring_of_four_on_a_lan() -> None:
    # 6 steps of 50 us and two ends; 6/4 of the tensor at 0.8 ns and two ends a byte.
    cost = ring_cost(peers(4), AssumedLinks(uniform(4, *LAN)))
    assert parts(cost) == approx(6 * 50e-6 + 12 * O_S, 1.5 * (0.8e-9 + 2 * O_PER_BYTE_S))


def test_a_star_of_four_on_a_lan() -> None:
    # In and out; the root takes 3 and sends 3, and a leaf one of each. 3 tensors in, 3 out.
    cost = star_cost(peers(4), AssumedLinks(uniform(4, *LAN)))
    shared = 3 * 0.8e-9 * 1.16  # two further streams
    assert parts(cost) == approx(2 * 50e-6 + 8 * O_S, 2 * shared + 6 * O_PER_BYTE_S)


def test_a_mesh_of_four_on_a_lan() -> None:
    # Twice: 50 us, and three messages each way. Twice 3/4 of the tensor, in three streams.
    cost = mesh_cost(peers(4), AssumedLinks(uniform(4, *LAN)))
    per_byte = 2 * (0.75 * 0.8e-9 * 1.16 + 6 / 4 * O_PER_BYTE_S)
    assert parts(cost) == approx(2 * (50e-6 + 6 * O_S), per_byte)


def test_the_slowest_link_of_the_ring_sets_its_pace() -> None:
    matrix = uniform(4, *LAN)
    slow = LinkMeasure(100 * US, 12_500_000)
    matrix[PeerId(1), PeerId(3)] = matrix[PeerId(3), PeerId(1)] = slow
    lan = ring_cost(peers(4), AssumedLinks(uniform(4, *LAN)))
    assert ring_cost(peers(4), AssumedLinks(matrix)) == lan  # no neighbours
    matrix[PeerId(3), PeerId(4)] = slow
    expected = 1.5 * (80e-9 + 2 * O_PER_BYTE_S)
    assert ring_cost(peers(4), AssumedLinks(matrix)).per_byte_s == pytest.approx(expected)


def test_whatever_goes_around_a_ring_passes_the_longest_way_twice() -> None:
    # One way in ms: 1>2 is 10, 2>3 is 20, 3>1 is 30. Four hops, the worst start: 30 10 20 30.
    matrix = {
        (PeerId(1), PeerId(2)): LinkMeasure(20 * MS, 0),
        (PeerId(2), PeerId(3)): LinkMeasure(40 * MS, 0),
        (PeerId(3), PeerId(1)): LinkMeasure(60 * MS, 0),
    }
    assert ring_cost(peers(3), AssumedLinks(matrix)).fixed_s == pytest.approx(0.09 + 8 * O_S)


def test_what_nobody_has_measured_is_assumed() -> None:
    one, two = peers(2)
    assert AssumedLinks({}).latency_s(one, two) == 0.5e-3
    assert AssumedLinks({}).bytes_per_s(one, two) == 1.25e9
    near = AssumedLinks({(one, two): LinkMeasure(1_999_999, 0)})
    far = AssumedLinks({(two, one): LinkMeasure(2_000_000, 0)})
    assert near.bytes_per_s(one, two) == 1.25e9
    assert far.bytes_per_s(one, two) == 125e6
    assert far.latency_s(one, two) == 1e-3  # measured at the other end
    assert AssumedLinks({(two, one): LinkMeasure(0, 7)}).bytes_per_s(one, two) == 7
    assert AssumedLinks({(two, one): LinkMeasure(0, 7)}).latency_s(one, two) == 0.5e-3


def test_a_mesh_of_unequal_shares_takes_as_long_as_its_slowest_link() -> None:
    # In ns a byte: a link between 1 and 2 carries 1/2 + 1/4 at 80, the others less at 0.8.
    matrix = uniform(3, *LAN)
    slow = LinkMeasure(100 * US, 12_500_000)
    matrix[PeerId(1), PeerId(2)] = slow
    links = AssumedLinks(matrix)
    messages = 8 * O_PER_BYTE_S / 3
    expected = 0.75 * 80e-9 + messages
    assert mesh_cost(peers(3), links, MeshPlan((2, 1, 1))).per_byte_s == pytest.approx(expected)
    # Nothing of 1 and 2 goes over that link: then the port of 3 carries 1 + 1 tensors, in two
    # streams that slow each other down by 8 %.
    expected = 2 * 0.8e-9 * 1.08 + messages
    assert mesh_cost(peers(3), links, MeshPlan((0, 0, 5))).per_byte_s == pytest.approx(expected)


def test_a_mesh_of_sites_takes_as_long_as_its_slowest_link() -> None:
    # Of sites {1, 2} and {3}, whose shares are 1/4, 1/4 and 1/2. 1 and 2 each collect 1/4 for 3.
    one, two, three = peers(3)
    plan, messages = MeshPlan((1, 1, 2), (0, 0, 1)), 8 * O_PER_BYTE_S / 3
    fast = dict.fromkeys(permutations(peers(3), 2), LinkMeasure(100 * US, 10**12))
    wide = {one: 10**13, two: 10**13, three: 10**13}

    def per_byte_s(pair: tuple[PeerId, PeerId]) -> float:
        matrix = {**fast, pair: LinkMeasure(100 * US, 10**7)}
        return mesh_cost(peers(3), AssumedLinks(matrix, wide), plan).per_byte_s - messages

    # Inside: contributions to what the other one owns and collects, and results the other way.
    assert per_byte_s((one, two)) == pytest.approx(1e-7 * (1 / 2 + 1 / 2))
    # Across: to 3 half of the sums for its part, and the results of 1; back, the same.
    assert per_byte_s((one, three)) == pytest.approx(1e-7 * (1 / 4 + 1 / 4))


def test_a_link_inside_a_building_does_not_show_what_a_port_carries() -> None:
    matrix = uniform(4, 80 * MS, 10**7)
    near = LinkMeasure(100 * US, 0)
    matrix[PeerId(1), PeerId(2)] = matrix[PeerId(2), PeerId(1)] = near
    _, ports = speeds_of(peers(4), AssumedLinks(matrix))
    assert ports == pytest.approx([10**7 / 1.16] * 4)
    _, ports = speeds_of(peers(2), AssumedLinks(matrix))
    assert ports == pytest.approx([1.25e9] * 2)


def test_a_measured_port_carries_what_it_has_carried() -> None:
    matrix = uniform(4, *LAN)
    links = AssumedLinks(matrix, {PeerId(1): 3 * 1_250_000_000})
    assert links.port_bytes_per_s(PeerId(1), 1.25e9, 3) == 3.75e9
    assert links.port_bytes_per_s(PeerId(2), 1.25e9, 3) == pytest.approx(1.25e9 / 1.16)
    # A smaller one was not busy.
    links = AssumedLinks(matrix, {PeerId(1): 1000})
    assert links.port_bytes_per_s(PeerId(1), 1.25e9, 3) == pytest.approx(1.25e9 / 1.16)
