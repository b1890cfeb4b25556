"""The master dies; another incarnation, or a standby, takes up the run, or nobody does."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.faults.base import Ground
from pccl.stress.sim.faults.timed import TimedFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage

_PATIENCE_NS = NS_PER_S
"""How long a takeover waits for a moment in which everybody is a member."""


@dataclass(frozen=True)
class OfMaster(TimedFault):
    """The master is killed at some time."""

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        return cls(ground.instant(rng))


@dataclass(frozen=True)
class MasterDeath(OfMaster):
    """No other one comes."""

    kind: ClassVar[str] = "master_death"

    def _strike(self, stage: Stage) -> None:
        stage.struck(self)
        stage.excuses.master_lost()
        stage.kill_master()


@dataclass(frozen=True)
class MasterRestart(OfMaster):
    """A new one starts on the same address after a while; it has kept what it had stored."""

    kind: ClassVar[str] = "master_restart"
    calm: ClassVar[bool] = True
    blank: ClassVar[bool] = False

    back_after_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one; it is back before anybody gives the run up."""
        away_s = rng.choice((0.0, 0.001, rng.uniform(0.01, 1.0), ground.timing.master_lost_s / 4))
        return cls(ground.instant(rng), 1 + round(away_s * NS_PER_S))

    def _strike(self, stage: Stage) -> None:
        if stage.kill_master():
            stage.struck(self)
            stage.at(stage.now_ns() + self.back_after_ns, self._come_back, stage)

    def _come_back(self, stage: Stage) -> None:
        stage.restart_master(blank=self.blank)

    @property
    def ends_ns(self) -> int:
        """When it is back."""
        return self.when_ns + self.back_after_ns


@dataclass(frozen=True)
class BlankMasterRestart(MasterRestart):
    """The new one knows nothing: its directory is lost."""

    kind: ClassVar[str] = "master_restart_blank"
    blank: ClassVar[bool] = True


@dataclass(frozen=True)
class Takeover(OfMaster):
    """The master dies for good, and its standby takes over."""

    kind: ClassVar[str] = "standby"
    calm: ClassVar[bool] = True
    keeps_majority: ClassVar[bool] = True
    needs_standby: ClassVar[bool] = True

    def _strike(self, stage: Stage) -> None:
        # What has just begun, or what nobody has told the standby of, it can't take over.
        if not (stage.everybody_is_member() and stage.standby_knows):
            if stage.now_ns() < self.when_ns + _PATIENCE_NS:
                stage.at(stage.now_ns() + stage.scenario.latency_ns, self._strike, stage)
        elif stage.kill_master():
            stage.struck(self)
