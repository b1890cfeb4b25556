"""The order of samples: which sample has which position in the stream. Pure, without memory.

Each epoch has a permutation of its own. A permutation of n samples is a Feistel network over the
numbers below a power of four, of which those from n on are walked over (cycle walking: Black and
Rogaway, 2002). So it needs no list of samples, and every peer can compute any part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 6
_WORD = (1 << 64) - 1


class SampleOrder(Protocol):
    """Names the samples at positions of the stream."""

    size: int
    """Number of samples in an epoch."""

    def at(self, positions: Numbers) -> list[int] | list[tuple[int, int]]:
        """Return the sample at each position."""
        ...


class FlatOrder:
    """The order of samples that have numbers.

    Args:
        size: number of samples in an epoch.
        seed: determines the order; None: ascending.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self.size = size
        self._seed = seed

    def at(self, positions: Numbers) -> list[int]:
        """Return the number of the sample at each position."""
        epochs, found = np.divmod(positions, self.size)
        if self._seed is not None:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                found[here] = permuted(found[here], self.size, self._seed, int(epoch))
        numbers: list[int] = found.tolist()
        return numbers


class ShardOrder:
    """The order of samples in shards: shards in any order, samples of a shard in sequence.

    Args:
        lengths: number of samples in each shard.
        seed: determines the order of the shards; None: ascending.
    """

    def __init__(self, lengths: Sequence[int], seed: int | None) -> None:
        self._lengths = np.array(lengths, np.int64)
        self._seed = seed
        self.size = int(self._lengths.sum())
        self._starts = lru_cache(2)(self._starts_in)

    def at(self, positions: Numbers) -> list[tuple[int, int]]:
        """Return the shard at each position, and the number of the sample in it."""
        found: list[tuple[int, int]] = []
        numbers: list[int] = positions.tolist()
        for number in numbers:
            epoch, place = divmod(number, self.size)
            shards, starts = self._starts(epoch)
            turn = int(np.searchsorted(starts, place, "right")) - 1
            found.append((int(shards[turn]), place - int(starts[turn])))
        return found

    def _starts_in(self, epoch: int) -> tuple[Numbers, Numbers]:
        """Return the shards of an epoch in order, and the place of the first sample of each."""
        count = len(self._lengths)
        shards: Numbers = np.arange(count)
        if self._seed is not None:
            shards = permuted(shards, count, self._seed, epoch)
        ends: Numbers = np.cumsum(self._lengths[shards])
        return shards, ends - self._lengths[shards]


def permuted(numbers: Numbers, size: int, seed: int, epoch: int) -> Numbers:
    """Return where a permutation of the numbers below ``size`` moves some of them."""
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.uint64(_mixed(_mixed(_mixed(seed) + epoch) + turn)) for turn in range(_ROUNDS)]

    def moved(words: _Words) -> _Words:
        left, right = words >> half, words & mask
        for key in keys:
            left, right = right, left ^ (_mixed_words(right ^ key) & mask)
        return (left << half) | right

    found = moved(numbers.astype(np.uint64))
    while (outside := found >= np.uint64(size)).any():
        found[outside] = moved(found[outside])
    return found.astype(np.int64)


def _mixed(word: int) -> int:
    """Return a word whose bits all depend on all bits of ``word`` (SplitMix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


def _mixed_words(words: _Words) -> _Words:
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
