"""``Ledger``: where the run is, and whose work is in its last rounds; part of the shared state.

Who was cut off while it reduced cannot know whether its pseudo-gradient was applied. Back in the
run it finds that here, with everything else that the members agree on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROUNDS_KEPT = 16
"""A peer that was cut off in an older round takes its work for applied."""

CONTRIBUTORS_MAX = 255
"""Of one round; with more of them nobody can look itself up: all take their work for applied."""

_COLUMNS = 2 + CONTRIBUTORS_MAX
_HEAD = 2


class Ledger:
    """A view of the array that is shared.

    Args:
        values: shape (``Ledger.SIZE``,), int64; all zeros at the beginning of a run.
    """

    SIZE = _HEAD + ROUNDS_KEPT * _COLUMNS

    def __init__(self, values: npt.NDArray[np.int64]) -> None:
        self._head = values[:_HEAD]
        self._rows = values[_HEAD:].reshape(ROUNDS_KEPT, _COLUMNS)
        """Each: number of the round plus 1, contributors plus 1, their ids."""

    @property
    def number(self) -> int:
        """Number of the open round, or else of the next one.

        It equals the outer steps made so far.
        """
        return int(self._head[0])

    @property
    def is_open(self) -> bool:
        """Whether the members are in this round: a newcomer has to take part in it."""
        return bool(self._head[1])

    def open(self) -> None:
        """The members begin the round."""
        self._head[1] = 1

    def close(self, contributors: Sequence[int]) -> None:
        """The round is over.

        Args:
            contributors: ids of the peers whose work was applied.
        """
        number = self.number
        row = self._rows[number % ROUNDS_KEPT]
        row[:] = 0
        row[0] = number + 1
        if len(contributors) <= CONTRIBUTORS_MAX:
            row[1] = len(contributors) + 1
            row[2 : 2 + len(contributors)] = sorted(contributors)
        self._head[:] = number + 1, 0

    def has_applied(self, number: int, peer: int) -> bool:
        """Whether the work of a peer in a round is in the outer parameters; True if in doubt."""
        if number >= self.number:
            return False
        row = self._rows[number % ROUNDS_KEPT]
        if row[0] != number + 1 or not row[1]:
            return True
        return peer in row[2 : 1 + row[1]].tolist()


class Revisions:
    """The revisions with which the shared state goes into synchronizations.

    A newcomer has synchronized nothing, and comes with a beginning: 0. But if it has replayed
    rounds before it was admitted, and all who made them are gone, it is the one who has them. A
    round since the last synchronization counts, too: who was cut off from it has less to offer.

    Args:
        ledger: of the state.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._synced: int | None = None
        self._number = 0
        """Of the ledger then."""

    def synced(self, revision: int) -> None:
        """The state was synchronized with this, or comes from a checkpoint that was."""
        self._synced, self._number = revision, self._ledger.number

    def next(self) -> int:
        """What to offer in the next one."""
        number = self._ledger.number
        if self._synced is None:
            return 2 * number + 1 if number else 0  # each round, and a synchronization after it
        return self._synced + 1 + number - self._number
