"""Runs one seed: the production runtime in virtual time, with faults and checkers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.checkers.excuses import Excuses
from pccl.stress.sim.checkers.guards import GuardCheckers
from pccl.stress.sim.checkers.outcomes import Checkers, Violation
from pccl.stress.sim.checkers.state import StateCheckers
from pccl.stress.sim.checkers.training import TrainingCheckers
from pccl.stress.sim.checkers.turns import Departures
from pccl.stress.sim.faults.base import LifePhase
from pccl.stress.sim.faults.master import MasterDeath
from pccl.stress.sim.loop import Deadlock, OutOfTime, VirtualLoop
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.publication.checker import PublicationChecker
from pccl.stress.sim.publication.readers import SimReaders
from pccl.stress.sim.scenarios.scenario import Scenario, draw
from pccl.stress.sim.scenarios.to_train import draw_to_train
from pccl.stress.sim.stage import Seat, Stage
from pccl.stress.sim.store.checker import StoreChecker
from pccl.stress.sim.trace import Trace

LIMIT_S = 250
"""Virtual seconds after the last fault at which a run fails: all deadlines add up to less, so a
process waits for ever."""


@dataclass(slots=True)
class Verdict:
    """The result of one seed."""

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
    faults: dict[str, int] = field(default_factory=dict[str, int])
    struck_in: dict[str, int] = field(default_factory=dict[str, int])
    endings: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        return self.violation is None


class Simulation:
    """One run of one scenario."""

    def __init__(
        self, scenario: Scenario, application: Callable[[RunParts, Any, bool], Any] | None = None
    ) -> None:
        self.scenario = scenario
        self.trace = Trace()
        self.verdict = Verdict(scenario)
        self._loop = loop = VirtualLoop(limit_ns=scenario.ends_ns + LIMIT_S * NS_PER_S)
        self.excuses = Excuses(scenario.timing, 2 * scenario.latency_ns, loop.now_ns)
        self.checkers = checkers = Checkers(scenario, self.excuses)
        guarded = scenario.training is not None and scenario.training.guard is not None
        if guarded or any(slot.guard is not None for slot in scenario.slots):
            checkers.guards = GuardCheckers(checkers.done, self.excuses, may_part=scenario.standby)
        if scenario.syncs is not None:
            known = checkers.known_committed
            checkers.state = StateCheckers(
                scenario.syncs, checkers.done, known, may_part=scenario.standby
            )
        if scenario.store:
            checkers.store = StoreChecker(checkers.done, may_lose=scenario.standby)
        if scenario.readers:
            checkers.publication = PublicationChecker(scenario.seed, checkers.done, loop.now_ns)
        if scenario.training is not None:
            axes = scenario.processes_max
            checkers.training = TrainingCheckers(
                scenario.training, axes, checkers.done, self.excuses
            )
            checkers.departures = Departures(checkers, scenario.latency_ns)
        self._errors: list[BaseException | str] = []
        self._rng = Random(f"{scenario.seed}/starts")
        parts = RunParts(scenario, loop, self.trace, checkers, application)
        self.stage = stage = Stage(parts, self.excuses, self._on_done)
        self.readers: SimReaders | None = None
        if checkers.publication is not None:
            self.readers = SimReaders(parts, stage.network, checkers.publication)
            checkers.publication.working = self._working
        loop.set_exception_handler(self._on_loop_error)

    def run(self) -> Verdict:
        """Run to the end, and return the verdict; failures of the run do not raise."""
        verdict = self.verdict
        silence = logging.getLogger("pccl")
        level, silence.disabled = silence.level, True
        silence.setLevel(logging.CRITICAL + 1)
        state = self.checkers.state
        try:
            with state.hear_elections() if state is not None else nullcontext():
                self._loop.run_until_complete(self._main())
        except RuntimeError:
            if not self._errors:  # otherwise _on_loop_error has stopped the loop
                raise
        except (Violation, Deadlock, OutOfTime, AssertionError) as error:
            self._errors.append(error)
        finally:
            verdict.story = self.trace.story()
            verdict.trace_digest, verdict.events = self.trace.digest, self.trace.count
            silence.disabled = False
            silence.setLevel(level)
            self._clean_up()
        if self._errors:
            first = self._errors[0]
            kind = f"{type(first).__name__}: " if isinstance(first, BaseException) else ""
            verdict.violation = f"{kind}{first}"
        else:
            verdict.story = ""
        verdict.virtual_s = self._loop.now_ns() / NS_PER_S
        verdict.reduces = self.checkers.reduces
        verdict.aborts = self.checkers.aborts
        verdict.done = dict(self.checkers.done)
        verdict.kills = {phase.value: self.stage.kills[phase.value] for phase in LifePhase}
        verdict.faults = dict(self.stage.strikes)
        verdict.struck_in = dict(self.stage.struck_in)
        return verdict

    async def _main(self) -> None:
        scenario, stage = self.scenario, self.stage
        await stage.start()
        if self.readers is not None:
            self.readers.start()
        for fault in scenario.faults:
            fault.plant(stage)
        if scenario.training is not None and scenario.settles_ns:
            self._loop.call_at_ns(scenario.ends_ns - 1, self._check_together)
        early = scenario.peers - scenario.late_peers
        for seat in list(stage.seats):
            late = seat.index >= early
            wait_ns = self._rng.randrange(max(1, scenario.stop_ns // 2)) if late else seat.index
            stage.begin(seat, wait_ns)
        while True:
            tasks = [seat.task for seat in stage.seats if seat.task and not seat.task.done()]
            if not tasks:
                break
            with suppress(asyncio.CancelledError, Exception):  # _on_done has judged it
                await tasks[0]
        for seat in stage.seats:
            ending = str(seat.workload.ended_with) if seat.alive else "killed"
            self.verdict.endings[ending] = self.verdict.endings.get(ending, 0) + 1
        self.checkers.look_at_memory()
        if self.readers is not None:
            self.readers.close()
        stage.close()
        self._check_liveness([seat for seat in stage.seats if seat.alive])

    def _working(self) -> set[str]:
        """Return the names of the processes of group 0 that have not finished."""
        seats = (seat for seat in self.stage.seats if seat.process.group == 0)
        return {seat.process.name for seat in seats if seat.alive and not seat.is_over}

    # -- liveness --------------------------------------------------------------------------------

    def _check_liveness(self, seats: list[Seat]) -> None:
        for seat in seats:
            name, ending = seat.process.name, seat.workload.ended_with
            if ending not in ("finished", "left", "master lost"):
                raise Violation(f"{name} survived all faults, but ended with {ending}")
        if self._settled and self.scenario.training is None:
            self._check_convergence([s for s in seats if s.workload.ended_with == "finished"])

    @property
    def _settled(self) -> bool:
        """Whether all processes had enough time, and a master, to join or return."""
        scenario = self.scenario
        if not scenario.settles_ns or any(isinstance(f, MasterDeath) for f in scenario.faults):
            return False
        return self.stage.struck_ns <= scenario.ends_ns - scenario.settles_ns

    def _check_convergence(self, seats: list[Seat]) -> None:
        """Check that all members of a group ended with the same vote."""
        for group in range(self.scenario.groups):
            votes = {
                seat.process.name: seat.workload.last_vote
                for seat in seats
                if seat.index % self.scenario.groups == group
            }
            if len(set(votes.values())) > 1:
                raise Violation(f"members of group {group} ended with different votes: {votes}")
            self.checkers.done["converged"] += 1

    def _check_together(self) -> None:
        """Check that all processes that train are members of one run."""
        if not self._settled or self.checkers.nobody_to_join:
            return
        seats = [seat for seat in self.stage.seats if seat.alive and not seat.is_over]
        for seat in seats:
            group = [one.process for one in seats if one.process.group == seat.process.group]
            alive = {(process.run, process.peer) for process in group}
            roster = seat.process.engine.roster
            members = () if roster is None else roster.members
            if {(seat.process.run, member.peer) for member in members} != alive:
                raise Violation(f"{seat.process.name} trains with {members}, not with {alive}")
        self.checkers.done["converged"] += 1

    # -- errors ----------------------------------------------------------------------------------

    def _on_done(self, process: PeerProcess, task: asyncio.Task[None]) -> None:
        """Stop the run at once if an application failed, before other processes wait for it."""
        error = None if task.cancelled() else task.exception()
        if error is not None and (process.alive or isinstance(error, Violation)):
            self._errors.append(error)
            self._loop.stop()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._errors.append(error if error is not None else str(context.get("message")))
        loop.stop()

    def _clean_up(self) -> None:
        """Cancel all tasks and close the loop, also after a failure."""
        self._loop.set_exception_handler(lambda loop, context: None)
        self.stage.crash()
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


def run_scenario(scenario: Scenario) -> Verdict:
    """Run a scenario, and return the verdict."""
    return Simulation(scenario).run()


def run_seed(seed: int) -> Verdict:
    """Run the scenario of one seed, and return the verdict."""
    return run_scenario(draw(seed))


def run_training_seed(seed: int) -> Verdict:
    """Run the scenario of one seed in which processes train, and return the verdict."""
    return run_scenario(draw_to_train(seed))
