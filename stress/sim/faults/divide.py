"""The first master lives and is cut off from some members, in a phase of what they do together.

They look for another master, and their standby may take up the run while the first one still has
the other members. One member may lag: nothing more reaches it from the others, so that it is not
done when they are, and its caller leaves.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.excuses import MASTER_NAME
from pccl.stress.sim.faults.base import Fault, Ground, LifePhase
from pccl.stress.sim.faults.phase_watch import PhaseWatch

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage

DIVIDED_IN = (
    LifePhase.ROUND,
    LifePhase.REDUCE_SCATTER,
    LifePhase.GATHER,
    LifePhase.DONE,
    LifePhase.SYNC,
)
"""What the process that triggers it is doing."""

_MEMBERS_MIN = 3
"""Of fewer no majority can be cut off that leaves somebody with the first master."""


@dataclass(frozen=True)
class Divide(Fault):
    """Cut ``cut`` off from the first master once ``trigger`` is in ``phase``."""

    needs_standby: ClassVar[bool] = True

    trigger: int
    phase: LifePhase
    occurrence: int
    """Which time it enters the phase (from 0)."""
    cut: tuple[int, ...]
    lagging: int | None
    """The member that nothing reaches any more from the others; None: all go on."""
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one; most last long enough for the standby to take over."""
        order = rng.sample(range(ground.peers), ground.peers)
        left = 1 if rng.random() < 0.6 else rng.randrange(1, ground.peers)
        if ground.peers < _MEMBERS_MIN:
            left = 1
        timing = ground.timing
        takeover_s = timing.dial_s + timing.recovery_s + timing.resume_s
        lasts_s = takeover_s * rng.choice((0.2, 0.8, 1.2, 1.2, 2.5, 2.5))
        return cls(
            trigger=order[-1],
            phase=rng.choice((*DIVIDED_IN, LifePhase.GATHER, LifePhase.DONE)),
            occurrence=rng.choice((0, 0, 1, 2, 4)),
            cut=tuple(sorted(order[left:])),
            lagging=order[0] if rng.random() < 0.7 else None,
            duration_ns=round(lasts_s * NS_PER_S),
        )

    def plant(self, stage: Stage) -> None:
        """Wait for the phase."""
        PhaseWatch(
            stage, self.trigger, self.phase, self.occurrence, lambda seat: self._strike(stage)
        )

    def _strike(self, stage: Stage) -> None:
        if not stage.master.host.alive:
            return
        stage.struck(self, self.phase)
        stage.divided(self.duration_ns)
        for index in self.cut:
            name = stage.name(index)
            stage.excuses.silenced(name, MASTER_NAME, self.duration_ns)
            self._cut(stage, name)
            stage.network.stall(name, MASTER_NAME, self.duration_ns)
        if self.lagging is not None:
            lagging = stage.name(self.lagging)
            for other in stage.names():
                if other.startswith("p") and other != lagging:
                    stage.excuses.silenced(other, lagging, self.duration_ns)
                    stage.network.stall(other, lagging, self.duration_ns, one_way=True)

    @abstractmethod
    def _cut(self, stage: Stage, name: str) -> None:
        """What becomes of the connections of the process there, before nothing moves any more."""

    @property
    def ends_ns(self) -> int:
        """A phase has no time."""
        return self.duration_ns

    @property
    def indices(self) -> tuple[int, ...]:
        """All that it names."""
        return (self.trigger, *self.cut, *(() if self.lagging is None else (self.lagging,)))


@dataclass(frozen=True)
class MasterHalfOpen(Divide):
    """The members are told that their connections are lost; the first master is not."""

    kind: ClassVar[str] = "master_half_open"

    def _cut(self, stage: Stage, name: str) -> None:
        for end in list(stage.network.ends):
            if (end.local.host, end.remote.host) == (name, MASTER_NAME):
                stage.excuses.broken(end)
                end.forget()


@dataclass(frozen=True)
class MasterCutOff(Divide):
    """Neither side is told; each finds out by the other one's silence."""

    kind: ClassVar[str] = "master_cut_off"

    def _cut(self, stage: Stage, name: str) -> None:
        pass
