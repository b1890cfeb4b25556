"""The ``Ledger`` records the position of the run, and the contributors of its last rounds.

It is part of the shared state. A peer that was cut off during a reduce cannot know whether the run
applied its pseudo-gradient. It finds the answer here when it has joined again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROUNDS_KEPT = 16
"""Number of rounds that the ledger keeps. A peer treats its work in older rounds as applied."""

CONTRIBUTORS_MAX = 254
"""Most contributors that a round can list; in a larger round, all peers count as contributors."""

_RUN_BYTES = 8
_COLUMNS = 3 + CONTRIBUTORS_MAX
_HEAD = 2


class Ledger:
    """The ledger of one replica: a view of an array in the shared state.

    A row names its run, because another run gives the same ids to other peers.

    Args:
        values: the array, shape (``Ledger.SIZE``,); all zeros at the beginning of a run.

    Attributes:
        run: id of the replica's run; empty before its first synchronization. Rounds that it replays
            until then count for the run of the previous round; the first one, for any run.
    """

    SIZE = _HEAD + ROUNDS_KEPT * _COLUMNS

    def __init__(self, values: npt.NDArray[np.int64]) -> None:
        self._head = values[:_HEAD]
        self._rows = values[_HEAD:].reshape(ROUNDS_KEPT, _COLUMNS)
        """One row per round: its number plus 1, the number of contributors plus 1, the first bytes
        of the run's id, the contributors' ids."""
        self.run = b""

    @property
    def number(self) -> int:
        """Number of the open round, or else of the next one.

        It equals the number of outer steps made so far.
        """
        return int(self._head[0])

    @property
    def is_open(self) -> bool:
        """Whether the members have begun this round, so that newcomers have to take part in it."""
        return bool(self._head[1])

    def open(self) -> None:
        """Record that the members begin the round."""
        self._head[1] = 1

    def close(self, contributors: Sequence[int]) -> None:
        """Record that the round is over.

        Args:
            contributors: ids of the peers whose work was applied.
        """
        number = self.number
        row = self._rows[number % ROUNDS_KEPT]
        row[:] = 0
        row[0] = number + 1
        last = self._rows[(number - 1) % ROUNDS_KEPT]
        row[2] = _short(self.run) if self.run else last[2]
        if len(contributors) <= CONTRIBUTORS_MAX:
            row[1] = len(contributors) + 1
            row[3 : 3 + len(contributors)] = sorted(contributors)
        self._head[:] = number + 1, 0

    def has_applied(self, number: int, peer: int, run: bytes) -> bool:
        """Whether the outer parameters contain the work of a peer of ``run``; True if unknown."""
        if number >= self.number:
            return False
        row = self._rows[number % ROUNDS_KEPT]
        if row[0] != number + 1:
            return True
        if row[2] not in (0, _short(run)):
            return False  # the round with this number in another run
        return not row[1] or peer in row[3 : 2 + row[1]].tolist()


class Revisions:
    """The revisions that a replica offers in synchronizations of the shared state.

    A newcomer that has synchronized nothing offers 0. If it replayed rounds before its admission,
    it offers more: the peers that made these rounds may be gone. A round since the last
    synchronization counts, too, so a peer that was cut off before that round offers less. So does
    a peer that has fetched an older snapshot over its checkpoint.

    Args:
        ledger: the ledger of the state.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._synced: int | None = None
        self._number = 0
        """Round number of the ledger at the last synchronization."""

    def synced(self, revision: int) -> None:
        """Record the revision of the last synchronization, or of a loaded checkpoint."""
        self._synced, self._number = revision, self._ledger.number

    def next(self) -> int:
        """Return the revision to offer in the next synchronization."""
        number = self._ledger.number
        if self._synced is None or number < self._number:
            return 2 * number + 1 if number else 0  # a round and a synchronization count one each
        return self._synced + 1 + number - self._number


def _short(run: bytes) -> int:
    return int.from_bytes(run[:_RUN_BYTES], "little", signed=True)
