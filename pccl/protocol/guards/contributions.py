"""The guard of a weighted average: which contributions the members do not trust.

Each member declares the L2 norm of its contribution in its request. The master then decides for
all members, and its start message names the contributions that it has flagged.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass
from typing import Annotated

from pccl.protocol.guards.bounds import Below, UpTo

NORM_MAX = sys.float_info.max
Norm = Annotated[float, UpTo(NORM_MAX)]
"""The L2 norm of a finite contribution."""
DEVIATIONS_MAX = 1e6
GUARD_ROUNDS_MAX = 64


class GuardAction(enum.IntEnum):
    """What happens to a contribution that the guard flags."""

    OFF = 0
    """Nothing: the guard does not look."""
    WARN = 1
    """An event and a log line name its member."""
    EXCLUDE = 2
    """The same, and its weight becomes 0."""


@dataclass(frozen=True, slots=True)
class ContributionGuard:
    """The guard of an operation. All members must agree about it."""

    not_finite: GuardAction
    """For contributions with NaN or infinity."""
    outliers: GuardAction
    """For contributions whose norm is too large."""
    deviations: Annotated[float, UpTo(DEVIATIONS_MAX, 1)]
    """Scaled median absolute deviations above the median at which the largest norm lies."""
    rounds: Annotated[int, Below(GUARD_ROUNDS_MAX + 1)]
    """Earlier operations under this tag whose norms count."""

    def __str__(self) -> str:
        return (
            f"not finite: {self.not_finite.name.lower()}, outliers: {self.outliers.name.lower()} "
            f"above {self.deviations:g} deviations over {self.rounds} rounds"
        )


@dataclass(frozen=True, slots=True)
class FlaggedContribution:
    """A contribution that the master does not trust."""

    rank: Annotated[int, Below(1 << 16)]
    norm: Norm | None
    """Nil: it is not finite."""
    limit: Norm | None
    """The largest norm that the master trusts; nil if the contribution is not finite."""
    excluded: bool
