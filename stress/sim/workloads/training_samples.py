"""``TrainingSamples``: the samples of one process that trains, if the run counts samples."""

from __future__ import annotations

from collections import deque

import numpy as np

from pccl.bindings.data.reader import LeaseReader, PeerLease, lease_of
from pccl.bindings.data.sample_ledger import SampleLedger
from pccl.stress.sim.checkers.samples import SampleCheckers
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.workloads.application import name_of
from pccl.stress.sim.workloads.toy_model import Whole

_RUNS_MAX = 48
"""Runs in a ledger: few, so that some ledgers are full."""

_SIZE = SampleLedger.SIZE % 4 + 4 * _RUNS_MAX


class TrainingSamples:
    """The samples of one life of a process.

    Args:
        parts: shared objects of the run.
        process: the process.
        weight: weight of an inner step, for which it stands in runs that count no samples.

    Attributes:
        ledger: the ledger of the run; None: the run counts no samples.
        reader: reads the lease of the process.
    """

    def __init__(self, parts: RunParts, process: PeerProcess, weight: float) -> None:
        training, checkers = parts.scenario.training, parts.checkers.training
        assert training is not None
        assert checkers is not None
        self.ledger: SampleLedger | None = None
        self.reader: LeaseReader | None = None
        if training.lease:
            record = np.zeros(_SIZE, np.int64)
            self.ledger = SampleLedger(record, training.lease, training.samples)
            self.reader = LeaseReader(int(weight))
        # A late process may have work of an earlier round left, which the ledger takes for that of
        # the later one that it has just put into a round.
        self._may_be_out_of_order = (
            parts.scenario.quorum is not None and training.delay >= training.sync_steps
        )
        self._weight = weight
        self._process = process
        self._checkers: SampleCheckers = checkers.samples
        self._leases: deque[PeerLease | None] = deque()
        """Leases after the entries and rounds that the training task has not heard of."""

    def load(self, old: TrainingSamples) -> None:
        """Continue from a checkpoint."""
        if self.ledger is not None and self.reader is not None:
            assert old.ledger is not None
            assert old.reader is not None
            self.ledger.record[:] = old.ledger.record
            self.reader.load_state_dict(old.reader.state_dict())

    @property
    def are_missing(self) -> bool:
        """Whether the process cannot make an inner step before it gets more samples."""
        return self.reader is not None and self.reader.is_dry

    def read(self, axis: int, step: int) -> float:
        """Take samples for an inner step, and return its weight."""
        if self.reader is None:
            return self._weight
        self.reader.restart()
        positions: list[int] = self.reader.issue().tolist()
        self.reader.hand_over()
        self._checkers.trained(axis, step, positions)
        return self.reader.stepped()

    def told(self) -> None:
        """Record the lease after an entry or a round, in the task that makes the calls."""
        ledger, peer = self.ledger, self._process.peer
        self._leases.append(None if ledger is None else lease_of(ledger, peer))

    def heard(self) -> PeerLease | None:
        """Return the lease after the next entry or round, in the task that trains."""
        return self._leases.popleft()

    def check(self, values: Whole) -> None:
        """Check the ledger and the first fragment of the outer parameters beside it."""
        if self.ledger is not None and not self._may_be_out_of_order:
            self._checkers.check(name_of(self._process), self.ledger, values)
