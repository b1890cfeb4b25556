"""``LightningCallback``: ``lightning.Trainer`` follows a run of ``DiLoCo``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pccl.bindings.diloco.optimizer import DiLoCo
from pccl.bindings.events import Event
from pccl.bindings.trainers.following import follow, points, wrapper_of

if TYPE_CHECKING:
    _Callback = object
else:
    from lightning.pytorch import Callback as _Callback


class LightningCallback(_Callback):
    """Brings a ``lightning.Trainer`` to the step of its run, and draws the events of the run.

        callback = LightningCallback()
        # configure_optimizers returns DiLoCo(..., on_event=callback)
        Trainer(..., callbacks=[callback]).fit(module)

    When training begins, this peer joins the run; schedulers with the interval ``"step"`` and
    ``global_step`` go to the run's step, then and whenever the peer joins again. When training
    ends, ``finish()`` makes all models equal, and the callback closes ``DiLoCo`` and its
    communicator. ``sync_every`` must be a number of steps.
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self._opt: DiLoCo | None = None

    def __call__(self, event: Event) -> None:
        """Give the numbers of an event to the loggers of the trainer, at the run's step."""
        if self._opt is not None and (found := points(event)):
            for logger in self._trainer.loggers:
                logger.log_metrics(found, step=self._opt.steps)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the run.

        Raises:
            PCCLError: this peer cannot join the run.
            TypeError: the optimizer of the trainer is no ``DiLoCo``.
            ValueError: ``sync_every`` is a time.
        """
        self._trainer = trainer
        self._opt = wrapper_of(trainer.optimizers[0])
        for config in trainer.lr_scheduler_configs:
            if (config.interval, config.frequency) == ("step", 1):
                follow(self._opt, config.scheduler)
        self._opt.join()
        self._advance(self._opt)

    def on_train_batch_end(self, *_: Any) -> None:
        """Follow the run, which has gone on if this peer has joined it again."""
        assert self._opt is not None
        self._advance(self._opt)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Make the model equal to that of the other peers.

        Raises:
            PCCLError: as for ``step``.
        """
        assert self._opt is not None
        self._opt.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the run at once."""
        if self._opt is not None:
            self._opt.__exit__(type(exception), exception, None)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the run, and close the communicator."""
        if self._opt is not None:
            self._opt.close()

    def _advance(self, opt: DiLoCo) -> None:
        """Set the trainer's step, and the one at which it logs. They differ by the open step."""
        loop = self._trainer.fit_loop.epoch_loop
        made = loop.automatic_optimization.optim_progress.optimizer.step.total
        skipped = opt.steps - made.completed
        made.ready += skipped
        made.completed += skipped
        loop._batches_that_stepped += skipped
