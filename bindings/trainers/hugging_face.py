"""``HuggingFaceCallback``: ``transformers.Trainer`` follows a run of ``DiLoCo``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pccl.bindings.diloco.optimizer import DiLoCo
from pccl.bindings.events import Event
from pccl.bindings.trainers.following import follow, points, wrapper_of

if TYPE_CHECKING:
    _TrainerCallback = object
else:
    from transformers import TrainerCallback as _TrainerCallback

_Trainer = TypeVar("_Trainer")


class HuggingFaceCallback(_TrainerCallback):
    """Brings a ``transformers.Trainer`` to the step of its run, and draws the events of the run.

        callback = HuggingFaceCallback()
        with pccl.Communicator() as comm, DiLoCo(..., comm=comm, on_event=callback) as opt:
            trainer = callback.attach(Trainer(..., optimizers=(opt, None)))
            trainer.train()

    When training begins, this peer joins the run; the trainer's scheduler and ``global_step`` go to
    the run's step, then and whenever the peer joins again. When training ends, ``opt.finish()``
    makes all models equal. ``sync_every`` must be a number of steps.
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self._opt: DiLoCo
        self._points: list[dict[str, float]] = []

    def attach(self, trainer: _Trainer) -> _Trainer:
        """Add this callback to a trainer, and send it the events.

        Returns:
            The trainer.
        """
        self._trainer = trainer
        self._trainer.add_callback(self)
        return trainer

    def __call__(self, event: Event) -> None:
        """Keep the numbers of an event for ``trainer.log``."""
        if self._trainer is not None and (found := points(event)):
            self._points.append(found)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Join the run.

        Raises:
            PCCLError: this peer cannot join the run.
            TypeError: the optimizer of the trainer is no ``DiLoCo``.
            ValueError: ``sync_every`` is a time, or ``load_best_model_at_end`` is set.
        """
        if args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end would give each peer a model of its own; set it to False, "
                "and load a checkpoint after train()"
            )
        self._opt = wrapper_of(given["optimizer"])
        follow(self._opt, given["lr_scheduler"])
        self._opt.join()
        self._advance(state)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Follow the run, which has gone on if this peer has joined it again."""
        state.global_step += 1  # as the trainer does next
        self._advance(state)
        state.global_step -= 1

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Make the model equal to that of the other peers.

        Raises:
            PCCLError: as for ``step``.
        """
        self._opt.finish()
        self._advance(state)

    def _advance(self, state: Any) -> None:
        """Set the trainer's step to the run's, and log what has happened.

        The trainer's mean losses remain means over the steps that it has made itself.
        """
        skipped, state.global_step = self._opt.steps - state.global_step, self._opt.steps
        for name in ("_initial_global_step", "_globalstep_last_logged"):
            if skipped and hasattr(self._trainer, name):
                setattr(self._trainer, name, getattr(self._trainer, name) + skipped)
        while self._points:
            self._trainer.log(self._points.pop(0))
