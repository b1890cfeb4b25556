"""A process closes its communicator while calls are open."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Fault, Ground

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class Leave(Fault):
    """``close()`` at some time, whatever goes on."""

    kind: ClassVar[str] = "leave"
    calm: ClassVar[bool] = True

    when_ns: int
    peer: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        return cls(ground.instant(rng), ground.peer(rng))

    def plant(self, stage: Stage) -> None:
        """Schedule it."""
        stage.at(self.when_ns, self._strike, stage)

    def _strike(self, stage: Stage) -> None:
        seat = stage.seats[self.peer]
        if seat.alive and not seat.is_over:
            stage.struck(self)
            seat.process.host.run(seat.workload.leave)

    @property
    def ends_ns(self) -> int:
        """At once."""
        return self.when_ns

    @property
    def indices(self) -> tuple[int, ...]:
        """Who leaves."""
        return (self.peer,)
