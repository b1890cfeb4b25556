"""A process is busy with what others send it, and a member that the rest waits for is stopped."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.protocol.types import NS_PER_S, PeerId
from pccl.stress.sim.faults.base import MASTER, Ground
from pccl.stress.sim.faults.timed import TimedFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat, Stage


@dataclass(frozen=True)
class Load(TimedFault):
    """The process computes without a pause and does everything up to ``lag_ns`` late.

    Its ticks are late for that reason alone, so the load must not put off what they judge. If it
    is the master, the stopped member must be removed within the deadline and some slack.
    """

    kind: ClassVar[str] = "load"

    peer: int
    victim: int
    """The member that is stopped meanwhile."""
    lag_ns: int
    duration_ns: int

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one; it lasts several deadlines."""
        timing = ground.timing
        lag_ns = round(timing.tick_s * rng.choice((1, 2, 4)) * NS_PER_S)
        duration_ns = round(timing.deadline_s * rng.uniform(2.0, 4.0) * NS_PER_S)
        busy = MASTER if rng.random() < 0.7 else ground.peer(rng)
        return cls(ground.instant(rng), busy, ground.peer(rng), lag_ns, duration_ns)

    def _strike(self, stage: Stage) -> None:
        host, victim = stage.host(self.peer), stage.host(self.victim)
        if not host.alive:
            return
        stage.struck(self)
        stage.excuses.slowed(host.name, self.lag_ns)
        host.run_queue.set_lag(self.lag_ns, computes=True)
        stage.at(self.ends_ns, host.run_queue.set_lag, 0)
        if victim.alive and victim is not host:
            stage.excuses.paused(victim.name, self.duration_ns)
            victim.freeze()
            stage.at(self.ends_ns, victim.thaw)
            if self.peer == MASTER:
                seat = stage.seats[self.victim]
                self._watch(stage, seat, seat.process.peer, None)

    def _watch(self, stage: Stage, seat: Seat, peer: PeerId, since_ns: int | None) -> None:
        """See whether the master keeps its word.

        Args:
            stage: where it happens.
            seat: the victim's.
            peer: its id when it was stopped.
            since_ns: since when it is awaited, and nothing but its silence keeps it; None: it is
                not.
        """
        timing, now_ns, master = stage.scenario.timing, stage.now_ns(), stage.master
        machine, known = master.server.machine, master.server.machine.membership.peers.get(peer)
        plain = master.host.alive and not master.host.run_queue.is_starved
        if plain and not machine.recovering and known is not None and peer in machine.awaited():
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
            stage.at(when_ns, self._watch, stage, seat, peer, since_ns)

    @property
    def ends_ns(self) -> int:
        """When all is as before."""
        return self.when_ns + self.duration_ns

    @property
    def indices(self) -> tuple[int, ...]:
        """The busy one and the victim."""
        return (self.peer, self.victim)
