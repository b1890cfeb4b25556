"""Ring orders that avoid broken links, against a search of all orders."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.types import PeerId
from pccl.topology.ring_order import Pair, arrange, broken_neighbours, lacking


def peers(*numbers: int) -> list[PeerId]:
    return [PeerId(number) for number in numbers]


def pairs(*numbers: tuple[int, int]) -> set[Pair]:
    return {Pair(peers(*pair)) for pair in numbers}


def works(order: tuple[PeerId, ...], broken: set[Pair]) -> bool:
    ring = [*order, order[0]]
    neighbours = [Pair((a, b)) for a, b in pairwise(ring) if a != b]
    return not broken.intersection(neighbours)


def left_out_at_least(ring: list[PeerId], broken: set[Pair]) -> int:
    for size in range(len(ring)):
        for out in combinations(ring, size):
            kept = [peer for peer in ring if peer not in out]
            if any(works((kept[0], *rest), broken) for rest in permutations(kept[1:])):
                return size
    raise AssertionError("one alone always works")


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_as_few_as_possible_are_left_out(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    ring = peers(*data.draw(st.permutations(range(1, size + 1))))
    possible = [Pair(pair) for pair in combinations(ring, 2)]
    broken = set(data.draw(st.lists(st.sampled_from(possible)))) if possible else set[Pair]()
    order, left_out = arrange(ring, broken)
    assert sorted(order + left_out) == sorted(ring)
    assert works(tuple(order), broken)
    assert len(left_out) == left_out_at_least(ring, broken)


WHO_GOES: list[tuple[list[PeerId], set[Pair], tuple[list[PeerId], list[PeerId]]]] = [
    (peers(1, 2, 3, 4), pairs(), (peers(1, 2, 3, 4), [])),
    (peers(4, 2, 3, 1), pairs((2, 1)), (peers(4, 2, 3, 1), [])),
    (peers(1, 2), pairs((1, 2)), (peers(1), peers(2))),
    (peers(1, 2, 3), pairs((1, 2)), (peers(1, 3), peers(2))),
    (peers(1, 2, 3, 4), pairs((1, 2), (1, 3)), (peers(2, 3, 4), peers(1))),
    (peers(5), pairs(), (peers(5), [])),
]


@pytest.mark.parametrize(("ring", "broken", "expected"), WHO_GOES)
def test_who_is_left_out(
    ring: list[PeerId], broken: set[Pair], expected: tuple[list[PeerId], list[PeerId]]
) -> None:
    assert arrange(ring, broken) == expected


def test_a_silent_one_is_left_out_before_a_younger_one() -> None:
    ring = peers(1, 2, 3)
    assert arrange(ring, pairs((1, 2)), silent=peers(1)) == (peers(2, 3), peers(1))
    assert arrange(ring, pairs((1, 2)), silent=peers(1, 2, 3)) == (peers(1, 3), peers(2))
    more = pairs((1, 2), (2, 3))
    assert arrange(ring, more, silent=peers(1, 3)) == (peers(1, 3), peers(2))


def test_a_large_ring_with_many_broken_links_is_arranged_in_reasonable_time() -> None:
    ring = peers(*range(1, 65))
    broken = {Pair(pair) for pair in combinations(ring, 2) if (sum(pair) * 7919) % 3 == 0}
    order, left_out = arrange(ring, broken)
    assert works(tuple(order), broken)
    assert left_out == []


def test_a_search_that_is_given_up_leaves_those_who_can_all_talk_to_each_other() -> None:
    ring = peers(*range(1, 41))
    broken = {Pair(p) for p in combinations(ring, 2) if (p[0] <= 20) is (p[1] <= 20)}
    broken |= {Pair(p) for p in combinations(ring, 2) if sum(p) % 5}  # hardly anything works
    order, left_out = arrange(ring, broken)
    assert works(tuple(order), broken)
    assert sorted(order + left_out) == ring
    assert len(order) >= 2


def test_the_neighbours_that_cannot_talk() -> None:
    ring, broken = peers(3, 1, 2, 4), pairs((1, 2), (3, 4), (3, 2))
    assert broken_neighbours(ring, broken) == [Pair(peers(4, 3)), Pair(peers(1, 2))]
    assert broken_neighbours(peers(1), broken) == []
    assert broken_neighbours(peers(1, 2), broken) == [Pair(peers(1, 2))]


def test_a_network_in_two_halves_keeps_one_of_them_without_a_long_search() -> None:
    ring = peers(*range(1, 41))
    broken = {Pair(p) for p in combinations(ring, 2) if (p[0] <= 20) is not (p[1] <= 20)}
    order, left_out = arrange(ring, broken)
    assert (len(order), len(left_out)) == (20, 20)
    assert works(tuple(order), broken)


def test_whoever_is_left_out_reads_which_link_it_lacks() -> None:
    """Not another one's: it could do nothing about that."""
    links = pairs((1, 3), (3, 4), (4, 6), (5, 6))
    broken = {pair: f"reset {min(pair)}" for pair in links}
    assert lacking([PeerId(4)], broken) == "peers 3, 4 have no link (reset 3)"
    assert lacking([PeerId(3), PeerId(6)], broken) == (
        "peers 1, 3 have no link (reset 1); peers 4, 6 have no link (reset 4)"
    )
    assert lacking([PeerId(p) for p in (1, 3, 4, 5, 6)], broken).count("have no link") == 3
