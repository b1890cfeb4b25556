"""What every fault is: drawn from a seed, written into a scenario, planted into a run."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage

MS = NS_PER_S // 1000

MASTER = -1
"""The index of the master, where a fault names a process."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What a fault is drawn for."""

    peers: int
    stop_ns: int
    """When members begin to vote for the end."""
    latency_ns: int
    timing: Timing

    def instant(self, rng: Random) -> int:
        """Some time of the run."""
        return rng.randrange(self.stop_ns)

    def peer(self, rng: Random) -> int:
        """The index of some peer."""
        return rng.randrange(self.peers)

    def process(self, rng: Random) -> int:
        """The index of some process, often the master's."""
        return MASTER if rng.random() < 0.3 else self.peer(rng)

    def pair(self, rng: Random) -> tuple[int, int]:
        """The indices of two processes."""
        a, b = rng.sample(range(-1, self.peers), 2)
        return a, b

    def duration(self, rng: Random) -> int:
        """From far below every deadline to far above."""
        timing = self.timing
        return round(
            NS_PER_S
            * rng.choice(
                (
                    0.01,
                    rng.uniform(0.05, 1.0),
                    timing.heartbeat_s * rng.uniform(0.5, 3.0),
                    timing.deadline_s * rng.uniform(0.2, 0.8),
                    timing.deadline_s * rng.uniform(0.9, 1.2),
                    timing.deadline_s * rng.uniform(1.2, 3.0),
                    timing.progress_s * rng.uniform(1.0, 1.5),
                )
            )
        )


@dataclass(frozen=True)
class Fault(ABC):
    """One thing that goes wrong in a run."""

    kind: ClassVar[str]
    """Its name in scenarios, summaries and files."""
    calm: ClassVar[bool] = False
    """Whether it may cost nobody who lives its place."""
    keeps_majority: ClassVar[bool] = False
    """Whether a run with a standby must go on: no member is gone without a word."""
    needs_standby: ClassVar[bool] = False
    """Whether the run must have a second master."""

    @classmethod
    @abstractmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""

    @abstractmethod
    def plant(self, stage: Stage) -> None:
        """Schedule it; called when all processes are there, at time 0."""

    @property
    def ends_ns(self) -> int:
        """When what it does by itself is over (its consequences may last); 0: at once."""
        return 0

    @property
    def starts(self) -> int:
        """How many processes it starts at most."""
        return 0

    @property
    def indices(self) -> tuple[int, ...]:
        """The processes that it names (-1: the master)."""
        return ()


class LifePhase(enum.Enum):
    """What a process was doing when it was killed."""

    CONNECTING = "connecting"
    ROUND = "round"
    REDUCE_SCATTER = "reduce_scatter"
    GATHER = "gather"
    DONE = "done_before_commit"
    OTHER = "other"
    SYNC = "sync"
    FETCHING = "fetching"
    """Shared state."""
