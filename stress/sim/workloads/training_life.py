"""The application of a process that trains: ``Rounds`` and ``LocalTrainer`` over the engine.

Two tasks take the place of the two threads of the optimizer wrapper: one trains, and one makes the
joint calls. The model consists of whole numbers (:mod:`~pccl.stress.sim.workloads.toy_model`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import numpy as np

from pccl.bindings.diloco.ledger import Ledger, Revisions
from pccl.bindings.diloco.local_trainer import LocalTrainer, RoundMerged, Steps
from pccl.bindings.diloco.rounds import (
    Connect,
    Contribution,
    Effect,
    Entered,
    Members,
    NewcomersWait,
    Notice,
    Pause,
    Reduce,
    ReduceBuffers,
    RoundCommitted,
    Rounds,
    Sync,
    Take,
    Update,
)
from pccl.protocol.errors import DeadlineExceeded, MembershipError, PCCLError, ResyncRequired
from pccl.protocol.shared_state import ResumePolicy, SharedStateSyncStrategy, SyncPurpose
from pccl.protocol.types import NS_PER_S, RoundKind
from pccl.runtime.requests import RunRequest
from pccl.runtime.state.sync import SyncOptions
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.checkers.outcomes import Sleep, Violation
from pccl.stress.sim.checkers.training import Contents, Held
from pccl.stress.sim.checkers.turns import Turns
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.workloads.application import Application, name_of, patience_s
from pccl.stress.sim.workloads.joint_task import CallsEnded, JointTask, WaitInterrupted
from pccl.stress.sim.workloads.pauses import Breaks, GivenNotice, ReplicaPauses
from pccl.stress.sim.workloads.toy_model import ToyOuter, ToyReplica, whole
from pccl.stress.sim.workloads.training_plan import LIVES_MAX
from pccl.stress.sim.workloads.training_reduces import TrainingReduces
from pccl.stress.sim.workloads.training_samples import TrainingSamples


class TrainingLife:
    """One life of a process: from joining the run to its end, or to an error that ends the life.

    It starts from nothing, or from the checkpoint of a process that has stopped.
    """

    def __init__(self, parts: RunParts, process: PeerProcess, sleep: Sleep) -> None:
        scenario, training = parts.scenario, parts.scenario.training
        training_checkers = parts.checkers.training
        assert training is not None
        assert training_checkers is not None
        self._scenario = scenario
        self._training = training
        self._process, self._engine = process, process.engine
        self._checkers = parts.checkers
        self._training_checkers = training_checkers
        self._loop = parts.loop
        self._sleep = sleep
        saved = training_checkers.saved[process.group]
        old: TrainingLife | None = saved.popleft() if saved else None
        axes = training_checkers.axes
        axis = training_checkers.claim_axis() if old is None else old._replica.axis
        rng = Random(f"{scenario.seed}/{process.name}/training of {axis}")
        slower = training.slowest if axis == 1 else 1.0
        self._step_ns = round(training.step_ns * rng.uniform(0.5, 1.0) * slower)
        weights = (1.0, 2.0, 3.0) if training.lease else (1.0, 1.0, 2.0, 0.3)
        self._weight: float = rng.choice(weights) if old is None else old._weight
        self._samples = TrainingSamples(parts, process, self._weight)
        self._schedule = schedule = training.schedule
        self._outer = ToyOuter(
            schedule.fragments,
            axes,
            training.piece_bytes,
            extras=training.extras,
            samples=self._samples.ledger,
        )
        self._replica: ToyReplica = (
            ToyReplica(schedule.fragments, axis, axes, training.digits, training.unit)
            if old is None
            else old._replica
        )
        self._pauses = ReplicaPauses(parts, process)
        self._reduces = TrainingReduces(parts, process, self._outer, self._replica)
        self._trainer = LocalTrainer(
            schedule,
            self._replica.parts,
            training.mixing,
            lambda: self._now_s,
            self._replica.buffers if training.extras else None,
            eager=training.eager,
            samples=self._samples.reader,
        )
        late = {"has_quorum": scenario.quorum is not None}
        self._rounds = Rounds(schedule, self._outer, self._notify, training.min_peers, **late)
        self._reduces.replays = self._rounds
        self._steps = self._steps_at_entry = 0
        self._revisions = Revisions(self._outer.ledger)
        self._joint: JointTask[RoundCommitted | tuple[Entered, Held, Held]] = JointTask(
            parts.loop, process.clock, lambda: self._engine.machine.newcomers_wait
        )
        self._line = 0
        self._held = Held(self._outer.contents())
        """Contents and line after the last round or entry."""
        self._excluded: Contribution | None = None
        """Work in the last round, if the guard has excluded it, until the next sync."""
        self._must_reset = False
        """Whether the guard has excluded work since the last entry."""
        self._has_missed = False
        """Whether the last effect has raised ResyncRequired."""
        self._resumed: Contents | None = None
        """Outer parameters of a checkpoint, until the process has joined."""
        if old is not None:
            self._resume(old)
        self._breaks = Breaks(parts, process.name, self._steps, sleep)
        self._notice = GivenNotice(parts, process, self._breaks)
        self._turns = Turns(parts, process)

    def _resume(self, old: TrainingLife) -> None:
        """Continue from what another process saved, as ``DiLoCo.load_state_dict`` does."""
        self._checkers.done["checkpoint loaded"] += 1
        self._steps = self._steps_at_entry = self._outer.inner_steps = old._steps
        self._outer.load(old._held.contents, old._outer.revision)
        self._revisions.synced(self._outer.revision)
        self._samples.load(old._samples)
        self._reduces.feedback.load_state_dict(old._reduces.feedback.state_dict())
        self._trainer.pipeline.resume(old._trainer.pipeline.position(), self._now_s)
        for number, _, _ in self._trainer.pipeline.position()["flights"]:
            self._trainer.commit(old._trainer.commits[number])
        self._held, self._resumed = old._held, old._held.contents

    def _save(self) -> None:
        """Leave a checkpoint to the next process, as ``DiLoCo.state_dict`` does.

        No reduce is open. Rounds without an outcome get none, because the run has failed.
        """
        for launch in self._trainer.pipeline.in_flight():
            if launch.number not in self._trainer.commits:
                self._trainer.give_up(launch, is_applied=False)
        taken, self._replica.taken = self._replica.taken, {}
        self._replica.flown = {n: taken[n] for n in taken.keys() & self._trainer.commits.keys()}
        self._held = Held(self._outer.contents(), self._line)
        self._checkers.done["checkpoint saved"] += 1
        self._training_checkers.saved[self._process.group].append(self)

    @property
    def _who(self) -> str:
        return name_of(self._process)

    async def run(self) -> None:
        """Join, train and end.

        Raises:
            PCCLError: the process cannot continue in this run.
        """
        caller = self._joint.start(self._rounds.run(), self._carry_out)
        try:
            await self._train()
        except CallsEnded:
            pass
        except PCCLError:
            self._hear()
            if self._breaks.stops_at and self._trainer.entry and self._rounds.doubt is None:
                self._save()
            raise
        finally:
            caller.cancel()
        if self._trainer.pipeline.number or self._steps:
            self._check_accounts()

    # -- the task that trains ----------------------------------------------------------------------

    async def _train(self) -> None:
        await self._joint.until(lambda: bool(self._joint.news))
        self._hear()
        await self._do(self._trainer.begin())
        while not self._breaks.may_end(self._trainer.pipeline):
            await self._breaks.compute(self._step_ns)
            await self._nap()
            self._joint.check()
            self._hear()
            while self._trainer.pipeline.due_merges():  # Ctrl-C has interrupted the wait for them
                await self._do(self._trainer.begin())
            if self._samples.are_missing:
                self._checkers.done["idle round"] += 1
                await self._do(self._trainer.idle())
                continue
            weight = self._samples.read(self._replica.axis, self._steps)
            self._replica.step(self._steps)
            self._training_checkers.stepped(self._replica.axis, self._steps)
            self._steps += 1
            self._outer.inner_steps = self._steps
            self._training_checkers.may_be_offered.add(self._steps)
            self._notice.stepped(self._steps, self._step_ns)
            how = {"is_awaited": self._is_awaited, "has_quorum": self._scenario.quorum is not None}
            await self._do(self._trainer.step(weight, **how))
            if self._steps == self._breaks.drains_at:
                await self._hand_over()
                return
            if self._steps == self._breaks.stops_at:
                await self._joint.until(lambda: self._joint.is_idle)
                self._hear()
                self._save()
                return
        while not await self._do(self._trainer.finish()):
            pass
        await self._joint.until(lambda: self._joint.is_idle)
        self._hear()
        if self._steps > self._steps_at_entry:
            self._training_checkers.finished(self._who, self._replica)

    async def _hand_over(self) -> None:
        """Hand over all work, as ``TrainingDriver.leave_if_asked`` does."""
        self._notice.give()
        while self._trainer.pipeline.has_work or self._trainer.pipeline.has_flights:
            while not await self._do(self._trainer.hand_over()):
                pass
            await self._joint.until(lambda: self._joint.is_idle)
            self._hear()
        self._checkers.done["drained"] += 1
        self._replica.returned.clear()  # nothing may be left of them
        self._training_checkers.finished(self._who, self._replica)

    async def _nap(self) -> None:
        if self._breaks.is_nap_due():
            self._turns.naps()
            await self._breaks.nap()

    @property
    def _is_awaited(self) -> bool:
        """Whether members wait for this process's next round, as ``TrainingDriver`` decides."""
        asked, is_idle = self._engine.machine.is_awaited, self._joint.is_idle
        if self._scenario.quorum is None:
            return self._training.shards == 1 and self._notice.awaits(is_idle=is_idle)
        self._turns.stepped(is_awaited=asked, is_idle=is_idle)
        awaited = is_idle and asked
        behind = not awaited and self._trainer.is_behind()
        self._checkers.done["awaited launch"] += awaited
        self._checkers.done["early launch"] += behind
        return awaited or behind

    @property
    def _now_s(self) -> float:
        return self._process.clock.now_ns() / NS_PER_S

    @property
    def _time_is_up(self) -> bool:
        return self._loop.now_ns() >= self._scenario.ends_ns

    async def _do(self, steps: Steps) -> bool:
        """Carry out actions; return False if Ctrl-C has interrupted a wait."""
        for action in steps:
            match action:
                case Contribution():
                    self._put(action)
                case RoundMerged():
                    self._merged(action)
                case None:
                    try:
                        await self._joint.until(
                            lambda: bool(self._joint.news), self._breaks.draw_interrupt_ns()
                        )
                    except WaitInterrupted:
                        self._checkers.done["wait interrupted"] += 1
                        return False
                    self._hear()
        return True

    def _put(self, contribution: Contribution) -> None:
        if self._samples.reader is None:
            self._training_checkers.weighs(self._who, contribution, self._weight, self._steps)
        self._replica.taken[contribution.number] = contribution.values
        self._replica.taken_at[contribution.number] = self._steps
        self._replica.returned.discard(contribution.fragment)
        if contribution.buffers is not None and self._reduces.is_broken(contribution):
            contribution.buffers[:] = 0.0
        self._joint.put(contribution)

    def _merged(self, merged: RoundMerged) -> None:
        replica, checkers, merge = self._replica, self._training_checkers, merged.merge
        fragment = merge.fragment
        began = replica.taken_at.get(merge.number, self._steps)
        replica.taken.pop(merge.number, None)  # it may be from before a checkpoint
        replica.flown.pop(merge.number, None)
        if merge.is_taken:
            work, during = replica.parts[fragment].given_up, range(began, self._steps)
            checkers.given_up(self._who, replica.axis, fragment, work, during)
            checkers.samples.replaced(replica.axis, fragment, work)
        common = whole(merged.committed.contribution.values)
        checkers.accounts(self._who, replica, fragment, common)

    def _hear(self) -> None:
        checkers, replica = self._training_checkers, self._replica
        while self._joint.news:
            news, lease = self._joint.news.popleft(), self._samples.heard()
            if isinstance(news, RoundCommitted):
                self._trainer.commit(news, lease)
                if not news.average.took_part:  # its work is in the model again
                    replica.taken.pop(news.contribution.number, None)
                    replica.returned.add(news.contribution.fragment)
                continue
            entered, held, now = news
            common = [np.frombuffer(content, np.int64) for content in now.contents[:-1]]
            record = np.frombuffer(now.contents[-1], np.int64)
            resumed, self._resumed = self._resumed, None
            is_same = resumed is not None and resumed[:-1] == now.contents[:-1]
            is_elsewhere = resumed is not None
            was_reset = entered.is_reset
            entered = self._trainer.read_on(entered, lease, is_elsewhere=is_elsewhere)
            self._checkers.done["samples lost to others"] += entered.is_reset and not was_reset
            stays = is_same and self._trainer.is_at(entered) and not entered.is_reset
            if stays:
                self._checkers.done["checkpoint continued"] += 1
                self._trainer.stay(entered)
            else:
                buffers = record[Ledger.SIZE :].view(np.float64)
                self._trainer.enter(entered, common, buffers, is_elsewhere=is_elsewhere)
            self._steps_at_entry = self._steps
            taken, replica.taken = replica.taken, {}
            checkers.entered(self._who, replica, held, now, taken, is_reset=entered.is_reset)
            replica.flown = replica.flown if stays else {}
            replica.taken.update(replica.flown)

    def _check_accounts(self) -> None:
        """Check at the end that no work is lost, also work in rounds that were not merged."""
        self._hear()
        for number in list(self._replica.taken):
            if number in self._trainer.commits:
                del self._replica.taken[number]
        for fragment, common in enumerate(self._outer.values):
            self._training_checkers.accounts(self._who, self._replica, fragment, common)

    # -- the task that makes joint calls -----------------------------------------------------------

    async def _carry_out(self, effect: Effect) -> object:
        if self._has_missed:
            self._checkers.done[f"catch-up: {type(effect).__name__}"] += 1
        self._has_missed = False
        try:
            return await self._make(effect)
        except PCCLError as error:
            self._checkers.done[f"training: {type(error).__name__}"] += 1
            self._checkers.may_raise(self._process.name, error)
            self._has_missed = isinstance(error, ResyncRequired)
            if self._has_missed and self._scenario.quorum is not None:
                self._training_checkers.lags(self._process.run, self._process.peer)
                if isinstance(effect, Reduce):  # the members have reduced without it
                    self._training_checkers.saw_end(self._replica.axis)
            raise

    async def _make(self, effect: Effect) -> object:
        match effect:
            case Connect(again):
                await self._reduces.connect(again=again)
                return self._pauses.members()
            case Update():
                quorum, began_ns = self._scenario.quorum, self._loop.now_ns()
                asked = RunRequest(RoundKind.UPDATE_TOPOLOGY, patience_s(self._scenario), quorum)
                await self._notice.round(asked)
                self._turns.updated(began_ns)
                return self._pauses.members()
            case Sync():
                return await self._sync()
            case Take():
                return await self._take(effect)
            case Reduce(contribution):
                average = await self._reduces.work(contribution)
                if average.is_excluded:
                    self._excluded, self._must_reset = contribution, True
                return average
            case ReduceBuffers(sums, leads):
                await self._reduces.buffers(sums, leads=leads)
                return None
            case Pause():
                self._checkers.done["waits for a holder"] += bool(effect.why)
                await self._sleep(self._pauses.next_ns(effect))
                self._joint.is_closing |= self._time_is_up or self._pauses.is_replica_gone
                return self._joint.is_closing

    async def _sync(self) -> Members:
        outer, process = self._outer, self._process
        excluded, self._excluded = self._excluded, None
        if excluded is not None:
            self._record(excluded.number, is_settled=bool(excluded.weight))
        outer.revision = self._revisions.next()
        before = outer.contents()
        request = SyncOptions(
            outer,
            SyncPurpose.SYNC,
            SharedStateSyncStrategy.ENFORCE_POPULAR,
            ResumePolicy.ADVANCED,
            quorum=self._scenario.quorum,
        )
        try:
            info = await self._engine.sync(request)
        except PCCLError:
            if outer.contents() != before:
                raise Violation(f"{self._who}: a failed sync changed its contents") from None
            raise
        result = info.outcome
        assert result is not None
        self._revisions.synced(info.revision)
        operation = InRun(process.run, result.operation)
        self._line = self._training_checkers.synced(
            self._who,
            operation,
            process.peer,
            result.members,
            info.revision,
            before,
            outer.contents(),
        )
        # Members that were late synchronize by themselves.
        ids = result.members if self._scenario.quorum is None else self._pauses.members().ids
        return Members(process.peer, ids, run=operation.run)

    async def _take(self, take: Take) -> Contribution | NewcomersWait | None:
        self._pauses.end()
        taken = await self._joint.take(take)
        if isinstance(taken, NewcomersWait):
            self._checkers.done["admission between rounds"] += 1
            return taken
        return taken and replace(taken, values=taken.values.astype(np.float32))

    def _record(self, number: int, *, is_settled: bool) -> None:
        """Check a round whose outer step this process has taken.

        ``is_settled``: whether its work in the round is in the model, or is in it again.
        """
        assert self._reduces.last is not None
        operation, before, parts = self._reduces.last
        self._training_checkers.committed(
            self._who, operation, number, parts, Held(before, self._line), self._outer
        )
        self._samples.check(self._outer.values[0])
        self._held = Held(self._outer.contents(), self._line)
        if is_settled:
            self._training_checkers.saw_end(self._replica.axis)

    def _notify(self, notice: Notice) -> None:
        if isinstance(notice, RoundCommitted | Entered):
            self._samples.told()
        if isinstance(notice, RoundCommitted):
            if self._must_reset:
                raise Violation(f"{self._who}: it goes on with work that a guard has excluded")
            took_part, given = notice.average.took_part, notice.contribution
            self._record(given.number, is_settled=bool(given.weight) or not took_part)
            self._turns.saw(given.number, took_part=took_part)
            self._joint.tell(notice)
        elif isinstance(notice, Entered):
            if notice.is_reset != self._must_reset:
                raise Violation(f"{self._who}: excluded: {self._must_reset}, but {notice}")
            self._must_reset = False
            self._turns.enters()
            self._samples.check(self._outer.values[0])
            if self._training.extras and notice.entry == 1 and notice.number:
                self._training_checkers.fetched(self._who, self._outer)
            held, self._held = self._held, Held(self._outer.contents(), self._line)
            for fragment in notice.corrected:
                self._reduces.feedback.forget(f"{fragment}")
            self._joint.tell((notice, held, self._held))


class TrainingWorkload(Application):
    """The application of one process: at most ``LIVES_MAX`` lives."""

    lives_max = LIVES_MAX
    begins_anew_after = (MembershipError, DeadlineExceeded)

    def __init__(self, parts: RunParts, process: PeerProcess) -> None:
        super().__init__(parts, process)
        self._begin = partial(TrainingLife, parts, process, self.sleep)

    async def _live(self, life: int) -> None:
        await self._begin().run()

    def _is_final(self, error: PCCLError) -> bool:
        self._checkers.done[f"training ended: {type(error).__name__}"] += 1
        return self._checkers.nobody_to_join

    def interrupt(self) -> None:
        """Do nothing, because no Ctrl-C reaches the thread that makes the calls."""
