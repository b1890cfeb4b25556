"""What faults that strike at a time have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Self

from pccl.stress.sim.faults.base import Fault, Ground

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat, Stage
    from pccl.transports.sim.connection import SimConnection


@dataclass(frozen=True)
class TimedFault(Fault):
    """One that strikes at a time."""

    when_ns: int

    def plant(self, stage: Stage) -> None:
        """Schedule it."""
        stage.at(self.when_ns, self._strike, stage)

    @abstractmethod
    def _strike(self, stage: Stage) -> None:
        """It is time."""

    @property
    def ends_ns(self) -> int:
        """When it strikes; those that last override it."""
        return self.when_ns


@dataclass(frozen=True)
class ConnectionFault(TimedFault):
    """One that befalls the ``choice``-th (modulo their number) connection of the run."""

    choice: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        return cls(ground.instant(rng), rng.randrange(1 << 16))

    def _strike(self, stage: Stage) -> None:
        end = stage.choose(self._ends(stage), self.choice)
        if end is not None:
            stage.struck(self)
            self._befall(stage, end)

    def _ends(self, stage: Stage) -> Iterable[SimConnection]:
        """The connections to choose from, by one or both of their ends."""
        return stage.network.ends

    @abstractmethod
    def _befall(self, stage: Stage, end: SimConnection) -> None:
        """Do it to the connection of which ``end`` is one."""


@dataclass(frozen=True)
class CallerFault(TimedFault):
    """One that the caller in a process brings about."""

    peer: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        return cls(ground.instant(rng), ground.peer(rng))

    def _strike(self, stage: Stage) -> None:
        seat = stage.seats[self.peer]
        if seat.alive and not seat.is_over:
            stage.struck(self)
            seat.process.host.run(self._deed(seat))

    @abstractmethod
    def _deed(self, seat: Seat) -> Callable[[], None]:
        """What the caller does."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Whose caller."""
        return (self.peer,)
