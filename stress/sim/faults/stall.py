"""One connection stands still in one direction for a while; others of the same pair do not."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Fault, Ground

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class Stall(Fault):
    """Hold up what one end of the ``choice``-th connection sends."""

    kind: ClassVar[str] = "stall"

    when_ns: int
    choice: int
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        return cls(ground.instant(rng), rng.randrange(1 << 16), ground.duration(rng))

    def plant(self, stage: Stage) -> None:
        """Schedule it."""
        stage.at(self.when_ns, self._strike, stage)

    def _strike(self, stage: Stage) -> None:
        end = stage.choose(stage.network.ends, self.choice)
        if end is not None:
            stage.struck(self)
            stage.excuses.silenced(end.local.host, end.remote.host, self.duration_ns)
            end.stall(self.duration_ns)

    @property
    def ends_ns(self) -> int:
        """When it goes on."""
        return self.when_ns + self.duration_ns
