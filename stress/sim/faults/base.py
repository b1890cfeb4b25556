"""The base classes of faults: a seed draws their fields, and a file can store them."""

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
"""Index of the master in faults that name a process."""

Script = Iterator[int] | None
"""The steps of a fault: it yields the ns to wait before the next step; None: no steps are left."""


@dataclass(frozen=True, slots=True)
class Ground:
    """The properties of a run that faults are drawn for."""

    peers: int
    stop_ns: int
    """When members begin to vote for the end."""
    latency_ns: int
    timing: Timing

    def instant(self, rng: Random) -> int:
        """Draw a time of the run, in ns."""
        return rng.randrange(self.stop_ns)

    def peer(self, rng: Random) -> int:
        """Draw the index of a peer."""
        return rng.randrange(self.peers)

    def process(self, rng: Random) -> int:
        """Draw the index of a process, often the master's."""
        return MASTER if rng.random() < 0.3 else self.peer(rng)

    def pair(self, rng: Random) -> tuple[int, int]:
        """Draw the indices of two processes."""
        a, b = rng.sample(range(-1, self.peers), 2)
        return a, b

    def duration(self, rng: Random) -> int:
        """Draw a duration in ns, from far below every deadline to far above."""
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
    """What a process is doing, for example when a fault kills it."""

    CONNECTING = "connecting"
    ROUND = "round"
    REDUCE_SCATTER = "reduce_scatter"
    GATHER = "gather"
    DONE = "done_before_commit"
    OTHER = "other"
    SYNC = "sync"
    FETCHING = "fetching"
    """It fetches shared state."""


# -- fields ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """A mark in the type of a field, which says how to draw the field.

    Attributes:
        how: draws the value; None: the class draws it together with other fields.
        names: whether the value holds indices of processes.
    """

    how: Callable[[Ground, Random], Any] | None = None
    names: bool = False


def one_of(*choices: Any) -> Drawn:
    """Draw one of ``choices``, which may contain a value several times."""
    return Drawn(lambda ground, rng: rng.choice(choices))


def below(limit: int) -> Drawn:
    """Draw an integer from 0 to ``limit - 1``."""
    return Drawn(lambda ground, rng: rng.randrange(limit))


def chance(probability: float) -> Drawn:
    """Draw True with this probability."""
    return Drawn(lambda ground, rng: rng.random() < probability)


Instant = Annotated[int, Drawn(Ground.instant)]
Duration = Annotated[int, Drawn(Ground.duration)]
Peer = Annotated[int, Drawn(Ground.peer, names=True)]
Process = Annotated[int, Drawn(Ground.process, names=True)]
OtherProcess = Annotated[int | None, Drawn(names=True)]
"""None: all other processes."""
Members = Annotated[tuple[int, ...], Drawn(names=True)]
Choice = Annotated[int, below(1 << 16)]
"""Index into the candidates, modulo their number."""
Seed = Annotated[int, below(1 << 32)]


@cache
def _drawn(fault: type[Fault]) -> Mapping[str, Drawn]:
    """Return the marks of the fields of a kind of fault, in order of the fields."""
    hints = get_type_hints(fault, include_extras=True)
    return {
        name: mark
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Drawn)
    }


@dataclass(frozen=True)
class Fault(ABC):
    """One fault in a run."""

    kind: ClassVar[str] = ""
    """Name in scenarios, summaries and files; empty for a base class."""
    calm: ClassVar[bool] = False
    """Whether this fault must not cost any living process its place."""
    keeps_majority: ClassVar[bool] = False
    """Whether a run with a standby must continue, because no member is lost without a goodbye."""
    needs_standby: ClassVar[bool] = False
    """Whether the run must have a second master."""

    def __init_subclass__(cls, kind: str = "", **promises: bool) -> None:
        cls.kind = kind
        for name, promised in promises.items():
            assert hasattr(cls, name), name
            setattr(cls, name, promised)

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault. ``given``: fields that are drawn already."""
        for name, mark in _drawn(cls).items():
            if name not in given and mark.how is not None:
                given[name] = mark.how(ground, rng)
        return cls(**given)

    @abstractmethod
    def plant(self, stage: Stage) -> None:
        """Schedule the fault. The runner calls this at time 0, when all processes exist."""

    @property
    def ends_ns(self) -> int:
        """End of the fault in ns, without its consequences; 0: the fault names no time."""
        times = ("when_ns", "duration_ns", "back_after_ns")
        return sum(getattr(self, name, None) or 0 for name in times)

    @property
    def starts(self) -> int:
        """Maximum number of processes that the fault starts."""
        return 0

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the processes that the fault names; -1: the master."""
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
    """A fault that strikes at a given time."""

    when_ns: Instant

    def plant(self, stage: Stage) -> None:
        """Schedule the fault."""
        stage.at(self.when_ns, lambda: play(stage, self.strike(stage)))

    @abstractmethod
    def strike(self, stage: Stage) -> Script:
        """Carry out the fault, and return its further steps, if any."""


def play(stage: Stage, script: Script) -> None:
    """Run the script of a fault until its next wait, and schedule the rest."""
    wait_ns = None if script is None else next(script, None)
    if wait_ns is not None:
        stage.at(stage.now_ns() + wait_ns, play, stage, script)
