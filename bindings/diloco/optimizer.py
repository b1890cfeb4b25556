"""``DiLoCo``: an inner optimizer that averages with other peers now and then."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

import pccl
from pccl.bindings.arguments import (
    check_amount,
    check_communicator,
    check_compression,
    check_listeners,
)
from pccl.bindings.compression import Compression
from pccl.bindings.diloco import interrupts
from pccl.bindings.diloco.joint_caller import JointCaller
from pccl.bindings.diloco.local_model import LocalModel, named_parameters
from pccl.bindings.diloco.outer import OuterFactory, OuterParameters, outer_factory
from pccl.bindings.diloco.rounds import Average, Contribution, RoundCommitted
from pccl.bindings.diloco.schedule import partition, schedule
from pccl.bindings.diloco.training_driver import TrainingDriver
from pccl.bindings.event_queue import EventQueue
from pccl.bindings.events import Consumer
from pccl.config import resolve_min_peers

_log = logging.getLogger("pccl.diloco")

VERSION = 1
"""Of what ``state_dict`` returns."""

WEIGHT_MAX = 1e30
"""Of one step: sums of it stay far from what a reduce takes."""


class DiLoCo(torch.optim.Optimizer):
    """Train with peers that may come and go, and hear from each other seldom.

    Every ``sync_every`` steps of the inner optimizer the peers average what the steps have changed
    (the pseudo-gradient), and all take the same step of an outer optimizer with that (DiLoCo,
    Douillard et al., arXiv:2311.08105). With ``delay`` they go on training meanwhile, and with
    ``fragments`` they do so one part of the model after the other (Streaming DiLoCo,
    arXiv:2501.18512).

    To its surroundings it is the inner optimizer: its ``param_groups`` and ``state`` are those of
    ``inner``, so learning-rate schedulers, gradient scalers and clipping work as ever.

    The first ``step`` joins the run; ``join`` does it earlier. A background thread makes all calls
    of ``comm`` from then on; don't make others. ``close`` and the end of ``with`` close it.

    Args:
        params: the parameters to be averaged, as ``model.parameters()`` or
            ``model.named_parameters()``: those that ``inner`` trains, in an order that is the
            same for all peers. Frozen ones are left out; tied ones count once.
        inner: the optimizer of the local steps. Its state stays local.
        comm: of the run; connected, or not yet.
        sync_every: inner steps between two synchronizations of the same parameter; or a time, as
            ``"30s"``, so that slow and fast machines meet.
        outer: makes the outer optimizer of the parameters that it is given, on the host, in
            float32. None: SGD with lr 0.7 and Nesterov momentum 0.9.
        delay: so many inner steps after a pseudo-gradient was taken its average is merged; 0: the
            step waits for it; ``sync_every``: the update that is delayed by one round.
        mixing: how much of the local parameters remains when the outer ones are merged; None: 0.5
            with a delay that is not 0 and less than ``sync_every``, otherwise 0.
        fragments: parts of the model that are synchronized in turn; each transfer is so much
            smaller.
        fragment_order: ``"strided"``: dealt out, so that each has some of all depths;
            ``"sequential"``: neighbours. Either way they are about equally large.
        compression: a wire format of the library (``"int8"``, ``"int4"``, ...), with error
            feedback; or ``QuantizationOptions`` with a format. The feedback is always the own.
        min_peers: how many must be in the group for a synchronization; others are waited for. The
            same for all. None: what ``PCCL_MIN_PEERS`` says (``pccl launch --min-peers``), or 1.
        on_event: functions that are told what happens, on the training thread.

    Raises:
        TypeError, ValueError: an argument that cannot be used; the message says how to mend it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        inner: torch.optim.Optimizer,
        comm: pccl.Communicator,
        sync_every: int | str = 100,
        outer: OuterFactory | None = None,
        delay: int = 0,
        mixing: float | None = None,
        fragments: int = 1,
        fragment_order: str = "strided",
        compression: str | pccl.QuantizationOptions | None = None,
        min_peers: int | None = None,
        on_event: Consumer | Iterable[Consumer] = (),
    ) -> None:
        check_communicator(comm)
        named = named_parameters(params, inner)
        factory = outer_factory(outer)
        self._schedule = schedule(sync_every, fragments, delay)
        mixed = self._schedule.mixing(mixing)
        min_peers = resolve_min_peers(min_peers)
        parts = partition([p.numel() for _, p in named], fragments, fragment_order)
        self.inner = inner
        self._model = LocalModel([[named[index] for index in part] for part in parts], factory)
        self._compression = Compression(check_compression(compression), pccl.ErrorFeedback())
        self._outer = OuterParameters(
            [part.outer for part in self._model.parts],
            f"min_peers={min_peers}, fragments={fragments} {fragment_order}, {self._compression}",
        )
        self._caller = JointCaller(
            comm, self._outer, self._schedule, min_peers, self._compression, self._model.shards
        )
        weakref.finalize(self, self._caller.stop)
        self._events = EventQueue(check_listeners(on_event))
        self._driver = TrainingDriver(
            self._schedule, self._model, mixed, self._caller, self._events
        )
        self._pipeline = self._driver.trainer.pipeline
        self._has_started = self._has_joined = False
        self._is_made = False
        super().__init__(inner.param_groups, inner.defaults)
        self._is_made = True
        self.param_groups = inner.param_groups
        self.state = inner.state

    # -- what it looks like ------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"DiLoCo({self._schedule}, inner={self.inner!r})"

    @property
    def inner_steps(self) -> int:
        """Inner steps that this replica has made."""
        return self._pipeline.steps

    @property
    def steps(self) -> int:
        """Inner steps of the run up to here: as many as a member from its beginning has made.

        A learning rate that follows from it is the same for all members, whenever they have joined.
        With a time budget there is no such number: it is ``inner_steps``.
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
    def members(self) -> tuple[int, ...]:
        """Ids of the peers in the group, as of the last joint call; empty before ``join``."""
        return self._events.members

    @property
    def shared_state(self) -> pccl.SharedState:
        """Outer parameters, the outer optimizer's tensors, and the ledger: the same for all."""
        return self._outer.state

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a copy would be in the run as the same member.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a DiLoCo is a member of a run, and can be neither copied nor pickled; save its "
            "state_dict(), and load that into a new one"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once it is made: the members have agreed on the parameters.

        Raises:
            RuntimeError: always, after construction.
        """
        if self._is_made:
            raise RuntimeError(
                "the members of a run share the parameters that DiLoCo was made of; make the inner "
                "optimizer with all param groups, and DiLoCo of it"
            )
        super().add_param_group(param_group)

    # -- training ----------------------------------------------------------------------------------

    def join(self) -> bool:
        """Join the run, and take over its parameters. Does nothing the second time.

        Returns:
            Whether the local parameters were changed by it.

        Raises:
            PCCLError: the run can't be joined; the message says why.
        """
        if self._has_joined:
            return False
        if not self._has_started:
            with interrupts.deferred():
                self._caller.start()
                self._has_started = True
        self._driver.enter()
        changed = self._model.any_shard(self._driver.trainer.has_changed)
        self._has_joined = True
        self._events.deliver()
        return changed

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:
        """Make an inner step, and what is due after it.

        The first one joins the run. If that has changed the parameters, the gradients were those
        of others, and are not applied: the next step is the first.

        Args:
            closure: as of the inner optimizer.
            weight: the work in this step, in tokens or samples: averages are weighted by it. What
                is made in a round whose steps all weigh 0 is dropped.

        Returns:
            What the inner optimizer returns.

        Raises:
            PCCLError: the run can't go on; the message says why. Making a new ``Communicator`` and
                a new ``DiLoCo`` with this one's ``state_dict`` goes on where this one stopped.
            TypeError, ValueError: a closure that is none; a weight that is no number of at least 0.
        """
        check_amount("weight", weight, WEIGHT_MAX)
        if closure is not None and not callable(closure):
            raise TypeError(
                f"closure must be a function, not {closure!r}; say weight= for a weight"
            )
        if self.join() and closure is None:
            return None
        self._driver.hear()
        if self._pipeline.due_merges():  # Ctrl-C has ended the step before this one
            self._driver.enter()
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self._driver.stepped(weight)
        self._events.deliver()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the inner optimizer."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def finish(self) -> None:
        """Wait for the rounds in flight, and give the model the outer parameters.

        Call it after a multiple of ``sync_every`` steps, or right after the last fragment's round
        has begun. Fragments that were due earlier in the cycle get one final round immediately, so
        that every inner step is averaged. After another number of steps, it logs any work that was
        not averaged. All members that call it in the same ``round`` take part, and end with the
        same model, whenever they joined. It waits for peers that are still training.

        Training may go on afterwards. A peer that joins before those final rounds would have been
        due counts too many ``steps``, but fewer than ``sync_every`` too many.

        Raises:
            PCCLError: as of ``step``.
        """
        if self._has_started or self._driver.resumed is not None:
            self.join()
            self._driver.hear()
            self._driver.carry_out(self._driver.trainer.finish())
            self._caller.settle()
            self._driver.hear()
        with interrupts.deferred():
            self._model.take_over()
            left_out = self._pipeline.leave_out_work()
        if left_out:
            _log.warning(
                "finish() leaves out work of a weight of %g that is in no average: stop after a "
                "multiple of sync_every steps, or right after the last fragment's round has begun "
                "(unless this replica was cut off shortly before: nobody makes more rounds for it)",
                left_out,
            )
        self._events.deliver()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model: save it with the model's own ``state_dict``.

        Waits for what is being reduced. After an error, too, it holds all work that is not in the
        outer parameters, but for what was being reduced when the run was lost for good, which may
        be in those of others. Holds the inner and the outer optimizer, the outer parameters,
        residuals of the compression, and the position in the pipeline.
        """
        if self._has_started:
            self._caller.settle()
            self._driver.hear(after_failure=True)
            self._driver.give_up_flights()
        position = self._pipeline.position()
        in_flight = [self._driver.trainer.commits[number] for number, *_ in position["flights"]]
        return {
            "version": VERSION,
            "layout": [list(part.names) for part in self._model.parts],
            "inner": self.inner.state_dict(),
            "outer": self._outer.state_dict(),
            "base": [part.base.clone() for part in self._model.parts],
            "position": position,
            "in_flight": [_packed(committed) for committed in in_flight],
            "residuals": {
                name: torch.as_tensor(kept)
                for name, kept in self._compression.feedback.state_dict().items()
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another process stopped; the model's ``state_dict`` is loaded besides.

        The first ``step`` joins the run with it. If the run has got further meanwhile, this
        replica takes over its outer parameters, and keeps its own work since its last
        synchronization.

        Raises:
            RuntimeError: this one has joined the run already.
            ValueError: it was saved with other parameters or fragments.
        """
        if self._has_started:
            raise RuntimeError("load_state_dict must be called before the first step, or join")
        saved = state_dict
        if saved.get("version") != VERSION:
            raise ValueError(
                "this is not the state of a DiLoCo of this version (state_dict() makes one)"
            )
        if saved["layout"] != [list(part.names) for part in self._model.parts]:
            raise ValueError(
                "it was saved with other parameters, fragments or fragment_order; use the same"
            )
        self.inner.load_state_dict(saved["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._outer.load_state_dict(saved["outer"])
        for part, base in zip(self._model.parts, saved["base"], strict=True):
            part.base.copy_(base)
        self._pipeline.resume(saved["position"], time.monotonic())
        for packed in saved["in_flight"]:
            self._driver.trainer.commit(self._unpacked(packed))
        self._compression.feedback.load_state_dict(
            {name: kept.cpu().numpy() for name, kept in saved["residuals"].items()}
        )
        self._driver.resumed = [values.cpu().clone() for values in saved["outer"]["values"]]

    def _unpacked(self, packed: dict[str, Any]) -> RoundCommitted:
        number, fragment = packed["number"], self._schedule.fragment(packed["number"])
        values = self._model.parts[fragment].outer.empty().copy_(packed["values"])
        contribution = Contribution(number, fragment, packed["weight"], values, 0)
        average = Average(tuple(packed["contributors"]), packed["total_weight"])
        return RoundCommitted(contribution, average, packed["mean_norm"])

    def close(self) -> None:
        """Leave the run: finish the call that is under way, and close ``comm``. Idempotent."""
        self._caller.close(abandon=False)

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._caller.close(abandon=kind is not None)


def _packed(committed: RoundCommitted) -> dict[str, Any]:
    return {
        "number": committed.contribution.number,
        "weight": committed.contribution.weight,
        "values": committed.contribution.values.clone(),
        "contributors": list(committed.average.contributors),
        "total_weight": committed.average.total_weight,
        "mean_norm": committed.mean_norm,
    }
