"""What befalls all connections that there are between a process and another one, or all others."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Ground
from pccl.stress.sim.faults.timed import TimedFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage
    from pccl.transports.sim.connection import SimConnection


@dataclass(frozen=True)
class Between(TimedFault):
    """Each connection between ``peer`` and ``other``; new ones are not concerned."""

    peer: int
    other: int | None
    """None: everybody else."""
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        peer, other = ground.pair(rng)
        return cls(ground.instant(rng), peer, other, ground.duration(rng))

    def _strike(self, stage: Stage) -> None:
        stage.struck(self)
        name, others = stage.name(self.peer), stage.others(self.peer, self.other)
        for end in list(stage.network.ends):
            if end.local.host == name and end.remote.host in others:
                self._befall(stage, end)

    @abstractmethod
    def _befall(self, stage: Stage, end: SimConnection) -> None:
        """Do it to the connection of which ``end`` is at ``peer``."""

    @property
    def ends_ns(self) -> int:
        """When it is over."""
        return self.when_ns + self.duration_ns

    @property
    def indices(self) -> tuple[int, ...]:
        """Both sides."""
        return (self.peer,) if self.other is None else (self.peer, self.other)


@dataclass(frozen=True)
class PairReset(Between):
    """They are reset at both ends."""

    kind: ClassVar[str] = "pair_reset"

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.broken(end)
        end.reset()


@dataclass(frozen=True)
class PairStall(Between):
    """They stand still in both directions for a while."""

    kind: ClassVar[str] = "pair_stall"

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.silenced(end.local.host, end.remote.host, self.duration_ns)
        end.stall(self.duration_ns)
        end.other.stall(self.duration_ns)


@dataclass(frozen=True)
class PairHalfOpen(Between):
    """``other`` has lost them, and ``peer`` is not told until it sends."""

    kind: ClassVar[str] = "pair_half_open"

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.deadened(end)
        end.other.forget()
