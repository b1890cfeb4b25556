"""The application of a simulated peer: the loop of a program that expects churn.

Each iteration admits newcomers, votes on the end, and then makes the scenario's collectives. It
repeats each collective until it succeeds, or the peer is alone. In the vote each member contributes
whether its time is up; if any member's time is up, all stop. Inputs depend on seed, peer, iteration
and tag only; the checkers compute the expected results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import (
    DeadlineExceeded,
    Evicted,
    MasterLost,
    NotAdmitted,
    NotConnected,
    OutcomeUnknown,
    PCCLError,
    Result,
    ResyncRequired,
    TooFewPeers,
)
from pccl.protocol.types import Descriptor, ReduceOp, RoundKind
from pccl.runtime.collective.operand import borrow
from pccl.runtime.requests import JoinRequest, ReduceManyRequest, ReduceRequest
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.checkers.outcomes import Violation
from pccl.stress.sim.faults.base import MS
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.publication.work import PublishWork
from pccl.stress.sim.scenarios.scenario import Buckets, Slot, Style
from pccl.stress.sim.store.work import StoreWork
from pccl.stress.sim.workloads.application import Application, name_of, patience_s
from pccl.stress.sim.workloads.calls import Interrupted, SimCalls
from pccl.stress.sim.workloads.exchanges import ExchangeWork
from pccl.stress.sim.workloads.inputs import (
    Flaw,
    declared_norm,
    draw_flaw,
    draw_input,
    draw_weight,
)
from pccl.stress.sim.workloads.state import StateWork

Array = npt.NDArray[Any]

_VOTE_TAG = 1 << 32
_BROADCAST_TAG = _VOTE_TAG + 1
_BARRIER_TAG = _VOTE_TAG + 2
_DROPPED_TAG = _VOTE_TAG + 3
_BUCKET_TAG = _VOTE_TAG + 4
_TURNS_OF_WAITING = 8
"""Approximate number of iterations between the busy part of a run and its end."""
_GANG_S = 2.0
"""How long a newcomer waits for ``min_peers`` members, because some may have been killed."""


_WITHOUT_MASTER = (MasterLost, NotAdmitted, DeadlineExceeded)


class Workload(Application):
    """The application of one peer. ``starts``: the peer exists from the start of the run."""

    lives_max = 40
    begins_anew_after = (*_WITHOUT_MASTER, Evicted, ResyncRequired)

    def __init__(self, parts: RunParts, process: PeerProcess, *, starts: bool) -> None:
        super().__init__(parts, process)
        self._rng = Random(f"{parts.scenario.seed}/{process.name}")
        self._calls = SimCalls(parts, process, self._rng, self.sleep)
        self._exchanges = ExchangeWork(parts, process, self._calls, self._rng)
        self._store: StoreWork | None = None
        if parts.checkers.store is not None:
            self._store = StoreWork(parts, parts.checkers.store, process, self._calls)
        self._publishing: PublishWork | None = None
        if parts.checkers.publication is not None and process.group == 0:
            self._publishing = PublishWork(parts, parts.checkers.publication, process, self._calls)
        self._iteration = 0
        self._rejoins = False
        """Whether the next life begins with ``update_topology`` instead of ``connect``."""
        self._state: StateWork | None = None
        if parts.scenario.syncs is not None:
            self._state = StateWork(parts, process, self._calls, starts=starts)

    def interrupt(self) -> None:
        """Cancel the open calls of the process."""
        self._calls.interrupt()

    async def _live(self, life: int) -> None:
        rejoins = self._rejoins
        if rejoins:
            await self._calls.joint(RoundKind.UPDATE_TOPOLOGY, patience_s(self._scenario))
        else:
            await self._connect(life)
        work = self._work(rejoined=rejoins)
        if self._publishing is not None:
            work = self._publishing.during(work)
        await (work if self._store is None else self._store.during(work))

    def _is_final(self, error: PCCLError) -> bool:
        self._checkers.may_raise(self._process.name, error)
        if isinstance(error, _WITHOUT_MASTER) and self._checkers.nobody_to_join:
            return True
        self._checkers.done[type(error).__name__] += 1
        if self._state is not None:
            self._state.begin_anew()
        self._rejoins = isinstance(error, Evicted) and self._rng.random() < 0.5
        return False

    async def _connect(self, attempt: int) -> None:
        if self._scenario.min_peers > 1 and attempt == 0:
            try:
                wanted = self._scenario.min_peers
                await self._join(JoinRequest(100, wanted, timeout_s=_GANG_S))
            except DeadlineExceeded:
                pass
            else:
                process, roster = self._process, self._engine.roster
                seen = roster.global_world_size if roster is not None else 0
                self._checkers.joined(self._who, process.run, process.peer, seen, wanted)
                return
        await self._join(JoinRequest(100, timeout_s=patience_s(self._scenario)))

    async def _join(self, request: JoinRequest) -> None:
        if self._state is None:
            await self._engine.connect(request)
        else:
            request = replace(request, prefetch=self._state.prefetch())
            await self._state.joins(partial(self._engine.connect, request))

    # -- the loop ------------------------------------------------------------------------------

    async def _work(self, *, rejoined: bool) -> None:
        first = True
        while True:
            await self.end_nap()
            await self._admit(first=first, rejoined=rejoined)
            first = False
            self._iteration += 1
            if self._world_size < 2:
                if self._time_is_up:
                    return
                await self.sleep(max(self._scenario.latency_ns, MS, self._pace_ns))
                continue
            if self._pace_ns:
                await self.sleep(self._pace_ns)
            if self._rng.random() < 0.5:
                await self.sleep(self._rng.randrange(2 * self._scenario.latency_ns))
            if self._errs_now:
                await self._calls.joint(RoundKind.UPDATE_TOPOLOGY)
            over = await self._vote()
            await self._collectives()
            if over:
                return

    async def _admit(self, *, first: bool, rejoined: bool) -> None:
        # The round that admitted a newcomer answers its first update_topology, unless it rejoined
        # by update_topology. Where members ask first, a newcomer must not ask either.
        if self._scenario.asks_pending:
            admits = not first and await self._calls.joint(RoundKind.PEERS_PENDING)
        else:
            admits = not (first and rejoined)
        if admits:
            await self._calls.joint(RoundKind.UPDATE_TOPOLOGY)
        if self._state is not None:
            await self._state.run()
        if self._scenario.optimizes:
            with suppress(TooFewPeers):
                await self._calls.joint(RoundKind.OPTIMIZE_TOPOLOGY)

    @property
    def _world_size(self) -> int:
        roster = self._engine.roster
        return len(roster.members) if roster is not None else 0

    @property
    def _time_is_up(self) -> bool:
        return self._loop.now_ns() >= self._scenario.ends_ns

    @property
    def _pace_ns(self) -> int:
        """Time to compute before the next call, in ns; longer after the busy part of the run."""
        scenario = self._scenario
        waits = self._loop.now_ns() >= scenario.stop_ns
        spare_ns = (scenario.ends_ns - scenario.stop_ns) // _TURNS_OF_WAITING if waits else 0
        return scenario.pause_ns + spare_ns

    @property
    def _errs_now(self) -> bool:
        mistake = self._scenario.mistake
        if mistake is None or self._process.index != mistake.culprit:
            return False
        return self._iteration == mistake.iteration + 1

    async def _vote(self) -> bool:
        """Return whether any member wants to stop: the same value on all members."""
        votes = np.array([self._time_is_up], dtype=np.int32)
        slot = Slot(_VOTE_TAG, 1, DataType.INT32, ReduceOp.SUM, quorum=self._scenario.quorum)
        result = await self._reduce(slot, votes)
        if result is None:
            return self._time_is_up
        run, outcome = self._process.results[slot.tag]
        self.last_vote = InRun(run, outcome.operation)
        return bool(result[0])

    async def _collectives(self) -> None:
        if self._scenario.drops:
            self._launch_and_drop()
        slots = self._scenario.slots
        inputs = [self._input(slot) for slot in slots]
        match self._scenario.style:
            case Style.SEQUENTIAL:
                for slot, original in zip(slots, inputs, strict=True):
                    await self._reduce(slot, original)
            case Style.CONCURRENT:
                await self._all([self._reduce(s, x) for s, x in zip(slots, inputs, strict=True)])
            case Style.HANDLES:
                await self._reduce_by_handles(slots, inputs)
            case Style.MULTIPLE:
                await self._reduce_multiple(slots, inputs)
        if self._scenario.buckets is not None:
            await self._reduce_buckets(self._scenario.buckets)
        if self._scenario.broadcasts:
            await self._broadcast()
        if self._scenario.barriers:
            await self._barrier()
        await self._exchanges.run(self._iteration)

    async def _all(self, works: list[Coroutine[Any, Any, Any]]) -> None:
        tasks = [self._loop.create_task(work) for work in works]
        try:
            for task in tasks:
                await task
        except BaseException as error:
            for task in tasks:
                task.cancel()
                task.add_done_callback(_retrieve)
            if isinstance(error, NotConnected) and error.__cause__ is not None:
                raise error.__cause__ from None  # another call reported the loss before
            raise

    def _input(self, slot: Slot) -> Array:
        return draw_input(slot, self._scenario.seed, self._process.peer, self._iteration)

    def _request(
        self, slot: Slot, original: Array, *, in_place: bool
    ) -> tuple[ReduceRequest, Array, Array]:
        """Return a request on fresh copies of ``original``, and its two buffers."""
        send = original.copy()
        recv = send if in_place and slot.quorum is None else np.full_like(send, 7)
        where = self._scenario.seed, self._process.peer, self._iteration
        weight = draw_weight(slot, *where)
        norm: float | None = 0.0
        if slot.guard is not None and weight:
            flaw, size = draw_flaw(*where, slot.tag)
            if flaw is Flaw.LIE and slot.tag in self._process.caught_lying:
                flaw = Flaw.NOT_FINITE
            norm = declared_norm(original, flaw, size)
        asks = ReduceCall(0, slot.tag, slot.descriptor(), weight=weight, norm=norm)
        return ReduceRequest(borrow(send, recv), asks), send, recv

    # -- collectives ---------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        return name_of(self._process)

    async def _reduce(self, slot: Slot, original: Array) -> Array | None:
        """Repeat a reduce until it succeeds, and return the result; None: this peer is alone."""
        if slot.quorum is not None:
            await self._calls.nap()
        in_place = self._rng.random() < 0.5

        async def attempt() -> Array | None:
            request, send, recv = self._request(slot, original, in_place=in_place)
            retry = self._scenario.retries
            request = replace(request, retry=retry, timeout_s=self._calls.budget_s())
            try:
                await self._calls.make(self._engine.reduce(request))
            except TooFewPeers:
                self._checkers.failed(self._who, send, original)
                return None
            except (PCCLError, Interrupted):
                self._check_failed(send, recv, original)
                raise
            return self._check_succeeded(slot, send, recv, original)

        return await self._calls.repeat(attempt, "a reduce")

    async def _reduce_buckets(self, buckets: Buckets) -> None:
        """Launch all reduces before looking at any outcome, as a step of data parallelism does."""
        tags = range(_BUCKET_TAG, _BUCKET_TAG + buckets.count)
        slots = tuple(Slot(tag, 100, DataType.FLOAT, ReduceOp.SUM) for tag in tags)
        await self._reduce_by_handles(slots, [self._input(slot) for slot in slots], buckets)

    async def _compute(self, buckets: Buckets) -> list[PCCLError]:
        """Compute between two launches; return the error if a call reports a lost place."""
        await self.sleep(buckets.compute_ns)
        if buckets.asks:
            try:
                await self._calls.joint(RoundKind.PEERS_PENDING)
            except (Evicted, MasterLost, NotConnected) as error:
                return [error]
        return []

    async def _reduce_by_handles(
        self, slots: tuple[Slot, ...], inputs: list[Array], buckets: Buckets | None = None
    ) -> None:
        engine = self._engine
        failures: list[PCCLError] = []
        launched: list[tuple[int, Slot, Array, Array, Array]] = []
        again: list[tuple[Slot, Array]] = []
        for slot, original in zip(slots, inputs, strict=True):
            in_place = self._rng.random() < 0.5
            request, send, recv = self._request(slot, original, in_place=in_place)
            if buckets is not None:
                failures += await self._compute(buckets)
            try:
                ticket = engine.launch(replace(request, timeout_s=self._calls.budget_s()))
            except TooFewPeers:
                continue
            except NotConnected as error:
                failures.append(error)
                break
            launched.append((ticket, slot, send, recv, original))
        for ticket, slot, send, recv, original in launched:
            before = self._engine.roster
            if self._rng.random() < 0.2:
                await self.sleep(self._rng.randrange(2 * self._scenario.latency_ns))
            if self._engine.roster is not before:
                raise Violation(f"{self._who}: the roster changed before the wait for a handle")
            try:
                await self._finish(ticket)
            except TooFewPeers:  # it had to wait, and all others left meanwhile
                self._check_failed(send, recv, original)
            except PCCLError as error:
                self._check_failed(send, recv, original)
                again.append((slot, original))
                failures.append(error)
            else:
                self._checkers.done["handle"] += 1
                self._check_succeeded(slot, send, recv, original)
            finally:
                engine.calls.forget(ticket)
        if self._leaving is None:
            self._checkers.handles_told(self._who, failures)
        for failure in failures:
            await self._calls.again(failure)
        for slot, original in again:
            await self._reduce(slot, original)

    async def _finish(self, ticket: int) -> None:
        while True:
            try:
                await self._calls.make(self._engine.finish(ticket))
                return
            except Interrupted:  # the operation goes on
                continue

    async def _reduce_multiple(self, slots: tuple[Slot, ...], inputs: list[Array]) -> None:
        waiting = list(zip(slots, inputs, strict=True))
        max_in_flight = 1 + self._scenario.seed % 3

        async def attempt() -> None:
            nonlocal waiting
            made = [self._request(s, x, in_place=self._rng.random() < 0.5) for s, x in waiting]
            requests = tuple(request for request, _, _ in made)
            wanted = ReduceManyRequest(requests, max_in_flight, timeout_s=self._calls.budget_s())
            completed: tuple[int, ...] = tuple(slot.tag for slot, _ in waiting)
            failure: PCCLError | Interrupted | None = None
            try:
                await self._calls.make(self._engine.reduce_many(wanted))
            except PCCLError as error:
                completed, failure = error.completed_tags, error
                # A process that joins again fetches the state anyway.
                told = isinstance(error, OutcomeUnknown | ResyncRequired | Evicted | MasterLost)
                if self._engine.machine.needs_resync and not told:
                    raise Violation(f"{self._who}: no error tells it to synchronize") from error
            except Interrupted as error:
                completed, failure = (), error
            for (slot, original), (_, send, recv) in zip(waiting, made, strict=True):
                if slot.tag in completed:
                    self._checkers.done["of several"] += 1
                    self._check_succeeded(slot, send, recv, original)
                else:
                    self._check_failed(send, recv, original)
            waiting = [(slot, x) for slot, x in waiting if slot.tag not in completed]
            if waiting and failure is not None and not isinstance(failure, TooFewPeers):
                raise failure

        await self._calls.repeat(attempt, "several reduces")

    def _launch_and_drop(self) -> None:
        """Launch a reduce and drop its handle at once, which must disturb no other call."""
        slot = Slot(_DROPPED_TAG, 100, DataType.INT32, ReduceOp.MAX)
        request, _, _ = self._request(slot, self._input(slot), in_place=True)
        try:
            ticket = self._engine.launch(request)
        except TooFewPeers:
            return
        except PCCLError as error:
            if error.result is not Result.INVALID_ARGUMENT:
                raise
            return  # the last such reduce is not over yet
        before = self._engine.roster
        self._engine.calls.forget(ticket)
        if self._engine.roster is not before:
            raise Violation(f"{self._who}: the roster changed when a handle was dropped")
        self._checkers.done["dropped handle"] += 1

    async def _broadcast(self) -> None:
        slot = Slot(_BROADCAST_TAG, self._scenario.slots[0].count, DataType.FLOAT, ReduceOp.SUM)
        original = self._input(slot)

        async def attempt() -> None:
            root = self._iteration_of_all() % self._world_size
            buffer = original.copy()
            descriptor = Descriptor.broadcast(slot.data_type, slot.count, root)
            asks = ReduceCall(0, slot.tag, descriptor)
            request = ReduceRequest(borrow(buffer), asks, timeout_s=self._calls.budget_s())
            try:
                info = await self._calls.make(self._engine.reduce(request))
            except (PCCLError, Interrupted):
                self._check_failed(buffer, buffer, original)
                raise
            result = info.outcome
            assert result is not None
            if len(result.contributors) > 1:
                operation = InRun(self._process.run, result.operation)
                self._checkers.was_broadcast(
                    self._who, operation, result.contributors, root, buffer
                )
            self._checkers.returned(self._who, f"the result of {result.operation}", buffer)

        await self._calls.repeat(attempt, "a broadcast")

    def _iteration_of_all(self) -> int:
        """Return a number on which all members of a view agree; their iterations differ."""
        roster = self._engine.roster
        return roster.view if roster is not None else 0

    async def _barrier(self) -> None:
        async def attempt() -> None:
            asks = ReduceCall(0, _BARRIER_TAG, Descriptor.barrier())
            request = ReduceRequest(None, asks, timeout_s=self._calls.budget_s())
            info = await self._calls.make(self._engine.reduce(request))
            result = info.outcome
            assert result is not None
            if len(result.contributors) > 1:
                operation = InRun(self._process.run, result.operation)
                self._checkers.passed_barrier(self._who, operation, result.contributors)

        await self._calls.repeat(attempt, "a barrier")

    def _check_succeeded(self, slot: Slot, send: Array, recv: Array, original: Array) -> Array:
        if recv is not send:
            self._checkers.untouched(self._who, send, original)
        run, result = self._process.results[slot.tag]
        if result.took_part is not (self._process.peer in result.contributors):
            raise Violation(f"{self._who}: who took part in {result}?")
        self._checkers.succeeded(self._who, run, result, slot, recv)
        self._checkers.returned(self._who, f"the result of {result.operation}", recv)
        return recv

    def _check_failed(self, send: Array, recv: Array, original: Array) -> None:
        self._checkers.failed(self._who, send, original)
        self._checkers.returned(self._who, "the input of a failed call", send)
        if recv is not send:
            self._checkers.returned(self._who, "the result buffer of a failed call", recv)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
