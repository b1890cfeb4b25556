"""How the two tasks of a process that trains wait for each other, and what interrupts one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from pccl.bindings.diloco.rounds import NEWCOMERS_POLL_S
from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.checkers.outcomes import Sleep
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import ProcessClock
from pccl.stress.sim.workloads.application import wake

NEWCOMERS_POLL_NS = round(NEWCOMERS_POLL_S * NS_PER_S)

_TURNS_OF_WAITING = 12
"""Approximate number of rounds between the busy part of a run and its end."""


class WaitInterrupted(Exception):
    """Ctrl-C has ended a wait."""


class Wakeups:
    """Wakes the tasks of one process whenever something has changed.

    Args:
        loop: the loop of the run.
        clock: the clock of the process.
    """

    def __init__(self, loop: VirtualLoop, clock: ProcessClock) -> None:
        self._loop, self._clock = loop, clock
        self._waiting: list[asyncio.Future[None]] = []

    def changed(self) -> None:
        """Wake all tasks that wait."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            wake(future)

    async def wait(self, longest_ns: int | None) -> None:
        """Wait until something has changed, at most for ``longest_ns``; None: without limit."""
        waiting: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(waiting)
        if longest_ns is not None:
            self._clock.call_at_ns(self._clock.now_ns() + longest_ns, wake, waiting)
        await waiting

    async def until(
        self,
        condition: Callable[[], bool],
        check: Callable[[], None] = lambda: None,
        interrupt_ns: int | None = None,
    ) -> None:
        """Wait until a condition holds.

        Args:
            condition: the condition.
            check: raises an error if it will never hold.
            interrupt_ns: duration after which Ctrl-C ends the wait; None: never.

        Raises:
            WaitInterrupted: Ctrl-C has ended the wait.
        """
        end_ns: int | None = None
        if interrupt_ns is not None:
            end_ns = self._clock.now_ns() + interrupt_ns
            self._clock.call_at_ns(end_ns, self.changed)
        while not condition():
            check()
            if end_ns is not None and self._clock.now_ns() >= end_ns:
                raise WaitInterrupted
            waiting: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(waiting)
            await waiting


class Breaks:
    """What interrupts the task that trains: naps, Ctrl-C in a wait, and a stop with a checkpoint.

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
