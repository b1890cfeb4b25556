"""The batches of one peer, with a ledger that the test changes as a wrapper does."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakMethod

import pytest

from pccl.bindings.data import ElasticSampler
from pccl.bindings.data.reader import lease_of
from pccl.bindings.data.sample_ledger import SampleLedger

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

ME = 4


class Wrapper:
    """A wrapper that averages the work of one peer alone.

    Attributes:
        trained: samples in the steps so far.
        idled: rounds without work.
    """

    def __init__(self, sampler: ElasticSampler, *, others: int = 0) -> None:
        self.sampler = sampler
        made = sampler.attach(WeakMethod(self.join), WeakMethod(self.idle))
        self.ledger: SampleLedger = made[0]
        self.name = made[1]
        self.idled = 0
        self._others = range(100, 100 + others)

    def join(self) -> None:
        self.ledger.admit([ME, *self._others])
        self.sampler.reader.entered(lease_of(self.ledger, ME), None)

    def idle(self) -> None:
        self.idled += 1
        self.round(0)

    def round(self, count: int) -> None:
        """Average so many samples of this peer, and all that other peers have."""
        others = {
            peer: sum(end - start for start, end in self.ledger.lease(peer))
            for peer in self._others
        }
        self.ledger.close({ME: count, **others})
        self.sampler.reader.averaged(count, lease_of(self.ledger, ME))


class Squares(Dataset[int]):
    """Samples, which workers load."""

    def __getitem__(self, index: int) -> int:
        return index**2

    def __len__(self) -> int:
        return 50


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_each_sample_comes_once_in_an_epoch(workers: int | None) -> None:
    sampler = ElasticSampler(50, 4, epochs=2, lease=7)
    wrapper = Wrapper(sampler)
    loader: Any = None
    if workers is not None:
        loader = DataLoader(
            Squares(), batch_sampler=sampler, num_workers=workers, persistent_workers=bool(workers)
        )
    seen: list[int] = []
    for batch in sampler.batches(loader):
        seen += batch if workers is None else batch.sqrt().int().tolist()
        wrapper.round(sampler.reader.stepped())
        assert sampler.done == len(seen)
    assert sorted(seen[:50]) == sorted(seen[50:]) == list(range(50))
    assert seen[:50] != seen[50:]
    assert sampler.finished
    assert sampler.epoch == 2


def test_several_batches_may_be_in_a_round() -> None:
    sampler = ElasticSampler(1000, 4, lease=40)
    wrapper = Wrapper(sampler)
    batches = sampler.batches()
    for number in range(1, 60):
        next(batches)
        if number % 3 == 0:
            count = sampler.reader.stepped()
            assert count == 12
            wrapper.round(count)
    assert wrapper.ledger.done == 19 * 12
    assert not wrapper.idled


def test_without_samples_a_peer_takes_part_in_rounds_until_all_are_done() -> None:
    sampler = ElasticSampler(30, 10, epochs=1, lease=10)
    wrapper = Wrapper(sampler, others=1)
    count = 0
    for batch in sampler.batches():
        count += len(batch)
        wrapper.round(sampler.reader.stepped())
    assert sampler.finished
    assert 0 < count < 30
    assert wrapper.ledger.done == 30


def test_the_last_batch_may_be_small() -> None:
    sampler = ElasticSampler(10, 4, epochs=1, shuffle=False)
    wrapper = Wrapper(sampler)
    sizes: list[int] = []
    for batch in sampler.batches():
        sizes.append(len(batch))
        wrapper.round(sampler.reader.stepped())
    assert sizes == [4, 4, 2]


def test_a_lease_that_is_gone_voids_what_is_being_loaded() -> None:
    sampler = ElasticSampler(50, 4, lease=20)
    wrapper = Wrapper(sampler)
    loader: Any = DataLoader(
        Squares(), batch_sampler=sampler, num_workers=2, persistent_workers=True
    )
    batches = sampler.batches(loader)
    first = [next(batches).tolist() for _ in range(3)]
    wrapper.ledger.close({7: 0})  # this peer was cut off, and all of its lease is another's
    wrapper.ledger.admit([ME])
    lease = lease_of(wrapper.ledger, ME)
    assert not sampler.reader.keeps(8, lease)
    sampler.reader.entered(lease, None)
    assert sampler.reader.stepped() == 0
    again = next(batches).tolist()
    assert again not in first
    assert sampler.reader.stepped() == 4
    wrapper.ledger.close({ME: 4, 7: 12})
    assert wrapper.ledger.done == 16


def test_work_stays_with_the_lease() -> None:
    """Of a batch that is not in a step yet, too."""
    sampler = ElasticSampler(50, 4, lease=20)
    wrapper = Wrapper(sampler)
    batches = sampler.batches()
    next(batches)
    assert sampler.reader.stepped() == 4
    second = next(batches)
    lease = lease_of(wrapper.ledger, ME)
    assert sampler.reader.keeps(4, lease)
    sampler.reader.entered(lease, 4)
    assert sampler.reader.stepped() == 4
    assert not set(next(batches)) & set(second)
    saved = sampler.reader.state_dict()
    other = ElasticSampler(50, 4, lease=20)
    other.reader.load_state_dict(saved)
    assert other.reader.keeps(8, lease)  # the third batch is in no step
    assert not other.reader.keeps(8, lease_of(wrapper.ledger, ME + 1))
    assert not other.reader.keeps(12, lease)


def test_settings_are_told() -> None:
    names = {
        Wrapper(sampler).name
        for sampler in (
            ElasticSampler(50, 4),
            ElasticSampler(50, 4, epochs=2),
            ElasticSampler(50, 4, seed=1),
            ElasticSampler(50, 4, shuffle=False),
            ElasticSampler(50, 8),
            ElasticSampler([20, 30], 4),
            ElasticSampler([30, 20], 4),
        )
    }
    assert len(names) == 7
    assert Wrapper(ElasticSampler(50, 8, lease=256)).name in names


def test_shards() -> None:
    sampler = ElasticSampler([5, 3], 2, shuffle=False)
    wrapper = Wrapper(sampler)
    batches = sampler.batches()
    assert [next(batches) for _ in range(3)] == [
        [(0, 0), (0, 1)],
        [(0, 2), (0, 3)],
        [(0, 4), (1, 0)],
    ]
    del wrapper


def test_a_sampler_belongs_to_a_wrapper() -> None:
    sampler = ElasticSampler(50, 4)
    with pytest.raises(RuntimeError, match="data="):
        next(sampler.batches())
    wrapper = Wrapper(sampler)
    next(sampler.batches())
    del wrapper
    gc.collect()
    with pytest.raises(RuntimeError, match="data="):
        next(sampler.batches())


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"size": []},
        {"size": [0, 0]},
        {"size": [3, -1]},
        {"batch_size": 0},
        {"epochs": 0},
        {"lease": 0},
        {"seed": -1},
    ],
)
def test_arguments_are_checked(options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"size": 10, "batch_size": 2}
    with pytest.raises(ValueError, match=r"must be"):
        ElasticSampler(**given | options)
