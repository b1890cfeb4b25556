"""A connection that one end still believes in: nothing arrives any more, and nobody is told."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Fault, Ground

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class DeadLane(Fault):
    """A lane delivers nothing more one way; new connections between the two work."""

    kind: ClassVar[str] = "dead_lane"

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
        end = stage.choose(stage.lane_ends(), self.choice)
        if end is not None:
            stage.struck(self)
            stage.excuses.deadened(end)
            end.stall(None)

    @property
    def ends_ns(self) -> int:
        """A lane of its number takes its place once somebody finds out."""
        return self.when_ns


@dataclass(frozen=True)
class HalfOpen(DeadLane):
    """One end of any connection is told that it is lost; the other hears when it sends."""

    kind: ClassVar[str] = "half_open"

    def _strike(self, stage: Stage) -> None:
        end = stage.choose(stage.network.ends, self.choice)
        if end is not None:
            stage.struck(self)
            stage.excuses.deadened(end)
            end.forget()
