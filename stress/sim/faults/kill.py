"""A process is killed, as by SIGKILL, in a phase of its life; perhaps another takes its place."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.protocol import messages as msg
from pccl.protocol.peer_events import (
    ControlMessage,
    JoinCall,
    PeerEvent,
    ReduceCall,
    ReduceDone,
    RoundCall,
)
from pccl.stress.sim.faults.base import Fault, Ground, LifePhase

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat, Stage

_POLLS_MAX = 400
"""How often to look whether a reduce has come to its gather (it may be aborted before)."""

_TARGETS = (
    LifePhase.CONNECTING,
    LifePhase.ROUND,
    LifePhase.REDUCE_SCATTER,
    LifePhase.GATHER,
    LifePhase.DONE,
    LifePhase.OTHER,
)


@dataclass(frozen=True)
class Kill(Fault):
    """Kill a process once it is in ``phase`` (OTHER: at ``delay_ns`` of the run)."""

    kind: ClassVar[str] = "kill"
    calm: ClassVar[bool] = True

    peer: int
    phase: LifePhase
    occurrence: int
    """Which time it enters the phase (from 0)."""
    delay_ns: int
    """How long after that."""
    back_after_ns: int | None = None
    """When a new process on the same machine joins; None: never."""

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        phase = rng.choice(_TARGETS)
        if phase is LifePhase.OTHER:
            delay_ns = ground.instant(rng)
        else:
            latency_ns = ground.latency_ns
            delay_ns = rng.choice((0, 1, rng.randrange(latency_ns), rng.randrange(latency_ns)))
        return cls(ground.peer(rng), phase, rng.choice((0, 0, 1, 3)), delay_ns)

    def plant(self, stage: Stage) -> None:
        """Schedule it, or wait for the phase."""
        if self.phase is LifePhase.OTHER:
            stage.at(self.delay_ns, self._strike, stage, stage.seats[self.peer])
        else:
            stage.watch(_Watch(self, stage).on_event)

    def strike(self, stage: Stage, seat: Seat, after_ns: int) -> None:
        """Kill it then."""
        stage.at(stage.now_ns() + after_ns, self._strike, stage, seat)

    def _strike(self, stage: Stage, seat: Seat) -> None:
        if stage.kill(seat) and self.back_after_ns is not None:
            stage.at(stage.now_ns() + self.back_after_ns, stage.restart, seat)

    @property
    def ends_ns(self) -> int:
        """A phase has no time."""
        return (self.back_after_ns or 0) + (self.delay_ns if self.phase is LifePhase.OTHER else 0)

    @property
    def starts(self) -> int:
        """The one that takes its place, if any."""
        return self.back_after_ns is not None

    @property
    def indices(self) -> tuple[int, ...]:
        """The victim."""
        return (self.peer,)


@dataclass(frozen=True)
class Restart(Kill):
    """Kill a process; a new one on the same machine joins after a while."""

    kind: ClassVar[str] = "restart"

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        kill = Kill.draw(rng, ground)
        back_after_ns = rng.choice((1, ground.latency_ns, ground.duration(rng)))
        return cls(kill.peer, kill.phase, kill.occurrence, kill.delay_ns, back_after_ns)


class _Watch:
    """Waits until its victim is in the phase."""

    def __init__(self, kill: Kill, stage: Stage) -> None:
        self._kill = kill
        self._stage = stage
        self._entered = -1
        self._armed = True

    def on_event(self, seat: Seat, event: PeerEvent) -> None:
        """A peer's machine has handled an event: is it time?"""
        kill = self._kill
        if not self._armed or seat.index != kill.peer:
            return
        entered = _phase_entered(event, seat)
        if entered is kill.phase:
            self._entered += 1
            if self._entered == kill.occurrence:
                self._armed = False
                kill.strike(self._stage, seat, kill.delay_ns)
        elif entered is LifePhase.REDUCE_SCATTER and kill.phase is LifePhase.GATHER:
            self._await_gather(seat, 0)

    def _await_gather(self, seat: Seat, polls: int) -> None:
        stage = self._stage
        if not self._armed or not seat.alive:
            return
        if seat.process.life_phase() is LifePhase.GATHER:
            self._armed = False
            self._kill.strike(stage, seat, self._kill.delay_ns % 1000)
        elif polls < _POLLS_MAX:
            wait_ns = max(1000, stage.scenario.latency_ns // 20)
            stage.at(stage.now_ns() + wait_ns, self._await_gather, seat, polls + 1)


def _phase_entered(event: PeerEvent, seat: Seat) -> LifePhase | None:
    match event:
        case JoinCall():
            return LifePhase.CONNECTING
        case RoundCall():
            return LifePhase.ROUND
        case ControlMessage(msg.OperationStarted()):
            return LifePhase.REDUCE_SCATTER
        case ReduceCall() if seat.process.life_phase() is LifePhase.REDUCE_SCATTER:
            return LifePhase.REDUCE_SCATTER  # its data has gone ahead
        case ReduceDone():
            return LifePhase.DONE
        case _:
            return None
