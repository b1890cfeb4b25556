"""A process is stopped for a while, as by SIGSTOP; its kernel goes on."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Ground
from pccl.stress.sim.faults.timed import TimedFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class Freeze(TimedFault):
    """Nothing runs in the process; what arrives is kept, and acknowledged up to the window.

    A call into C that holds the interpreter lock looks the same from outside.
    """

    kind: ClassVar[str] = "freeze"

    peer: int
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        return cls(ground.instant(rng), ground.process(rng), ground.duration(rng))

    def _strike(self, stage: Stage) -> None:
        host = stage.host(self.peer)
        if host.alive:
            stage.struck(self)
            stage.excuses.paused(host.name, self.duration_ns)
            host.freeze()
            stage.at(stage.now_ns() + self.duration_ns, host.thaw)

    @property
    def ends_ns(self) -> int:
        """When it is thawed."""
        return self.when_ns + self.duration_ns

    @property
    def indices(self) -> tuple[int, ...]:
        """The victim."""
        return (self.peer,)
