"""The guard of weighted averages: judges contributions by their norms, over peers and rounds.

A norm is an outlier if it is above the limit: the median plus ``deviations`` times the scaled
median absolute deviation (MAD) of this round's norms and those of the last rounds. Half of all
norms can be wrong without moving either much (Hampel, "The influence curve and its role in robust
estimation", JASA 1974).

* The spread is at least ``SPREAD_MIN`` of the median: equal norms have no deviation.
* Fewer than ``SAMPLES_MIN`` norms, or a median of 0, give no limit.
* If more than half of this round's norms are above the limit, the norms of the run have changed,
  and this round is judged alone. So the guard never excludes more than half as outliers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from pccl.protocol.guards.contributions import (
    GUARD_ROUNDS_MAX,
    NORM_MAX,
    ContributionGuard,
    FlaggedContribution,
    GuardAction,
)
from pccl.protocol.types import Descriptor, OperationId

SAMPLES_MIN = 5
"""Fewest norms from which the guard derives a limit."""

SPREAD_MIN = 0.05
"""The least spread, as a share of the median."""

SCALE = 1.4826
"""Makes the MAD of a normal distribution its standard deviation."""

NORMS_KEPT_MAX = 1 << 16
"""Most norms of earlier rounds that a master keeps; the tag that was longest unused is dropped."""


def judge(
    guard: ContributionGuard,
    weights: Sequence[float],
    norms: Sequence[float | None],
    past: Iterable[float],
) -> tuple[FlaggedContribution, ...]:
    """Return the contributions of this round that the guard flags, in the order of ranks.

    Args:
        guard: what the members agreed on.
        weights: one per rank; a contribution of weight 0 is not judged.
        norms: one per rank; None: not finite.
        past: norms of earlier rounds.
    """
    own = [norm for weight, norm in zip(weights, norms, strict=True) if weight and norm is not None]
    limit = _limit(guard, [*past, *own])
    if limit is not None and 2 * sum(norm > limit for norm in own) > len(own):
        limit = _limit(guard, own)
    flagged: list[FlaggedContribution] = []
    for rank, (weight, norm) in enumerate(zip(weights, norms, strict=True)):
        is_outlier = norm is not None and limit is not None and norm > limit
        action = guard.outliers if is_outlier else guard.not_finite if norm is None else None
        if weight and action:
            excluded = action is GuardAction.EXCLUDE
            flagged.append(FlaggedContribution(rank, norm, limit if is_outlier else None, excluded))
    return tuple(flagged)


def _limit(guard: ContributionGuard, norms: list[float]) -> float | None:
    if len(norms) < SAMPLES_MIN or guard.outliers is GuardAction.OFF:
        return None
    middle = median(norms)
    deviation = SCALE * median(abs(norm - middle) for norm in norms)
    limit = middle + guard.deviations * max(deviation, SPREAD_MIN * middle)
    return min(limit, NORM_MAX) if middle else None


class NormHistory:
    """The trusted norms of the last committed rounds, by group and tag. A restart loses them."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], tuple[int, deque[tuple[float, ...]]]] = {}
        """(group, tag) -> elements of the tensor, and norms; the longest unused first."""
        self._kept = 0

    def __len__(self) -> int:
        return self._kept

    def past(self, operation: OperationId, descriptor: Descriptor) -> list[float]:
        """Return the norms of earlier rounds that count for an operation."""
        count, rounds = self._rounds.get((operation.group, operation.tag), (0, ()))
        if descriptor.guard is None or count != descriptor.count or not descriptor.guard.rounds:
            return []
        return [norm for norms in list(rounds)[-descriptor.guard.rounds :] for norm in norms]

    def note(self, operation: OperationId, count: int, norms: tuple[float, ...]) -> None:
        """Keep the trusted norms of a committed operation with tensors of ``count`` elements."""
        tag = operation.group, operation.tag
        known = self._rounds.pop(tag, None)
        if known is None or known[0] != count:
            self._kept -= sum(map(len, known[1])) if known is not None else 0
            known = count, deque[tuple[float, ...]]()
        self._rounds[tag] = known
        rounds = known[1]
        rounds.append(norms)
        self._kept += len(norms)
        if len(rounds) > GUARD_ROUNDS_MAX:
            self._kept -= len(rounds.popleft())
        while self._kept > NORMS_KEPT_MAX:
            oldest = self._rounds.pop(next(iter(self._rounds)))
            self._kept -= sum(map(len, oldest[1]))
