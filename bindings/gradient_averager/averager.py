"""``GradientAverager``: averages gradients through hooks on the parameters and the optimizer."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import pccl
from pccl import ErrorFeedback, QuantizationOptions, SyncProgress
from pccl.bindings.arguments import (
    check_communicator,
    check_compression,
    check_count,
    check_listeners,
    claim,
    release,
)
from pccl.bindings.compression import Compression
from pccl.bindings.data import ElasticSampler
from pccl.bindings.event_queue import EventQueue
from pccl.bindings.events import Event, GradientsAveraged, RoundsMissed, TrainsAlone
from pccl.bindings.gradient_averager.averageable import averageable
from pccl.bindings.gradient_averager.bucket_plan import BucketPiece, plan_buckets
from pccl.bindings.gradient_averager.buckets import Bucket
from pccl.bindings.gradient_averager.reductions import OUT_OF_STEP, Reductions
from pccl.bindings.gradient_averager.replica import AveragedReplica
from pccl.bindings.gradient_averager.step_samples import StepSamples
from pccl.bindings.schedulers import warn_of_late_scheduler
from pccl.config import resolve_min_peers
from pccl.errors import (
    Evicted,
    MasterLost,
    NotConnected,
    PCCLError,
    ResyncRequired,
    raised_here,
)
from pccl.inquiry import RemovalCause

_log = logging.getLogger("pccl.averager")

BUCKET_BYTES = 4 << 20
FIRST_TAG = 1 << 32
"""Tag of the first bucket, far above programs' usual tags; later buckets have the next tags."""


class GradientAverager:
    """Averages the gradients of every step over all peers, during the backward pass.

        with GradientAverager(model, optimizer, comm=comm, min_peers=2) as averager:
            while averager.steps < 1000:
                averager.update()
                optimizer.zero_grad()
                loss(model, next(batches)).backward()
                averager.step()

    Parameters, optimizer state and step count stay bit for bit the same on all peers, also when
    peers join and leave. ``update`` joins the run, admits newcomers and sends them the state. All
    peers must call it at the start of every step. A peer that was cut off rejoins in this call.

    Between ``backward()`` and ``synchronize()`` (or ``step()``, which calls it) the gradients are
    being averaged in place: do not read or change them. Clip and unscale them after
    ``synchronize()``. All trainable parameters get a gradient in every step; it is zero if no peer
    has one.

    Args:
        model: contiguous parameters, on the CPU or a CUDA device, in the same order on all peers.
        optimizer: optimizer of the model's parameters; its state must be tensors and numbers.
        comm: communicator of the run, connected or not, for this object only. The caller closes it.
        bucket_bytes: gradients are reduced together up to this size. The same for all peers.
        compression: wire format of the gradients: the name of a format, with error feedback, or
            options, whose ``name`` is filled in. The same for all peers.
        min_peers: members that the run must have before this peer is admitted, itself included;
            None: as for ``Communicator.connect``.
        shared: further tensors that newcomers receive, by name, contiguous.
        stateful: other objects that count steps, by name: learning-rate schedulers, a GradScaler.
            Newcomers receive the numbers in their ``state_dict()``.
        data: gives each peer samples of its own; ``synchronize`` records what is done. All peers
            use one, or none.
        resume: as for ``Communicator.sync_shared_state``.
        on_progress: as for ``Communicator.sync_shared_state``, for the fetch of a newcomer.
        on_event: function, or several, called with each :data:`pccl.bindings.events.Event` on the
            training thread.

    Raises:
        ValueError, TypeError: a parameter cannot be averaged, or another argument cannot be used;
            the message says what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        comm: pccl.Communicator,
        bucket_bytes: int = BUCKET_BYTES,
        compression: str | QuantizationOptions | None = None,
        min_peers: int | None = None,
        shared: Mapping[str, Tensor] | None = None,
        stateful: Mapping[str, Any] | None = None,
        data: ElasticSampler | None = None,
        resume: str = "never",
        on_progress: Callable[[SyncProgress], None] | None = None,
        on_event: Callable[[Event], None] | Iterable[Callable[[Event], None]] = (),
    ) -> None:
        check_communicator(comm)
        check_count("bucket_bytes", bucket_bytes)
        named = averageable(model, optimizer)
        pieces = [BucketPiece(str(p.dtype), p.numel() * p.element_size()) for _, p in named]
        plans = plan_buckets(pieces, bucket_bytes)
        self._buckets = [Bucket([named[number] for number in plan]) for plan in plans]
        options = check_compression(compression)
        own = ErrorFeedback() if isinstance(compression, str) else None
        feedback = options.error_feedback if own is None and options is not None else own
        self._compression = Compression(options, feedback)
        self._samples = None if data is None else StepSamples(data, self._require_membership)
        ledger = {} if self._samples is None else self._samples.shared
        everything = {**(shared or {}), **ledger}
        self._replica = AveragedReplica(model, optimizer, everything, stateful or {})
        # Trained parameters change in every step, so fetching them early is useless.
        frozen = any(not parameter.requires_grad for parameter in model.parameters())
        self._fetches_early = bool(shared) or frozen
        self._trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._optimizer, self._comm = optimizer, comm
        self._min_peers, self._resume = resolve_min_peers(min_peers), resume
        self._on_progress = on_progress
        listeners = check_listeners(on_event)
        self._events = EventQueue(listeners, "pccl.gradient_averager")
        self._stop_listening: Callable[[], object] | None = None
        if listeners.count:
            self._stop_listening = weakref.finalize(self, self._events.listen_to(comm))
        claim(comm, self, "GradientAverager")
        self._reductions = Reductions(comm)
        self._members: frozenset[int] = frozenset()
        self._accumulates, self._began_s = False, 0.0
        self._copying: list[int] = []
        self._launched = [False] * len(self._buckets)
        self._hooks: list[Any] = []
        self._listen()
        comm.expect_notice(self._replica.is_in_step)

    @property
    def steps(self) -> int:
        """Steps that the run has taken; the same on all peers."""
        return self._replica.steps

    @property
    def is_member(self) -> bool:
        """Whether this peer is in the run; otherwise ``update`` joins it."""
        return bool(self._members)

    # -- membership --------------------------------------------------------------------------------

    @raised_here
    def update(self) -> tuple[int, ...]:
        """Join the run, or admit newcomers; afterwards all replicas are equal. Joint call.

        Returns:
            The ids of the newcomers; if this peer has just joined, the ids of all members.

        Raises:
            RuntimeError: gradients are being averaged; call ``synchronize`` first. Or a parameter's
                ``requires_grad`` has changed; make a new GradientAverager.
            MasterLost: there is no master. Start one, and call again.
            Evicted, StateMismatch: the other peers train another model.
            StateUnavailable, NotAdmitted: as for ``sync_shared_state`` and ``connect``.
            SystemExit: SIGTERM has given notice, so this peer has left the run after its last step.
        """
        if self._reductions.are_open:
            raise RuntimeError("gradients are being averaged; call synchronize() or step() first")
        if any(parameter.requires_grad != trains for parameter, trains in self._trainable):
            raise RuntimeError(
                "requires_grad of a parameter has changed; close() this GradientAverager and make "
                "a new one, on all peers at the same step"
            )
        if self._comm.is_leaving:
            self.close()
            self._comm.close()
            raise SystemExit(0)
        while True:
            was_member = self.is_member
            try:
                return self._meet()
            except Evicted as error:
                if error.cause is RemovalCause.STATE_CONFLICT:
                    raise
                self._leave()
            except MasterLost:
                if not was_member:
                    raise
                self._leave()
            except ResyncRequired:
                self._leave()
                self._connect()

    def _meet(self) -> tuple[int, ...]:
        """Join the run, or update the topology, between two steps; synchronize with newcomers."""
        if not self._is_connected:
            self._connect()
        else:
            self._comm.update_topology()
        members = self._now()
        newcomers = members - self._members
        if self._events.met(self.steps, self._comm.peer_id, members) and len(members) == 1:
            self._events.put(TrainsAlone(step=self.steps))
        self._events.deliver()
        if newcomers:
            if self._samples is not None:
                self._samples.admit(newcomers)
            self._synchronize_state()
            if self._samples is not None and not self._members:
                self._samples.entered(self._comm.peer_id)
        self._members = self._now()
        self._replica.begin()
        return tuple(sorted(newcomers))

    def _connect(self) -> None:
        self._comm.connect(
            min_peers=self._min_peers,
            shared_state=self._replica.state if self._fetches_early else None,
            on_progress=self._on_progress if self._fetches_early else None,
        )

    @property
    def _is_connected(self) -> bool:
        try:
            return self._comm.peer_id >= 0
        except NotConnected:
            return False

    def _now(self) -> frozenset[int]:
        return frozenset(member.peer_id for member in self._comm.members())

    def _synchronize_state(self) -> None:
        """Make all replicas equal, and increase the revision for the next synchronization."""
        began_s, before = time.monotonic(), self.steps
        self._replica.publish()
        info = self._comm.sync_shared_state(
            self._replica.state, resume=self._resume, on_progress=self._on_progress
        )
        self._replica.state.push_revision()
        own_steps = self.steps
        self._replica.adopt()
        if own_steps > self.steps:
            _log.warning(
                "dropped %d steps of this peer: it was at step %d, and the group elected the state "
                "of step %d",
                *(own_steps - self.steps, own_steps, self.steps),
            )
        if not self._members:
            remedy = "pass it in stateful=, so that newcomers receive its state"
            warn_of_late_scheduler(self.steps, remedy, self._optimizer)
        self._events.synced(self.steps, info, time.monotonic() - began_s)
        if 0 < before < self.steps:
            missed = self.steps - before
            self._events.put(RoundsMissed(step=self.steps, number=self.steps, missed=missed))
        self._events.deliver()

    def _leave(self) -> None:
        """Record that this peer has lost its membership; it can join again as a newcomer."""
        self._members = frozenset()
        self._replica.begin_anew()
        for number in range(len(self._buckets)):
            self._compression.feedback.forget(_name(number))

    @raised_here
    def verify(self) -> None:
        """Check that all replicas are bit-identical; change nothing. Joint call.

        Raises:
            StateMismatch: the replicas differ; the message names the first tensor that differs.
            Evicted, MasterLost: this peer was cut off; the next ``update`` joins again.
        """
        self._replica.publish()
        try:
            self._comm.verify(self._replica.state)
        except OUT_OF_STEP:
            self._leave()
            raise

    # -- gradients ---------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Context in which gradients accumulate locally; the next average includes them."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    @raised_here
    def synchronize(self, *also: Tensor) -> bool:
        """Replace all gradients by their averages. Joint call.

        Missing gradients count as zero, so call this after a failed batch, too. If a peer is lost
        during the call, the averages that were not complete do not contain its gradients. All
        averages are the same on all remaining peers.

        Args:
            also: further tensors to average in place, such as the loss: contiguous, on the CPU,
                with a float dtype. The same number and shapes on all peers.

        Returns:
            Whether the gradients are averages. If not, this peer has lost its membership: take no
            step. The next ``update`` joins again, and fetches the state of the run.

        Raises:
            RuntimeError: ``update`` was not called.
            DescriptorMismatch: the peers average different tensors.
        """
        called_s = time.monotonic()
        if not self._reductions.are_open:
            self._require_membership()
            self._began_s = called_s
        with torch.no_grad():
            for number, bucket in enumerate(self._buckets):
                if not self._launched[number]:
                    bucket.take_rest()
                    bucket.wait_on_host()
                    self._launch(number)
        for number, tensor in enumerate(also, len(self._buckets)):
            if number == len(self._launched):  # not launched by a call that Ctrl-C interrupted
                self._launched.append(True)
                self._reductions.launch(tensor, FIRST_TAG + number, None)
        try:
            outcome = self._reductions.wait()
        finally:
            if not self._reductions.are_open:  # else Ctrl-C: this may be called again
                self._begin_step()
        if isinstance(outcome, PCCLError):
            _log.warning(
                "dropped the gradients of step %d, because this peer lost its membership: %s; the "
                "next update() joins again, and fetches the state of the run",
                *(self.steps + 1, outcome.reason),
            )
            self._leave()
            return False
        if self._samples is not None:
            self._samples.averaged(self._comm.peer_id, outcome)
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.give_back()
        self._events.put(
            GradientsAveraged(
                step=self.steps + 1,
                contributors=outcome.contributors,
                tx_bytes=outcome.tx_bytes,
                rx_bytes=outcome.rx_bytes,
                hidden_s=max(0.0, called_s - self._began_s),
                exposed_s=time.monotonic() - called_s,
            )
        )
        self._events.deliver()
        return True

    @raised_here
    def step(self, *also: Tensor) -> bool:
        """``synchronize``, then the optimizer's step, unless this peer lost its membership.

        Args:
            also: as for ``synchronize``.

        Returns:
            Whether a step was taken.

        Raises:
            RuntimeError, DescriptorMismatch: as for ``synchronize``.
        """
        averaged = self.synchronize(*also)
        if averaged:
            self._optimizer.step()
        return averaged

    def _listen(self) -> None:
        """Register hooks on parameters and optimizer; the hooks do not keep this object alive."""
        this = weakref.ref(self)
        for number, bucket in enumerate(self._buckets):
            for place, each in enumerate(bucket.parameters):
                parameter: Any = each  # torch types this only in part

                def arrived(_: Tensor, number: int = number, place: int = place) -> None:
                    averager = this()
                    if averager is not None:
                        averager._arrived(number, place)

                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

        def steps(*_: object) -> None:
            averager = this()
            if averager is not None and averager._reductions.are_open:
                raise RuntimeError(
                    "the gradients are being averaged; call averager.step(), or synchronize() "
                    "before optimizer.step()"
                )

        def stepped(*_: object) -> None:
            averager = this()
            if averager is not None and averager.is_member:
                averager._replica.stepped()
                averager._comm.report_step(averager.steps)

        self._hooks.append(self._optimizer.register_step_pre_hook(steps))
        self._hooks.append(self._optimizer.register_step_post_hook(stepped))

    def _arrived(self, number: int, place: int) -> None:
        """Take a gradient that backward has made; launch the buckets that are complete."""
        if self._accumulates:
            return
        self._require_membership()
        with torch.no_grad():
            self._buckets[number].take(place)
        if self._buckets[number].is_complete:
            self._copying.append(number)
        for other in list(self._copying):
            if self._buckets[other].is_on_host:
                self._copying.remove(other)
                self._launch(other)

    def _launch(self, number: int) -> None:
        if not self._reductions.are_open:
            self._began_s = time.monotonic()
        if self._samples is not None:
            self._samples.launch(self._reductions)
        self._launched[number] = True
        options = self._compression.options(_name(number))
        self._reductions.launch(self._buckets[number].values, FIRST_TAG + number, options)

    def _begin_step(self) -> None:
        self._launched = [False] * len(self._buckets)
        self._copying.clear()
        if self._samples is not None:
            self._samples.begin_step()
        for bucket in self._buckets:
            bucket.begin()

    def _require_membership(self) -> None:
        if not self.is_member:
            raise RuntimeError(
                "this peer is not in the run; call averager.update() before each forward pass"
            )

    # -- the rest ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all state but that of model, optimizer and ``stateful``, for a checkpoint."""
        samples = {} if self._samples is None else {"samples": self._samples.state_dict()}
        return {
            "steps": self.steps,
            "error_feedback": self._compression.feedback.state_dict(),
            **samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Call it before the first ``update``.

        If several peers of a new run load checkpoints, the checkpoint with the most steps counts.

        Raises:
            RuntimeError: this peer is in the run already.
        """
        if self.is_member:
            raise RuntimeError("call load_state_dict() before the first update()")
        self._replica.steps = int(state["steps"])
        if self._samples is not None:
            self._samples.load_state_dict(state)
        self._replica.begin_anew()
        if self._compression.remembers:
            self._compression.feedback.load_state_dict(state["error_feedback"])

    def close(self) -> None:
        """Remove the hooks from model and optimizer. It does not close the communicator.

        Another wrapper may use the communicator afterwards.
        """
        release(self._comm, self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._stop_listening is not None:
            self._stop_listening()

    def __enter__(self) -> GradientAverager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is not None:
            self._events.deliver()  # why the run could not continue


def _name(bucket: int) -> str:
    return f"bucket.{bucket}"
