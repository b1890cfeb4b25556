"""``LocalTrainer``: what the training loop of one replica does between its joint calls.

It takes pseudo-gradients, merges the outcomes of their rounds, and keeps the work that is in no
outer parameters when the replica was cut off. With :class:`~pccl.bindings.diloco.rounds.Rounds`,
which makes the joint calls meanwhile, it is all of a replica. Nothing here waits: its methods are
generators that yield what is to be done. The same text drives the optimizer wrapper and the
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
class RoundMerged:
    """The outcome of a round was merged into the model."""

    merge: Merge
    committed: RoundCommitted


Steps = Generator[Contribution | RoundMerged | None, None, None]
"""What to do: reduce a contribution; note that a round was merged; None: wait until there is news
of the joint calls, and hand it over (``enter``, ``commit``)."""


class ModelPart(Protocol):
    """One fragment of the local model; see ``local_model.LocalFragment``."""

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


class LocalTrainer:
    """One replica.

    Args:
        schedule: when what is due.
        parts: the local model, by fragment.
        mixing: how much of the local parameters remains in a merge.
        clock: the present, in seconds.

    Attributes:
        pipeline: where it is.
        entry: number of the last entry into the run; 0: it has not come in yet.
        commits: outcomes of rounds that are not merged yet, by number.
        has_changed: whether parameters of the model were changed.
    """

    def __init__(
        self,
        schedule: Schedule,
        parts: Sequence[ModelPart],
        mixing: float,
        clock: Callable[[], float],
    ) -> None:
        self.pipeline = Pipeline(schedule)
        self.entry = 0
        self.commits: dict[int, RoundCommitted] = {}
        self.has_changed = False
        self._parts = tuple(parts)
        self._mixing = mixing
        self._clock = clock
        self._taken: dict[int, Any] = {}
        """Pseudo-gradients by the number of their round, until it is merged."""

    # -- news of the joint calls -------------------------------------------------------------------

    def enter(self, entered: Entered, common: Sequence[Any], *, is_elsewhere: bool = False) -> None:
        """Take over the run's parameters; work that is not in them is kept.

        Args:
            entered: where the run is.
            common: the outer parameters, by fragment; not yours any more.
            is_elsewhere: what is in flight belongs to another life of this replica.
        """
        self.entry = entered.entry
        lost: list[list[Any]] = [[] for _ in self._parts]
        for launch in self.pipeline.in_flight():
            if launch.number in entered.applied or is_elsewhere:
                continue
            self.pipeline.carry(launch)
            if launch.number in self._taken:
                lost[launch.fragment].append(self._taken[launch.number])
        for part, values, works in zip(self._parts, common, lost, strict=True):
            self.has_changed |= part.anchor(values, works)
        self._taken.clear()
        self.commits.clear()
        self.pipeline.enter(entered.number, self._clock(), is_open=entered.is_open)

    def stay(self, entered: Entered) -> None:
        """The run is where this replica is, as if neither had ever stopped."""
        self.entry = entered.entry

    def commit(self, committed: RoundCommitted) -> None:
        """A round is over."""
        self.commits[committed.contribution.number] = committed

    # -- training ----------------------------------------------------------------------------------

    def begin(self) -> Steps:
        """Do what is due before the first inner step."""
        yield from self._carry_out(self.pipeline.due_merges())

    def step(self, weight: float) -> Steps:
        """An inner step was made: do what is due after it.

        Args:
            weight: the work in it.
        """
        yield from self._carry_out(self.pipeline.step(weight, self._clock()))

    def finish(self) -> Steps:
        """Make last rounds, at once, and merge everything.

        Whoever has begun as many rounds takes part in the same ones: see ``last_number``.
        """
        last = self.pipeline.last_number
        while True:
            while self.pipeline.number < last:  # a member that was cut off finds the run further
                yield self._launch(self.pipeline.launch_early(self._clock()))
            due = self.pipeline.flush()  # only now: a merge gives up work that was not taken
            if not due:
                return
            yield from self._carry_out(due)

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
        entry = self.entry
        for action in due:
            if isinstance(action, Launch):
                yield self._launch(action)
                continue
            while action.number not in self.commits:
                yield None
                if self.entry != entry:
                    return  # cut off and back again: what else was due is void
            yield self._merge(action)

    def _launch(self, launch: Launch) -> Contribution:
        values = self._taken[launch.number] = self._parts[launch.fragment].take()
        return Contribution(launch.number, launch.fragment, launch.weight, values, self.entry)

    def _merge(self, merge: Merge) -> RoundMerged:
        committed = self.commits.pop(merge.number)
        self.pipeline.merged(merge.number, self._clock())
        part, common = self._parts[merge.fragment], committed.contribution.values
        if merge.is_taken:
            part.merge(common, self._mixing)
        else:
            part.anchor(common, ())
        self._taken.pop(merge.number, None)
        self.has_changed = True
        return RoundMerged(merge, committed)
