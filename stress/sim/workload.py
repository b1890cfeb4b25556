"""What the application of a simulated peer does: the usual loop of a churn-tolerant user.

Every iteration: admit newcomers, then the scenario's collectives, each retried until it succeeds
or the peer is alone. The first collective of an iteration also votes for the end: each member
contributes whether its time is up, and all stop when anybody's is. Inputs depend on peer and
iteration only; what they must add up to is the checkers' business.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.collectives.reductions import numpy_dtype
from pccl.protocol.errors import (
    CollectiveAborted,
    Evicted,
    MasterLost,
    NotAdmitted,
    PCCLError,
    TooFewPeers,
)
from pccl.protocol.types import DataType, ReduceOp
from pccl.runtime.operand import borrow
from pccl.stress.sim.checkers import Checkers
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.scenario import MS, Scenario, Slot

_VOTE_TAG = 1 << 32
_ATTEMPTS_MAX = 200
_REJOINS_MAX = 3
_LONELY_TURNS_MAX = 40


class Workload:
    """The application of one peer."""

    def __init__(
        self, scenario: Scenario, process: PeerProcess, checkers: Checkers, loop: VirtualLoop
    ) -> None:
        self._scenario = scenario
        self._process = process
        self._engine = process.engine
        self._checkers = checkers
        self._loop = loop
        self._rng = Random(f"{scenario.seed}/{process.name}")
        self._iteration = 0
        self.ended_with: str | None = None
        """Why it stopped; None while it runs."""

    async def run(self) -> None:
        """Join, work, stop; lost memberships are taken up again."""
        for _ in range(_REJOINS_MAX):
            try:
                await self._engine.connect(n_attempts=100)
                await self._work()
                self.ended_with = "finished"
                break
            except MasterLost:
                self.ended_with = "master lost"
                break
            except (Evicted, NotAdmitted) as error:
                self.ended_with = type(error).__name__
        await self._engine.close()

    @property
    def _world_size(self) -> int:
        roster = self._engine.roster
        return len(roster.members) if roster is not None else 0

    async def _work(self) -> None:
        lonely_turns = 0
        newcomer = True
        while True:
            # A newcomer's first update_topology is satisfied by the round that admitted it; where
            # members ask first, it must not ask either.
            if not self._scenario.asks_pending or (
                not newcomer and await self._engine.are_peers_pending()
            ):
                await self._engine.update_topology()
            newcomer = False
            self._iteration += 1
            if self._world_size < 2:
                lonely_turns += 1
                if self._time_is_up or lonely_turns > _LONELY_TURNS_MAX:
                    return
                await self.sleep(max(self._scenario.latency_ns, MS))
                continue
            if self._rng.random() < 0.5:
                await self.sleep(self._rng.randrange(2 * self._scenario.latency_ns))
            over = await self._vote()
            await self._reduce_slots()
            if over:
                return

    @property
    def _time_is_up(self) -> bool:
        return self._loop.now_ns() >= self._scenario.stop_ns

    async def _vote(self) -> bool:
        """Whether any member wants to stop; the same for all."""
        votes = np.array([self._time_is_up], dtype=np.int32)
        slot = Slot(_VOTE_TAG, 1, DataType.INT32, ReduceOp.SUM)
        result = await self._reduce(slot, votes)
        return result is None or bool(result[0])

    async def _reduce_slots(self) -> None:
        slots = self._scenario.slots
        if not self._scenario.concurrent:
            for slot in slots:
                await self._reduce(slot, self._input(slot))
            return
        tasks = [self._loop.create_task(self._reduce(slot, self._input(slot))) for slot in slots]
        try:
            for task in tasks:
                await task
        except BaseException:
            for task in tasks:
                task.cancel()
                task.add_done_callback(_retrieve)
            raise

    def _input(self, slot: Slot) -> npt.NDArray[Any]:
        """Values of very different magnitude, so that the order of additions shows."""
        rng = np.random.default_rng(
            [self._scenario.seed, int(self._process.peer), self._iteration, slot.tag]
        )
        dtype = numpy_dtype(slot.data_type)
        if np.issubdtype(dtype, np.integer):
            bound = 2 ** (8 * dtype.itemsize - 2)
            return rng.integers(-bound, bound, slot.count, dtype=dtype)
        scale = 10.0 ** rng.integers(-6, 7, slot.count)
        return (rng.standard_normal(slot.count) * scale).astype(dtype)

    async def _reduce(self, slot: Slot, original: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Reduce until it succeeds; None if this peer is alone."""
        who = f"{self._process.name} (peer {self._process.peer})"
        in_place = self._rng.random() < 0.5
        for _ in range(_ATTEMPTS_MAX):
            send = original.copy()
            recv = send if in_place else np.full_like(send, 7)
            try:
                report = await self._engine.all_reduce(borrow(send, recv), slot.op, slot.tag)
            except TooFewPeers:
                self._checkers.failed(who, send, original)
                return None
            except PCCLError as error:
                self._checkers.failed(who, send, original)
                self._checkers.returned(who, "the input of a failed reduce", send)
                if not in_place:
                    self._checkers.returned(who, "the result buffer of a failed reduce", recv)
                if not isinstance(error, CollectiveAborted):
                    raise
                continue
            if not in_place:
                self._checkers.untouched(who, send, original)
            self._checkers.succeeded(who, report.operation, report.contributors, slot.op, recv)
            self._checkers.returned(who, f"the result of {report.operation}", recv)
            return recv
        raise AssertionError(f"{who}: {_ATTEMPTS_MAX} attempts without a result")

    async def sleep(self, duration_ns: int) -> None:
        """Let virtual time pass."""
        woken: asyncio.Future[None] = self._loop.create_future()
        self._loop.call_at_ns(self._loop.now_ns() + duration_ns, _wake, woken)
        await woken


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
