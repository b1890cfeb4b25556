"""``Application``: the program that a simulated process runs, from its start to its end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import ClassVar

from pccl.protocol.errors import NotAdmitted, PCCLError
from pccl.runtime.requests import JoinRequest
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.scenarios.scenario import Scenario

_REFUSALS_MAX = 40
_PATIENCE_S = 60.0
"""How long a newcomer looks for a master of a run that may have lost its majority."""


class Application(ABC):
    """The application of one process; a process that loses its membership begins again.

    Attributes:
        ended_with: why it stopped; None while it runs.
        last_vote: last operation in which members voted on the end; None: no vote so far.
    """

    lives_max: ClassVar[int]
    """Maximum number of lives of the process."""
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
        self._naps_until_ns = 0

    async def run(self) -> None:
        """Join, work and stop; rejoin when cut off, for at most ``lives_max`` lives."""
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
            PCCLError: the process lost its place in the run.
        """

    @abstractmethod
    def _is_final(self, error: PCCLError) -> bool:
        """Whether the application must end now; if not, prepare its next life."""

    @abstractmethod
    def interrupt(self) -> None:
        """Cancel the open calls of the process."""

    def leave(self) -> None:
        """Close the communicator, whatever calls are open."""
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._engine.close())

    def nap(self, duration_ns: int) -> None:
        """Begin no joint call for ``duration_ns``."""
        self._naps_until_ns = self._process.clock.now_ns() + duration_ns

    async def end_nap(self) -> None:
        """Wait until the nap is over."""
        while (rest_ns := self._naps_until_ns - self._process.clock.now_ns()) > 0:
            await self.sleep(rest_ns)

    async def sleep(self, duration_ns: int) -> None:
        """Wait for ``duration_ns`` of the process's clock."""
        woken: asyncio.Future[None] = self._loop.create_future()
        clock = self._process.clock
        clock.call_at_ns(clock.now_ns() + duration_ns, wake, woken)
        await woken


def patience_s(scenario: Scenario) -> float | None:
    """Return the seconds after which a process stops trying to join; None: it never stops."""
    return _PATIENCE_S if scenario.standby else None


async def join(process: PeerProcess, request: JoinRequest) -> None:
    """Join the run; try again if the master refuses the process.

    Raises:
        PCCLError: it cannot join the run.
    """
    for _ in range(_REFUSALS_MAX):
        try:
            await process.engine.connect(request)
        except NotAdmitted:  # perhaps it cannot reach a member now
            continue
        return
    raise AssertionError(f"{process.name}: the master refused this process {_REFUSALS_MAX} times")


def name_of(process: PeerProcess) -> str:
    """Return the name of a process in violations."""
    return f"{process.name} (peer {process.peer})"


def wake(future: asyncio.Future[None]) -> None:
    """Resume the waiting task."""
    if not future.done():
        future.set_result(None)
