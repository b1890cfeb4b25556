"""``StoreWork``: the calls to the run's store that a process makes beside its joint calls.

Each member has a key that it alone writes and all read, and all members add to one key. A process
waits for keys that it sets itself meanwhile, so that each wait ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import Any

from pccl.machines.peer.events import StoreCall
from pccl.machines.results import StoreResult
from pccl.protocol.errors import DeadlineExceeded, MembershipError, NotConnected, PCCLError
from pccl.protocol.messages import StoreOp
from pccl.protocol.types import PeerId
from pccl.runtime.requests import StoreQuestion
from pccl.stress.sim.checkers.outcomes import Violation
from pccl.stress.sim.faults.base import MS
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.store.checker import Caller, StoreChecker
from pccl.stress.sim.workloads.calls import Interrupted, SimCalls

_PAUSE_NS, _PAUSE_NS_MAX = MS // 4, 2000 * MS
"""The longest pause between two calls: at first, and after many of them."""
_FOREIGN_S = 5.0
"""Time limit of a read of another member's key, which may have been lost."""


class StoreWork:
    """The calls of one process to the store.

    Args:
        parts: shared objects of the run.
        checker: checks the results.
        process: the process.
        calls: makes its calls.
    """

    def __init__(
        self,
        parts: RunParts,
        checker: StoreChecker,
        process: PeerProcess,
        calls: SimCalls,
    ) -> None:
        self._done, self._loop, self._checker = parts.checkers.done, parts.loop, checker
        self._process, self._calls = process, calls
        self._rng = Random(f"{parts.scenario.seed}/{process.name}/store")
        self._waits = 0

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        """Do other work, and make calls meanwhile; then read the own key, which must be there."""
        asking = self._loop.create_task(self._go_on())
        try:
            await work
        finally:
            await _ended(asking)
        await self._once(self._read_own)

    async def _go_on(self) -> None:
        """Make calls until the process is no longer a member, in longer and longer intervals."""
        pause_ns = _PAUSE_NS
        with suppress(MembershipError, NotConnected):  # a joint call reports that, too
            while True:
                ways = (self._add, self._set, self._read_own, self._read, self._wait)
                await self._once(self._rng.choice(ways))
                await self._calls.sleep(self._rng.randrange(pause_ns))
                pause_ns = min(pause_ns * 6 // 5, _PAUSE_NS_MAX)

    async def _once(self, way: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await way()
        except (DeadlineExceeded, Interrupted) as error:
            self._done[f"store call: {type(error).__name__}"] += 1

    @property
    def _me(self) -> Caller:
        return self._process.run, self._process.peer

    async def _ask(
        self, op: StoreOp, *keys: bytes, value: bytes = b"", timeout_s: float | None = None
    ) -> StoreResult:
        budget_s = self._calls.budget_s() or timeout_s
        question = StoreQuestion(StoreCall(0, op, keys, value), budget_s)
        return await self._calls.make(self._process.engine.ask_store(question))

    async def _add(self) -> None:
        me = self._me
        floor = self._checker.adds(me[0])
        result = await self._ask(StoreOp.ADD, b"sum", value=b"1")
        self._checker.added(me, _number(result), floor)

    async def _set(self) -> None:
        me = self._me
        number = self._checker.sets(me)
        await self._ask(StoreOp.SET, _key_of(me[1]), value=b"%d" % number)
        self._checker.has_set(me, number)

    async def _read_own(self) -> None:
        if self._checker.reads(self._me):
            await self._read_of(self._me, None)

    async def _read(self) -> None:
        writers = self._checker.writers(self._me[0])
        if writers:
            await self._read_of((self._me[0], self._rng.choice(writers)), _FOREIGN_S)

    async def _read_of(self, writer: Caller, timeout_s: float | None) -> None:
        me, floor = self._me, self._checker.reads(writer)
        result = await self._ask(StoreOp.GET, _key_of(writer[1]), timeout_s=timeout_s)
        self._checker.read(me, writer, _number(result), floor)

    async def _wait(self) -> None:
        """Wait for some keys in a task, and set them."""
        me = self._me
        self._waits += 1
        keys = [b"wait %d %d %d" % (me[1], self._waits, n) for n in range(self._rng.randint(1, 3))]
        waiting = self._loop.create_task(self._ask(StoreOp.WAIT, *keys))
        try:
            for key in keys:
                await self._ask(StoreOp.SET, key, value=b"here")
            result = await waiting
        finally:
            await _ended(waiting)
        if not result.done:
            raise Violation(f"{self._process.name}: a wait has ended without {keys}")
        self._checker.waited(me)
        for key in keys:
            await self._ask(StoreOp.DELETE, key)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task that has not ended, and wait for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError, PCCLError, Interrupted):
        await task


def _key_of(peer: PeerId) -> bytes:
    return b"of %d" % peer


def _number(result: StoreResult) -> int:
    assert result.value is not None
    return int(result.value)
