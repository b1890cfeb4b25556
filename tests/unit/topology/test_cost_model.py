"""The cost model, against times that were worked out by hand."""

from __future__ import annotations

from itertools import permutations

import pytest

from pccl.protocol.types import (
    STAR_BYTES_MAX,
    Algorithm,
    AlgorithmStep,
    AlgorithmTable,
    LinkMeasure,
    PeerId,
)
from pccl.topology.cost_model import (
    IMPLEMENTED,
    MESH_MEMBERS_MAX,
    AssumedLinks,
    Cost,
    choose_algorithms,
    mesh_cost,
    ring_cost,
    star_cost,
)
from pccl.topology.ring_order import Pair

ALL = (Algorithm.RING, Algorithm.STAR, Algorithm.MESH)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
US, MS = 1_000, 1_000_000

Matrix = dict[tuple[PeerId, PeerId], LinkMeasure]


def peers(count: int) -> list[PeerId]:
    return [PeerId(number) for number in range(1, count + 1)]


def uniform(count: int, rtt_ns: int, bytes_per_s: int) -> Matrix:
    measure = LinkMeasure(rtt_ns, bytes_per_s)
    return dict.fromkeys(permutations(peers(count), 2), measure)


def table(count: int, matrix: Matrix, *broken: tuple[int, int]) -> AlgorithmTable:
    pairs = [Pair((PeerId(one), PeerId(other))) for one, other in broken]
    return choose_algorithms(peers(count), matrix, pairs, ALL)


def approx(fixed_s: float, per_byte_s: float) -> object:
    return pytest.approx((fixed_s, per_byte_s))


def parts(cost: Cost) -> tuple[float, float]:
    return cost.fixed_s, cost.per_byte_s


LAN = (100 * US, 1_250_000_000)
"""0.1 ms there and back, 10 Gbit/s."""
WAN = (80 * MS, 25_000_000)
"""80 ms there and back, 200 Mbit/s."""

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


def test_four_on_a_lan() -> None:
    # In us and ns a byte: star 300 + 5.854, mesh 400 + 1.535: they meet at 23 KB. Of the ring's
    # 600 + 1.343 count 90 %: 540 + 1.209, which the mesh meets at 429 KB.
    assert table(4, uniform(4, *LAN)) == AlgorithmTable(
        (AlgorithmStep(16 * KIB, Algorithm.STAR), AlgorithmStep(256 * KIB, Algorithm.MESH)),
        Algorithm.RING,
        Algorithm.MESH,
    )


def test_four_on_a_wan() -> None:
    # In ms and ns a byte: star 80.2 + 278.7, mesh 80.3 + 69.74: they meet at 478 bytes, and smaller
    # ones are not told apart. Of the ring's 240.3 + 60.14 count 216.3 + 54.13: 8.7 MB.
    expected = AlgorithmTable(
        (AlgorithmStep(8 * MIB, Algorithm.MESH),), Algorithm.RING, Algorithm.MESH
    )
    assert table(4, uniform(4, *WAN)) == expected


def test_of_two_each_is_the_same_and_the_ring_can_be_repaired() -> None:
    for link in (LAN, WAN):
        assert table(2, uniform(2, *link)) == AlgorithmTable()


def test_one_slow_link_between_neighbours_makes_the_mesh_the_quickest_for_any_size() -> None:
    # The ring sends 2 (N-1) chunks over it, the mesh 2.
    matrix = uniform(8, *LAN)
    assert table(8, matrix).algorithm_for(GIB) is Algorithm.RING
    slow = LinkMeasure(100 * US, 1_250_000)
    matrix[PeerId(2), PeerId(3)] = matrix[PeerId(3), PeerId(2)] = slow
    assert table(8, matrix).algorithm_for(GIB) is Algorithm.MESH


def test_large_groups_have_no_mesh_and_small_tensors_a_star() -> None:
    size = MESH_MEMBERS_MAX + 1
    found = choose_algorithms(peers(size), {}, (), ALL)
    assert found.algorithm_for(4 * KIB) is Algorithm.STAR
    assert Algorithm.MESH not in {step.algorithm for step in found.steps}
    assert found.beyond is Algorithm.RING


def test_who_cannot_talk_is_not_asked_to() -> None:
    wan = uniform(4, *WAN)
    chosen = {step.algorithm for step in table(4, wan, (2, 4)).steps}
    assert chosen == {Algorithm.STAR}
    chosen = {step.algorithm for step in table(4, wan, (1, 3)).steps}
    assert chosen == set()  # 1 is the root
    assert table(4, wan, (1, 3)) == AlgorithmTable()
    assert table(4, wan, (7, 9)) == table(4, wan)  # no members


def test_alone_there_is_nothing_to_choose() -> None:
    assert choose_algorithms(peers(1), {}, (), ALL) == AlgorithmTable()
    assert choose_algorithms([], {}, (), ALL) == AlgorithmTable()


def test_only_what_there_is_is_chosen() -> None:
    wan = uniform(4, *WAN)
    assert choose_algorithms(peers(4), wan, (), (Algorithm.RING,)) == AlgorithmTable()
    both = choose_algorithms(peers(4), wan, (), (Algorithm.RING, Algorithm.MESH))
    assert both.algorithm_for(1) is Algorithm.MESH
    assert set(choose_algorithms(peers(4), wan, ()).steps) == set(
        choose_algorithms(peers(4), wan, (), IMPLEMENTED).steps
    )


def test_no_star_above_its_limit() -> None:
    # 200 ms one way and a terabyte a second: two steps beat four whatever the size.
    matrix = uniform(3, 400 * MS, 10**12)
    found = choose_algorithms(peers(3), matrix, (), (Algorithm.RING, Algorithm.STAR))
    assert found == AlgorithmTable((AlgorithmStep(STAR_BYTES_MAX, Algorithm.STAR),))
