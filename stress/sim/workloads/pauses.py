"""How long a process that trains waits for other members, and what interrupts its work."""

from __future__ import annotations

from random import Random

from pccl.bindings.diloco.pipeline import Pipeline
from pccl.bindings.diloco.rounds import Members, Pause
from pccl.protocol.types import NS_PER_S
from pccl.runtime.requests import RunRequest
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
        self._process = process
        self._index = process.index
        self._count = 0
        """Number of pauses since the last round."""

    def members(self) -> Members:
        """Return the members, and whether all replicas are complete, as ``ReplicaCalls`` does."""
        roster = self._process.engine.roster
        assert roster is not None
        ids = tuple(member.peer for member in roster.members)
        complete = self._shards * roster.largest_group_size
        is_whole = self._shards == 1 or roster.global_world_size == complete
        return Members(self._process.peer, ids, is_whole)

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
        drains_at: number of inner steps in which it gets notice to leave; 0: it does not.
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
        self._drains = Random(f"{scenario.seed}/{name}/{steps}/drains")
        self.drains_at = steps + self._drains.randint(1, 20)
        self.drains_at *= self._drains.random() < scenario.training.drains

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

    def may_end(self, pipeline: Pipeline) -> bool:
        """Whether time is up, and the last fragment's round has just begun: no work is lost."""
        position = pipeline.position()
        is_end = not position["since"] and position["number"] % self._training.fragments == 0
        return is_end and self._loop.now_ns() >= self._scenario.ends_ns

    def draw_notice_ns(self, step_ns: int) -> int:
        """Return how long after the end of an inner step a notice comes."""
        return round(self._drains.uniform(0, 2) * step_ns)

    def is_nap_due(self) -> bool:
        """Draw whether the task naps before its next step; the joint calls go on."""
        return self._scenario.naps > 0 and self._naps.random() < self._scenario.naps

    async def nap(self) -> None:
        """Do nothing for a while, up to several times the longest grace."""
        await self._sleep(round(10 ** self._naps.uniform(-2, 1.6) * NS_PER_S))


class GivenNotice:
    """The notice to one life of a process, after which it hands over its work and leaves.

    Args:
        parts: shared objects of the run.
        process: the process.
        breaks: draws when the notice comes.
    """

    def __init__(self, parts: RunParts, process: PeerProcess, breaks: Breaks) -> None:
        assert parts.checkers.departures is not None
        self._departures = parts.checkers.departures
        self._process = process
        self._breaks = breaks
        self._loop = parts.loop
        self._is_given = False

    def stepped(self, steps: int, step_ns: int) -> None:
        """Let the notice come soon, if the next inner step is the last one."""
        if steps + 1 == self._breaks.drains_at:
            clock = self._process.clock
            at_ns = clock.now_ns() + self._breaks.draw_notice_ns(step_ns)
            clock.call_at_ns(at_ns, self._process.engine.leave_soon)

    def give(self) -> None:
        """Let members be notified, as SIGTERM does."""
        self._is_given = True
        self._process.engine.leave_soon()

    async def round(self, asked: RunRequest) -> None:
        """Make an ``update_topology``."""
        if self._is_given:
            self._departures.waits(self._process, self._loop.now_ns())
        try:
            await self._process.engine.round(asked)
        finally:
            self._departures.goes_on(self._process)

    def awaits(self, *, is_idle: bool) -> bool:
        """Whether another process that leaves waits for this one; no quorum does."""
        is_awaited = self._process.engine.machine.is_awaited
        if is_idle:
            now_ns = self._loop.now_ns()
            self._departures.stepped(self._process, now_ns, is_awaited=is_awaited)
        return is_idle and is_awaited
