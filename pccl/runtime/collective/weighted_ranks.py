"""``WeightedRanks``: whose contributions to a weighted average are read, and must be finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.collectives.layout import Segment
from pccl.protocol.guards.contributions import ContributionGuard
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.collective.coding import Coding
from pccl.runtime.collective.memory import Memory

OnNotFinite = Callable[[OperationId, PeerId], None]


class WeightedRanks:
    """The ranks of one operation, by the weights and declarations of their contributions.

    Args:
        guard: guard of the operation; None: contributions are not checked.
        ring: the members in ring order.

    Attributes:
        muted: the ranks whose contributions have weight 0, and are never read.
        is_refused: whether a contribution was not finite, although its member had declared so. This
            peer then never reports its result.
        on_not_finite: called once with that member.
    """

    def __init__(self, guard: ContributionGuard | None, ring: tuple[PeerId, ...]) -> None:
        self.muted: frozenset[int] = frozenset()
        self.is_refused = False
        self.on_not_finite: OnNotFinite | None = None
        self._guard = guard
        self._ring = ring
        self._infinite: frozenset[int] | None = None

    def begin(self, muted: frozenset[int], infinite: frozenset[int]) -> None:
        """Take the ranks of weight 0, and those that declared a contribution that is not finite."""
        self.muted = muted
        if self._guard is not None and self._guard.not_finite:
            self._infinite = infinite - muted

    def muted_before(self, rank: int) -> int:
        """Return how many ranks right before ``rank`` are muted."""
        return self._until(rank, lambda other: other not in self.muted) if self.muted else 0

    def finite_before(self, rank: int) -> int:
        """Return how many ranks right before ``rank`` must send finite values in a ring."""
        infinite = self._infinite
        return 0 if infinite is None else self._until(rank, lambda other: other in infinite)

    def _until(self, rank: int, ends: Callable[[int], bool]) -> int:
        size = len(self._ring)
        distances = range(1, size + 1)
        return next((d - 1 for d in distances if ends((rank - d) % size)), size)

    @property
    def must_all_be_finite(self) -> bool:
        """Whether every contribution that is read must be finite, and so the result."""
        return self._infinite is not None and not self._infinite

    def must_be_finite(self, rank: int) -> bool:
        """Whether the contribution of ``rank`` must be finite."""
        return self._infinite is not None and rank not in self._infinite

    def refuses(self, operation: OperationId, rank: int, values: npt.NDArray[Any]) -> bool:
        """Whether values from ``rank``, which must be finite, are not; then refuse the result."""
        if np.isfinite(values).all():
            return False
        if not self.is_refused:
            self.is_refused = True
            assert self.on_not_finite is not None
            self.on_not_finite(operation, self._ring[rank])
        return True

    def refuses_final(
        self,
        operation: OperationId,
        rank: int,
        segment: Segment,
        result: Memory,
        coding: Coding | None = None,
    ) -> bool:
        """Whether a final segment that ``rank`` computed must be finite, and is not.

        Nobody else has received the contribution of ``rank`` to these values.

        Args:
            operation: id of the operation.
            rank: the rank that computed the segment.
            segment: the segment.
            result: memory of the result.
            coding: decodes the segment, if its place still holds encoded bytes.
        """
        if not self.must_all_be_finite:
            return False
        values = coding.coded_values(segment) if coding else result.elements(*segment.span)
        return self.refuses(operation, rank, values)
