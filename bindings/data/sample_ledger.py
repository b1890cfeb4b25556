"""The ``SampleLedger`` records which samples a run has averaged, and which peer reads the rest.

It is part of the shared state, beside the parameters. All members change it in the same way at the
same points, so it always describes the parameters that it comes with.

Samples have positions in one endless stream. Every position is done, leased to a peer, returned, or
after ``next``, where no lease has begun. A *run* is an interval of positions that are leased
together. A peer works through its runs from front to back, so what is left of a run is an interval,
too. A run is never split: the next peer gets all that is left of it. So the number of runs does not
depend on the number of samples.

How many runs there are: a peer gets new positions only while no run is returned, and only while it
holds less than its goal. So each live peer has about three, and each loss returns as many, which
the next leases take first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Interval = tuple[int, int]
"""The first position, and the one after the last."""

RUNS_MAX = 2048
"""Most runs, for 64 KiB. If all are in use, no lease begins until a run is done: peers wait."""

ROUNDS_AHEAD = 3
"""Rounds for which a lease lasts: the one being averaged, the next, and one that is prefetched."""

LEASE_MAX = 1 << 32
"""Most positions that a lease grows to, whatever a peer says that it has done."""

_HEAD = 3
_COLUMNS = 4


@dataclass(slots=True)
class _Run:
    """Positions that are not done: of one peer, or returned (``holder`` is None)."""

    start: int
    end: int
    holder: int | None
    missed: int = 0
    """Rounds since the last one that its holder took part in."""


class SampleLedger:
    """The sample ledger of one replica: a view of an array in the shared state.

    Args:
        record: the array, of shape (``SampleLedger.SIZE``,); all zeros at the beginning of a run.
        lease: positions in a first lease, the same for all peers.
        total: number of positions; None: the stream has no end.
    """

    SIZE = _HEAD + RUNS_MAX * _COLUMNS

    def __init__(self, record: npt.NDArray[np.int64], lease: int, total: int | None = None) -> None:
        self.record = record
        self._lease, self._total = lease, total
        self._rows = record[_HEAD:].reshape(-1, _COLUMNS)

    @property
    def next(self) -> int:
        """The first position that was never leased."""
        return int(self.record[0])

    @property
    def done(self) -> int:
        """Number of positions that are done."""
        return self.next - sum(end - start for start, end in self.rest)

    @property
    def rest(self) -> list[Interval]:
        """The positions before ``next`` that are not done, ascending."""
        return sorted((run.start, run.end) for run in self._read())

    @property
    def unleased(self) -> int | None:
        """Number of positions that no peer holds; None: the stream has no end."""
        return self._unleased(self._read())

    @property
    def is_finished(self) -> bool:
        """Whether all positions are done."""
        return self._total is not None and self.next >= self._total and not self.record[1]

    def lease(self, peer: int) -> list[Interval]:
        """Return what is left of the runs of a peer, in its reading order."""
        return [(run.start, run.end) for run in self._read() if run.holder == peer]

    def admit(self, peers: Iterable[int]) -> None:
        """Give leases to newcomers. A peer that holds a lease keeps it."""
        runs, newcomers = self._read(), set(peers)
        readers = len(newcomers | _holders(runs))
        for peer in sorted(newcomers - _holders(runs)):
            self._lend(runs, peer, max(self._lease, int(self.record[2])), readers)
        self._write(runs)

    def close(self, counts: Mapping[int, float], patience: int = 0) -> None:
        """Record a round: positions are done, leases grow, and those of lost peers are returned.

        Args:
            counts: for each member in the outcome, how many positions its contribution contains:
                the first of its lease. 0 for one that contributed nothing, or was excluded. More
                than it holds is a lie, and counts as all that it holds.
            patience: rounds in a row without a peer after which its lease is returned.
        """
        runs = self._read()
        for run in runs:
            run.missed = 0 if run.holder in counts else run.missed + 1
            if run.missed > patience:
                run.holder = None
        known = {peer: min(int(count), _held(runs, peer)) for peer, count in counts.items()}
        for peer in sorted(known):
            left = known[peer]
            for run in runs:
                if run.holder == peer:
                    taken = min(left, run.end - run.start)
                    run.start, left = run.start + taken, left - taken
        runs = [run for run in runs if run.start < run.end]
        ahead = {peer: min(ROUNDS_AHEAD * count, LEASE_MAX) for peer, count in known.items()}
        self.record[2] = max(ahead.values(), default=0)
        readers = len(ahead.keys() | _holders(runs))
        for peer in sorted(ahead, key=lambda one: (_held(runs, one), one)):
            self._lend(runs, peer, max(self._lease, ahead[peer]), readers)
        self._write(runs)

    def _lend(self, runs: list[_Run], peer: int, goal: int, readers: int) -> None:
        """Lease returned runs to a peer, then new positions, until it holds ``goal`` positions.

        At the end of the stream, it gets its share of the rest.
        """
        held = _held(runs, peer)
        while held < goal:
            returned = [run for run in runs if run.holder is None]
            if not returned:
                break
            run = min(returned, key=lambda one: one.start)
            runs.remove(run)  # runs stand in the order in which they were leased
            runs.append(_Run(run.start, run.end, peer))
            held += run.end - run.start
        unleased = self._unleased(runs)
        size = goal if unleased is None else min(goal, -(-unleased // readers))
        if held < goal and size:
            last = next((run for run in reversed(runs) if run.holder == peer), None)
            if last is not None and last.end == self.next:
                last.end += size
            elif len(runs) < len(self._rows):
                runs.append(_Run(self.next, self.next + size, peer))
            else:
                return
            self.record[0] += size

    def _unleased(self, runs: list[_Run]) -> int | None:
        if self._total is None:
            return None
        return self._total - self.next + _held(runs, None)

    def _read(self) -> list[_Run]:
        rows: list[list[int]] = self._rows[: int(self.record[1])].tolist()
        return [
            _Run(start, end, peer - 1 if peer else None, missed)
            for start, end, peer, missed in rows
        ]

    def _write(self, runs: list[_Run]) -> None:
        used = len(runs)
        self._rows[used : int(self.record[1])] = 0
        self.record[1] = used
        for row, run in zip(self._rows, runs, strict=False):
            row[:] = run.start, run.end, 0 if run.holder is None else run.holder + 1, run.missed


def _holders(runs: list[_Run]) -> set[int]:
    return {run.holder for run in runs if run.holder is not None}


def _held(runs: list[_Run], peer: int | None) -> int:
    """Return the number of positions that a peer holds, or that are returned (None)."""
    return sum(run.end - run.start for run in runs if run.holder == peer)
