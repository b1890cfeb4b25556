"""A small run for ``Rounds`` and ``LocalTrainer``: whole numbers, and a group that decides.

Each process has an axis of its own in every fragment. Its inner step number k takes ``4 ** k`` away
there, the "average" is a sum, and the outer step subtracts it. So the outer parameters tell, digit
by digit, how often each inner step of each process is in them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from pccl.bindings.diloco.ledger import Ledger
from pccl.bindings.diloco.local_trainer import LocalTrainer, RoundMerged, Steps
from pccl.bindings.diloco.rounds import (
    Average,
    Connect,
    Contribution,
    Effect,
    Entered,
    Members,
    Notice,
    Reduce,
    RoundCommitted,
    Rounds,
    Sync,
    Take,
    Update,
)
from pccl.bindings.diloco.schedule import Schedule
from pccl.errors import Evicted, MasterLost, PCCLError, TooFewPeers

Vector = list[int]


def minus(one: Vector, two: Vector) -> Vector:
    return [a - b for a, b in zip(one, two, strict=True)]


class Outer:
    """Outer parameters of one process."""

    samples = None

    def __init__(self, fragments: int, axes: int) -> None:
        self.record = np.zeros(Ledger.SIZE, np.int64)
        self.ledger = Ledger(self.record)
        self.values: list[Vector] = [[0] * axes for _ in range(fragments)]

    def nothing(self, fragment: int) -> Vector:
        return [0] * len(self.values[fragment])

    def offer(self) -> None:
        pass

    def no_buffers(self, fragment: int) -> None:
        return None

    def apply(self, fragment: int, average: Vector, buffers: None) -> tuple[float, float]:
        self.values[fragment] = minus(self.values[fragment], average)
        return 0.0, 0.0

    def common_buffers(self) -> None:
        pass

    def copy(self, fragment: int, target: Vector) -> None:
        target[:] = self.values[fragment]

    def touch(self, fragment: int | None) -> None:
        pass

    def content(self) -> tuple[bytes, str]:
        return self.record.tobytes(), repr(self.values)

    def take_over(self, other: Outer) -> None:
        self.record[:] = other.record
        self.values = [list(one) for one in other.values]


class Part:
    """One fragment of a local model.

    Attributes:
        given_up: what was done between taking a pseudo-gradient and a merge.
    """

    def __init__(self, axes: int) -> None:
        self.params = [0] * axes
        self.base = [0] * axes
        self.given_up = [0] * axes

    def work(self) -> Vector:
        return minus(self.base, self.params)

    def take(self) -> Vector:
        work, self.base = self.work(), list(self.params)
        return work

    def put_back(self, work: Vector) -> None:
        self.base = [a + b for a, b in zip(self.base, work, strict=True)]

    def preview(self, common: Vector, state: None, work: Vector, share: float) -> Vector:
        """The average is a sum, so own work alone makes a step."""
        return minus(common, work)

    def merge(self, common: Vector, mixing: float) -> None:
        self.given_up = [a + b for a, b in zip(self.given_up, self.work(), strict=True)]
        self.params, self.base = list(common), list(common)

    def anchor(self, common: Vector, lost: Iterable[Vector]) -> bool:
        for one in lost:
            self.put_back(one)
        self.params, self.base = minus(common, self.work()), list(common)
        return True


class Process:
    """One replica: a thread that trains, as the optimizer wrapper does, and one that calls.

    Attributes:
        effect: the joint call that it is in, or what else it waits for.
        made: inner steps.
        parts: its model, by fragment.
        waits: its training needs the outcome of a round.
        steps_at_entry: inner steps that it had made when it came into the run, or back.
        watched: rounds that it followed without work in them.
    """

    def __init__(
        self, axis: int, axes: int, schedule: Schedule, history: dict[int, Any], *, eager: bool
    ) -> None:
        self.axis = axis
        self.peer = 0
        self.made = 0
        self.is_valid = False
        self.cut: PCCLError | None = None
        self.outer = Outer(schedule.fragments, axes)
        self.parts = [Part(axes) for _ in range(schedule.fragments)]
        self.trainer = LocalTrainer(schedule, self.parts, 0.0, lambda: 0.0, eager=eager)
        self.queue: deque[Contribution] = deque()
        self.waits = False
        self.steps_at_entry = 0
        self.watched = 0
        self._due: Steps
        self._news: deque[RoundCommitted | tuple[Entered, list[Vector]]] = deque()
        self._history = history
        self._steps = Rounds(schedule, self.outer, self._notify).run()
        self.effect: Effect = next(self._steps)

    # -- the thread that calls ---------------------------------------------------------------------

    def send(self, outcome: object) -> None:
        self.effect = self._steps.send(outcome)
        self._raise_cut()

    def throw(self, error: PCCLError) -> None:
        self.effect = self._steps.throw(error)

    def cut_off(self, error: PCCLError) -> None:
        """Its next joint call raises, or the one that it is in."""
        self.is_valid, self.cut = False, error
        self._raise_cut()

    def _raise_cut(self) -> None:
        if self.cut is not None and not isinstance(self.effect, Take):
            error, self.cut = self.cut, None
            self.throw(error)

    def feed(self) -> bool:
        """Let it have the next pseudo-gradient."""
        if isinstance(self.effect, Take) and self.queue:
            self.send(self.queue.popleft())
            return True
        return False

    def _notify(self, notice: Notice) -> None:
        number = self.outer.ledger.number
        if isinstance(notice, Members):
            return
        values = repr(self.outer.values)
        assert self._history.setdefault(number, values) == values, "not alike after a round"
        if isinstance(notice, Entered):
            self._news.append((notice, [list(one) for one in self.outer.values]))
        else:
            self._news.append(notice)

    # -- the thread that trains --------------------------------------------------------------------

    def train(self) -> bool:
        """Do one thing; False: it has to wait."""
        if not self.waits and self.trainer.entry:
            self._make_inner_step()
            return True
        if not self.hear():
            return False
        if self.waits:
            self._go_on()
        else:
            self.do(self.trainer.begin())
        return True

    def do(self, due: Steps) -> None:
        self._due = due
        self._go_on()

    def _go_on(self) -> None:
        self.waits = False
        for action in self._due:
            if action is None:
                self.waits = True
                return
            if isinstance(action, RoundMerged):
                self.watched += not action.merge.is_taken
            else:
                self.queue.append(replace(action, values=list(action.values)))

    def _make_inner_step(self) -> None:
        for part in self.parts:
            part.params[self.axis] -= 4**self.made
        self.made += 1
        self.hear()
        self.do(self.trainer.step(1.0))

    def hear(self) -> bool:
        heard = bool(self._news)
        while self._news:
            news = self._news.popleft()
            if isinstance(news, RoundCommitted):
                self.trainer.commit(news)
            else:
                self.trainer.enter(*news)
                self.steps_at_entry = self.made
        return heard

    @property
    def has_joined(self) -> bool:
        return bool(self.trainer.entry)

    @property
    def is_idle(self) -> bool:
        """Whether nothing more comes of itself."""
        quiet = not self.queue and not self._news and self.cut is None
        return quiet and isinstance(self.effect, Take)


class Group:
    """The run: admits, cuts off, elects, and commits with those who are left.

    Attributes:
        alive: all processes that run.
        members: in ring order.
        applied: the weight that was applied, by axis and fragment.
        history: the outer parameters before each round.
    """

    def __init__(self, schedule: Schedule, axes: int, seed: int, *, eager: bool = False) -> None:
        self.schedule, self.axes, self._eager = schedule, axes, eager
        self.random = random.Random(seed)
        self.alive: list[Process] = []
        self.members: list[Process] = []
        self.history: dict[int, Any] = {}
        self.applied = [[0.0] * schedule.fragments for _ in range(axes)]
        self._heirs: list[Process] = []
        """The members before the master was lost: one of them begins the group again."""
        self._latched: list[tuple[Process, int, Contribution]] = []
        """Who has done its part of the reduce and was cut off."""
        self._started = self._ids = self._losses = 0

    # -- what may happen ---------------------------------------------------------------------------

    def start(self) -> None:
        if self._started < self.axes:
            self.alive.append(
                Process(self._started, self.axes, self.schedule, self.history, eager=self._eager)
            )
            self._started += 1

    def evict(self) -> None:
        """Cut a member off; the others go on."""
        process = self.random.choice(self.members or [None])
        if process is not None and self._can_spare(process):
            self._remove(process).cut_off(Evicted())

    def evict_newcomer(self) -> None:
        waiting = [one for one in self._outside() if isinstance(one.effect, Update)]
        if waiting:
            self.random.choice(waiting).cut_off(Evicted())

    def kill(self) -> None:
        """Somebody dies."""
        process = self.random.choice(self.alive)
        if process in self.members:
            if not self._can_spare(process):
                return
            self._remove(process)
        elif self._heirs == [process] or len(self.alive) == 1:
            return
        self._heirs = [one for one in self._heirs if one is not process]
        self.alive.remove(process)

    def lose_master(self) -> None:
        if self._losses == 2 or not any(process.is_valid for process in self.members):
            return  # the third time ends the training
        self._losses += 1
        lost, self.members = self.members, []
        self._heirs = [process for process in lost if process.is_valid]
        self._latched.clear()
        for process in lost:
            process.cut_off(MasterLost())

    def _can_spare(self, process: Process) -> bool:
        """Somebody has to be left who holds what the run has made."""
        return any(one.is_valid for one in self.members if one is not process)

    def _remove(self, process: Process) -> Process:
        self.members.remove(process)
        if isinstance(process.effect, Reduce) and self.random.random() < 0.5:
            self._latched.append((process, process.peer, _copy(process.effect.contribution)))
        return process

    # -- joint calls -------------------------------------------------------------------------------

    def decide(self) -> bool:
        """Let the joint call return that all members are in; False: there is none."""
        calls: dict[type[Effect], Callable[[], None]] = {
            Update: self._admit,
            Sync: self._sync,
            Reduce: self._reduce,
        }
        if not self.members:
            return self._found()
        kinds = {type(process.effect) for process in self.members}
        assert len(kinds - {Take}) <= 1, f"they wait for different things: {kinds}"
        if len(kinds) > 1 or kinds == {Take}:
            return False
        calls[kinds.pop()]()
        return True

    def _outside(self) -> list[Process]:
        """Who waits to be admitted."""
        return [
            process
            for process in self.alive
            if process not in self.members and isinstance(process.effect, (Connect, Update))
        ]

    def _found(self) -> bool:
        able = [one for one in self._outside() if not self._heirs or one in self._heirs]
        if not able:
            return False
        self._heirs = []
        self._enroll([self.random.choice(able)])
        return True

    def _admit(self) -> None:
        self._enroll([*self.members, *self._outside()])

    def _enroll(self, processes: list[Process]) -> None:
        for process in processes:
            if process not in self.members:
                self._ids += 1
                process.peer = self._ids
        self.members = processes
        self._tell_members()

    def _tell_members(self) -> None:
        ids = tuple(process.peer for process in self.members)
        for process in self.members:
            process.send(Members(process.peer, ids))

    def _sync(self) -> None:
        valid = [process for process in self.members if process.is_valid]
        assert len({process.outer.content() for process in valid}) <= 1, "not alike"
        elected = valid[0] if valid else max(self.members, key=_progress)
        for process in self.members:
            process.outer.take_over(elected.outer)
            process.is_valid = True
        self._tell_members()

    def _reduce(self) -> None:
        latched, self._latched = self._latched, []
        if len(self.members) == 1 and (not latched or self.random.random() < 0.5):
            effect = self.members[0].effect
            assert isinstance(effect, Reduce)
            self._count(self.members[0], effect.contribution)
            self.members[0].throw(TooFewPeers())
            return
        parts = latched + [
            (process, process.peer, process.effect.contribution)
            for process in self.members
            if isinstance(process.effect, Reduce)
        ]
        assert len({(part.number, part.fragment) for _, _, part in parts}) == 1, "another round"
        total = [sum(column) for column in zip(*(part.values for *_, part in parts), strict=True)]
        for process, _, part in parts:
            self._count(process, part)
        average = Average(
            tuple(peer for _, peer, part in parts if part.weight),
            sum(part.weight for *_, part in parts),
        )
        for process in self.members:
            assert isinstance(process.effect, Reduce)
            process.effect.contribution.values[:] = total
            process.send(average)

    def _count(self, process: Process, part: Contribution) -> None:
        self.applied[process.axis][part.fragment] += part.weight


def _progress(process: Process) -> tuple[int, bool]:
    return process.outer.ledger.number, process.outer.ledger.is_open


def _copy(part: Contribution) -> Contribution:
    return Contribution(part.number, part.fragment, part.weight, list(part.values), part.entry)
