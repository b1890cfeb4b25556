"""Many newcomers at once."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Ground
from pccl.stress.sim.faults.timed import TimedFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class Joiners(TimedFault):
    """So many new processes start at the same time."""

    kind: ClassVar[str] = "joiners"
    calm: ClassVar[bool] = True
    keeps_majority: ClassVar[bool] = True

    count: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        return cls(ground.instant(rng), rng.choice((2, 3, 4, 8)))

    def _strike(self, stage: Stage) -> None:
        stage.struck(self)
        for _ in range(self.count):
            stage.join()

    @property
    def starts(self) -> int:
        """All of them."""
        return self.count
