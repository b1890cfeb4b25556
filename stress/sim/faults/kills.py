"""Kills a process, as SIGKILL does, in a phase of its life; perhaps a new one takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Self

from pccl.stress.sim.faults.base import Drawn, Fault, Ground, LifePhase, Peer, one_of, play
from pccl.stress.sim.faults.phases import PhaseWatch

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat, Stage

_TARGETS = (
    LifePhase.CONNECTING,
    LifePhase.ROUND,
    LifePhase.REDUCE_SCATTER,
    LifePhase.GATHER,
    LifePhase.DONE,
    LifePhase.OTHER,
)


@dataclass(frozen=True)
class Kill(Fault, kind="kill", calm=True):
    """Kill a process once it is in ``phase`` (OTHER: at ``delay_ns`` of the run)."""

    peer: Peer
    phase: LifePhase
    occurrence: Annotated[int, one_of(0, 0, 1, 3)]
    """Number of the process's entry into the phase (from 0)."""
    delay_ns: int
    """Time from the entry into the phase to the kill; OTHER: from the start of the run."""
    back_after_ns: int | None = None
    """Time until a new process on the same machine joins; None: no new process."""

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault."""
        phase = rng.choice(_TARGETS)
        if phase is LifePhase.OTHER:
            delay_ns = ground.instant(rng)
        else:
            latency_ns = ground.latency_ns
            delay_ns = rng.choice((0, 1, rng.randrange(latency_ns), rng.randrange(latency_ns)))
        return super().draw(rng, ground, phase=phase, delay_ns=delay_ns)

    def plant(self, stage: Stage) -> None:
        """Schedule the kill, or wait for the phase."""
        if self.phase is LifePhase.OTHER:
            stage.at(self.delay_ns, self._strike, stage, stage.seats[self.peer])
        else:
            in_gather = self.phase is LifePhase.GATHER  # the watch sees a gather after its start
            wait_ns = self.delay_ns % 1000 if in_gather else self.delay_ns
            PhaseWatch(
                stage,
                self.peer,
                self.phase,
                self.occurrence,
                lambda seat: stage.at(stage.now_ns() + wait_ns, self._strike, stage, seat),
            )

    def _strike(self, stage: Stage, seat: Seat) -> None:
        play(stage, self._script(stage, seat))

    def _script(self, stage: Stage, seat: Seat) -> Iterator[int]:
        if stage.kill(seat) and self.back_after_ns is not None:
            yield self.back_after_ns
            stage.restart(seat)

    @property
    def ends_ns(self) -> int:
        """End of the fault in ns; the unknown time of a phase counts as 0."""
        return (self.back_after_ns or 0) + (self.delay_ns if self.phase is LifePhase.OTHER else 0)

    @property
    def starts(self) -> int:
        """1 if a new process takes the place of the victim, else 0."""
        return self.back_after_ns is not None


@dataclass(frozen=True)
class Restart(Kill, kind="restart"):
    """Kill a process; a new one on the same machine joins after a while."""

    back_after_ns: Annotated[
        int | None,
        Drawn(lambda ground, rng: rng.choice((1, ground.latency_ns, ground.duration(rng)))),
    ] = None
