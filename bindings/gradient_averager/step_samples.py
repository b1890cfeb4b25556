"""The samples of each step, if a ``GradientAverager`` has an ``ElasticSampler``.

Each peer gives the number of its samples as the weight of a small average beside the gradients. So
all members learn all numbers with the outcome, and change the ledger in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from pccl.bindings.data.reader import lease_of
from pccl.bindings.data.sampler import ElasticSampler, check_sampler
from pccl.bindings.gradient_averager.reductions import BucketOutcome, Reductions

SAMPLES_TAG = 3 << 31
"""Tag of the average, above those of buckets."""


class StepSamples:
    """The samples of the steps of one peer, and the ledger of the run.

    Args:
        data: gives the peer its samples.
        join: method that raises an error unless the peer is in the run.
    """

    def __init__(self, data: ElasticSampler, join: Callable[[], object]) -> None:
        check_sampler(data)
        self._reader = data.reader
        self._ledger, self._name = data.attach(WeakMethod(join))
        self._record = torch.as_tensor(self._ledger.record)
        self._count = 0
        """Samples in the step that is being averaged."""
        self._is_launched = False

    @property
    def shared(self) -> dict[str, Tensor]:
        """The tensor of the shared state, by name."""
        return {self._name: self._record}

    def admit(self, newcomers: Iterable[int]) -> None:
        """Give leases to newcomers, before the synchronization with them."""
        self._ledger.admit(newcomers)

    def entered(self, peer: int) -> None:
        """Read the lease in the state of the run. The last step of this peer may be lost."""
        self._reader.entered(lease_of(self._ledger, peer), None)

    def launch(self, reductions: Reductions) -> None:
        """Give the number of samples in this step, with its first bucket, during backward."""
        if not self._is_launched:
            self._is_launched = True
            self._count = self._reader.stepped()
            reductions.launch(torch.zeros(1), SAMPLES_TAG, weight=self._count)

    def begin_step(self) -> None:
        """Forget the step that has ended."""
        self._is_launched = False

    def averaged(self, peer: int, outcome: BucketOutcome) -> None:
        """Record what is done; all members do this with the same outcome.

        Samples of a peer that is in some averages only are given out again.
        """
        self._ledger.close({one: outcome.weights[one] for one in outcome.contributors})
        self._reader.averaged(self._count, lease_of(self._ledger, peer))

    def state_dict(self) -> Tensor:
        """Return a copy of the ledger."""
        return self._record.clone()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the ledger from a checkpoint of the averager, if it has one."""
        if "samples" in state:
            self._record.copy_(state["samples"])
