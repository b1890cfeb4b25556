"""``Application``: what a simulated process runs on the library, from its start to its end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import ClassVar

from pccl.protocol.errors import PCCLError
from pccl.stress.sim.checkers.outcomes import InRun
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.scenarios.scenario import Scenario

_PATIENCE_S = 60.0
"""How long a newcomer looks for a master of a run that may have lost its majority."""


class Application(ABC):
    """One of one process; it begins anew when the run can't go on for it.

    Attributes:
        ended_with: why it stopped; None while it runs.
        last_vote: the last operation in which members agreed on whether to stop; None: they don't.
    """

    lives_max: ClassVar[int]
    """How often it begins."""
    begins_anew_after: ClassVar[tuple[type[PCCLError], ...]]

    def __init__(self, parts: RunParts, process: PeerProcess) -> None:
        self.ended_with: str | None = None
        self.last_vote: InRun | None = None
        self._scenario = parts.scenario
        self._process = process
        self._engine = process.engine
        self._checkers = parts.checkers
        self._loop = parts.loop
        self._leaving: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Join, work, stop."""
        for life in range(self.lives_max):
            try:
                await self._live(life)
                await self._checkers.before_goodbye(self._process, self.sleep)
                self.ended_with = "finished"
                break
            except PCCLError as error:
                if self._leaving is not None:
                    self.ended_with = "left"
                    break
                if not isinstance(error, self.begins_anew_after):
                    raise
                if self._is_final(error):
                    self.ended_with = "master lost"
                    break
                self.ended_with = type(error).__name__
        await self._engine.close()

    @abstractmethod
    async def _live(self, life: int) -> None:
        """Join and work.

        Raises:
            PCCLError: it has lost its place.
        """

    @abstractmethod
    def _is_final(self, error: PCCLError) -> bool:
        """It has lost its place: whether for good. Otherwise it gets ready to begin anew."""

    @abstractmethod
    def interrupt(self) -> None:
        """Cancel the calls that the process is in."""

    def leave(self) -> None:
        """Close the communicator, whatever goes on."""
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._engine.close())

    async def sleep(self, duration_ns: int) -> None:
        """Let virtual time pass."""
        woken: asyncio.Future[None] = self._loop.create_future()
        clock = self._process.clock
        clock.call_at_ns(clock.now_ns() + duration_ns, wake, woken)
        await woken


def patience_s(scenario: Scenario) -> float | None:
    """How long to try to get into a run, which may lack its majority for ever; None: for ever."""
    return _PATIENCE_S if scenario.standby else None


def name_of(process: PeerProcess) -> str:
    """What violations call it."""
    return f"{process.name} (peer {process.peer})"


def wake(future: asyncio.Future[None]) -> None:
    """Let whoever waits go on."""
    if not future.done():
        future.set_result(None)
