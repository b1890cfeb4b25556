"""``DiLoCo``: wraps an inner optimizer, and periodically averages with other peers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar
from weakref import WeakMethod

import torch

import pccl
from pccl.bindings import interrupts
from pccl.bindings.arguments import (
    check_communicator,
    check_count,
    check_listeners,
)
from pccl.bindings.compression import of_pseudo_gradients
from pccl.bindings.data.sample_ledger import ROUNDS_AHEAD, SampleLedger
from pccl.bindings.data.sampler import ElasticSampler, check_sampler
from pccl.bindings.diloco.checkpoints import TrainingCheckpoints
from pccl.bindings.diloco.joint_caller import JointCaller
from pccl.bindings.diloco.model.averaging import radial_averages
from pccl.bindings.diloco.model.buffers import named_buffers
from pccl.bindings.diloco.model.inner_state import InnerState
from pccl.bindings.diloco.model.local_model import LocalModel, forget_broken, named_parameters
from pccl.bindings.diloco.model.outer import OuterParameters
from pccl.bindings.diloco.model.outer_optimizers import OuterFactory, outer_factor, outer_factory
from pccl.bindings.diloco.replica_calls import QuorumOptions, ReplicaCalls, agreed_settings
from pccl.bindings.diloco.schedule import partition, schedule
from pccl.bindings.diloco.training_driver import TrainingDriver
from pccl.bindings.event_queue import EventQueue
from pccl.bindings.events import Consumer
from pccl.bindings.schedulers import FollowedScheduler, warn_of_late_scheduler
from pccl.checks import shown
from pccl.config import resolve_min_peers
from pccl.errors import raised_here

_log = logging.getLogger("pccl.diloco")

_Scheduler = TypeVar("_Scheduler")


class DiLoCo(torch.optim.Optimizer):
    """An optimizer that trains with peers that may join and leave at any time.

    Every ``sync_every`` steps of the inner optimizer the peers average the change of their
    parameters (the pseudo-gradient). All of them take the same step of an outer optimizer with the
    average (DiLoCo, Douillard et al., arXiv:2311.08105). With ``delay`` they train meanwhile. With
    ``fragments`` they average one part of the model after the other (Streaming, arXiv:2501.18512).

    It replaces the inner optimizer in the loop: its ``param_groups`` and ``state`` are those of
    ``inner``, so learning-rate schedulers, gradient scalers and clipping work unchanged.

    The first ``step`` joins the run; ``join`` joins earlier. From then on a background thread makes
    all calls of ``comm``; the program makes none. ``close`` and the end of ``with`` close ``comm``.

    Args:
        params: the model, or the parameters to be averaged, as ``model.named_parameters()`` or
            ``model.parameters()``: those that ``inner`` trains, in an order that is the same for
            all peers. Frozen ones are ignored; a tied one counts once. None: those of ``inner``.
        inner: the optimizer of the local steps. Peers that join late fetch its state, such as
            moments, from a member.
        comm: communicator of the run, connected or not. Only this object may make its joint calls.
        sync_every: inner steps between two synchronizations of the same parameter; or a time, as
            ``"30s"``, so that slow and fast machines synchronize together.
        outer: function that makes the outer optimizer of a fragment from its parameters, which are
            on the host in float32, and from their ``names``, if it has such a parameter; such as
            ``clipped(max_norm=1.0)``. None: SGD, see :func:`~.outer_optimizers.default_outer`.
        outer_lr_lambda: factor of the outer rates, by the run's outer steps of a fragment, from 0.
        delay: inner steps between taking a pseudo-gradient and merging its average; 0: the step
            waits for the average; ``sync_every``: the update is delayed by one round.
        mixing: share of the local parameters that a merge keeps; None: 0.5 with a delay between 0
            and ``sync_every``, otherwise 0.
        eager: with a delay of ``sync_every``: train on what the outer step makes of the own latest
            pseudo-gradient alone, instead of waiting a round for it (arXiv:2502.12996).
        fragments: number of parts of the model, which are synchronized in turn.
        fragment_order: ``"strided"``: each fragment has parameters of all depths;
            ``"sequential"``: of neighbouring layers. Fragments have about equal sizes. With
            ``"-blocks"`` after it, blocks such as ``layers.3`` stay whole.
        compression: a wire format of the library (``"int8"``, ``"int4"``, ...), with error
            feedback; or ``QuantizationOptions`` with a format, and a feedback for its decay alone.
        averaging: ``"mean"``; or ``"radial-directional"``, for many replicas: the average of each
            parameter has the mean length, and the mean direction, of its pseudo-gradients (RDA in
            Decoupled DiLoCo, arXiv:2604.21428). Embeddings of the module ``params`` take the mean.
        min_peers: members of the group that a synchronization waits for, the same for all peers.
            None: ``PCCL_MIN_PEERS`` (``pccl launch --min-peers``), otherwise 1.
        buffers: what the model keeps beside its parameters, as ``model.named_buffers()``, of any
            shape and dtype; the same names on all peers. Rounds of the last fragment average float
            buffers, weighted as the parameters, and take other buffers from one member. Newcomers
            receive them, too. None: the buffers in the ``state_dict`` of ``params``, if that is a
            module; otherwise, and with ``()``, none.
        warm_up: None: a peer that joins late fetches what ``inner`` keeps, with equal names, shapes
            and dtypes on all peers; without usable values it logs that, and uses 100. A number: it
            fetches nothing, and its learning rate rises over so many steps. All peers must use
            None, or all a number.
        guard: which pseudo-gradients the averages exclude, as for ``Communicator.all_reduce``, the
            same for all peers; ``"off"``: none. None: those that are not finite, and unusual norms
            are logged. An excluded replica takes the outer parameters, and drops its local work.
        quorum: members that a round needs, and ``grace_s`` its grace, as for
            ``Communicator.all_reduce``, the same for all peers. Late work goes into the next round.
        data: gives each peer samples of its own; a step weighs as many as its samples. All peers
            use one, or none. The model must not be sharded.
        publish_every: outer steps between two versions of the model that readers outside the run
            get (docs/publishing.md), numbered by outer steps; the same for all peers. None: none.
        on_event: functions that receive each event, on the training thread.

    Raises:
        TypeError, ValueError: an argument cannot be used, as a communicator that another wrapper
            uses; the message says how to correct it.
    """

    def __init__(
        self,
        params: torch.nn.Module | Iterable[Any] | None = None,
        *,
        inner: torch.optim.Optimizer,
        comm: pccl.Communicator,
        sync_every: int | str = 100,
        outer: OuterFactory | None = None,
        outer_lr_lambda: Callable[[int], float] | None = None,
        delay: int = 0,
        mixing: float | None = None,
        eager: bool = False,
        fragments: int = 1,
        fragment_order: str = "strided",
        compression: str | pccl.QuantizationOptions | None = None,
        averaging: str = "mean",
        min_peers: int | None = None,
        buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
        warm_up: int | None = None,
        guard: pccl.Guard | str | None = None,
        quorum: int | float | None = None,
        grace_s: float | str = "auto",
        data: ElasticSampler | None = None,
        publish_every: int | None = None,
        on_event: Consumer | Iterable[Consumer] = (),
    ) -> None:
        check_communicator(comm)
        if publish_every is not None:
            check_count("publish_every", publish_every)
        guard = pccl.Guard() if guard is None else guard
        agreed = agreed_settings(guard, quorum, grace_s)
        named = named_parameters(params, inner)
        self._schedule = schedule(sync_every, fragments, delay)
        mixed = self._schedule.mixing(mixing)
        self._schedule.check_eager(eager, mixed)
        min_peers = resolve_min_peers(min_peers)
        names, sizes = zip(*((name, p.numel()) for name, p in named), strict=True)
        self._parts = partition(sizes, fragments, fragment_order, names)
        self.inner = inner
        parts = [[named[index] for index in part] for part in self._parts]
        make_outer = outer_factory(outer, sum(sizes), self._schedule)  # the same on all peers
        self._model = LocalModel(parts, make_outer, named_buffers(buffers, params))
        if warm_up is not None:
            check_count("warm_up", warm_up, lowest=0)
        self._inner_state = InnerState(inner, named, warm_up)
        samples = None if data is None else self._attach(data)
        self._compression = of_pseudo_gradients(compression)
        radial, kind = radial_averages(averaging, params, self._model.parts, self._model.shards)
        self._outer = OuterParameters(
            [part.outer for part in self._model.parts],
            f"min_peers={min_peers}, fragments={fragments} {fragment_order}, {self._compression}"
            f"{kind}{agreed}",
            self._model.buffers,
            self._inner_state,
            previews=eager,
            factor=outer_factor(outer_lr_lambda),
            samples=samples,
        )
        self._caller = JointCaller(comm, ReplicaCalls(
            comm, self._outer, self._schedule, min_peers, self._compression, self._model.shards,
            guard, QuorumOptions(quorum, grace_s), radial=radial, publish_every=publish_every or 0,
        ))  # fmt: skip
        weakref.finalize(self, self._caller.stop)
        if self._schedule.is_round_late and not eager and self._outer.has_momentum:
            _log.warning(
                "averages that are merged a whole round late (delay=sync_every) overshoot with "
                "outer momentum; use eager=True, or an outer optimizer without momentum"
            )
        self._comm, listeners = comm, check_listeners(on_event)
        self._events = EventQueue(listeners)
        self._stop_listening: Callable[[], object] | None = None
        if listeners.count:
            self._stop_listening = weakref.finalize(self, self._events.listen_to(comm))
        reader = None if data is None else data.reader
        self._driver = TrainingDriver(
            self._schedule, self._model, mixed, self._caller, self._events,
            eager=eager, samples=reader,
        )  # fmt: skip
        self._checkpoints = TrainingCheckpoints(
            inner, self._inner_state, self._outer, self._model.parts, self._parts, self._driver,
            self._compression, reader,
        )  # fmt: skip
        self._driver.on_reset = partial(forget_broken, inner)
        self._pipeline = self._driver.trainer.pipeline
        self._followed: list[FollowedScheduler] = []
        self._has_started = self._has_joined = self._has_stepped = self._is_made = False
        super().__init__(inner.param_groups, inner.defaults)
        self._is_made = True
        self.param_groups, self.state = inner.param_groups, inner.state

    def _attach(self, data: ElasticSampler) -> tuple[SampleLedger, str]:
        """Return a ledger of samples for the run, and its name."""
        check_sampler(data)
        if self._model.shards > 1:
            raise ValueError(
                "data= needs a model that is not sharded: the ranks of a replica would get "
                "different samples; give each replica a sampler of its own"
            )
        steps = ROUNDS_AHEAD * self._schedule.sync_steps
        return data.attach(WeakMethod(self.join), WeakMethod(self._idle), steps)

    # -- properties --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        inner, outer = type(self.inner).__name__, self._outer.fragments[0].optimizer
        return (
            f"<DiLoCo: {self._schedule}, inner {inner}, outer {type(outer).__name__}, "
            f"inner steps: {self.inner_steps}, outer steps: {self.outer_steps}, "
            f"members: {len(self.members)}>"
        )

    @property
    def inner_steps(self) -> int:
        """Inner steps that this replica has made."""
        return self._pipeline.steps

    @property
    def steps(self) -> int:
        """Inner steps that a member from the beginning of the run has made by now.

        A learning rate computed from it is the same on all members. With a time budget there is no
        such number, and this equals ``inner_steps``.
        """
        return self._pipeline.run_steps

    @property
    def round(self) -> int:
        """Rounds of the run that have begun on this peer: outer steps made and in flight.

        Members that train until the same ``round`` and then call ``finish`` end with the same
        model, whenever they joined.
        """
        return self._pipeline.number

    @property
    def outer_steps(self) -> int:
        """Outer steps that the run has made, of all fragments together."""
        return self._outer.ledger.number

    @property
    def fragments(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters in each fragment."""
        return tuple(part.names for part in self._model.parts)

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the peers in the group, as of the last joint call; empty before ``join``."""
        return self._events.members

    @property
    def shared_state(self) -> pccl.SharedState:
        """Outer parameters, outer optimizer tensors and the ledger, equal on all members."""
        return self._outer.state

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to copy or pickle: the copy would be in the run as the same member.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a DiLoCo is a member of a run, and can be neither copied nor pickled; save its "
            "state_dict(), and load that into a new one"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse after construction, because the members have agreed on the parameters.

        Raises:
            RuntimeError: always, after construction.
        """
        if self._is_made:
            raise RuntimeError(
                "the members have agreed on the parameters of a DiLoCo; make the inner optimizer "
                "with all param groups, then a new DiLoCo from it"
            )
        super().add_param_group(param_group)

    # -- training ----------------------------------------------------------------------------------

    @raised_here
    def join(self) -> bool:
        """Join the run, and load its parameters. A second call does nothing.

        Returns:
            Whether the local parameters have changed.

        Raises:
            PCCLError: this replica cannot join the run; the message says why.
        """
        if self._has_joined:
            return False
        if not self._has_started:
            with interrupts.deferred():
                self._caller.start()
                self._has_started = True
        self._driver.enter()
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._bring_schedulers(self.steps)
        changed = self._model.any_shard(self._driver.trainer.has_changed)
        self._has_joined = True
        self._events.deliver()
        return changed

    @raised_here
    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> Any:
        """Make an inner step, and the joint calls and merges that are due after it.

        The first step joins the run. If joining has changed the parameters, the gradients are
        outdated. Without ``closure`` they are not applied, and the next step is the first.

        Args:
            closure: function that computes the loss again, as for the inner optimizer.
            weight: the work in this step, in tokens or samples; averages are weighted by it. The
                changes of a round whose steps all weigh 0 are dropped. None: 1.0, or with ``data``
                the number of samples since the last step.

        Returns:
            The result of the inner optimizer's ``step``; None if the gradients were not applied.

        Raises:
            PCCLError: the run cannot continue; the message says why. To continue training,
                make a new ``Communicator``, and a new ``DiLoCo`` with this one's ``state_dict``.
            TypeError, ValueError: ``closure`` is not callable; ``weight`` is not a number >= 0.
            SystemExit: SIGTERM has given notice, so this replica handed over its work, and left.
        """
        amount = self._driver.check_weight(weight)
        if closure is not None and not callable(closure):
            raise TypeError(
                f"closure must be a function, not {shown(closure)}; pass a weight as weight=..."
            )
        changed = self.join()
        trainer = self._driver.trainer
        entry = trainer.entry
        if not self._has_stepped:
            self._has_stepped = True
            remedy = "wrap it with opt.follow(), or use opt.steps instead"
            warn_of_late_scheduler(self.steps, remedy, self, self.inner)
        if changed and closure is None:
            _log.warning(
                "step() dropped the gradients of one inner step, because joining the run has "
                "replaced the parameters; to lose no step, call opt.join() before the loop"
            )
            return None
        self._driver.hear()
        if self._pipeline.due_merges():  # Ctrl-C has interrupted the previous step
            self._driver.enter()
        if trainer.entry != entry:
            self._bring_schedulers(self.steps)
        entry = trainer.entry
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        with self._inner_state.stepping():
            loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self._driver.stepped(amount)
        if trainer.entry != entry:  # the program's scheduler.step() comes next
            self._bring_schedulers(self.steps - 1)
        self._comm.report_step(self.steps, figures=self._driver.figures)
        self._events.deliver()
        self._driver.leave_if_asked()
        return loss

    @raised_here
    def _idle(self) -> None:
        """Take part in a round without work, because this peer has no samples."""
        self._driver.idle()
        self._events.deliver()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the inner optimizer does."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def follow(self, scheduler: _Scheduler) -> _Scheduler:
        """Bring a scheduler to the run's step whenever this peer has joined the run late or again.

        The program still calls ``scheduler.step()`` once after each ``step``.

        Args:
            scheduler: a learning-rate scheduler of this object or of ``inner``, at its first step
                or with the loaded state of a checkpoint.

        Returns:
            The scheduler.

        Raises:
            TypeError: ``scheduler`` is no ``LRScheduler``, or follows a metric.
            ValueError: it belongs to another optimizer, or ``sync_every`` is a time.
        """
        if not self._schedule.sync_steps:
            raise ValueError("sync_every is a time, so the run counts no steps to follow")
        self._followed.append(FollowedScheduler(scheduler, self, self.inner))
        if self._has_joined:
            self._followed[-1].bring(self.steps)
        return scheduler

    def _bring_schedulers(self, step: int) -> None:
        for followed in self._followed:
            followed.bring(step)

    @raised_here
    def finish(self) -> None:
        """Wait for the rounds in flight, and load the outer parameters into the model.

        Call it after a multiple of ``sync_every`` steps, or right after the last fragment's round
        has begun. Fragments that were due earlier in the cycle get one final round immediately, so
        that every inner step is averaged. After another number of steps, it logs any work that was
        not averaged. All members that call it in the same ``round`` take part, and end with the
        same model, whenever they joined. It waits for peers that are still training.

        Training may continue. If a peer joins before the final rounds would have been due, its
        ``steps`` are too high, by less than ``sync_every``.

        Raises:
            PCCLError: as for ``step``.
        """
        if self._has_started or self._driver.resumed is not None:
            self.join()
            self._driver.hear()
            self._driver.carry_out(self._driver.trainer.finish())
        with ExitStack() as stack:
            if self._has_started:
                stack.enter_context(self._caller.settled())
                self._driver.hear()
            stack.enter_context(interrupts.deferred())
            self._model.take_over()
            left_out = self._pipeline.leave_out_work()
        if left_out:
            _log.warning(
                "finish() dropped local work of weight %g that no average contains. Stop after a "
                "multiple of sync_every steps, or right after the last fragment's round has begun. "
                "If this replica was cut off shortly before, ignore this",
                left_out,
            )
        self._events.deliver()

    def state_dict(self) -> dict[str, Any]:
        """Return all state except the model's; save it with the model's own ``state_dict``.

        Waits for the open reduce. The result holds both optimizers, the outer parameters, the
        residuals of the compression, and the position in the schedule. It also holds all work that
        is not in the outer parameters, even after an error. The exception is work that was being
        reduced when a lost membership ended the run here: other members may have applied it.
        """
        if not self._has_started:
            return self._checkpoints.save()
        self._driver.send_all()
        with self._caller.settled():
            self._driver.give_up_flights()
            return self._checkpoints.save()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where another process stopped. Load the model's ``state_dict`` separately.

        The first ``step`` joins the run with this state. If the run has advanced meanwhile, this
        replica loads its outer parameters, and keeps the own work since its last synchronization.

        Raises:
            RuntimeError: this object has joined the run already.
            ValueError: the checkpoint has other parameters or fragments.
        """
        if self._has_started:
            raise RuntimeError("load_state_dict must be called before the first step() or join()")
        self._checkpoints.load(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def close(self) -> None:
        """Leave the run: finish the open call, and close ``comm``. Idempotent."""
        self._close(abandon=False)

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(abandon=kind is not None)

    def _close(self, *, abandon: bool) -> None:
        self._caller.close(abandon=abandon)
        if self._stop_listening is not None:
            self._stop_listening()
            if abandon:
                self._events.deliver()  # why the run could not continue
