"""Faults that kill the master; a new master, a standby or neither takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.faults.base import Ground, TimedFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage

_PATIENCE_NS = NS_PER_S
"""How long the fault waits until the standby can take over."""


@dataclass(frozen=True)
class MasterDeath(TimedFault, kind="master_death"):
    """The master dies, and no new one starts."""

    def strike(self, stage: Stage) -> None:
        """Kill the master."""
        stage.struck(self)
        stage.excuses.is_master_gone = True
        stage.kill_master()


@dataclass(frozen=True)
class MasterRestart(TimedFault, kind="master_restart", calm=True):
    """The master dies. After a while a new one starts at its address, with the stored data."""

    blank: ClassVar[bool] = False

    back_after_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault; the new master starts before any peer gives up the run."""
        away_s = rng.choice((0.0, 0.001, rng.uniform(0.01, 1.0), ground.timing.master_lost_s / 4))
        return super().draw(rng, ground, back_after_ns=1 + round(away_s * NS_PER_S))

    def strike(self, stage: Stage) -> Iterator[int]:
        """Kill the master, and start a new one."""
        if stage.kill_master():
            stage.struck(self)
            yield self.back_after_ns
            stage.restart_master(self.back_after_ns, blank=self.blank)


@dataclass(frozen=True)
class BlankMasterRestart(MasterRestart, kind="master_restart_blank", blank=True):
    """The master dies, and its directory is lost. A new one starts without stored data."""


@dataclass(frozen=True)
class Takeover(TimedFault, kind="standby", calm=True, keeps_majority=True, needs_standby=True):
    """The master dies, no new one starts, and its standby takes over."""

    def strike(self, stage: Stage) -> Iterator[int]:
        """Kill the master once the standby can take over, if that is within ``_PATIENCE_NS``."""
        # A standby cannot take over a run that has just begun, or that it does not know.
        while not (stage.everybody_is_member() and stage.standby_knows):
            if stage.now_ns() >= self.when_ns + _PATIENCE_NS:
                return
            yield stage.scenario.latency_ns
        if stage.kill_master():
            stage.struck(self)
