"""Nothing moves between processes for a while, in both directions or in one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Ground
from pccl.stress.sim.faults.timed import TimedFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class Partition(TimedFault):
    """Nothing moves between ``peer`` and ``other``. Nothing is lost: it arrives afterwards."""

    kind: ClassVar[str] = "partition"
    one_way: ClassVar[bool] = False

    peer: int
    other: int | None
    """None: everybody else."""
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        peer, other = ground.pair(rng)
        alone = rng.random() < 0.25
        return cls(
            ground.instant(rng),
            peer,
            None if alone and peer >= 0 else other,
            ground.duration(rng),
        )

    def _strike(self, stage: Stage) -> None:
        stage.struck(self)
        name = stage.name(self.peer)
        for other in stage.others(self.peer, self.other):
            stage.excuses.silenced(name, other, self.duration_ns)
            stage.network.stall(name, other, self.duration_ns, one_way=self.one_way)

    @property
    def ends_ns(self) -> int:
        """When it heals."""
        return self.when_ns + self.duration_ns

    @property
    def indices(self) -> tuple[int, ...]:
        """Both sides."""
        return (self.peer,) if self.other is None else (self.peer, self.other)


@dataclass(frozen=True)
class OneWayPartition(Partition):
    """Nothing arrives at ``other`` from ``peer``; the other way works."""

    kind: ClassVar[str] = "partition_one_way"
    one_way: ClassVar[bool] = True
