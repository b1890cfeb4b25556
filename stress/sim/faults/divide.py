"""Cuts the first master, which still runs, off from some members, in a phase of their work.

These members look for another master, and the standby may take over the run. Meanwhile the first
master still has the other members. One member may lag: data reaches it late, and after the cut not
at all. So it is not done when the other members are, and its caller leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Self

from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.checkers.excuses import MASTER_NAME
from pccl.stress.sim.faults.base import Fault, Ground, LifePhase, Members, OtherProcess, Peer, play
from pccl.stress.sim.faults.phases import PhaseWatch

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage
    from pccl.transports.sim.routes import HostRoute

DIVIDED_IN = (
    LifePhase.ROUND,
    LifePhase.REDUCE_SCATTER,
    LifePhase.GATHER,
    LifePhase.DONE,
    LifePhase.SYNC,
)
"""Phases of the process ``trigger`` in which the fault may strike."""

_MEMBERS_MIN = 3
"""With fewer members, a cut of a majority leaves the first master no member."""


@dataclass(frozen=True)
class Divide(Fault, needs_standby=True):
    """Cuts the members ``cut`` off from the first master once ``trigger`` is in ``phase``."""

    trigger: Peer
    phase: LifePhase
    occurrence: int
    """Number of the entry of ``trigger`` into the phase (from 0)."""
    cut: Members
    lagging: OtherProcess
    """The member that receives data late, and then not at all; None: no member lags."""
    late_ns: int
    """Extra latency of data to the lagging member, before the cut."""
    leaves_after_ns: int
    """Time from the cut until the lagging member's caller leaves."""
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault; most last long enough for the standby to take over."""
        order = rng.sample(range(ground.peers), ground.peers)
        left = 1 if rng.random() < 0.6 else rng.randrange(1, ground.peers)
        if ground.peers < _MEMBERS_MIN:
            left = 1
        timing = ground.timing
        takeover_s = timing.dial_s + timing.recovery_s + timing.resume_s
        longest_ns = round(timing.dial_s * NS_PER_S / 16)
        lasts_s = takeover_s * rng.choice((0.2, 0.8, 1.2, 1.2, 2.5, 2.5))
        return cls(
            trigger=order[-1],
            phase=rng.choice((*DIVIDED_IN, LifePhase.DONE, LifePhase.DONE)),
            occurrence=rng.choice((0, 0, 1, 2, 4)),
            cut=tuple(sorted(order[left:])),
            lagging=order[0] if rng.random() < 0.7 else None,
            late_ns=min(rng.randint(1, 4) * ground.latency_ns, longest_ns),
            leaves_after_ns=rng.randint(1, 8) * ground.latency_ns,
            duration_ns=round(lasts_s * NS_PER_S),
        )

    def plant(self, stage: Stage) -> None:
        """Delay the data to the lagging member, and wait for the phase."""
        for route in self._routes_to_lagging(stage):
            route.extra_ns += self.late_ns
        PhaseWatch(
            stage,
            self.trigger,
            self.phase,
            self.occurrence,
            lambda seat: play(stage, self._strike(stage)),
        )

    def _strike(self, stage: Stage) -> Iterator[int]:
        if not stage.master.host.alive:
            return
        stage.struck(self, self.phase)
        stage.divided(self.duration_ns)
        for index in self.cut:
            name = stage.name(index)
            stage.excuses.silenced(name, MASTER_NAME, self.duration_ns)
            self._cut(stage, name)
            stage.network.stall(name, MASTER_NAME, self.duration_ns)
        if self.lagging is None:
            return
        for other in self._others(stage):
            stage.excuses.silenced(other, stage.name(self.lagging), self.duration_ns)
        routes = self._routes_to_lagging(stage)
        for route in routes:
            route.gate.shut(self.duration_ns)
        stage.at(stage.now_ns() + self.leaves_after_ns, self._leave, stage, self.lagging)
        yield self.duration_ns
        for route in routes:
            route.extra_ns -= self.late_ns

    def _leave(self, stage: Stage, index: int) -> None:
        seat = stage.seats[index]
        if seat.alive and not seat.is_over:
            seat.process.host.run(seat.workload.interrupt)

    def _others(self, stage: Stage) -> list[str]:
        """Return the hosts of the initial members, without the lagging one."""
        return [stage.name(i) for i in range(stage.scenario.peers) if i != self.lagging]

    def _routes_to_lagging(self, stage: Stage) -> list[HostRoute]:
        if self.lagging is None:
            return []
        lagging = stage.name(self.lagging)
        return [stage.network.route(other, lagging) for other in self._others(stage)]

    def _cut(self, stage: Stage, name: str) -> None:
        """Change the connections of the host ``name`` just before its data stops."""


@dataclass(frozen=True)
class MasterHalfOpen(Divide, kind="master_half_open"):
    """The members learn that their connections are lost; the first master does not."""

    def _cut(self, stage: Stage, name: str) -> None:
        for end in list(stage.network.ends):
            if (end.local.host, end.other.local.host) == (name, MASTER_NAME):
                stage.excuses.broken(end)
                end.forget()


@dataclass(frozen=True)
class MasterCutOff(Divide, kind="master_cut_off"):
    """Neither side learns of the cut, except by the silence of the other side."""
