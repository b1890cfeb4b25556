"""``Trainee``: what the training loop of one replica does between its joint calls.

It takes pseudo-gradients, merges what comes of them, and keeps the work that is in no outer
parameters when the replica was cut off. With :class:`~pccl.bindings.diloco.rounds.Rounds`, which
makes the joint calls meanwhile, it is all of a replica. Nothing here waits: its methods are
generators that yield what is to be waited for. The same text drives the optimizer wrapper and the
simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pccl.bindings.diloco.pipeline import Launch, Merge, Pipeline
from pccl.bindings.diloco.rounds import Contribution, Entered, RoundCommitted
from pccl.bindings.diloco.schedule import Schedule


@dataclass(frozen=True, slots=True)
class RoundWait:
    """Wait until a round is over. Sent: ``RoundCommitted``, or None: it was cut off from that.

    In the second case ``Trainee.enter`` was called meanwhile.
    """

    number: int


Steps = Generator[RoundWait, RoundCommitted | None, bool]
"""Returns whether parameters of the model were changed."""


class ModelPart(Protocol):
    """One fragment of the local model; see ``replica.Part``."""

    def take(self) -> Any:
        """The work since it was accounted for last."""
        ...

    def put_back(self, work: Any) -> None:
        """It is part of what is taken next."""
        ...

    def merge(self, common: Any, mixing: float) -> None:
        """Take over outer parameters; give up the work, but for its share."""
        ...

    def anchor(self, common: Any, lost: Iterable[Any]) -> bool:
        """Take over outer parameters; keep the work, and what was taken and is lost."""
        ...


class Driver(Protocol):
    """What hears of it."""

    def put(self, contribution: Contribution) -> None:
        """A pseudo-gradient is to be reduced."""
        ...

    def merged(self, merge: Merge, committed: RoundCommitted) -> None:
        """A round was merged into the model."""
        ...


class Trainee:
    """One replica.

    Args:
        schedule: when what is due.
        parts: the local model, by fragment.
        mixing: how much of the local parameters remains in a merge.
        driver: is told what happens.
        clock: the present, in seconds.

    Attributes:
        pipeline: where it is.
        entry: number of the last entry into the run; 0: it has not come in yet.
    """

    def __init__(
        self,
        schedule: Schedule,
        parts: Sequence[ModelPart],
        mixing: float,
        driver: Driver,
        clock: Callable[[], float],
    ) -> None:
        self.pipeline = Pipeline(schedule)
        self.entry = 0
        self._parts = tuple(parts)
        self._mixing = mixing
        self._driver = driver
        self._clock = clock
        self._taken: dict[int, Any] = {}
        """Pseudo-gradients by the number of their round, until it is merged."""

    # -- entering ----------------------------------------------------------------------------------

    def enter(self, entered: Entered, common: Sequence[Any], *, is_elsewhere: bool = False) -> bool:
        """Take over the run's parameters; work that is not in them is kept.

        Args:
            entered: where the run is.
            common: the outer parameters, by fragment; not yours any more.
            is_elsewhere: what is in flight belongs to another life of this replica.

        Returns:
            Whether the model was changed.
        """
        self.entry = entered.entry
        lost: list[list[Any]] = [[] for _ in self._parts]
        for launch in self.pipeline.in_flight():
            if launch.number in entered.applied or is_elsewhere:
                continue
            self.pipeline.carry(launch)
            if launch.number in self._taken:
                lost[launch.fragment].append(self._taken[launch.number])
        changed = [
            part.anchor(values, works)
            for part, values, works in zip(self._parts, common, lost, strict=True)
        ]
        self._taken.clear()
        self.pipeline.enter(entered.number, self._clock(), is_open=entered.is_open)
        return any(changed)

    def stay(self, entered: Entered) -> None:
        """The run is where this replica is, as if neither had ever stopped."""
        self.entry = entered.entry

    # -- training ----------------------------------------------------------------------------------

    def begin(self) -> Steps:
        """Do what is due before the first inner step."""
        return (yield from self._carry_out(self.pipeline.due_merges()))

    def step(self, weight: float) -> Steps:
        """An inner step was made: do what is due after it.

        Args:
            weight: the work in it.
        """
        return (yield from self._carry_out(self.pipeline.step(weight, self._clock())))

    def finish(self) -> Steps:
        """Make last rounds, at once, and merge everything.

        Whoever has begun as many rounds takes part in the same ones: see ``last_number``.
        """
        changed = False
        last = self.pipeline.last_number
        while True:
            while self.pipeline.number < last:  # who was cut off finds the others further
                self._launch(self.pipeline.launch_early(self._clock()))
            due = self.pipeline.flush()  # only now: a merge gives up work that was not taken
            if not due:
                return changed
            changed |= yield from self._carry_out(due)

    def give_up(self, launch: Launch, *, is_applied: bool) -> None:
        """A round will not be merged, since the run can't go on.

        Args:
            launch: what is in flight.
            is_applied: the work may be in the outer parameters of others, and is not kept.
        """
        work = self._taken.pop(launch.number, None)
        if work is not None and not is_applied:
            self._parts[launch.fragment].put_back(work)
        self.pipeline.give_up(launch, is_applied=is_applied)

    def _carry_out(self, due: Sequence[Launch | Merge]) -> Steps:
        changed = False
        for action in due:
            if isinstance(action, Launch):
                self._launch(action)
                continue
            committed = yield RoundWait(action.number)
            changed = True
            if committed is None:
                break  # cut off and back again: what else was due is void
            self._merge(action, committed)
        return changed

    def _launch(self, launch: Launch) -> None:
        values = self._taken[launch.number] = self._parts[launch.fragment].take()
        self._driver.put(
            Contribution(launch.number, launch.fragment, launch.weight, values, self.entry)
        )

    def _merge(self, merge: Merge, committed: RoundCommitted) -> None:
        self.pipeline.merged(merge.number, self._clock())
        part, common = self._parts[merge.fragment], committed.contribution.values
        if merge.is_taken:
            part.merge(common, self._mixing)
        else:
            part.anchor(common, ())
        self._taken.pop(merge.number, None)
        self._driver.merged(merge, committed)
