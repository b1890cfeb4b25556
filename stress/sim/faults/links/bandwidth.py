"""A link carries little for a while."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import MS, Ground
from pccl.stress.sim.faults.timed import TimedFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class Bandwidth(TimedFault):
    """Both directions between two processes carry at most ``bytes_per_s``."""

    kind: ClassVar[str] = "bandwidth"
    calm: ClassVar[bool] = True
    keeps_majority: ClassVar[bool] = True

    peer: int
    other: int | None
    """None: everybody else."""
    bytes_per_s: int
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        peer, other = ground.pair(rng)
        return cls(
            ground.instant(rng),
            peer,
            other,
            rng.choice((5_000, 20_000, 100_000)),
            rng.choice((100 * MS, 1000 * MS, 4000 * MS)),
        )

    def _strike(self, stage: Stage) -> None:
        stage.struck(self)
        for other in stage.others(self.peer, self.other):
            stage.excuses.narrowed(stage.name(self.peer), other, self.duration_ns)
        for route in stage.routes(self.peer, self.other):
            route.caps.append(self.bytes_per_s)
            stage.at(stage.now_ns() + self.duration_ns, route.caps.remove, self.bytes_per_s)

    @property
    def ends_ns(self) -> int:
        """When it carries as much as before."""
        return self.when_ns + self.duration_ns

    @property
    def indices(self) -> tuple[int, ...]:
        """Both sides."""
        return (self.peer,) if self.other is None else (self.peer, self.other)
