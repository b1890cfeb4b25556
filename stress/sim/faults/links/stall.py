"""One connection stands still in one direction for a while; others of the same pair do not."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Ground
from pccl.stress.sim.faults.timed import ConnectionFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage
    from pccl.transports.sim.connection import SimConnection


@dataclass(frozen=True)
class StreamStall(ConnectionFault):
    """Hold up what one end of any connection sends."""

    kind: ClassVar[str] = "stall"

    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        return cls(ground.instant(rng), rng.randrange(1 << 16), ground.duration(rng))

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.silenced(end.local.host, end.remote.host, self.duration_ns)
        end.stall(self.duration_ns)

    @property
    def ends_ns(self) -> int:
        """When it goes on."""
        return self.when_ns + self.duration_ns
