"""Faults that strike when an operation goes on without some members."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Self

from pccl.machines.peer.events import ControlMessage, PeerEvent
from pccl.protocol.messages import OperationNarrowed
from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.faults.base import Fault, Ground, Script, one_of, play

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat, Stage


@dataclass(frozen=True)
class NarrowingFault(Fault):
    """A fault that strikes when the master has named the participants of an operation."""

    occurrence: Annotated[int, one_of(0, 1, 2, 4, 8, 16)]
    """Number of the message about participants at which it strikes, among all members (from 0)."""
    delay_ns: int
    """Time from the arrival of this message to the fault."""

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault; within three latencies, each participant has posted and started."""
        delay_ns = rng.choice((0, 1, rng.randrange(3 * ground.latency_ns)))
        return super().draw(rng, ground, delay_ns=delay_ns)

    def plant(self, stage: Stage) -> None:
        """Wait for the message."""
        left = self.occurrence

        def look(seat: Seat, event: PeerEvent) -> None:
            nonlocal left
            if isinstance(event, ControlMessage) and isinstance(event.message, OperationNarrowed):
                left -= 1
                if left == -1:
                    when_ns = stage.now_ns() + self.delay_ns
                    stage.at(when_ns, lambda: play(stage, self.strike(stage, seat)))

        stage.watch(look)

    @abstractmethod
    def strike(self, stage: Stage, participant: Seat) -> Script:
        """Carry out the fault; ``participant`` got the message."""

    @property
    def ends_ns(self) -> int:
        """0, because the time is not known in advance."""
        return 0


@dataclass(frozen=True)
class NarrowedKill(NarrowingFault, kind="narrowed_kill", calm=True):
    """A participant is killed."""

    def strike(self, stage: Stage, participant: Seat) -> None:
        """Kill it."""
        if stage.kill(participant):
            stage.struck(self)


@dataclass(frozen=True)
class NarrowedMaster(NarrowingFault, kind="narrowed_master", calm=True):
    """The master is killed; a new one starts at its address."""

    back_after_ns: Annotated[int, one_of(1, NS_PER_S // 2)]

    def strike(self, stage: Stage, participant: Seat) -> Iterator[int]:
        """Kill the master, and start a new one after a while."""
        if stage.kill_master():
            stage.struck(self)
            yield self.back_after_ns
            stage.restart_master(self.back_after_ns, blank=False)
