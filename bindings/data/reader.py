"""The ``LeaseReader``: which positions of its lease a peer has read, and trained with. Pure.

The front of the lease is what the program has, in the order in which it got it. What follows may be
in batches that are being loaded. When the run has averaged work of this peer, the front is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pccl.bindings.data.order import Numbers
from pccl.bindings.data.sample_ledger import Interval, SampleLedger


@dataclass(frozen=True, slots=True)
class PeerLease:
    """What the ledger of the run says to one peer.

    Attributes:
        runs: the positions that it holds, in reading order.
        done: number of positions of the run that are done.
        is_last: whether no position is left for further leases, unless a peer is lost.
        is_finished: whether all positions are done.
    """

    runs: tuple[Interval, ...] = ()
    done: int = 0
    is_last: bool = False
    is_finished: bool = False


def lease_of(ledger: SampleLedger, peer: int) -> PeerLease:
    """Return what a ledger says to a peer."""
    runs, is_last = tuple(ledger.lease(peer)), ledger.unleased == 0
    return PeerLease(runs, ledger.done, is_last, ledger.is_finished)


class LeaseReader:
    """Reads the lease of one peer, in batches.

    Args:
        batch_size: positions in a batch.

    Attributes:
        lease: the lease, as of the last outcome that the training loop knows.
        entry: changes when another lease takes the place of the lease. Then batches that are being
            loaded are void.
    """

    def __init__(self, batch_size: int) -> None:
        self.lease = PeerLease()
        self.entry = 0
        self._batch_size = batch_size
        self._handed = self._pending = 0
        """Positions that the program has, and how many of them are not in a step yet."""
        self._issued = 0
        """Positions that the program has, or that are in batches which are being loaded."""
        self._loading: deque[int] = deque()
        """Sizes of these batches."""

    # -- batches -----------------------------------------------------------------------------------

    @property
    def is_dry(self) -> bool:
        """Whether the program has all batches that the lease has."""
        return not self._size(self._handed)

    def restart(self) -> None:
        """Issue the batches again that the program does not have."""
        self._issued = self._handed
        self._loading.clear()

    def issue(self) -> Numbers:
        """Return the positions of the next batch; empty: the lease must grow first."""
        size = self._size(self._issued)
        positions = _positions(self.lease.runs, self._issued, size)
        if size:
            self._issued += size
            self._loading.append(size)
        return positions

    def hand_over(self) -> None:
        """Record that the program gets the next batch."""
        size = self._loading.popleft()
        self._handed += size
        self._pending += size

    def _size(self, begin: int) -> int:
        """Return the size of a batch; only at the end of all epochs may it be smaller."""
        left = max(0, sum(end - start for start, end in self.lease.runs) - begin)
        is_whole = left >= self._batch_size or self.lease.is_last
        return min(left, self._batch_size) if is_whole else 0

    # -- steps and outcomes ------------------------------------------------------------------------

    def stepped(self) -> int:
        """Return the number of positions since the last step, which are in this one."""
        pending, self._pending = self._pending, 0
        return pending

    def averaged(self, count: int, lease: PeerLease) -> None:
        """Record that the run has averaged the first ``count`` positions; the lease has grown."""
        self._handed -= count
        self._issued -= count
        self.lease = lease
        assert 0 <= self._handed <= self._issued, "the run counts samples that this peer never had"

    def keeps(self, count: float, lease: PeerLease) -> bool:
        """Whether another lease begins with the positions of this peer's work.

        Args:
            count: number of positions whose work is in steps of this peer, and not done.
            lease: the lease in a state that this peer has received.
        """
        count = int(count) + self._pending
        if count > self._handed:
            return False  # the run has gone back to before a round that this peer knew
        own = _positions(self.lease.runs, self._handed - count, count)
        return np.array_equal(own, _positions(lease.runs, 0, count))

    def entered(self, lease: PeerLease, kept: float | None) -> None:
        """Read on in another lease.

        Args:
            lease: the lease.
            kept: number of its first positions whose work is in steps of this peer; None: the peer
                has dropped all its work, and reads them again.
        """
        self.entry += 1
        self._pending = 0 if kept is None else self._pending
        self._handed = int(kept or 0) + self._pending
        self.lease = lease
        self.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of work that is not done, for a checkpoint."""
        handed = self._handed - self._pending
        return {"runs": [list(run) for run in self.lease.runs], "handed": handed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.lease = PeerLease(tuple((start, end) for start, end in state["runs"]))
        self._handed, self._pending = int(state["handed"]), 0
        self.restart()


def _positions(runs: Sequence[Interval], begin: int, count: int) -> Numbers:
    """Return some positions of a lease, in reading order."""
    found: list[Numbers] = [np.zeros(0, np.int64)]
    for start, end in runs:
        first = min(start + begin, end)
        last = min(first + count, end)
        found.append(np.arange(first, last))
        begin, count = max(0, begin - (end - start)), count - (last - first)
    return np.concatenate(found)
