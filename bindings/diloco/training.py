"""``Training``: the training thread of one replica, and what it hears of the conductor's."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from pccl.bindings.diloco import interrupts
from pccl.bindings.diloco.conductor import Conductor, GroupSynced
from pccl.bindings.diloco.outer import length
from pccl.bindings.diloco.pipeline import Merge
from pccl.bindings.diloco.replica import Replica
from pccl.bindings.diloco.rounds import Contribution, Entered, Members, RoundCommitted
from pccl.bindings.diloco.schedule import Schedule
from pccl.bindings.diloco.telling import Telling
from pccl.bindings.diloco.trainee import Steps, Trainee


class Training:
    """Carries out what the trainee wants, with the conductor; tells what happens.

    Args:
        schedule: when what is due.
        replica: the local model.
        mixing: how much of it remains in a merge.
        conductor: makes the joint calls.
        telling: is told.

    Attributes:
        trainee: what is due when.
        resumed: the outer parameters of the checkpoint that was loaded, until the run is joined.
        has_changed: whether parameters of the model were changed, by whatever it was.
    """

    def __init__(
        self,
        schedule: Schedule,
        replica: Replica,
        mixing: float,
        conductor: Conductor,
        telling: Telling,
    ) -> None:
        self.trainee = Trainee(schedule, replica.parts, mixing, self, time.monotonic)
        self.resumed: Sequence[torch.Tensor] | None = None
        self.has_changed = False
        self._conductor = conductor
        self._telling = telling
        self._norms: dict[int, float] = {}
        """Of pseudo-gradients, by the number of their round, until it is merged."""
        self._waited_s = self._took_s = 0.0
        """For the round that is merged now, and how long it took."""

    @property
    def inner_steps(self) -> int:
        """That this replica has made."""
        return self.trainee.pipeline.steps

    # -- what the trainee wants --------------------------------------------------------------------

    def carry_out(self, steps: Steps) -> None:
        """Do what is due.

        Raises:
            PCCLError: the run can't go on; the message says why.
        """
        outcome: RoundCommitted | None = None
        while True:
            with interrupts.put_off():
                try:
                    wait = steps.send(outcome)
                except StopIteration as end:
                    self.has_changed |= end.value
                    return
            outcome = self._wait(wait.number)

    def _wait(self, number: int) -> RoundCommitted | None:
        self._telling.deliver()  # what is known already must not wait for the round as well
        began_s, entry = time.monotonic(), self.trainee.entry
        while (ended := self._conductor.wait(number)) is None:
            self.hear()
            if self.trainee.entry != entry:
                return None
            self._telling.deliver()  # it may take long; after Ctrl-C in it the merge stays due
        committed, self._took_s = ended
        self._waited_s = time.monotonic() - began_s
        return committed

    def put(self, contribution: Contribution) -> None:
        """See ``trainee.Driver``."""
        self._norms[contribution.number] = length(contribution.values)
        self._conductor.put(contribution)

    def merged(self, merge: Merge, committed: RoundCommitted) -> None:
        """See ``trainee.Driver``."""
        self._conductor.forget(merge.number)
        norm = self._norms.pop(merge.number, 0.0)
        self._telling.merged(
            self.inner_steps, committed, norm, took_s=self._took_s, exposed_s=self._waited_s
        )

    # -- what happens meanwhile --------------------------------------------------------------------

    def hear(self, *, after_failure: bool = False) -> None:
        """Take in what the conductor has to tell.

        Raises:
            PCCLError: the run can't go on, unless that is known.
        """
        with interrupts.put_off():
            notices = self._conductor.notices(after_failure=after_failure)
            for notice, copies in notices:  # before any listener is called
                if isinstance(notice, Entered):
                    self._enter(notice, copies)
            for notice, _ in notices:
                if isinstance(notice, Members):
                    self._telling.met(self.inner_steps, notice)
                elif isinstance(notice, GroupSynced):
                    self._telling.synced(self.inner_steps, notice)

    def _enter(self, entered: Entered, common: list[torch.Tensor]) -> None:
        pipeline, resumed = self.trainee.pipeline, self.resumed
        self.resumed = None
        is_there = entered.number == pipeline.number and not entered.is_open
        if resumed is not None:
            if is_there and all(map(torch.equal, resumed, common)):
                self.trainee.stay(entered)
                return
            for launch in pipeline.in_flight():  # their outcomes are of other rounds
                self._conductor.forget(launch.number)
        self._norms.clear()
        is_elsewhere = resumed is not None
        self.has_changed |= self.trainee.enter(entered, common, is_elsewhere=is_elsewhere)

    def give_up_flights(self) -> None:
        """What is in flight and has no outcome will have none: the run can't go on."""
        with interrupts.put_off():
            for launch in self.trainee.pipeline.in_flight():
                if not self._conductor.is_over(launch.number):
                    is_applied = self._conductor.is_in_doubt(launch.number)
                    self.trainee.give_up(launch, is_applied=is_applied)
