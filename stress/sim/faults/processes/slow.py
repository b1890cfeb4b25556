"""A process gets little CPU: whatever comes is handled late."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import MS, Ground
from pccl.stress.sim.faults.timed import TimedFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class Slow(TimedFault):
    """Everything in the process happens up to ``lag_ns`` late."""

    kind: ClassVar[str] = "slow"
    calm: ClassVar[bool] = True
    keeps_majority: ClassVar[bool] = True

    peer: int
    lag_ns: int
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one; the longest lag is well below every deadline, also of several steps."""
        timing = ground.timing
        longest_ns = round(min(timing.deadline_s / 4, timing.recovery_s / 10) * 1000) * MS
        lag_ns = rng.choice((MS, 20 * MS, longest_ns // 8, longest_ns))
        return cls(
            ground.instant(rng), ground.process(rng), lag_ns, rng.randint(5, 25) * max(lag_ns, MS)
        )

    def _strike(self, stage: Stage) -> None:
        host = stage.host(self.peer)
        if host.alive:
            stage.struck(self)
            stage.excuses.slowed(host.name, self.lag_ns)
            host.run_queue.set_lag(self.lag_ns)
            stage.at(stage.now_ns() + self.duration_ns, host.run_queue.set_lag, 0)

    @property
    def ends_ns(self) -> int:
        """When it is as quick as before."""
        return self.when_ns + self.duration_ns

    @property
    def indices(self) -> tuple[int, ...]:
        """The victim."""
        return (self.peer,)
