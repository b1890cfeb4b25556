"""Plans of views: tables and shares that were worked out by hand, and when a plan stays."""

from __future__ import annotations

from random import Random
from typing import NoReturn

import pytest

from pccl.protocol.link_messages import LinkMeasure
from pccl.protocol.types import (
    STAR_BYTES_MAX,
    Algorithm,
    AlgorithmStep,
    AlgorithmTable,
    PeerId,
)
from pccl.protocol.vocabulary.mesh_plan import MESH_MEMBERS_MAX, SHARE_UNITS, MeshPlan
from pccl.topology.cost_model import AssumedLinks
from pccl.topology.planner import near_sites, plan_view
from pccl.topology.ring_order import Pair
from tests.support.link_matrices import LAN, MS, US, WAN, Measures, peers, uniform

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def table(
    count: int,
    matrix: Measures,
    *broken: tuple[int, int],
    wide: int = 0,
    present: AlgorithmTable | None = None,
) -> AlgorithmTable:
    """The plan of the first ``count`` peers; the uplinks of the first ``wide`` are no limit."""
    pairs = [Pair((PeerId(one), PeerId(other))) for one, other in broken]
    links = AssumedLinks(matrix, dict.fromkeys(peers(wide), 10**12))
    return plan_view(peers(count), links, pairs, present)


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
    found = plan_view(peers(size), AssumedLinks({}), ())
    assert found.algorithm_for(4 * KIB) is Algorithm.STAR
    assert Algorithm.MESH not in {step.algorithm for step in found.steps}
    assert found.beyond is Algorithm.RING


def test_the_work_for_a_group_without_mesh_grows_with_its_size_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("2800 members have 3.9 million pairs")

    monkeypatch.setattr("pccl.topology.planner.combinations", refuse)
    assert table(2800, {}).beyond is Algorithm.RING


def test_who_cannot_talk_is_not_asked_to() -> None:
    wan = uniform(4, *WAN)
    chosen = {step.algorithm for step in table(4, wan, (2, 4)).steps}
    assert chosen == {Algorithm.STAR}
    chosen = {step.algorithm for step in table(4, wan, (1, 3)).steps}
    assert chosen == set()  # 1 is the root
    assert table(4, wan, (1, 3)) == AlgorithmTable()
    assert table(4, wan, (7, 9)) == table(4, wan)  # no members


def test_alone_there_is_nothing_to_choose() -> None:
    assert plan_view(peers(1), AssumedLinks({}), ()) == AlgorithmTable()
    assert plan_view([], AssumedLinks({}), ()) == AlgorithmTable()


def test_no_star_above_its_limit() -> None:
    # 200 ms one way and a terabyte a second: two steps beat four whatever the size.
    matrix = uniform(3, 400 * MS, 10**12)
    found = table(3, matrix, (2, 3))
    assert found == AlgorithmTable((AlgorithmStep(STAR_BYTES_MAX, Algorithm.STAR),))


# -- shares ------------------------------------------------------------------------------------


def with_speeds(matrix: Measures, speeds: dict[tuple[int, int], int]) -> Measures:
    """The same links, with other speeds in both directions."""
    changed = dict(matrix)
    for (one, other), speed in speeds.items():
        for pair in ((PeerId(one), PeerId(other)), (PeerId(other), PeerId(one))):
            changed[pair] = LinkMeasure(matrix[pair].rtt_ns, speed)
    return changed


def parts(shares: tuple[int, ...]) -> object:
    return pytest.approx([share / SHARE_UNITS for share in shares], abs=0.02)


HOME = with_speeds(uniform(4, *WAN), {(1, 4): 2_500_000, (2, 4): 2_500_000, (3, 4): 2_500_000})
"""The links of member 4 have a tenth of the speed of all others."""


def test_who_has_slow_links_owns_nothing() -> None:
    # Its port is the limit: it sends its contribution to the others, and no result.
    found = table(4, HOME)
    assert sum(found.mesh.shares) == SHARE_UNITS
    assert parts(found.mesh.shares) == [1 / 3, 1 / 3, 1 / 3, 0]
    assert found.algorithm_for(GIB) is Algorithm.MESH
    assert found.quantized is Algorithm.MESH


def test_shares_follow_the_pairs() -> None:
    # u1 + u2 = 5, u1 + u3 = u2 + u3 = 25 gives u = 2.5, 2.5, 22.5.
    matrix = with_speeds(uniform(3, *WAN), {(1, 2): 5_000_000})
    first, second, third = (share / SHARE_UNITS for share in table(3, matrix, wide=3).mesh.shares)
    assert third == pytest.approx(9 / 11, abs=0.02)
    assert first + second == pytest.approx(2 / 11, abs=0.02)


def test_equal_links_get_equal_shares() -> None:
    assert table(4, uniform(4, *WAN)).mesh.shares == ()
    assert table(4, with_speeds(uniform(4, *WAN), {(1, 4): 23_000_000})).mesh.shares == ()


def test_shares_need_a_mesh_and_measures() -> None:
    assert table(4, HOME, (1, 2)).mesh.shares == ()
    assert table(2, with_speeds(uniform(2, *WAN), {(1, 2): 1000})).mesh.shares == ()
    unknown = HOME | dict.fromkeys(
        [(PeerId(1), PeerId(2)), (PeerId(2), PeerId(1))], LinkMeasure(80 * MS, 0)
    )
    assert table(4, unknown).mesh.shares == ()
    unknown[PeerId(2), PeerId(1)] = LinkMeasure(80 * MS, 25_000_000)  # one direction is enough
    assert table(4, unknown).mesh.shares == table(4, HOME).mesh.shares
    large = MESH_MEMBERS_MAX + 1
    assert table(large, with_speeds(uniform(large, *WAN), {(1, 2): 1000})).mesh.shares == ()


def test_a_pair_on_one_machine_needs_no_measured_speed() -> None:
    near = HOME | dict.fromkeys(
        [(PeerId(1), PeerId(2)), (PeerId(2), PeerId(1))], LinkMeasure(100 * US, 0)
    )
    assert parts(table(4, near).mesh.shares) == [1 / 3, 1 / 3, 1 / 3, 0]


class Unread(dict[tuple[PeerId, PeerId], LinkMeasure]):
    """The links of a whole run, which a group must not go through for its own plan."""

    def items(self) -> NoReturn:
        raise AssertionError("a plan of one group must not take the time of all groups")


def test_a_plan_reads_the_links_of_its_group_only() -> None:
    assert table(4, Unread(HOME)).mesh.shares == table(4, HOME).mesh.shares


def test_a_newcomer_counts_as_slow_until_it_is_measured() -> None:
    slow = {(1, 2): 5_000_000}
    known = with_speeds(uniform(3, *WAN), slow)
    to_newcomer = {(1, 4): 5_000_000, (2, 4): 5_000_000, (3, 4): 5_000_000}
    four = with_speeds(uniform(4, *WAN), {**slow, **to_newcomer})
    assert table(4, known, wide=3).mesh.shares == table(4, four, wide=3).mesh.shares
    assert table(6, known, wide=3).mesh.shares == ()  # too few are known


def test_a_plan_stays_until_another_one_is_much_better() -> None:
    alike = uniform(3, *WAN)
    slow = with_speeds(alike, {(1, 2): 5_000_000})
    present = table(3, slow, wide=3)
    noisy = with_speeds(slow, {(1, 2): 5_300_000, (1, 3): 24_000_000})
    assert table(3, noisy, wide=3).mesh.shares not in ((), present.mesh.shares)
    assert table(3, noisy, wide=3, present=present) is present
    recovered = table(3, alike, wide=3, present=present)
    assert recovered.mesh.shares == ()
    assert table(3, slow, wide=3, present=recovered) == present


@pytest.mark.parametrize("seed", range(4))
def test_noise_of_a_tenth_does_not_change_a_plan(seed: int) -> None:
    """A plan every 20 seconds of an hour."""
    draw = Random(seed)
    pairs = [(one, other) for other in range(2, 8) for one in range(1, other)]
    true = {pair: draw.randrange(2_000_000, 40_000_000) for pair in pairs}
    present = table(7, with_speeds(uniform(7, *WAN), true), wide=7)
    assert present.mesh.shares
    for _ in range(180):
        noisy = {pair: int(speed * draw.uniform(0.9, 1.1)) for pair, speed in true.items()}
        found = table(7, with_speeds(uniform(7, *WAN), noisy), wide=7, present=present)
        assert found is present


def test_a_plan_does_not_outlive_its_links() -> None:
    present = table(4, HOME)
    assert table(4, HOME, (1, 2), present=present).mesh.shares == ()
    star = AlgorithmTable((AlgorithmStep(GIB, Algorithm.STAR),))
    assert plan_view(peers(1), AssumedLinks({}), (), star) == AlgorithmTable()


# -- sites -------------------------------------------------------------------------------------


def near_groups(*sizes: int) -> Measures:
    """Groups of peers at 0.1 ms, without measured speeds inside; 80 ms and 200 Mbit/s between."""
    site = [number for number, size in enumerate(sizes) for _ in range(size)]
    return {
        (one, other): LinkMeasure(100 * US, 0) if site[one - 1] == site[other - 1] else found
        for (one, other), found in uniform(sum(sizes), *WAN).items()
    }


def test_members_at_one_place_are_a_site() -> None:
    def sites(matrix: Measures, count: int = 5) -> tuple[int, ...]:
        return near_sites(peers(count), AssumedLinks(matrix))

    matrix = near_groups(2, 1, 2)
    assert sites(matrix) == (0, 0, 1, 2, 2)
    assert sites(near_groups(5)) == ()  # of one site nothing is gained
    assert sites(uniform(5, *WAN)) == ()
    assert sites({}) == ()  # nobody is near whose round trip is unknown
    # Who is near to one member only of a site does not belong to it.
    matrix[PeerId(2), PeerId(3)] = LinkMeasure(100 * US, 0)
    assert sites(matrix) == (0, 0, 1, 2, 2)


def test_two_sites_add_up_inside_first() -> None:
    # In ns a byte: a link across carries 1/4 at 40 instead of 1/2; all members have equal shares.
    found = table(4, near_groups(2, 2))
    assert found.mesh == MeshPlan(sites=(0, 0, 1, 1))
    assert {found.algorithm_for(size) for size in (MIB, GIB)} == {Algorithm.MESH}
    assert found.quantized is Algorithm.MESH


def test_a_slow_member_beside_a_site_owns_nothing() -> None:
    matrix = with_speeds(near_groups(2, 1, 1), {(1, 4): 10**6, (2, 4): 10**6, (3, 4): 10**6})
    found = table(4, matrix).mesh
    assert found.sites == (0, 0, 1, 2)
    assert found.shares[3] < 0.02 * SHARE_UNITS


def test_a_slow_network_inside_a_site_is_no_shortcut() -> None:
    # Inside, a link carries both halves of a tensor; across, in a mesh without sites, half of one.
    matrix = with_speeds(near_groups(2, 2), {(1, 2): 10_000_000, (3, 4): 10_000_000})
    assert table(4, matrix).mesh.sites == ()
