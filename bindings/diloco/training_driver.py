"""``TrainingDriver``: the part of a replica that runs on the training thread.

It carries out the actions of the local trainer, with the thread that makes the joint calls, and
reports events.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pccl.bindings import interrupts
from pccl.bindings.arguments import check_amount
from pccl.bindings.data.reader import LeaseReader
from pccl.bindings.diloco.joint_caller import JointCaller
from pccl.bindings.diloco.ledger import ROUNDS_KEPT
from pccl.bindings.diloco.local_trainer import LocalTrainer, RoundMerged, Steps
from pccl.bindings.diloco.model.local_model import LocalModel
from pccl.bindings.diloco.replica_calls import GroupSynced, JointNews
from pccl.bindings.diloco.rounds import Contribution, Entered, Members, RoundCommitted
from pccl.bindings.diloco.schedule import Schedule
from pccl.bindings.event_queue import EventQueue
from pccl.bindings.events import InnerStep, OuterStep, RoundsMissed, TrainsAlone

_log = logging.getLogger("pccl.diloco")

WEIGHT_MAX = 1e30
"""Upper limit for the weight of one step, far below the largest weight of a reduce."""


@dataclass(slots=True)
class _OwnRound:
    """A round with a pseudo-gradient of this replica: its start time and duration."""

    began_s: float = 0.0
    took_s: float = 0.0


class TrainingDriver:
    """Carries out the actions of the trainer; waits only where a merge needs an average.

    Args:
        schedule: determines when rounds begin and are merged.
        model: the local model.
        mixing: share of the local parameters that a merge keeps.
        caller: makes the joint calls.
        events: queue for the events of this replica.
        eager: whether a merge previews the next outer step.
        samples: the samples of this replica, if it gets them from the run.

    Attributes:
        trainer: decides on the actions.
        resumed: outer parameters of a loaded checkpoint, until the replica has joined the run.
        known: number of outer steps of the run that this replica knows; None: it never joined.
        figures: what the last outer step of this replica tells, by name, for the page.
        on_reset: called when the guard has excluded work of this replica.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: LocalModel,
        mixing: float,
        caller: JointCaller,
        events: EventQueue,
        *,
        eager: bool = False,
        samples: LeaseReader | None = None,
    ) -> None:
        self.trainer = LocalTrainer(
            schedule,
            model.parts,
            mixing,
            time.monotonic,
            model.buffers or None,
            eager=eager,
            samples=samples,
        )
        self._samples = samples
        self.resumed: Sequence[torch.Tensor] | None = None
        self.known: int | None = None
        self.figures: dict[str, float] = {}
        self.on_reset: Callable[[], None] = lambda: None
        self._model = model
        self._caller = caller
        self._events = events
        self._unsent: deque[Contribution] = deque()
        """Contributions that the caller does not have yet, in order."""
        self._rounds: dict[int, _OwnRound] = {}
        """Unmerged rounds of this replica, by number."""
        self._last_step_s = math.nan
        self._is_alone = False
        if model.shards == 1:  # the processes of a larger replica would have to leave together
            caller.expect_notice(self.has_work)

    # -- actions of the trainer --------------------------------------------------------------------

    def enter(self) -> None:
        """Wait until this replica has joined the run, and make the merges that are due then.

        Raises:
            PCCLError: the replica cannot join the run; the message says why.
        """
        while not self.trainer.entry:
            self._caller.wait()
            self.hear(after_failure=True)
        self.carry_out(self.trainer.begin())

    def check_weight(self, weight: float | None) -> float:
        """Check the argument ``weight`` of a step, and return the weight of its work.

        With samples of the run, ``stepped`` counts them.

        Raises:
            TypeError, ValueError: it is not a number >= 0, or there are samples of the run, too.
        """
        if self._samples is None:
            return check_amount("weight", 1.0 if weight is None else weight, WEIGHT_MAX)
        if weight is not None:
            raise ValueError("with data=, a step weighs as many as its samples; pass no weight")
        return 0.0

    def idle(self) -> None:
        """Without samples: wait for the next outcome, in a round without work if need be.

        Raises:
            PCCLError: the run cannot continue; the message says why.
        """
        self.hear()
        if self.trainer.pipeline.due_merges():  # Ctrl-C has interrupted a wait for them
            self.carry_out(self.trainer.begin())
        lease = self._samples
        if lease is not None and lease.is_dry and not lease.lease.is_finished:
            self.carry_out(self.trainer.idle())
        self.leave_if_asked()

    def stepped(self, weight: float) -> None:
        """Count an inner step, and carry out the actions that are due after it.

        Args:
            weight: weight of the work in the step, unless it has samples of the run.

        Raises:
            PCCLError: the run cannot continue; the message says why.
        """
        weight = weight if self._samples is None else self._samples.stepped()
        now_s = time.monotonic()
        step = self.trainer.pipeline.steps + 1
        self._events.put(InnerStep(step=step, seconds=now_s - self._last_step_s))
        self._last_step_s = now_s
        is_awaited, has_quorum = not self._unsent, self._caller.has_quorum
        is_awaited = is_awaited and (self._caller.is_awaited or self.trainer.is_behind())
        if has_quorum:  # the processes of a replica launch after the same step
            is_awaited = self._model.any_shard(is_awaited)
        elif self._model.shards > 1:  # without a quorum, they do not ask each other in each step
            is_awaited = False
        self.carry_out(self.trainer.step(weight, is_awaited=is_awaited, has_quorum=has_quorum))

    def carry_out(self, steps: Steps) -> None:
        """Carry out the actions of the trainer.

        Raises:
            PCCLError: the run cannot continue; the message says why.
        """
        try:
            self._carry_out(steps)
        finally:  # Ctrl-C may have interrupted a wait, and the program may train on
            with interrupts.deferred():
                self._model.hold()

    def _carry_out(self, steps: Steps) -> None:
        waited_s = 0.0
        while True:
            with interrupts.deferred():
                for action in steps:
                    if action is None:
                        break
                    if isinstance(action, RoundMerged):
                        self._merged(action, waited_s)
                        waited_s = 0.0
                    else:
                        self._unsent.append(action)
                else:
                    self.send_all()
                    return
                self._send(self.trainer.awaited)
            # May take long; if Ctrl-C interrupts it, the merge stays due.
            if self._events.deliver():
                continue  # a listener may have heard the news: ``state_dict`` does
            began_s = time.monotonic()
            self._caller.wait()
            self.hear(after_failure=True)
            waited_s += time.monotonic() - began_s

    def has_work(self) -> bool:
        """Whether there is work that is not in the outer parameters, as far as is known."""
        return self.trainer.pipeline.has_work or self.trainer.pipeline.has_flights

    def leave_if_asked(self) -> None:
        """Hand over all local work to the other members, and end the program, after a notice.

        Raises:
            PCCLError: the run cannot continue; the message says why.
            SystemExit: this replica has left the run.
        """
        if not self._caller.is_leaving:
            return
        while self.has_work():
            self.carry_out(self.trainer.hand_over())
            with self._caller.settled():
                self.hear()  # a member that returned may have reverted the last round
        self._events.deliver()
        self._caller.close(abandon=False)
        _log.info("SIGTERM: the run has all work of this peer, which has left")
        raise SystemExit(0)

    def send_all(self) -> None:
        """Pass all contributions to the thread of the joint calls."""
        with interrupts.deferred():
            self._send(self.trainer.pipeline.number)

    def _send(self, last: int) -> None:
        """Pass on contributions up to round ``last``, which a merge waits for.

        The others follow when no merge waits: until then, earlier averages take their memory.
        """
        while self._unsent and self._unsent[0].number <= last:
            contribution = self._unsent.popleft()
            self._rounds[contribution.number] = _OwnRound(time.monotonic())
            self._caller.put(contribution)

    def _merged(self, merged: RoundMerged, exposed_s: float) -> None:
        average, contribution = merged.committed.average, merged.committed.contribution
        own = self._rounds.pop(merged.merge.number, _OwnRound())
        mean_norm, step_norm = merged.committed.norms
        step = self.trainer.pipeline.steps
        # Newcomers that contribute nothing yet are company, too.
        is_alone = len(average.contributors) == 1 and len(self._events.members) == 1
        if is_alone and not self._is_alone:
            self._events.put(TrainsAlone(step=step))
        self._is_alone = is_alone
        made = OuterStep(
            step=step,
            number=contribution.number + 1,
            fragment=contribution.fragment,
            contributors=tuple(sorted(average.contributors)),
            own_weight=contribution.weight,
            total_weight=average.total_weight,
            tx_bytes=average.tx_bytes,
            rx_bytes=average.rx_bytes,
            reduce_s=own.took_s,
            hidden_s=max(own.took_s - exposed_s, 0.0),
            exposed_s=exposed_s,
            pseudo_gradient_norm=contribution.norm,
            mean_norm=mean_norm,
            step_norm=step_norm,
            cosine=cosine(average.product, contribution.norm, mean_norm),
            noise_scale=noise_scale(contribution.norm, mean_norm, average.replicas),
        )
        self._events.put(made)
        self.figures = {
            "own norm": made.pseudo_gradient_norm,
            "mean norm": made.mean_norm,
            "outer step": made.step_norm,
            "cosine": made.cosine,
            "noise scale": made.noise_scale,
        }

    # -- news of the joint calls -------------------------------------------------------------------

    def hear(self, *, after_failure: bool = False) -> None:
        """Process the news of the joint calls.

        Raises:
            PCCLError: the run cannot continue. Not raised with ``after_failure``.
        """
        with interrupts.deferred():
            for news in self._caller.news():
                self._take_in(news)
        if not after_failure:
            self._caller.check()

    def _take_in(self, news: JointNews) -> None:
        step = self.trainer.pipeline.steps
        match news.what:
            case Entered() as entered:
                self._enter(entered, news)
            case RoundCommitted(contribution) as committed:
                self.known = contribution.number + 1
                self.trainer.commit(committed, news.lease)
                if own := self._rounds.get(contribution.number):
                    own.took_s = news.at_s - own.began_s
            case Members(peer, ids):
                self._events.met(step, peer, ids)
            case GroupSynced(info, seconds):
                self._events.synced(step, info, seconds)

    def _enter(self, entered: Entered, news: JointNews) -> None:
        before, self.known = self.known, entered.number
        if before is not None:
            missed = entered.number - before - sum(one >= before for one in entered.applied)
            if missed > 0:
                step = self.trainer.pipeline.steps
                self._events.put(RoundsMissed(step=step, number=entered.number, missed=missed))
        resumed, self.resumed = self.resumed, None
        self._say_what_may_be_lost(entered)
        entered = self._read_on(entered, news, is_elsewhere=resumed is not None)
        is_same = resumed is not None and all(map(torch.equal, resumed, news.outer))
        if is_same and self.trainer.is_at(entered) and not entered.is_reset:
            self.trainer.stay(entered)
            return
        if entered.is_reset:
            self.on_reset()
        self._rounds.clear()
        self._unsent.clear()
        is_elsewhere = resumed is not None
        self.trainer.enter(entered, news.outer, news.buffers, is_elsewhere=is_elsewhere)

    def _read_on(self, entered: Entered, news: JointNews, *, is_elsewhere: bool) -> Entered:
        """Read on in the lease of the run, and say why work is dropped, if it is."""
        kept = self.trainer.unapplied(entered, is_elsewhere=is_elsewhere)
        was_excluded = entered.is_reset
        entered = self.trainer.read_on(entered, news.lease, is_elsewhere=is_elsewhere)
        if was_excluded:
            _log.warning(
                "the guard excluded this peer's work from round %d; it takes the outer parameters, "
                "and drops its local work",
                entered.number,
            )
        elif entered.is_reset:
            _log.warning(
                "other peers have the samples of this peer's work of weight %g, because it was cut "
                "off; it takes the outer parameters, and drops that work",
                kept,
            )
        return entered

    def _say_what_may_be_lost(self, entered: Entered) -> None:
        forgotten = [
            launch
            for launch in self.trainer.pipeline.in_flight()
            if launch.number in entered.applied and entered.number - launch.number > ROUNDS_KEPT
        ]
        if forgotten:
            _log.warning(
                "this peer was away for more than %d rounds, so the run no longer records whether "
                "it has averaged this peer's work of weight %g; this peer drops that work",
                *(ROUNDS_KEPT, sum(launch.weight for launch in forgotten)),
            )

    def give_up_flights(self) -> None:
        """Drop the rounds in flight that get no outcome, because the run has failed."""
        self.hear(after_failure=True)
        with interrupts.deferred():
            for launch in self.trainer.pipeline.in_flight():
                if launch.number not in self.trainer.commits:
                    is_applied = self._caller.is_in_doubt(launch.number)
                    self.trainer.give_up(launch, is_applied=is_applied)
                    if is_applied:
                        _log.warning(
                            "the run was lost while it averaged this peer's work of weight %g; "
                            "other members may have it, so this peer drops it",
                            launch.weight,
                        )


def cosine(product: float, norm: float, mean_norm: float) -> float:
    """Return the cosine of two vectors from their dot product and norms; NaN if one is zero."""
    return product / (norm * mean_norm) if norm * mean_norm else math.nan


def noise_scale(norm: float, mean_norm: float, replicas: float) -> float:
    """Return how many contributions have as much noise in their mean as signal.

    This is the simple noise scale of McCandlish et al. (arXiv:1812.06162, appendix A.1), with a
    contribution in the place of a batch. One round tells it roughly: average over many.

    Args:
        norm: L2 norm of one contribution.
        mean_norm: L2 norm of the mean.
        replicas: number of contributions in the mean, if all have equal weights.

    Returns:
        NaN with one replica or without work; infinity if no signal is seen.
    """
    if replicas <= 1 or not norm:
        return math.nan
    noise = (norm**2 - mean_norm**2) * replicas / (replicas - 1)
    signal = (replicas * mean_norm**2 - norm**2) / (replicas - 1)
    return max(0.0, noise) / signal if signal > 0 else math.inf
