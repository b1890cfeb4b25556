"""Many newcomers at once."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Fault, Ground

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class Joiners(Fault):
    """So many new processes start at the same time."""

    kind: ClassVar[str] = "joiners"
    calm: ClassVar[bool] = True
    keeps_majority: ClassVar[bool] = True

    when_ns: int
    count: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        return cls(ground.instant(rng), rng.choice((2, 3, 4, 8)))

    def plant(self, stage: Stage) -> None:
        """Schedule it."""
        stage.at(self.when_ns, self._strike, stage)

    def _strike(self, stage: Stage) -> None:
        stage.struck(self)
        for _ in range(self.count):
            stage.join()

    @property
    def ends_ns(self) -> int:
        """At once."""
        return self.when_ns
