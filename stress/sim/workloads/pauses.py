"""How long a process that trains waits for other members, and what interrupts its work."""

from __future__ import annotations

from random import Random

from pccl.bindings.diloco.rounds import Pause
from pccl.protocol.types import NS_PER_S, Roster
from pccl.stress.sim.checkers.outcomes import Sleep
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess

_ALONE_MAX = 6
"""Number of pauses after which a process gives up the rest of its replica."""

_TURNS_OF_WAITING = 12
"""Approximate number of rounds between the busy part of a run and its end."""


class ReplicaPauses:
    """The pauses of one life of a process, while members or the rest of its replica are missing.

    Replica i consists of the processes i * shards, i * shards + 1, ..., one in each group.

    Args:
        parts: shared objects of the run.
        process: the process.
    """

    def __init__(self, parts: RunParts, process: PeerProcess) -> None:
        training, training_checkers = parts.scenario.training, parts.checkers.training
        assert training is not None
        assert training_checkers is not None
        self._shards = training.shards
        self._first_ns = 4 * parts.scenario.latency_ns
        self._checkers = training_checkers
        self._index = process.index
        self._count = 0
        """Number of pauses since the last round."""

    def are_whole(self, roster: Roster) -> bool:
        """Whether all replicas are complete, as ``JointCaller`` decides it."""
        return (
            self._shards == 1
            or roster.global_world_size == self._shards * roster.largest_group_size
        )

    def next_ns(self, pause: Pause) -> int:
        """Return the duration of the next pause.

        The first ones before replicas are complete are brief, because runs are.
        """
        asked_ns = round(pause.seconds * NS_PER_S)
        if self._shards == 1 or pause.why:
            return asked_ns
        self._count += 1
        return min(asked_ns, self._first_ns << min(self._count, 30))

    def end(self) -> None:
        """Record that all members were there."""
        self._count = 0

    @property
    def is_replica_gone(self) -> bool:
        """Whether another process of this replica has ended, and none has replaced it soon."""
        first = self._index - self._index % self._shards
        others = range(first, first + self._shards)
        return self._count > _ALONE_MAX and not all(map(self._checkers.is_running, others))


class Breaks:
    """Draws what interrupts the task that trains.

    Args:
        parts: shared objects of the run.
        name: name of the process.
        steps: inner steps that it has made before this life.
        sleep: waits in virtual time.

    Attributes:
        stops_at: number of inner steps at which it saves a checkpoint and leaves; 0: it does not.
    """

    def __init__(self, parts: RunParts, name: str, steps: int, sleep: Sleep) -> None:
        scenario, self._loop = parts.scenario, parts.loop
        assert scenario.training is not None
        self._scenario, self._training, self._sleep = scenario, scenario.training, sleep
        self._interrupts = Random(f"{scenario.seed}/{name}/{steps}/interrupts")
        self._naps = Random(f"{scenario.seed}/{name}/{steps}/naps")
        stops = Random(f"{scenario.seed}/{name}/{steps}/stops")
        self.stops_at = steps + stops.randint(1, 20)
        self.stops_at *= stops.random() < scenario.training.stops

    async def compute(self, step_ns: int) -> None:
        """Make an inner step of ``step_ns``; it takes longer after the busy part of the run."""
        scenario = self._scenario
        if self._loop.now_ns() >= scenario.stop_ns:
            turns = _TURNS_OF_WAITING * self._training.steps_between
            step_ns += (scenario.ends_ns - scenario.stop_ns) // turns
        await self._sleep(step_ns)

    def draw_interrupt_ns(self) -> int | None:
        """Return after how long Ctrl-C interrupts a wait; None: it does not."""
        if self._interrupts.random() >= self._training.interrupts:
            return None
        return round(self._interrupts.uniform(0, 4) * self._scenario.latency_ns)

    def is_nap_due(self) -> bool:
        """Draw whether the task naps before its next step; the joint calls go on."""
        return self._scenario.naps > 0 and self._naps.random() < self._scenario.naps

    async def nap(self) -> None:
        """Do nothing for a while, up to several times the longest grace."""
        await self._sleep(round(10 ** self._naps.uniform(-2, 1.6) * NS_PER_S))
