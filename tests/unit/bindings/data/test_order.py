"""The order of samples: each once in an epoch, in another order in each."""

from __future__ import annotations

import numpy as np
import pytest

from pccl.bindings.data.order import FlatOrder, ShardOrder, permuted


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 65_537])
def test_a_permutation_has_each_number_once(size: int) -> None:
    for epoch in range(3):
        found = permuted(np.arange(size), size, seed=7, epoch=epoch)
        assert sorted(found.tolist()) == list(range(size))


def test_numbers_move_far_and_differently_in_each_epoch() -> None:
    size = 10_000
    first, second = (permuted(np.arange(size), size, 7, epoch) for epoch in range(2))
    other_seed = permuted(np.arange(size), size, 8, 0)
    for one, two in ((first, np.arange(size)), (first, second), (first, other_seed)):
        assert (one == two).mean() < 0.01
        assert abs(float(np.corrcoef(one, two)[0, 1])) < 0.05
    assert (np.diff(first) == 1).mean() < 0.01


def test_each_place_gets_each_number_about_as_often() -> None:
    size, epochs = 8, 4000
    seen = np.zeros((size, size))
    for epoch in range(epochs):
        seen[np.arange(size), permuted(np.arange(size), size, 1, epoch)] += 1
    assert seen.min() > 0.8 * epochs / size
    assert seen.max() < 1.2 * epochs / size


def test_a_billion_samples_take_no_memory() -> None:
    order = FlatOrder(10**9, seed=3)
    found = order.at(np.arange(10**9 - 500, 10**9 + 500))
    assert len(set(found[:500])) == len(set(found[500:])) == 500
    assert all(0 <= one < 10**9 for one in found)


def test_without_a_seed_the_order_is_ascending() -> None:
    assert FlatOrder(3, None).at(np.arange(2, 7)) == [2, 0, 1, 2, 0]
    assert ShardOrder([2, 0, 1], None).at(np.arange(5)) == [(0, 0), (0, 1), (2, 0), (0, 0), (0, 1)]


def test_shards_are_shuffled_and_read_in_sequence() -> None:
    lengths = [3, 1, 0, 5, 2]
    order = ShardOrder(lengths, seed=1)
    assert order.size == 11
    every = [(shard, one) for shard, length in enumerate(lengths) for one in range(length)]
    shards: set[tuple[int, ...]] = set()
    for epoch in range(20):
        found = order.at(np.arange(11) + 11 * epoch)
        assert sorted(found) == every
        shards.add(tuple(dict.fromkeys(shard for shard, _ in found)))
        for shard, _ in found:
            assert [one for other, one in found if other == shard] == list(range(lengths[shard]))
    assert len(shards) > 5
