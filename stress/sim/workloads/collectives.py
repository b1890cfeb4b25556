"""What the application of a simulated peer does: the usual loop of a churn-tolerant user.

Every iteration: admit newcomers, then a vote for the end, then the scenario's collectives, each
repeated until it succeeds or the peer is alone. In the vote each member contributes whether its
time is up, and all stop when anybody's is. Inputs depend on peer and iteration only; what they must
add up to is the checkers' business.
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
    CollectiveAborted,
    DeadlineExceeded,
    Evicted,
    LinkError,
    LockstepError,
    MasterLost,
    NotAdmitted,
    NotConnected,
    OutcomeUnknown,
    PCCLError,
    Result,
    ResyncRequired,
    TooFewPeers,
)
from pccl.protocol.types import NS_PER_S, Descriptor, ReduceOp, RoundKind
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import JoinRequest, ReduceManyRequest, ReduceRequest, RunRequest
from pccl.stress.sim.checkers.outcomes import Checkers, InRun, Violation
from pccl.stress.sim.faults.base import MS
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.scenarios.scenario import Buckets, Scenario, Slot, Style
from pccl.stress.sim.workloads.inputs import draw_input, draw_weight
from pccl.stress.sim.workloads.state import StateWork

Array = npt.NDArray[Any]

_VOTE_TAG = 1 << 32
_BROADCAST_TAG = _VOTE_TAG + 1
_BARRIER_TAG = _VOTE_TAG + 2
_DROPPED_TAG = _VOTE_TAG + 3
_BUCKET_TAG = _VOTE_TAG + 4
_ATTEMPTS_MAX = 200
_HASTY_MAX = 20
_PAUSE_NS = NS_PER_S // 4
"""After so many failures in a row a caller waits so long each time, and has no time limit any more:
faults may last a minute, and of many members one would always leave."""
_REJOINS_MAX = 40
_TURNS_OF_WAITING = 8
"""Iterations between the end of the busy part of a run and its end, about."""
_PATIENCE_S = 60.0
"""How long a newcomer looks for a master of a run that may have lost its majority."""
_GANG_S = 2.0
"""How long a newcomer insists on company: those it waits for may have been killed."""


_WITHOUT_MASTER = (MasterLost, NotAdmitted, DeadlineExceeded)
_BEGIN_ANEW = (*_WITHOUT_MASTER, Evicted, ResyncRequired)


class Interrupted(Exception):
    """The scenario has cancelled the call that the process was in."""


_REPEATED = (CollectiveAborted, DeadlineExceeded, Interrupted, LinkError, OutcomeUnknown)
"""Failures of a collective that the next call may not have. A broken pair heals at last."""


class Workload:
    """The application of one peer; ``starts``: it is there from the start."""

    def __init__(
        self,
        scenario: Scenario,
        process: PeerProcess,
        checkers: Checkers,
        loop: VirtualLoop,
        *,
        starts: bool,
    ) -> None:
        self._scenario = scenario
        self._process = process
        self._engine: PeerEngine = process.engine
        self._checkers = checkers
        self._loop = loop
        self._rng = Random(f"{scenario.seed}/{process.name}")
        self._iteration = 0
        self._is_hasty = True
        self._calls: dict[asyncio.Task[Any], bool] = {}
        """Those that the process is in -> whether the scenario has interrupted them."""
        self._leaving: asyncio.Task[None] | None = None
        self.ended_with: str | None = None
        """Why it stopped; None while it runs."""
        self.last_vote: InRun | None = None
        """The last operation in which members agreed on whether to stop."""
        self._state: StateWork | None = None
        if scenario.syncs is not None and checkers.state is not None:
            self._state = StateWork(
                scenario.syncs,
                scenario,
                process,
                checkers.state,
                self._call,
                self._budget_s,
                self._again,
                self.sleep,
                starts=starts,
            )

    async def run(self) -> None:
        """Join, work, stop; lost memberships are taken up again."""
        rejoins = False
        for attempt in range(_REJOINS_MAX):
            try:
                if rejoins:
                    await self._joint(RoundKind.UPDATE_TOPOLOGY, self._patience_s)
                else:
                    await self._connect(attempt)
                await self._work(rejoined=rejoins)
                await self._checkers.before_goodbye(self._process, self.sleep)
                self.ended_with = "finished"
                break
            except PCCLError as error:
                if self._leaving is not None:
                    self.ended_with = "left"
                    break
                if not isinstance(error, _BEGIN_ANEW):
                    raise
                self._checkers.may_raise(self._process.name, error)
                if isinstance(error, _WITHOUT_MASTER) and self._checkers.nobody_to_join:
                    self.ended_with = "master lost"
                    break
                self.ended_with = type(error).__name__
                self._checkers.done[self.ended_with] += 1
                if self._state is not None:
                    self._state.begin_anew()
                rejoins = isinstance(error, Evicted) and self._rng.random() < 0.5
        await self._engine.close()

    def leave(self) -> None:
        """Close the communicator, whatever goes on."""
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._engine.close())

    def interrupt(self) -> None:
        """Cancel the calls that the process is in."""
        for task in self._calls:
            self._calls[task] = True
            task.cancel()

    async def sleep(self, duration_ns: int) -> None:
        """Let virtual time pass."""
        woken: asyncio.Future[None] = self._loop.create_future()
        clock = self._process.clock
        clock.call_at_ns(clock.now_ns() + duration_ns, _wake, woken)
        await woken

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
        await self._join(JoinRequest(100, timeout_s=self._patience_s))

    @property
    def _patience_s(self) -> float | None:
        """How long to try to get into a run, which may lack its majority for ever."""
        return _PATIENCE_S if self._scenario.standby else None

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
                await self._joint(RoundKind.UPDATE_TOPOLOGY)
            over = await self._vote()
            await self._collectives()
            if over:
                return

    async def _admit(self, *, first: bool, rejoined: bool) -> None:
        # A newcomer's first update_topology is satisfied by the round that admitted it, unless an
        # update_topology has brought it back; where members ask first, it must not ask either.
        if self._scenario.asks_pending:
            admits = not first and await self._joint(RoundKind.PEERS_PENDING)
        else:
            admits = not (first and rejoined)
        if admits:
            await self._joint(RoundKind.UPDATE_TOPOLOGY)
        if self._state is not None:
            await self._state.run()
        if self._scenario.optimizes:
            with suppress(TooFewPeers):
                await self._joint(RoundKind.OPTIMIZE_TOPOLOGY)

    @property
    def _world_size(self) -> int:
        roster = self._engine.roster
        return len(roster.members) if roster is not None else 0

    @property
    def _time_is_up(self) -> bool:
        return self._loop.now_ns() >= self._scenario.ends_ns

    @property
    def _pace_ns(self) -> int:
        """How long to compute before the next call: who only waits for faults to end is slow."""
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
        """Whether any member wants to stop; the same for all."""
        votes = np.array([self._time_is_up], dtype=np.int32)
        slot = Slot(_VOTE_TAG, 1, DataType.INT32, ReduceOp.SUM)
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
                raise error.__cause__ from None  # another one was told of the loss before
            raise

    def _input(self, slot: Slot) -> Array:
        return draw_input(slot, self._scenario.seed, self._process.peer, self._iteration)

    def _request(
        self, slot: Slot, original: Array, *, in_place: bool
    ) -> tuple[ReduceRequest, Array, Array]:
        """A request on fresh copies of ``original``, with its two buffers."""
        send = original.copy()
        recv = send if in_place else np.full_like(send, 7)
        weight = draw_weight(slot, self._scenario.seed, self._process.peer, self._iteration)
        asks = ReduceCall(0, slot.tag, slot.descriptor(), weight=weight)
        return ReduceRequest(borrow(send, recv), asks), send, recv

    # -- calls ---------------------------------------------------------------------------------

    async def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Make one call of the engine; the scenario may interrupt it.

        Raises:
            Interrupted: it did.
        """
        task = self._loop.create_task(work)
        self._calls[task] = False
        try:
            return await task
        except asyncio.CancelledError:
            if self._calls[task]:
                raise Interrupted from None
            raise
        finally:
            del self._calls[task]

    def _budget_s(self) -> float | None:
        if not self._is_hasty or self._rng.random() >= self._scenario.impatience:
            return None
        return self._rng.randint(1, 8) * self._scenario.latency_ns / NS_PER_S

    async def _joint(self, kind: RoundKind, patience_s: float | None = None) -> bool:
        """Make a joint call of the run; repeat it when it was left, as long as patience lasts."""
        began_ns = self._loop.now_ns()
        for attempt in range(_ATTEMPTS_MAX):
            await self._pause(attempt)
            budget_s = self._budget_s() or patience_s
            try:
                asked = RunRequest(kind, timeout_s=budget_s)
                return bool(await self._call(self._engine.round(asked)))
            except (DeadlineExceeded, Interrupted) as error:
                self._checkers.done[type(error).__name__] += 1
                spent_ns = self._loop.now_ns() - began_ns
                if patience_s is not None and spent_ns >= patience_s * NS_PER_S:
                    raise DeadlineExceeded from error
        raise AssertionError(f"{self._process.name}: {_ATTEMPTS_MAX} attempts of a joint call")

    async def _pause(self, attempt: int) -> None:
        self._is_hasty = attempt <= _HASTY_MAX
        if not self._is_hasty:
            await self.sleep(_PAUSE_NS)

    async def _again(self, error: BaseException) -> None:
        """A collective has failed: get ready to repeat it, or give up.

        Raises:
            PCCLError: it makes no sense to repeat it.
        """
        self._checkers.done[type(error).__name__] += 1
        if isinstance(error, LockstepError):
            if self._scenario.mistake is None:
                raise Violation(f"{self._process.name} was accused of a mistake: {error}")
            await self._joint(RoundKind.UPDATE_TOPOLOGY)  # what the others wait in
        elif not isinstance(error, _REPEATED):
            raise error

    # -- collectives ---------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        return f"{self._process.name} (peer {self._process.peer})"

    async def _reduce(self, slot: Slot, original: Array) -> Array | None:
        """Reduce until it succeeds; None if this peer is alone."""
        in_place = self._rng.random() < 0.5
        for attempt in range(_ATTEMPTS_MAX):
            await self._pause(attempt)
            request, send, recv = self._request(slot, original, in_place=in_place)
            retry = self._scenario.retries
            request = replace(request, retry=retry, timeout_s=self._budget_s())
            try:
                await self._call(self._engine.reduce(request))
            except TooFewPeers:
                self._checkers.failed(self._who, send, original)
                return None
            except (PCCLError, Interrupted) as error:
                self._check_failed(send, recv, original)
                await self._again(error)
                continue
            return self._check_succeeded(slot, send, recv, original)
        raise AssertionError(f"{self._who}: {_ATTEMPTS_MAX} attempts without a result")

    async def _reduce_buckets(self, buckets: Buckets) -> None:
        """As a step of data parallelism does: look at no outcome before all are launched."""
        tags = range(_BUCKET_TAG, _BUCKET_TAG + buckets.count)
        slots = tuple(Slot(tag, 100, DataType.FLOAT, ReduceOp.SUM) for tag in tags)
        await self._reduce_by_handles(slots, [self._input(slot) for slot in slots], buckets)

    async def _compute(self, buckets: Buckets) -> list[PCCLError]:
        """What comes between two launches; a lost place that a call has told meanwhile."""
        await self.sleep(buckets.compute_ns)
        if buckets.asks:
            try:
                await self._joint(RoundKind.PEERS_PENDING)
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
                ticket = engine.launch(replace(request, timeout_s=self._budget_s()))
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
                raise Violation(f"{self._who}: the world changed before a handle was waited for")
            try:
                await self._finish(ticket)
            except TooFewPeers:  # it had to wait, and the others have gone meanwhile
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
            await self._again(failure)
        for slot, original in again:
            await self._reduce(slot, original)

    async def _finish(self, ticket: int) -> None:
        while True:
            try:
                await self._call(self._engine.finish(ticket))
                return
            except Interrupted:  # the operation goes on
                continue

    async def _reduce_multiple(self, slots: tuple[Slot, ...], inputs: list[Array]) -> None:
        waiting = list(zip(slots, inputs, strict=True))
        max_in_flight = 1 + self._scenario.seed % 3
        for attempt in range(_ATTEMPTS_MAX):
            await self._pause(attempt)
            made = [self._request(s, x, in_place=self._rng.random() < 0.5) for s, x in waiting]
            requests = tuple(request for request, _, _ in made)
            wanted = ReduceManyRequest(requests, max_in_flight, timeout_s=self._budget_s())
            completed: tuple[int, ...] = tuple(slot.tag for slot, _ in waiting)
            failure: PCCLError | Interrupted | None = None
            try:
                await self._call(self._engine.reduce_many(wanted))
            except PCCLError as error:
                completed, failure = error.completed_tags, error
                # Whoever joins again takes over the others' state anyway.
                told = isinstance(error, OutcomeUnknown | ResyncRequired | Evicted | MasterLost)
                if self._engine.machine.needs_resync and not told:
                    raise Violation(f"{self._who}: out of step, and not told") from error
            except Interrupted as error:
                completed, failure = (), error
            for (slot, original), (_, send, recv) in zip(waiting, made, strict=True):
                if slot.tag in completed:
                    self._checkers.done["of several"] += 1
                    self._check_succeeded(slot, send, recv, original)
                else:
                    self._check_failed(send, recv, original)
            waiting = [(slot, x) for slot, x in waiting if slot.tag not in completed]
            if not waiting or isinstance(failure, TooFewPeers):
                return
            assert failure is not None
            await self._again(failure)
        raise AssertionError(f"{self._who}: {_ATTEMPTS_MAX} attempts without a result")

    def _launch_and_drop(self) -> None:
        """Nobody ever looks at this one; it must disturb nothing."""
        slot = Slot(_DROPPED_TAG, 100, DataType.INT32, ReduceOp.MAX)
        request, _, _ = self._request(slot, self._input(slot), in_place=True)
        try:
            ticket = self._engine.launch(request)
        except TooFewPeers:
            return
        except PCCLError as error:
            if error.result is not Result.INVALID_ARGUMENT:
                raise
            return  # the one before is not over yet
        before = self._engine.roster
        self._engine.calls.forget(ticket)
        if self._engine.roster is not before:
            raise Violation(f"{self._who}: the world changed because a handle was dropped")
        self._checkers.done["dropped handle"] += 1

    async def _broadcast(self) -> None:
        slot = Slot(_BROADCAST_TAG, self._scenario.slots[0].count, DataType.FLOAT, ReduceOp.SUM)
        original = self._input(slot)
        for attempt in range(_ATTEMPTS_MAX):
            await self._pause(attempt)
            root = self._iteration_of_all() % self._world_size
            buffer = original.copy()
            descriptor = Descriptor.broadcast(slot.data_type, slot.count, root)
            asks = ReduceCall(0, slot.tag, descriptor)
            request = ReduceRequest(borrow(buffer), asks, timeout_s=self._budget_s())
            try:
                info = await self._call(self._engine.reduce(request))
            except (PCCLError, Interrupted) as error:
                self._check_failed(buffer, buffer, original)
                await self._again(error)
                continue
            id_ = info.outcome.operation
            if len(info.contributors) > 1:
                operation = InRun(self._process.run, id_)
                self._checkers.was_broadcast(self._who, operation, info.contributors, root, buffer)
            self._checkers.returned(self._who, f"what {id_} brought", buffer)
            return
        raise AssertionError(f"{self._who}: {_ATTEMPTS_MAX} attempts of a broadcast")

    def _iteration_of_all(self) -> int:
        """A number that all members of a view agree on (their iterations differ)."""
        roster = self._engine.roster
        return roster.view if roster is not None else 0

    async def _barrier(self) -> None:
        for attempt in range(_ATTEMPTS_MAX):
            await self._pause(attempt)
            asks = ReduceCall(0, _BARRIER_TAG, Descriptor.barrier())
            request = ReduceRequest(None, asks, timeout_s=self._budget_s())
            try:
                info = await self._call(self._engine.reduce(request))
            except (PCCLError, Interrupted) as error:
                await self._again(error)
                continue
            if len(info.contributors) > 1:
                operation = InRun(self._process.run, info.outcome.operation)
                self._checkers.passed_barrier(self._who, operation, info.contributors)
            return
        raise AssertionError(f"{self._who}: {_ATTEMPTS_MAX} attempts of a barrier")

    def _check_succeeded(self, slot: Slot, send: Array, recv: Array, original: Array) -> Array:
        if recv is not send:
            self._checkers.untouched(self._who, send, original)
        run, result = self._process.results[slot.tag]
        self._checkers.began_intact(
            self._who, InRun(run, result.operation), self._process.peer, original
        )
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


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
