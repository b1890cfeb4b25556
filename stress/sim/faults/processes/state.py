"""What goes wrong with shared state: liars, and what strikes while it is being fetched."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.machines.peer.events import ControlMessage, PeerEvent
from pccl.protocol.frame import FrameKind
from pccl.protocol.messages import SyncStarted
from pccl.protocol.types import NS_PER_S, OperationId
from pccl.stress.sim.faults.base import Fault, Ground, LifePhase
from pccl.stress.sim.faults.timed import TimedFault
from pccl.stress.sim.links import Liar

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat, Stage

_POLLS_MAX = 400
"""How often to look whether a member has begun to fetch."""


@dataclass(frozen=True)
class Lies(TimedFault):
    """For a while a process sends wrong pieces, or wrong maps, of shared state."""

    kind: ClassVar[str] = "lies"
    calm: ClassVar[bool] = True
    keeps_majority: ClassVar[bool] = True

    peer: int
    maps: bool
    probability: float
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one; it ends before its victims are given up, if it is their only source."""
        longest_ns = round(min(ground.timing.progress_s, ground.timing.hold_s) * NS_PER_S / 4)
        return cls(
            rng.choice((0, ground.instant(rng))),
            ground.peer(rng),
            rng.random() < 0.3,
            rng.choice((0.1, 0.5, 1.0)),
            rng.choice((ground.stop_ns, rng.randrange(longest_ns), longest_ns)),
        )

    def _strike(self, stage: Stage) -> None:
        stage.struck(self)
        stage.checkers.done["liar"] += 1
        kind = FrameKind.MAP if self.maps else FrameKind.PIECE
        rng = Random(f"{stage.scenario.seed}/lies of {self.peer}/{self.when_ns}")
        stage.seats[self.peer].lips.liar = Liar(rng, kind, self.probability)
        stage.at(self.ends_ns, self._end, stage)

    def _end(self, stage: Stage) -> None:
        lips = stage.seats[self.peer].lips
        if lips.liar is not None:
            stage.checkers.done["lie"] += lips.liar.lies
        lips.liar = None

    @property
    def ends_ns(self) -> int:
        """When it tells the truth again."""
        return self.when_ns + self.duration_ns

    @property
    def indices(self) -> tuple[int, ...]:
        """The liar."""
        return (self.peer,)


@dataclass(frozen=True)
class InFetch(Fault):
    """Strikes once a process fetches shared state.

    Attributes:
        occurrence: the how many-th time that anybody begins to (from 0).
        delay_ns: how long after that.
        choice: whom it concerns.
    """

    occurrence: int
    delay_ns: int
    choice: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        latency_ns = ground.latency_ns
        delay_ns = rng.choice((0, 1, rng.randrange(latency_ns), rng.randrange(4 * latency_ns)))
        return cls(rng.choice((0, 0, 1, 3, 6)), delay_ns, rng.randrange(1 << 16))

    def plant(self, stage: Stage) -> None:
        """Wait for that."""
        stage.watch(_FetchWatch(self, stage).on_event)

    @abstractmethod
    def strike(self, stage: Stage, fetcher: Seat) -> None:
        """It is time."""

    def source(self, stage: Stage, fetcher: Seat) -> Seat | None:
        """Somebody who gives to ``fetcher``."""
        peers = {
            view.peer
            for session in fetcher.process.engine.exchange.sessions.values()
            if session.fetch is not None
            for view in session.fetch.sources()
        }
        run = fetcher.process.run
        seats = [
            seat
            for seat in stage.seats
            if seat.alive and seat.process.run == run and seat.process.peer in peers
        ]
        return seats[self.choice % len(seats)] if seats else None


class _FetchWatch:
    """Waits until anybody fetches: when that begins, its machine hears nothing."""

    def __init__(self, fault: InFetch, stage: Stage) -> None:
        self._fault = fault
        self._stage = stage
        self._left = fault.occurrence

    def on_event(self, seat: Seat, event: PeerEvent) -> None:
        """A peer's machine has handled an event: will it fetch?"""
        match event:
            case ControlMessage(SyncStarted(operation)) if self._left >= 0:
                self._await_fetch(seat, operation, 0)
            case _:
                pass

    def _await_fetch(self, seat: Seat, operation: OperationId, polls: int) -> None:
        stage = self._stage
        session = seat.process.engine.exchange.sessions.get(operation)
        if self._left < 0 or not seat.alive or session is None:
            return
        if seat.process.life_phase() is LifePhase.FETCHING:
            self._left -= 1
            if self._left < 0:
                stage.at(stage.now_ns() + self._fault.delay_ns, self._fault.strike, stage, seat)
        elif polls < _POLLS_MAX:
            wait_ns = max(1000, stage.scenario.latency_ns // 20)
            stage.at(stage.now_ns() + wait_ns, self._await_fetch, seat, operation, polls + 1)


@dataclass(frozen=True)
class FetchKill(InFetch):
    """A source is killed, or who fetches."""

    kind: ClassVar[str] = "fetch_kill"
    calm: ClassVar[bool] = True

    def strike(self, stage: Stage, fetcher: Seat) -> None:
        """Kill it."""
        victim = fetcher if self.choice % 3 == 0 else self.source(stage, fetcher)
        if victim is not None and stage.kill(victim):
            stage.struck(self)


@dataclass(frozen=True)
class FetchStall(InFetch):
    """Nothing moves between a source and who fetches for a while."""

    kind: ClassVar[str] = "fetch_stall"

    duration_ns: int = 0

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one."""
        drawn = super().draw(rng, ground)
        return cls(drawn.occurrence, drawn.delay_ns, drawn.choice, ground.duration(rng))

    def strike(self, stage: Stage, fetcher: Seat) -> None:
        """Hold it up."""
        source = self.source(stage, fetcher)
        if source is not None:
            stage.struck(self)
            a, b = fetcher.process.name, source.process.name
            stage.excuses.silenced(a, b, self.duration_ns)
            stage.network.stall(a, b, self.duration_ns, one_way=False)


@dataclass(frozen=True)
class FetchInterrupt(InFetch):
    """The call of who fetches is cancelled, or that of a source."""

    kind: ClassVar[str] = "fetch_interrupt"
    calm: ClassVar[bool] = True
    keeps_majority: ClassVar[bool] = True

    def strike(self, stage: Stage, fetcher: Seat) -> None:
        """Cancel it."""
        victim = fetcher if self.choice % 2 else self.source(stage, fetcher)
        if victim is not None and victim.alive and not victim.is_over:
            stage.struck(self)
            victim.process.host.run(victim.workload.interrupt)


@dataclass(frozen=True)
class FetchMaster(InFetch):
    """The master is killed; another one starts on its address."""

    kind: ClassVar[str] = "fetch_master"
    calm: ClassVar[bool] = True

    def strike(self, stage: Stage, fetcher: Seat) -> None:
        """Kill it."""
        if stage.kill_master():
            stage.struck(self)
            back_ns = 1 if self.choice % 2 else NS_PER_S // 2
            stage.at(stage.now_ns() + back_ns, lambda: stage.restart_master(blank=False))
