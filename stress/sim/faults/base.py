"""What every fault is: fields that are drawn from a seed and written into a file, and a script."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_type_hints

from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage

MS = NS_PER_S // 1000

MASTER = -1
"""The index of the master, where a fault names a process."""

Script = Iterator[int] | None
"""What a fault does: it yields how long it waits before it goes on; None: it has done all."""


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


# -- fields ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the type of a field says besides.

    Attributes:
        how: draws its value; None: the class draws it together with others.
        names: whether it names processes, by their indices.
    """

    how: Callable[[Ground, Random], Any] | None = None
    names: bool = False


def one_of(*choices: Any) -> Drawn:
    """Each of these as often as it is given."""
    return Drawn(lambda ground, rng: rng.choice(choices))


def below(limit: int) -> Drawn:
    """An integer from 0 up to ``limit``, without it."""
    return Drawn(lambda ground, rng: rng.randrange(limit))


def chance(probability: float) -> Drawn:
    """True so often."""
    return Drawn(lambda ground, rng: rng.random() < probability)


Instant = Annotated[int, Drawn(Ground.instant)]
Duration = Annotated[int, Drawn(Ground.duration)]
Peer = Annotated[int, Drawn(Ground.peer, names=True)]
Process = Annotated[int, Drawn(Ground.process, names=True)]
OtherProcess = Annotated[int | None, Drawn(names=True)]
"""None: everybody else."""
Members = Annotated[tuple[int, ...], Drawn(names=True)]
Choice = Annotated[int, below(1 << 16)]
"""Which of those that there are, modulo their number."""
Seed = Annotated[int, below(1 << 32)]


@cache
def _drawn(fault: type[Fault]) -> Mapping[str, Drawn]:
    """The fields of a kind of fault that say how they are drawn, in order."""
    hints = get_type_hints(fault, include_extras=True)
    return {
        name: mark
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Drawn)
    }


@dataclass(frozen=True)
class Fault(ABC):
    """One thing that goes wrong in a run."""

    kind: ClassVar[str] = ""
    """Its name in scenarios, summaries and files; empty: it is only a base of others."""
    calm: ClassVar[bool] = False
    """Whether it may cost nobody who lives its place."""
    keeps_majority: ClassVar[bool] = False
    """Whether a run with a standby must go on: no member is gone without a word."""
    needs_standby: ClassVar[bool] = False
    """Whether the run must have a second master."""

    def __init_subclass__(cls, kind: str = "", **promises: bool) -> None:
        cls.kind = kind
        for name, promised in promises.items():
            assert hasattr(cls, name), name
            setattr(cls, name, promised)

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw one; ``given``: what of its fields is drawn already."""
        for name, mark in _drawn(cls).items():
            if name not in given and mark.how is not None:
                given[name] = mark.how(ground, rng)
        return cls(**given)

    @abstractmethod
    def plant(self, stage: Stage) -> None:
        """Schedule it; called when all processes are there, at time 0."""

    @property
    def ends_ns(self) -> int:
        """When what it does by itself is over (its consequences may last); 0: at once."""
        times = ("when_ns", "duration_ns", "back_after_ns")
        return sum(getattr(self, name, None) or 0 for name in times)

    @property
    def starts(self) -> int:
        """How many processes it starts at most."""
        return 0

    @property
    def indices(self) -> tuple[int, ...]:
        """The processes that it names (-1: the master)."""
        found: list[int] = []
        for name in (name for name, mark in _drawn(type(self)).items() if mark.names):
            named: int | tuple[int, ...] | None = getattr(self, name)
            if isinstance(named, tuple):
                found += named
            elif named is not None:
                found.append(named)
        return tuple(found)


@dataclass(frozen=True)
class TimedFault(Fault):
    """One that strikes at a time."""

    when_ns: Instant

    def plant(self, stage: Stage) -> None:
        """Schedule it."""
        stage.at(self.when_ns, lambda: play(stage, self.strike(stage)))

    @abstractmethod
    def strike(self, stage: Stage) -> Script:
        """It is time."""


def play(stage: Stage, script: Script) -> None:
    """Go on with the script of a fault, each time that it has waited for."""
    wait_ns = None if script is None else next(script, None)
    if wait_ns is not None:
        stage.at(stage.now_ns() + wait_ns, play, stage, script)
