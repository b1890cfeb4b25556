"""``ElasticSampler``: gives each peer samples that no other peer has.

The ledger of the run leases positions to this peer; this module turns them into batches. All of it
runs on the training thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakMethod

import numpy as np

from pccl.bindings.arguments import check_count
from pccl.bindings.data.order import FlatOrder, SampleOrder, ShardOrder
from pccl.bindings.data.reader import LeaseReader
from pccl.bindings.data.sample_ledger import SampleLedger
from pccl.checks import check_range, shown

BATCHES_LEASED = 64
"""Batches in a first lease, unless the program or the wrapper says more."""

SIZE_MAX = 1 << 48


class ElasticSampler:
    """Gives each peer samples that no other peer has, and each sample once in an epoch.

        sampler = ElasticSampler(len(dataset), batch_size=32, epochs=3)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4, persistent_workers=True)
        with DiLoCo(model, inner=inner, comm=comm, data=sampler) as opt:
            for batch in sampler.batches(loader):
                loss(model, batch).backward()
                opt.step()
                opt.zero_grad()
            opt.finish()

    A sample is done when the run has averaged the work of a peer with it. The list of samples that
    are done is part of the shared state. So newcomers and checkpoints have it, and it always
    describes the parameters. Samples of a lost peer go to other peers.

    Args:
        size: number of samples; or for each shard its number of samples. With shards, a sample is a
            pair of shard and number. A peer reads the samples of a shard in sequence.
        batch_size: samples in a batch of this peer.
        seed: determines the order, which differs from epoch to epoch.
        shuffle: whether to shuffle samples, or shards.
        epochs: number of epochs; None: no end.
        lease: samples that a peer gets at first; later, three times as many as its last round had.
            None: 64 batches, or, in ``DiLoCo``, those of three rounds if that is more.

    All peers pass the same values, except for ``batch_size`` if ``lease`` is given.

    Attributes:
        reader: the lease of this peer, for the wrapper of the training loop.

    Raises:
        TypeError, ValueError: an argument cannot be used; the message says why.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        lease: int | None = None,
    ) -> None:
        check_count("batch_size", batch_size)
        check_range("seed", seed, 0, SIZE_MAX)
        for name, count in (("epochs", epochs), ("lease", lease)):
            if count is not None:
                check_count(name, count)
        self.reader = LeaseReader(batch_size)
        self._batch_size = batch_size
        self._order, shown_size = _order(size, seed if shuffle else None)
        self._total = None
        if epochs is not None:
            self._total = check_range("size times epochs", epochs * self._order.size, 1, SIZE_MAX)
        self._settings = f"size={shown_size}, seed={seed if shuffle else None}, epochs={epochs}"
        self._lease = lease
        self._join: WeakMethod[Callable[[], object]] | None = None
        self._idle: WeakMethod[Callable[[], object]] | None = None

    @property
    def done(self) -> int:
        """Number of samples that the run has averaged, of all epochs, as of the last round."""
        return self.reader.lease.done

    @property
    def epoch(self) -> float:
        """Epochs that the run has done, with their fraction."""
        return self.done / self._order.size

    @property
    def finished(self) -> bool:
        """Whether all epochs are done; all peers learn that from the same round."""
        return self.reader.lease.is_finished

    def __iter__(self) -> Iterator[list[Any]]:
        """Return the samples of each batch, as long as the lease has more; for a ``DataLoader``."""
        reader, entry = self.reader, self.reader.entry
        reader.restart()
        while entry == reader.entry and len(positions := reader.issue()):
            yield self._order.at(positions)

    def batches(self, loader: Iterable[Any] | None = None) -> Generator[Any, None, None]:
        """Return all batches that this peer is to train with, until all epochs are done.

        Without samples for this peer, ``DiLoCo`` takes part in rounds without work. With
        ``GradientAverager`` the batch is None: take the step without gradients.

        Args:
            loader: a ``DataLoader`` with this object as its ``batch_sampler``; None: the batches
                are lists of samples.

        Raises:
            RuntimeError: no ``DiLoCo`` or ``GradientAverager`` has this sampler as its ``data``; or
                ``GradientAverager.update`` was not called.
        """
        self._call(self._join)
        reader = self.reader
        while not self.finished:
            if reader.is_dry:
                if self._idle is None:
                    yield None
                else:
                    self._call(self._idle)
                continue
            entry = reader.entry
            for batch in self if loader is None else loader:
                if entry != reader.entry:
                    break  # other peers have these samples now
                reader.hand_over()
                yield batch

    @staticmethod
    def _call(method: WeakMethod[Callable[[], object]] | None) -> None:
        found = None if method is None else method()
        if found is None:
            raise RuntimeError("pass this sampler to a DiLoCo or GradientAverager, as data=")
        found()

    def attach(
        self,
        join: WeakMethod[Callable[[], object]],
        idle: WeakMethod[Callable[[], object]] | None = None,
        steps: int = 0,
    ) -> tuple[SampleLedger, str]:
        """Make ``batches`` work with a wrapper of the training loop.

        Args:
            join: makes this peer a member of the run, or raises an error.
            idle: takes part in the next round without work; None: the program does that.
            steps: steps of this peer in three rounds; 0: unknown.

        Returns:
            A new ledger, and a name for it that tells other peers the settings.
        """
        self._join, self._idle = join, idle
        lease = self._lease or max(BATCHES_LEASED, steps) * self._batch_size
        record = np.zeros(SampleLedger.SIZE, np.int64)
        return SampleLedger(record, lease, self._total), f"samples, {self._settings}, lease={lease}"


def check_sampler(data: object) -> None:
    """Check the argument ``data`` of a wrapper.

    Raises:
        TypeError: it is no sampler.
    """
    if not isinstance(data, ElasticSampler):
        raise TypeError(f"data must be an ElasticSampler, not {shown(data)}")


def _order(size: int | Sequence[int], seed: int | None) -> tuple[SampleOrder, str]:
    """Return the order of samples, and the settings that determine it, as text."""
    if isinstance(size, int):
        check_range("size", size, 1, SIZE_MAX)
        return FlatOrder(size, seed), f"{size}"
    lengths = [check_range("the length of a shard", one, 0, SIZE_MAX) for one in size]
    check_range("the sum of the lengths", sum(lengths), 1, SIZE_MAX)
    digest = zlib.crc32(np.array(lengths, "<i8").tobytes())
    return ShardOrder(lengths, seed), f"{sum(lengths)} in {len(lengths)} shards ({digest:08x})"
