"""What interrupts the task that trains: naps, Ctrl-C in a wait, and a stop with a checkpoint."""

from __future__ import annotations

from random import Random

from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.checkers.outcomes import Sleep
from pccl.stress.sim.parts import RunParts

_TURNS_OF_WAITING = 12
"""Approximate number of rounds between the busy part of a run and its end."""


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
