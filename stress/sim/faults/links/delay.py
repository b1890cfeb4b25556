"""A link takes much longer for a while."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import MS, Ground
from pccl.stress.sim.faults.timed import TimedFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage
    from pccl.transports.sim.routes import HostRoute


@dataclass(frozen=True)
class Delay(TimedFault):
    """Whatever leaves in either direction between two processes takes ``extra_ns`` more."""

    kind: ClassVar[str] = "delay"
    calm: ClassVar[bool] = True
    keeps_majority: ClassVar[bool] = True

    peer: int
    other: int | None
    """None: everybody else."""
    extra_ns: int
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one; the longest is well below every deadline."""
        peer, other = ground.pair(rng)
        longest_ns = round(ground.timing.dial_s * 1000 / 16) * MS
        return cls(
            ground.instant(rng),
            peer,
            other,
            rng.choice((min(10 * ground.latency_ns, longest_ns), longest_ns // 4, longest_ns)),
            rng.choice((100 * MS, 1000 * MS, 4000 * MS)),
        )

    def _strike(self, stage: Stage) -> None:
        stage.struck(self)
        routes = stage.routes(self.peer, self.other)
        self._add(routes, self.extra_ns)
        stage.at(stage.now_ns() + self.duration_ns, self._add, routes, -self.extra_ns)

    def _add(self, routes: list[HostRoute], extra_ns: int) -> None:
        for route in routes:
            route.extra_ns += extra_ns

    @property
    def ends_ns(self) -> int:
        """When the last byte that it delays has arrived."""
        return self.when_ns + self.duration_ns + self.extra_ns

    @property
    def indices(self) -> tuple[int, ...]:
        """Both sides."""
        return (self.peer,) if self.other is None else (self.peer, self.other)
