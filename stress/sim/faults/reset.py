"""A connection is reset at both ends."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Fault, Ground

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class Reset(Fault):
    """Reset the ``choice``-th (modulo their number) connection of the run."""

    kind: ClassVar[str] = "reset"

    when_ns: int
    choice: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        return cls(ground.instant(rng), rng.randrange(1 << 16))

    def plant(self, stage: Stage) -> None:
        """Schedule it."""
        stage.at(self.when_ns, self._strike, stage)

    def _strike(self, stage: Stage) -> None:
        end = stage.choose(stage.network.ends, self.choice)
        if end is not None:
            stage.struck(self)
            stage.excuses.broken(end)
            end.reset()

    @property
    def ends_ns(self) -> int:
        """At once."""
        return self.when_ns
