"""Faults of processes: they stop, slow down, are interrupted, leave, or join."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Self

from pccl.protocol.types import NS_PER_S, OperationId, PeerId, RoundId
from pccl.stress.sim.faults.base import (
    MASTER,
    MS,
    Duration,
    Ground,
    Peer,
    Process,
    TimedFault,
    chance,
    one_of,
)

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat, Stage


@dataclass(frozen=True)
class Freeze(TimedFault, kind="freeze"):
    """Freezes a process, as SIGSTOP does; its kernel continues.

    The kernel stores arriving data, and acknowledges it up to the window. A call into C that holds
    the interpreter lock looks the same from outside.
    """

    peer: Process
    duration_ns: Duration

    def strike(self, stage: Stage) -> Iterator[int]:
        """Freeze the process, and thaw it after a while."""
        host = stage.host(self.peer)
        if host.alive:
            stage.struck(self)
            stage.excuses.paused(host.name, self.duration_ns)
            host.freeze()
            yield self.duration_ns
            host.thaw()


@dataclass(frozen=True)
class Nap(TimedFault, kind="nap", calm=True, keeps_majority=True):
    """The program of a process makes no joint call for a while; its I/O thread continues."""

    peer: Peer
    duration_ns: Duration

    def strike(self, stage: Stage) -> None:
        """Let the application rest."""
        seat = stage.seats[self.peer]
        if seat.alive and not seat.is_over:
            stage.struck(self)
            stage.excuses.dozed(seat.process.name, self.duration_ns)
            seat.workload.nap(self.duration_ns)


@dataclass(frozen=True)
class ClockPause(TimedFault, kind="clock_pause"):
    """A whole machine sleeps: no process runs, and no data reaches or leaves it."""

    peer: Process
    duration_ns: Duration
    clock_stands: Annotated[bool, chance(0.5)]
    """Whether the monotonic clock omits the sleep (Linux, macOS), or counts it (a paused VM)."""

    def strike(self, stage: Stage) -> Iterator[int]:
        """Put the machine to sleep, and wake it up after a while."""
        host = stage.host(self.peer)
        if not host.alive:
            return
        stage.struck(self)
        stage.excuses.paused(host.name, self.duration_ns)
        for other in stage.others(self.peer):
            stage.network.stall(host.name, other, self.duration_ns)
        clock = stage.clock(self.peer)
        host.freeze()
        yield self.duration_ns
        if self.clock_stands:
            clock.missed_ns += self.duration_ns
        host.thaw()


@dataclass(frozen=True)
class PullsRefused(TimedFault, kind="pulls_refused", calm=True, keeps_majority=True):
    """The system refuses a process to read other processes' memory, from now on.

    Nothing else changes: segments that others announce to it must come over the links.
    """

    peer: Peer

    def strike(self, stage: Stage) -> Iterator[int]:
        """Refuse all further pulls of the process, if it shares its machine."""
        host = stage.host(self.peer)
        if host.alive and host.memory is not None:
            stage.struck(self)
            host.memory.forbidden = True
        yield from ()


@dataclass(frozen=True)
class Slow(TimedFault, kind="slow", calm=True, keeps_majority=True):
    """A process gets little CPU: everything in it happens up to ``lag_ns`` late."""

    peer: Process
    lag_ns: int
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault; the longest lag is well below every deadline, even over several steps."""
        timing = ground.timing
        longest_ns = round(min(timing.deadline_s / 4, timing.recovery_s / 10) * 1000) * MS
        lag_ns = rng.choice((MS, 20 * MS, longest_ns // 8, longest_ns))
        when_ns, peer = ground.instant(rng), ground.process(rng)
        return cls(when_ns, peer, lag_ns, rng.randint(5, 25) * max(lag_ns, MS))

    def strike(self, stage: Stage) -> Iterator[int]:
        """Slow the process down for a while."""
        host = stage.host(self.peer)
        if host.alive:
            stage.struck(self)
            stage.excuses.slowed(host.name, self.lag_ns)
            stage.excuses.dozed(host.name, self.duration_ns)
            host.run_queue.set_lag(self.lag_ns)
            yield self.duration_ns
            host.run_queue.set_lag(0)


@dataclass(frozen=True)
class Load(TimedFault, kind="load"):
    """A process computes without a pause and does everything up to ``lag_ns`` late.

    Its ticks are late only because of the load, so it must not extend its deadlines. If the busy
    process is the master, it must remove a stopped member within the deadline and some slack.
    """

    peer: Process
    victim: Peer
    """The member that is stopped during the load."""
    lag_ns: int
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault that lasts several deadlines."""
        timing = ground.timing
        lag_ns = round(timing.tick_s * rng.choice((1, 2, 4)) * NS_PER_S)
        duration_ns = round(timing.deadline_s * rng.uniform(2.0, 4.0) * NS_PER_S)
        busy = MASTER if rng.random() < 0.7 else ground.peer(rng)
        return super().draw(rng, ground, peer=busy, lag_ns=lag_ns, duration_ns=duration_ns)

    def strike(self, stage: Stage) -> Iterator[int]:
        """Load one process and stop the other, for a while."""
        host, victim = stage.host(self.peer), stage.host(self.victim)
        if not host.alive:
            return
        stage.struck(self)
        stage.excuses.slowed(host.name, self.lag_ns)
        host.run_queue.set_lag(self.lag_ns, computes=True)
        stops = victim.alive and victim is not host
        if stops:
            stage.excuses.paused(victim.name, self.duration_ns)
            victim.freeze()
            if self.peer == MASTER:
                seat = stage.seats[self.victim]
                self._watch(stage, seat, seat.process.peer, None, frozenset())
        yield self.duration_ns
        host.run_queue.set_lag(0)
        if stops:
            victim.thaw()

    def _watch(
        self,
        stage: Stage,
        seat: Seat,
        peer: PeerId,
        since_ns: int | None,
        earlier: frozenset[RoundId | OperationId],
    ) -> None:
        """Check at every tick that the busy master removes the victim in time.

        Args:
            stage: the stage of the run.
            seat: seat of the victim.
            peer: id of the victim when it was stopped.
            since_ns: time since which members wait for the silent victim; None: no member waits.
            earlier: the rounds and operations that were undecided at the tick before. If all have
                ended meanwhile, members may have waited for nothing for a moment.
        """
        timing, now_ns, master = stage.scenario.timing, stage.now_ns(), stage.master
        machine, known = master.server.machine, master.server.machine.membership.peers.get(peer)
        plain = master.host.alive and not master.host.run_queue.is_starved
        undecided = frozenset(wait.subject for wait in machine.waits.all())
        if plain and not machine.recovering and known is not None and peer in machine.awaited():
            if undecided.isdisjoint(earlier):
                since_ns = now_ns
            heard_ns = master.heard_ns.get(known.connection or 0)
            since_ns = max(since_ns or now_ns, heard_ns) if heard_ns is not None else None
        else:
            if since_ns is not None and known is None and plain:
                stage.checkers.done["removed under load"] += 1
            since_ns = None
        slack_s = 2.0 + 4 * timing.tick_s + 4 * self.lag_ns / NS_PER_S
        patience_ns = round((timing.deadline_s + slack_s) * NS_PER_S)
        if since_ns is not None and now_ns - since_ns > patience_ns:
            stage.checkers.not_removed(peer, (now_ns - since_ns) / NS_PER_S)
        when_ns = now_ns + round(timing.tick_s * NS_PER_S)
        if when_ns < self.ends_ns and seat.alive:
            stage.at(when_ns, self._watch, stage, seat, peer, since_ns, undecided)


@dataclass(frozen=True)
class Joiners(TimedFault, kind="joiners", calm=True, keeps_majority=True):
    """``count`` new processes start at the same time."""

    count: Annotated[int, one_of(2, 3, 4, 8)]

    def strike(self, stage: Stage) -> None:
        """Start the processes."""
        stage.struck(self)
        for _ in range(self.count):
            stage.join()

    @property
    def starts(self) -> int:
        """Number of processes that the fault starts."""
        return self.count


@dataclass(frozen=True)
class CallerFault(TimedFault):
    """A fault that the caller in a process causes."""

    peer: Peer

    def strike(self, stage: Stage) -> None:
        """Let the caller act, unless its application has ended."""
        seat = stage.seats[self.peer]
        if seat.alive and not seat.is_over:
            stage.struck(self)
            seat.process.host.run(self._deed(seat))

    @abstractmethod
    def _deed(self, seat: Seat) -> Callable[[], None]:
        """Return the action of the caller."""


@dataclass(frozen=True)
class Interrupt(CallerFault, kind="interrupt", calm=True, keeps_majority=True):
    """Cancel the open calls of a process, as Ctrl-C does; the application repeats them."""

    def _deed(self, seat: Seat) -> Callable[[], None]:
        return seat.workload.interrupt


@dataclass(frozen=True)
class Leave(CallerFault, kind="leave", calm=True):
    """Call ``close()`` in a process, whatever calls are open."""

    def _deed(self, seat: Seat) -> Callable[[], None]:
        return seat.workload.leave
