"""A storm in the simulator: the production engine and wrapper in virtual time.

A replica is made of the classes that make up ``DiLoCo``. Tasks take the place of its two threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pccl
from gpt.model import GPT, digest
from pccl._api.arguments import join_request, reduce_request, sync_request
from pccl._api.reports import Attribute
from pccl.bindings.compression import of_pseudo_gradients
from pccl.bindings.diloco.local_trainer import LocalTrainer, RoundMerged, Steps
from pccl.bindings.diloco.model.inner_state import InnerState
from pccl.bindings.diloco.model.local_model import LocalModel
from pccl.bindings.diloco.model.outer import OuterParameters
from pccl.bindings.diloco.model.outer_optimizers import outer_factory
from pccl.bindings.diloco.replica_calls import (
    JointNews,
    QuorumOptions,
    ReplicaCall,
    ReplicaCalls,
)
from pccl.bindings.diloco.rounds import (
    Contribution,
    Entered,
    Members,
    Pause,
    RoundCommitted,
    Take,
)
from pccl.bindings.diloco.schedule import partition, schedule
from pccl.checks import check_quorum
from pccl.errors import NotConnected, PCCLError
from pccl.protocol.types import NS_PER_S, RoundKind
from pccl.runtime.requests import ReduceInfo, RunRequest, SharedStateSyncInfo
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.runner import Simulation
from pccl.stress.sim.scenarios.from_timeline import from_timeline
from pccl.stress.sim.workloads.application import Application
from pccl.stress.sim.workloads.joint_task import JointTask
from pccl.stress.studies.storm.storm import Storm
from pccl.stress.studies.storm.tape import (
    HeldOutLoss,
    ReplicaDone,
    ReplicaKilled,
    ReplicaStarted,
    ReplicaSynced,
    ReplicaTrains,
    RoundDone,
    StormBegan,
    TapeEvent,
    of_fault,
)
from pccl.stress.studies.storm.work import StormWork, state_digest
from pccl.stress.timeline import FaultKind

LIVES_MAX = 1000
ROUNDS_BEFORE = 2
"""Number of rounds before the first fault; by then all replicas train."""
WINDOW_BYTES = 4 << 20


class StormFailed(Exception):
    """The simulated storm broke a promise of the library; the message says which."""


@dataclass(slots=True)
class SimulatedStorm:
    """A storm to simulate, and its tape so far."""

    storm: Storm
    work: StormWork
    tape: list[TapeEvent] = field(default_factory=list[TapeEvent])

    def run(self) -> list[TapeEvent]:
        """Run the storm, and return its tape.

        Raises:
            StormFailed: a promise of the library was broken.
        """
        training = self.storm.training
        round_s = training.step_s * max(training.paces, default=1.0) * training.sync_every
        began_s = 1 + ROUNDS_BEFORE * round_s
        scenario = from_timeline(self.storm.timeline, round(began_s * NS_PER_S))
        scenario = replace(
            scenario, slots=(), min_peers=1, segment_bytes=256 << 10, window_bytes=WINDOW_BYTES,
            settles_ns=0, retries=False, pause_ns=0,
            quorum=check_quorum(training.quorum, training.grace_s),
        )  # fmt: skip
        self.tape.append(StormBegan(began_s))
        gone = set[int]()
        for fault in self.storm.timeline.faults:
            if fault.peer in gone:
                continue
            if fault.kind in (FaultKind.KILL, FaultKind.LEAVE):
                gone.add(fault.peer)
            at_s = began_s + fault.at_s
            self.tape += of_fault(fault, scenario.peers, at_s, at_s + fault.duration_s)
            if fault.kind is FaultKind.RESTART:
                self.tape.append(ReplicaStarted(at_s + fault.duration_s, fault.peer))
        verdict = Simulation(scenario, self._application).run()
        if not verdict.ok:
            raise StormFailed(f"{verdict.violation}\n{verdict.story[-4000:]}")
        return self.tape

    def _application(self, parts: RunParts, process: PeerProcess, starts: bool) -> Application:
        return ReplicaProgram(parts, process, self, starts=starts)


class SimulatedCommunicator:
    """The calls of the asyncio communicator, on the engine of a simulated process.

    Args:
        process: the process.
        synced: called with the shared state after each synchronization.
    """

    def __init__(self, process: PeerProcess, synced: Callable[[pccl.SharedState], None]) -> None:
        self._process, self._engine, self._synced = process, process.engine, synced

    @property
    def peer_id(self) -> int:
        """Id of this peer; raises NotConnected before it is a member."""
        if self._engine.roster is None:
            raise NotConnected
        return self._process.peer

    @property
    def is_awaited(self) -> bool:
        """Whether members wait for a call of this one."""
        return self._engine.machine.is_awaited

    @property
    def newcomers_wait(self) -> bool:
        """Whether newcomers are ready for admission."""
        return self._engine.machine.newcomers_wait

    def members(self) -> list[Any]:
        """Return the members of the group."""
        roster = self._engine.roster
        return [] if roster is None else [_Listed(member.peer) for member in roster.members]

    def get_attribute(self, attribute: Attribute | str) -> int:
        """Not needed, because each replica is one process."""
        raise NotImplementedError(attribute)

    async def connect(self, **options: Any) -> None:
        """Join the run."""
        await self._engine.connect(join_request(100, **options))

    async def update_topology(self, **options: Any) -> None:
        """Admit newcomers."""
        needed = check_quorum(options.get("quorum"), options.get("grace_s", "auto"))
        await self._engine.round(RunRequest(RoundKind.UPDATE_TOPOLOGY, None, needed))

    async def sync_shared_state(
        self, state: pccl.SharedState, **options: Any
    ) -> SharedStateSyncInfo:
        """Make the shared states equal."""
        info = await self._engine.sync(sync_request(state, **options))
        self._synced(state)
        return info

    async def all_reduce(self, *arguments: Any, **options: Any) -> ReduceInfo:
        """Reduce over all members."""
        return await self._engine.reduce(reduce_request(*arguments, **options))


@dataclass(frozen=True, slots=True)
class _Listed:
    peer_id: int


class ReplicaProgram(Application):
    """The program of a replica; when it fails, a supervisor starts it again."""

    lives_max = LIVES_MAX
    begins_anew_after = (PCCLError,)

    def __init__(
        self, parts: RunParts, process: PeerProcess, run: SimulatedStorm, *, starts: bool
    ) -> None:
        super().__init__(parts, process)
        self._parts, self._run = parts, run
        self._is_first = starts

    async def _live(self, life: int) -> None:
        start_s = self._run.storm.training.start_s
        if life:
            self._run.tape.append(ReplicaStarted(self._loop.time(), self._process.index))
        if life or not self._is_first:
            await self.sleep(round(start_s * NS_PER_S))
        await SimulatedReplica(self._parts, self._process, self._run, self).run()

    def _is_final(self, error: PCCLError) -> bool:
        self._run.tape.append(ReplicaKilled(self._loop.time(), self._process.index, by_itself=True))
        return False

    def interrupt(self) -> None:
        """Do nothing: no Ctrl-C comes."""


class SimulatedReplica:
    """One life of a replica: trains, and makes the joint calls.

    Args:
        parts: shared objects of the run.
        process: its process.
        run: the storm.
        program: its program, which may have to nap.
    """

    def __init__(
        self, parts: RunParts, process: PeerProcess, run: SimulatedStorm, program: ReplicaProgram
    ) -> None:
        training, timeline = run.storm.training, run.storm.timeline
        self._index, self._tape, self._work = process.index, run.tape, run.work
        self._loop, self._clock, self._program = parts.loop, process.clock, program
        self._ends_ns = parts.scenario.stop_ns
        self._step_ns = round(
            training.step_s * training.pace(process.index, timeline.peers) * NS_PER_S
        )
        self._life, self._made = run.work.next_life(), 0
        self._model, self._inner = run.work.model()
        named = list(self._model.named_parameters())
        timing = schedule(training.sync_every, training.fragments, training.delay)
        split = partition([p.numel() for _, p in named], training.fragments, "strided")
        numel = sum(p.numel() for _, p in named)
        make_outer = outer_factory(None, numel, timing)
        self._local = LocalModel([[named[i] for i in part] for part in split], make_outer)
        compression = of_pseudo_gradients(training.compression)
        self._names = [[named[i][0] for i in part] for part in split]
        self._inner_state = InnerState(self._inner, named)
        self._outer = OuterParameters(
            [part.outer for part in self._local.parts],
            inner=self._inner_state,
            previews=training.eager,
        )
        self._trainer = LocalTrainer(
            timing, self._local.parts, timing.mixing(None), self._now_s, eager=training.eager
        )
        self._comm = SimulatedCommunicator(process, self._note_state)
        self._calls = ReplicaCalls(
            self._comm, self._outer, timing, 1, compression, guard=pccl.Guard(),
            quorum=QuorumOptions(training.quorum, training.grace_s), clock=self._now_s,
        )  # fmt: skip
        self._calls.tell = self._hear_of
        self._process = process
        self._joint: JointTask[JointNews] = JointTask(
            parts.loop, process.clock, lambda: self._comm.newcomers_wait
        )

    async def run(self) -> None:
        """Join, train and finish.

        Raises:
            PCCLError: the replica cannot continue in this run.
        """
        caller = self._joint.start(self._calls.run(), self._carry_out)
        try:
            await self._train()
        finally:
            caller.cancel()

    async def _train(self) -> None:
        while not self._trainer.entry:
            await self._hear()
        await self._do(self._trainer.begin())
        while self._loop.now_ns() < self._ends_ns or self._trainer.pipeline.position()["since"]:
            await self._program.sleep(self._step_ns)
            await self._program.end_nap()
            self._joint.check()
            self._take_in()
            with self._inner_state.stepping():
                self._work.step(self._life, self._made, self._model, self._inner)
            self._made += 1
            await self._do(self._trainer.step(1.0, is_awaited=self._is_awaited))
        await self._do(self._trainer.finish())
        await self._joint.until(lambda: self._joint.is_idle)
        self._take_in()
        self._local.take_over()
        number = self._outer.ledger.number
        done = ReplicaDone(self._at_s, self._index, number, digest(self._model.parameters()))
        self._tape.append(done)

    @property
    def _is_awaited(self) -> bool:
        """Whether members wait for this replica, as ``TrainingDriver`` decides it."""
        awaited = self._joint.is_idle and self._comm.is_awaited
        return awaited or self._trainer.is_behind()

    @property
    def _at_s(self) -> float:
        return self._loop.time()

    def _now_s(self) -> float:
        return self._clock.now_ns() / NS_PER_S

    async def _do(self, steps: Steps) -> None:
        for action in steps:
            match action:
                case Contribution():
                    self._joint.put(action)
                case RoundMerged():
                    pass
                case None:
                    await self._hear()
        self._local.hold()

    async def _hear(self) -> None:
        await self._joint.until(lambda: bool(self._joint.news))
        self._take_in()

    def _take_in(self) -> None:
        while self._joint.news:
            news = self._joint.news.popleft()
            match news.what:
                case Entered() as entered:
                    self._trainer.enter(entered, news.outer, news.buffers)
                    trains = ReplicaTrains(self._at_s, self._index, self._comm.peer_id)
                    self._tape.append(trains)
                case RoundCommitted() as committed:
                    self._trainer.commit(committed)
                case _:
                    pass

    # -- the task that makes joint calls -----------------------------------------------------------

    async def _carry_out(self, asked: ReplicaCall | Take | Pause) -> object:
        match asked:
            case ReplicaCall(method, arguments, options):
                return await getattr(self._comm, method)(*arguments, **options)
            case Take():
                return await self._joint.take(asked)
            case Pause(seconds, _):
                await self._program.sleep(round(seconds * NS_PER_S))
                return False

    def _note_state(self, state: pccl.SharedState) -> None:
        run, content = self._process.run.hex(), state_digest(state)
        self._tape.append(ReplicaSynced(self._at_s, self._index, run, state.revision, content))

    def _hear_of(self, news: JointNews) -> None:
        what = news.what
        if isinstance(what, RoundCommitted):
            average, number = what.average, what.contribution.number
            workers = average.contributors if average.workers is None else average.workers
            own_weight = what.contribution.weight if average.took_part else 0.0
            self._tape.append(
                RoundDone(
                    self._at_s, self._index, self._process.run.hex(), number, tuple(workers),
                    average.total_weight, own_weight, average.tx_bytes,
                )
            )  # fmt: skip
            if self._work.judges(number):
                loss = self._work.judge(number, self._load_outer)
                self._tape.append(HeldOutLoss(self._at_s, number, loss))
        elif isinstance(what, Members):
            return
        self._joint.tell(news)

    def _load_outer(self, model: GPT) -> None:
        """Load the outer parameters into ``model``."""
        for names, fragment in zip(self._names, self._outer.fragments, strict=True):
            for name, value in zip(names, fragment.views(fragment.flat), strict=True):
                model.get_parameter(name).data.copy_(value)
