"""Runs one seed: the production runtime in virtual time, under the scenario's faults, checked."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from pccl.protocol.limits import Timing
from pccl.protocol.peer_events import PeerEffect, PeerEvent, Post
from pccl.protocol.types import NS_PER_S, PeerId
from pccl.runtime.requests import PeerOptions
from pccl.stress.sim.checkers import Checkers, Violation
from pccl.stress.sim.faults import Faults
from pccl.stress.sim.loop import Deadlock, OutOfTime, VirtualLoop
from pccl.stress.sim.process import MasterProcess, PeerProcess, RepeatingLink
from pccl.stress.sim.scenario import LifePhase, Scenario, draw
from pccl.stress.sim.trace import Trace
from pccl.stress.sim.workload import Workload
from pccl.transports.base import Address
from pccl.transports.link import Link
from pccl.transports.sim import SimNetwork

LIMIT_S = 400
"""Virtual time after which somebody evidently waits for ever: every deadline adds up to less."""


@dataclass(slots=True)
class Verdict:
    """What became of one seed."""

    scenario: Scenario
    violation: str | None = None
    story: str = ""
    trace_digest: str = ""
    events: int = 0
    virtual_s: float = 0.0
    reduces: int = 0
    aborts: int = 0
    done: dict[str, int] = field(default_factory=dict[str, int])
    kills: dict[str, int] = field(default_factory=dict[str, int])
    endings: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        return self.violation is None


class Simulation:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.trace = Trace()
        self.checkers = Checkers(scenario)
        self.verdict = Verdict(scenario, kills={phase.value: 0 for phase in LifePhase})
        self._loop = VirtualLoop(limit_ns=LIMIT_S * NS_PER_S)
        self._rng = Random(f"{scenario.seed}/network")
        self._network = SimNetwork(
            self._loop,
            self._rng,
            lambda now_ns, what: self.trace.note(now_ns, "network", what),
            latency_ns=scenario.latency_ns,
            bytes_per_s=scenario.bytes_per_s,
            window_bytes=scenario.window_bytes,
        )
        self._faults = Faults(scenario, self._loop, self._network, self._kill, self.checkers.done)
        self._processes: list[PeerProcess] = []
        self._workloads: list[asyncio.Task[None]] = []
        self._errors: list[BaseException | str] = []
        self._loop.set_exception_handler(self._on_loop_error)

    def run(self) -> Verdict:
        """Run to the end; never raises for what the run does."""
        verdict = self.verdict
        silence = logging.getLogger("pccl")
        level, silence.disabled = silence.level, True
        silence.setLevel(logging.CRITICAL + 1)
        try:
            self._loop.run_until_complete(self._main())
        except RuntimeError:
            if not self._errors:  # otherwise _on_loop_error has stopped the loop
                raise
        except (Violation, Deadlock, OutOfTime, AssertionError) as error:
            self._errors.append(error)
        finally:
            silence.disabled = False
            silence.setLevel(level)
            self._clean_up()
        if self._errors:
            first = self._errors[0]
            kind = f"{type(first).__name__}: " if isinstance(first, BaseException) else ""
            verdict.violation = f"{kind}{first}"
            verdict.story = self.trace.story()
        verdict.trace_digest = self.trace.digest
        verdict.events = self.trace.count
        verdict.virtual_s = self._loop.now_ns() / NS_PER_S
        verdict.reduces = self.checkers.reduces
        verdict.aborts = self.checkers.aborts
        verdict.done = dict(self.checkers.done)
        return verdict

    async def _main(self) -> None:
        scenario, loop = self.scenario, self._loop
        timing = Timing()
        master = MasterProcess(
            loop,
            self._network.host("master"),
            timing,
            self._rng,
            self.trace,
            self.checkers,
            scenario.token,
        )
        await master.start()
        options = PeerOptions(
            timing,
            Address("", 0),
            token=scenario.token,
            segment_bytes=scenario.segment_bytes,
        )
        for index in range(scenario.peers):
            process = PeerProcess(
                loop,
                self._network.host(f"p{index}"),
                options if index % 2 else replace(options, lanes=scenario.lanes),
                self.trace,
                self._on_event,
                self._make_link,
                index,
                index % scenario.groups,
            )
            self._processes.append(process)
        self._spread_links()
        self._faults.start(self._processes)
        if scenario.master_dies_ns is not None:
            loop.call_at_ns(scenario.master_dies_ns, master.kill)
        workloads = [
            Workload(scenario, process, self.checkers, loop) for process in self._processes
        ]
        for interrupt in scenario.interrupts:
            loop.call_at_ns(interrupt.when_ns, workloads[interrupt.victim].interrupt)
        early = scenario.peers - scenario.late_peers
        for index, workload in enumerate(workloads):
            task = loop.create_task(self._start(workload, index, index >= early))
            task.add_done_callback(partial(self._on_workload_done, self._processes[index]))
            self._workloads.append(task)
        for index, task in enumerate(self._workloads):
            with suppress(asyncio.CancelledError, Exception):  # _on_workload_done has judged it
                await task
            ending = workloads[index].ended_with if self._processes[index].alive else "killed"
            self.verdict.endings[str(ending)] = self.verdict.endings.get(str(ending), 0) + 1
        self.checkers.look_at_memory()
        master.server.close()
        self._check_liveness(workloads)

    async def _start(self, workload: Workload, index: int, late: bool) -> None:
        wait_ns = self._rng.randrange(self.scenario.stop_ns // 2) if late else index
        await workload.sleep(wait_ns)
        await workload.run()

    def _on_workload_done(self, process: PeerProcess, task: asyncio.Task[None]) -> None:
        """Whatever goes wrong in a workload ends the run at once, before others wait in vain."""
        error = None if task.cancelled() else task.exception()
        if error is not None and (process.alive or isinstance(error, Violation)):
            self._errors.append(error)
            self._loop.stop()

    def _check_liveness(self, workloads: list[Workload]) -> None:
        if not self.scenario.undisturbed:
            return
        for process, workload in zip(self._processes, workloads, strict=True):
            if process.alive and workload.ended_with != "finished":
                raise Violation(f"{process.name} ended with {workload.ended_with} without a fault")

    # -- faults ----------------------------------------------------------------------------------

    def _make_link(self, peer: PeerId) -> Link:
        if not self.scenario.repeats:
            return Link(peer)
        return RepeatingLink(peer, self._rng, self.scenario.repeats)

    def _spread_links(self) -> None:
        if not self.scenario.uneven_links:
            return
        names = ["master", *(process.name for process in self._processes)]
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                self._network.set_link(
                    a,
                    b,
                    latency_ns=self._rng.randint(1, 2 * self.scenario.latency_ns),
                    bytes_per_s=self.scenario.bytes_per_s,
                )

    def _kill(self, process: PeerProcess) -> None:
        if not process.alive:
            return
        index = self._processes.index(process)
        if index >= len(self._workloads) or self._workloads[index].done():
            return
        self.verdict.kills[process.life_phase().value] += 1
        self.checkers.killed(process.name)
        process.kill()
        self._workloads[index].cancel()

    def _on_event(self, process: PeerProcess, event: PeerEvent, effects: list[PeerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Post):
                operand = process.engine.operand_of(effect.call)
                content = operand.send.copy() if operand is not None else None
                self.checkers.posted(effect.operation, process.peer, content)
        self._faults.on_event(process.index, process, event)

    # -- errors ----------------------------------------------------------------------------------

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._errors.append(error if error is not None else str(context.get("message")))
        loop.stop()

    def _clean_up(self) -> None:
        """Leave no task and no loop behind, also after a failure."""
        self._loop.set_exception_handler(lambda loop, context: None)
        for process in self._processes:
            process.host.crash()
        tasks = [task for task in asyncio.all_tasks(self._loop) if not task.done()]
        for task in tasks:
            task.cancel()
        with suppress(Deadlock, OutOfTime, RuntimeError):
            for task in tasks:
                self._loop.run_until_complete(_settled(task))
        self._loop.close()


async def _settled(task: asyncio.Task[Any]) -> None:
    with suppress(Exception, asyncio.CancelledError):  # the verdict is known already
        await task


def run_seed(seed: int) -> Verdict:
    """Run the scenario of one seed."""
    return Simulation(draw(seed)).run()
