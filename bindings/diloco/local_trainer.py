"""``LocalTrainer``: the actions of a replica's training loop between its joint calls.

It takes pseudo-gradients, and merges the averages of their rounds. When the replica was cut off, it
keeps the work that the outer parameters do not contain. A replica is this class and
:class:`~pccl.bindings.diloco.rounds.Rounds`, which makes the joint calls meanwhile. This module
never waits: the methods are generators that yield actions. The optimizer wrapper and the simulator
both drive them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pccl.bindings.data.reader import LeaseReader, PeerLease
from pccl.bindings.diloco.pipeline import Launch, Merge, Pipeline
from pccl.bindings.diloco.rounds import Contribution, Entered, RoundCommitted
from pccl.bindings.diloco.schedule import Schedule


@dataclass(frozen=True, slots=True)
class RoundMerged:
    """Reports that the average of a round was merged into the model."""

    merge: Merge
    committed: RoundCommitted


Steps = Generator[Contribution | RoundMerged | None, None, None]
"""Actions for the driver: reduce a ``Contribution``; record a ``RoundMerged``; for None, wait for
news of the joint calls, and pass it to ``enter`` or ``commit``."""


class ModelPart(Protocol):
    """One fragment of the local model; see ``local_model.LocalFragment``."""

    def take(self) -> Any:
        """Return the work since the last ``take``, as a pseudo-gradient."""
        ...

    def put_back(self, work: Any) -> None:
        """Make ``work`` part of the next pseudo-gradient."""
        ...

    def preview(self, common: Any, state: Any, work: Any, share: float) -> Any:
        """Return what an outer step with a share of own work makes of ``common``, its memory."""
        ...

    def merge(self, common: Any, mixing: float) -> None:
        """Load outer parameters; discard the untaken work except for its share ``mixing``."""
        ...

    def anchor(self, common: Any, lost: Iterable[Any]) -> bool:
        """Load outer parameters; keep the untaken work, and the taken work in ``lost``."""
        ...


class ModelBuffers(Protocol):
    """The buffers of the local model; see ``buffers.SharedBuffers``."""

    def take(self, weight: float) -> Any:
        """Return a copy of the buffers, weighted, as something to add up."""
        ...

    def anchor(self, common: Any) -> None:
        """Load common buffers, unless the local ones come from the same."""
        ...

    def merge(self, common: Any, mixing: float) -> None:
        """Load common buffers; keep the share ``mixing`` of those that are averaged."""
        ...


class LocalTrainer:
    """Trains one replica between its joint calls.

    Args:
        schedule: determines when rounds begin and are merged.
        parts: the local model, by fragment.
        mixing: share of the local parameters that a merge keeps.
        clock: returns the current time in seconds.
        buffers: the buffers of the local model, which go with the last fragment; None: there are
            none.
        eager: whether a merge previews the next outer step; see :meth:`_preview`.
        samples: the samples of this replica, if it gets them from the run. Then weights are numbers
            of samples, and stay the same when a merge replaces a part of the work.

    Attributes:
        pipeline: position of the replica in the schedule.
        entry: number of the last entry into the run; 0: the replica has not joined yet.
        commits: outcomes of rounds that are not merged yet, by number.
        awaited: number of the round that a merge waits for, or waited for last.
        has_changed: whether this object has changed parameters of the model.
    """

    def __init__(
        self,
        schedule: Schedule,
        parts: Sequence[ModelPart],
        mixing: float,
        clock: Callable[[], float],
        buffers: ModelBuffers | None = None,
        *,
        eager: bool = False,
        samples: LeaseReader | None = None,
    ) -> None:
        self.pipeline = Pipeline(schedule)
        self.entry = 0
        self.commits: dict[int, RoundCommitted] = {}
        self.awaited = 0
        self.has_changed = False
        self._parts = tuple(parts)
        self._mixing = mixing
        self._clock = clock
        self._buffers = buffers
        self._is_eager = eager
        self._samples = samples
        self._taken: dict[int, Any] = {}
        """Pseudo-gradients of the unmerged rounds, by the number of the round."""

    # -- news of the joint calls -------------------------------------------------------------------

    def enter(
        self,
        entered: Entered,
        common: Sequence[Any],
        buffers: Any = None,
        *,
        is_elsewhere: bool = False,
    ) -> None:
        """Load the run's parameters and buffers, and keep the work that they do not contain.

        Args:
            entered: the position of the run.
            common: the outer parameters, by fragment; the trainer keeps these tensors.
            buffers: the common buffers, if the model has any.
            is_elsewhere: whether the run differs from the checkpoint; then drop work in flight.
        """
        self.entry = entered.entry
        lost: list[list[Any]] = [[] for _ in self._parts]
        for launch in self._lost(entered, is_elsewhere=is_elsewhere):
            self.pipeline.carry(launch)
            lost[launch.fragment].append(self._taken[launch.number])
        for part, values, works in zip(self._parts, common, lost, strict=True):
            if entered.is_reset:
                part.merge(values, 0.0)
            else:
                self.has_changed |= part.anchor(values, works)
        if self._buffers is not None and entered.is_reset:
            self._buffers.merge(buffers, 0.0)
        elif self._buffers is not None:
            self._buffers.anchor(buffers)
        self._taken.clear()
        self.commits.clear()
        if entered.is_reset:
            self.pipeline.leave_out_work()
        self.pipeline.enter(entered.number, self._clock(), is_open=entered.is_open)

    def _lost(self, entered: Entered, *, is_elsewhere: bool) -> list[Launch]:
        """Return the rounds in flight whose work the outer parameters lack, if it is to be kept."""
        if is_elsewhere or entered.is_reset:
            return []
        return [
            launch
            for launch in self.pipeline.in_flight()
            # If it was not taken, it was before a checkpoint, or it was nothing.
            if launch.number not in entered.applied and launch.number in self._taken
        ]

    def unapplied(self, entered: Entered, *, is_elsewhere: bool = False) -> float:
        """Return the weight of the first fragment's work that ``enter`` is going to keep.

        Args:
            entered: as for ``enter``.
            is_elsewhere: as for ``enter``.
        """
        lost = self._lost(entered, is_elsewhere=is_elsewhere)
        kept = 0.0 if entered.is_reset else self.pipeline.work(0)
        return kept + sum(launch.weight for launch in lost if not launch.fragment)

    def read_on(
        self, entered: Entered, lease: PeerLease | None, *, is_elsewhere: bool = False
    ) -> Entered:
        """Read on in the lease of the run, before ``enter`` or ``stay``.

        Args:
            entered: as for ``enter``.
            lease: the lease; None: the replica does not get its samples from the run.
            is_elsewhere: as for ``enter``.

        Returns:
            ``entered``; as a reset, if other peers have samples of work that would be kept.
        """
        if self._samples is None or lease is None:
            return entered
        kept = None
        if not entered.is_reset:
            kept = self.unapplied(entered, is_elsewhere=is_elsewhere)
            if not self._samples.keeps(kept, lease):
                entered, kept = replace(entered, is_reset=True), None
        self._samples.entered(lease, kept)
        return entered

    def is_at(self, entered: Entered) -> bool:
        """Whether the run is where this replica is, between two rounds."""
        return entered.number == self.pipeline.number and not entered.is_open

    def stay(self, entered: Entered) -> None:
        """Record the entry only, because the run is at the position of the loaded checkpoint."""
        self.entry = entered.entry

    def commit(self, committed: RoundCommitted, lease: PeerLease | None = None) -> None:
        """Store the outcome of a round until the round is merged.

        If the round left this replica out, its work goes into the next round.

        Args:
            committed: the outcome.
            lease: the lease of this replica after it, if it gets its samples from the run.
        """
        number = committed.contribution.number
        if self._samples is not None and lease is not None:
            count = 0 if committed.contribution.fragment else int(committed.contribution.weight)
            self._samples.averaged(count, lease)
        took_part = committed.average.took_part
        self.commits[number] = committed
        self.pipeline.heard(number, self._clock(), took_part=took_part)
        if took_part:
            return
        work = self._taken.pop(number, None)
        if work is not None:
            self._parts[committed.contribution.fragment].put_back(work)

    # -- training ----------------------------------------------------------------------------------

    def begin(self) -> Steps:
        """Make the merges that are due before the first inner step."""
        yield from self._carry_out(self.pipeline.due_merges())

    def step(self, weight: float, *, is_awaited: bool = False, has_quorum: bool = True) -> Steps:
        """Count an inner step, and make the launches and merges that are due after it.

        Args:
            weight: weight of the work in the step.
            is_awaited: whether members wait for the next round of this replica; see
                ``is_behind``, too.
            has_quorum: whether rounds go on without late members.
        """
        due = self.pipeline.step(
            weight, self._clock(), is_awaited=is_awaited, has_quorum=has_quorum
        )
        yield from self._carry_out(due)

    def is_behind(self) -> bool:
        """Whether the next round is due, so that it does not go on without this replica again."""
        return self.pipeline.is_behind(self._clock())

    def idle(self) -> Steps:
        """Wait for the rounds in flight, or take part in the next one now, if there are none."""
        entry = self.entry
        if not any(one.number not in self.commits for one in self.pipeline.in_flight()):
            yield self._launch(self.pipeline.launch_now(self._clock()))
        self.awaited = self.pipeline.in_flight()[-1].number
        while self.awaited not in self.commits:
            yield None
            if self.entry != entry:
                return
        yield from self._carry_out(self.pipeline.due_merges())

    def finish(self) -> Steps:
        """Launch the final rounds immediately, and merge all rounds.

        Members that have begun the same rounds launch the same final ones: see ``last_number``.
        """
        last = self.pipeline.last_number
        while True:
            while self.pipeline.number < last:  # a replica that was cut off may have skipped some
                yield self._launch(self.pipeline.launch_early(self._clock()))
            due = self.pipeline.flush()  # only now: a merge discards work that was not taken
            if not due:
                return
            yield from self._carry_out(due)

    def hand_over(self) -> Steps:
        """Launch rounds immediately for all work, and wait until they have it.

        Each fragment gets at most one round, and another one if a round went on without it.
        """
        while True:
            while self.pipeline.has_work:
                yield self._launch(self.pipeline.launch_early(self._clock()))
            due = self.pipeline.flush()
            if not due:
                return
            yield from self._carry_out(due)

    def give_up(self, launch: Launch, *, is_applied: bool) -> None:
        """Drop a round that will not be merged, because the run cannot continue.

        Args:
            launch: the round in flight.
            is_applied: whether other members may have applied the work; then it is not kept.
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
                self.awaited = action.number
                yield None
                if self.entry != entry:
                    return  # this replica has joined again, so the remaining actions are void
            yield self._merge(self.pipeline.merge(action.number))

    def _launch(self, launch: Launch) -> Contribution:
        values = self._taken[launch.number] = self._parts[launch.fragment].take()
        buffers = None
        if self._buffers is not None and launch.fragment == len(self._parts) - 1:
            buffers = self._buffers.take(launch.weight)
        return Contribution(
            launch.number, launch.fragment, launch.weight, values, self.entry, buffers
        )

    def _merge(self, merge: Merge) -> RoundMerged:
        committed = self.commits.pop(merge.number)
        self._taken.pop(merge.number, None)  # first: a preview can use the memory
        kept = self._mixing if merge.is_taken and self._samples is None else 1.0
        self.pipeline.merged(merge.number, self._clock(), kept)
        part, common = self._parts[merge.fragment], committed.contribution.values
        if self._is_eager:
            common = self._preview(part, committed)
        if merge.is_taken:
            part.merge(common, self._mixing)
        else:
            part.anchor(common, ())
        buffers = committed.contribution.buffers
        if self._buffers is not None and buffers is not None:
            self._buffers.merge(buffers, self._mixing if merge.is_taken else 0.0)
        self.has_changed = True
        return RoundMerged(merge, committed)

    def _preview(self, part: ModelPart, committed: RoundCommitted) -> Any:
        """Return what the next outer step would make of this replica's share alone.

        So the replica trains on with its own latest work, and the others' work is one round late
        (eager updates, Kale et al., arXiv:2502.12996). Its share is that of the merged round, in
        which it may not have taken part; then it is its weight relative to that round's.

        Only the local model is previewed. Its base is the preview, too, so the next pseudo-gradient
        does not contain that work again. When the round of that work is lost, ``anchor`` and
        ``put_back`` count from this base: the preview is taken back, and the work kept.
        """
        common, total = committed.contribution.values, committed.average.total_weight
        for launch in self.pipeline.in_flight():
            work = self._taken.get(launch.number)  # None: it was taken before a checkpoint
            is_next = launch.fragment == committed.contribution.fragment and work is not None
            if is_next and launch.weight and total:
                weight = committed.contribution.weight or launch.weight
                share = min(weight / total, 1.0)
                return part.preview(common, committed.outer_state, work, share)
        return common
