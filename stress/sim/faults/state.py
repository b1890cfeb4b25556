"""Faults of shared state: liars, and faults that strike during a fetch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Self

from pccl.protocol.frame import FrameKind
from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.faults.base import (
    Choice,
    Drawn,
    Duration,
    Fault,
    Ground,
    LifePhase,
    Peer,
    Script,
    TimedFault,
    chance,
    one_of,
    play,
)
from pccl.stress.sim.faults.phases import PhaseWatch
from pccl.stress.sim.links import Liar

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat, Stage


def _begins_ns(ground: Ground, rng: Random) -> int:
    return rng.choice((0, ground.instant(rng)))


def _lasts_ns(ground: Ground, rng: Random) -> int:
    """Draw a duration in ns; the fault ends before victims without another source are evicted."""
    longest_ns = round(min(ground.timing.progress_s, ground.timing.hold_s) * NS_PER_S / 4)
    return rng.choice((ground.stop_ns, rng.randrange(longest_ns), longest_ns))


@dataclass(frozen=True)
class Lies(TimedFault, kind="lies", calm=True, keeps_majority=True):
    """For a while a process sends wrong pieces, or wrong maps, of shared state."""

    when_ns: Annotated[int, Drawn(_begins_ns)]
    peer: Peer
    maps: Annotated[bool, chance(0.3)]
    probability: Annotated[float, one_of(0.1, 0.5, 1.0)]
    duration_ns: Annotated[int, Drawn(_lasts_ns)]

    def strike(self, stage: Stage) -> Iterator[int]:
        """Start to corrupt frames, and stop after a while."""
        stage.struck(self)
        stage.checkers.done["liar"] += 1
        kind = FrameKind.MAP if self.maps else FrameKind.PIECE
        rng = Random(f"{stage.scenario.seed}/lies of {self.peer}/{self.when_ns}")
        stage.seats[self.peer].lips.liar = Liar(rng, kind, self.probability)
        yield self.duration_ns
        lips = stage.seats[self.peer].lips
        if lips.liar is not None:
            stage.checkers.done["lie"] += lips.liar.lies
        lips.liar = None


@dataclass(frozen=True)
class FetchFault(Fault):
    """A fault that strikes when a process fetches shared state."""

    occurrence: Annotated[int, one_of(0, 0, 1, 3, 6)]
    """Number of the fetch at which the fault strikes, among all fetches of the run (from 0)."""
    delay_ns: int
    """Time from the start of this fetch to the fault."""
    choice: Choice
    """Chooses the victim."""

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault."""
        latency_ns = ground.latency_ns
        delay_ns = rng.choice((0, 1, rng.randrange(latency_ns), rng.randrange(4 * latency_ns)))
        return super().draw(rng, ground, delay_ns=delay_ns)

    def plant(self, stage: Stage) -> None:
        """Wait for the fetch."""

        def begun(seat: Seat) -> None:
            stage.at(stage.now_ns() + self.delay_ns, lambda: play(stage, self.strike(stage, seat)))

        PhaseWatch(stage, None, LifePhase.FETCHING, self.occurrence, begun)

    @abstractmethod
    def strike(self, stage: Stage, fetcher: Seat) -> Script:
        """Carry out the fault; the process of ``fetcher`` fetches shared state."""

    @property
    def ends_ns(self) -> int:
        """0, because the time of a phase is not known in advance."""
        return 0

    def source(self, stage: Stage, fetcher: Seat) -> Seat | None:
        """Return a living seat that sends shared state to ``fetcher``; None if there is none."""
        peers = {
            view.peer
            for session in fetcher.process.engine.exchange.sessions.values()
            if session.download.pieces is not None
            for view in session.download.pieces.sources()
        }
        run = fetcher.process.run
        seats = [
            seat
            for seat in stage.seats
            if seat.alive and seat.process.run == run and seat.process.peer in peers
        ]
        return seats[self.choice % len(seats)] if seats else None


@dataclass(frozen=True)
class FetchKill(FetchFault, kind="fetch_kill", calm=True):
    """A source or the fetching process is killed."""

    def strike(self, stage: Stage, fetcher: Seat) -> None:
        """Kill the victim."""
        victim = fetcher if self.choice % 3 == 0 else self.source(stage, fetcher)
        if victim is not None and stage.kill(victim):
            stage.struck(self)


@dataclass(frozen=True)
class FetchStall(FetchFault, kind="fetch_stall"):
    """No data moves between a source and the fetching process for a while."""

    duration_ns: Duration

    def strike(self, stage: Stage, fetcher: Seat) -> None:
        """Stop the data."""
        source = self.source(stage, fetcher)
        if source is not None:
            stage.struck(self)
            a, b = fetcher.process.name, source.process.name
            stage.excuses.silenced(a, b, self.duration_ns)
            stage.network.stall(a, b, self.duration_ns, one_way=False)


@dataclass(frozen=True)
class FetchInterrupt(FetchFault, kind="fetch_interrupt", calm=True, keeps_majority=True):
    """The call of the fetching process, or of a source, is cancelled."""

    def strike(self, stage: Stage, fetcher: Seat) -> None:
        """Cancel the call."""
        victim = fetcher if self.choice % 2 else self.source(stage, fetcher)
        if victim is not None and victim.alive and not victim.is_over:
            stage.struck(self)
            victim.process.host.run(victim.workload.interrupt)


@dataclass(frozen=True)
class FetchMaster(FetchFault, kind="fetch_master", calm=True):
    """The master is killed; a new one starts at its address."""

    def strike(self, stage: Stage, fetcher: Seat) -> Iterator[int]:
        """Kill the master, and start a new one after a while."""
        if stage.kill_master():
            stage.struck(self)
            yield (away_ns := 1 if self.choice % 2 else NS_PER_S // 2)
            stage.restart_master(away_ns, blank=False)
