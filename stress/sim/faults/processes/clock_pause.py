"""A whole machine sleeps for a while: its process, its kernel and, perhaps, its clock."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Ground
from pccl.stress.sim.faults.timed import TimedFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class ClockPause(TimedFault):
    """Nothing runs, nothing reaches the machine or leaves it."""

    kind: ClassVar[str] = "clock_pause"

    peer: int
    duration_ns: int
    clock_stands: bool
    """The monotonic clock does not count the sleep (Linux, macOS); or it does (a paused VM)."""

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        return cls(
            ground.instant(rng), ground.process(rng), ground.duration(rng), rng.random() < 0.5
        )

    def _strike(self, stage: Stage) -> None:
        host = stage.host(self.peer)
        if not host.alive:
            return
        stage.struck(self)
        stage.excuses.paused(host.name, self.duration_ns)
        for other in stage.others(self.peer):
            stage.network.stall(host.name, other, self.duration_ns)
        clock = stage.clock(self.peer)
        host.freeze()

        def wake() -> None:
            if self.clock_stands:
                clock.missed_ns += self.duration_ns
            host.thaw()

        stage.at(stage.now_ns() + self.duration_ns, wake)

    @property
    def ends_ns(self) -> int:
        """When it wakes up."""
        return self.when_ns + self.duration_ns

    @property
    def indices(self) -> tuple[int, ...]:
        """The victim."""
        return (self.peer,)
