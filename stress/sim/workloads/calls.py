"""``SimCalls``: makes the calls of one process, with interruptions, time limits and repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

from pccl.protocol.errors import (
    CollectiveAborted,
    DeadlineExceeded,
    LinkError,
    LockstepError,
    OutcomeUnknown,
    PCCLError,
)
from pccl.protocol.types import NS_PER_S, Quorum, RoundKind
from pccl.runtime.requests import RunRequest
from pccl.stress.sim.checkers.outcomes import Sleep, Violation
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess

_T = TypeVar("_T")

ATTEMPTS_MAX = 200
_HASTY_MAX = 20
_PAUSE_NS = NS_PER_S // 4
"""Pause before each attempt after ``_HASTY_MAX`` consecutive failures; then calls have no time
limit. Faults may last a minute, and with time limits one of many members would always leave."""


class Interrupted(Exception):
    """The scenario cancelled the open call of the process."""


_REPEATED = (CollectiveAborted, DeadlineExceeded, Interrupted, LinkError, OutcomeUnknown)
"""Failures after which the application repeats a collective; a broken link comes back."""


class SimCalls:
    """Makes the calls of one process.

    Args:
        parts: shared objects of the run.
        process: the process.
        rng: draws the time limits of calls.
        sleep: waits in virtual time.
    """

    def __init__(self, parts: RunParts, process: PeerProcess, rng: Random, sleep: Sleep) -> None:
        self._scenario = parts.scenario
        self._process = process
        self._done = parts.checkers.done
        self._loop = parts.loop
        self._rng = rng
        self.sleep = sleep
        self._is_hasty = True
        self._open: dict[asyncio.Task[Any], bool] = {}
        """Open call -> whether the scenario interrupted it."""

    def interrupt(self) -> None:
        """Cancel the open calls of the process."""
        for task in self._open:
            self._open[task] = True
            task.cancel()

    def budget_s(self) -> float | None:
        """Draw the time limit of the next call, in seconds; None: no limit."""
        if not self._is_hasty or self._rng.random() >= self._scenario.impatience:
            return None
        return self._rng.randint(1, 8) * self._scenario.latency_ns / NS_PER_S

    async def make(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Make one call of the engine; the scenario may interrupt it.

        Raises:
            Interrupted: the scenario interrupted the call.
        """
        task = self._loop.create_task(work)
        self._open[task] = False
        try:
            return await task
        except asyncio.CancelledError:
            if self._open[task]:
                raise Interrupted from None
            raise
        finally:
            del self._open[task]

    async def joint(self, kind: RoundKind, patience_s: float | None = None) -> bool:
        """Make a joint call of the run. If it ends early, repeat it for up to ``patience_s``."""
        began_ns = self._loop.now_ns()
        quorum = self._scenario.quorum if kind is RoundKind.UPDATE_TOPOLOGY else None
        if quorum is not None:
            await self.nap()
        for attempt in range(ATTEMPTS_MAX):
            await self.pause(attempt)
            budget_s = self.budget_s() or patience_s
            try:
                return await self.make(self._round(kind, budget_s, quorum))
            except (DeadlineExceeded, Interrupted) as error:
                self._done[type(error).__name__] += 1
                spent_ns = self._loop.now_ns() - began_ns
                if patience_s is not None and spent_ns >= patience_s * NS_PER_S:
                    raise DeadlineExceeded from error
        raise AssertionError(f"{self._process.name}: {ATTEMPTS_MAX} failed joint calls")

    def _round(
        self, kind: RoundKind, budget_s: float | None, quorum: Quorum | None
    ) -> Coroutine[Any, Any, bool]:
        return self._process.engine.round(RunRequest(kind, budget_s, quorum))

    async def nap(self) -> None:
        """Sometimes do nothing for a while, up to several times the longest grace."""
        if self._rng.random() < self._scenario.naps:
            self._done["nap"] += 1
            self._process.napping += 1
            try:
                await self.sleep(round(10 ** self._rng.uniform(-2, 1.6) * NS_PER_S))
            finally:
                self._process.napping -= 1

    async def repeat(self, attempt: Callable[[], Coroutine[Any, Any, _T]], what: str) -> _T:
        """Repeat a collective until it succeeds.

        Raises:
            PCCLError: a repeat cannot succeed.
        """
        for number in range(ATTEMPTS_MAX):
            await self.pause(number)
            try:
                return await attempt()
            except (PCCLError, Interrupted) as error:
                await self.again(error)
        raise AssertionError(f"{self._process.name}: {ATTEMPTS_MAX} failed attempts of {what}")

    async def again(self, error: BaseException) -> None:
        """Prepare to repeat a collective that failed, or raise its error.

        Raises:
            PCCLError: a repeat cannot succeed.
        """
        self._done[type(error).__name__] += 1
        if isinstance(error, LockstepError):
            if self._scenario.mistake is None:
                raise Violation(f"{self._process.name} made no mistake, but got: {error}")
            await self.joint(RoundKind.UPDATE_TOPOLOGY)  # in which the others wait
        elif not isinstance(error, _REPEATED):
            raise error

    async def pause(self, attempt: int) -> None:
        """After 20 failed attempts, wait before each further attempt, and set no time limit."""
        self._is_hasty = attempt <= _HASTY_MAX
        if not self._is_hasty:
            await self.sleep(_PAUSE_NS)
