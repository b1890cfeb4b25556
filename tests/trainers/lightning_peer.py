"""A process that trains with ``lightning.Trainer`` and ``DiLoCo``; see ``tiny``."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

import pccl
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.trainers import LightningCallback
from tests.trainers import tiny

if TYPE_CHECKING:
    _Module = torch.nn.Module
else:
    from lightning import LightningModule as _Module


class Module(_Module):
    """The tiny model, and the rates and losses of its steps."""

    def __init__(self, given: tiny.Given, comm: pccl.Communicator, callback: Any) -> None:
        super().__init__()
        self.model: Any = tiny.make_model(given.peer)
        self.rates: dict[int, float] = {}
        self.losses: dict[int, float] = {}
        self._given, self._comm, self._callback = given, comm, callback

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        loss: torch.Tensor = self.model(**batch).loss
        step = cast(Any, self).trainer.global_step + 1
        self.rates[step] = float(self.schedule.get_last_lr()[0])
        self.losses[step] = loss.item()
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the wrapper, and a scheduler that steps with it."""
        self.opt = DiLoCo(
            self.model,
            inner=torch.optim.AdamW(self.model.parameters(), lr=1e-3),
            comm=self._comm,
            sync_every=tiny.SYNC_EVERY,
            min_peers=self._given.peers,
            on_event=self._callback,
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.99)
        return {
            "optimizer": self.opt,
            "lr_scheduler": {"scheduler": self.schedule, "interval": "step"},
        }


def main() -> None:
    """Train until the run has made its steps."""
    given = tiny.given()
    library: Any = import_module("lightning")
    callback: Any = LightningCallback()
    module = Module(given, pccl.Communicator(given.master), callback)
    callbacks = [callback]
    if given.save:
        callbacks.append(
            library.pytorch.callbacks.ModelCheckpoint(
                given.folder, "{step}", every_n_train_steps=given.save, save_top_k=-1
            )
        )
    logger = library.pytorch.loggers.CSVLogger(given.folder, flush_logs_every_n_steps=1)
    trainer = library.Trainer(
        max_steps=given.steps,
        accumulate_grad_batches=tiny.ACCUMULATED,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=logger,
        callbacks=callbacks,
        enable_checkpointing=bool(given.save),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    kept = Path(given.folder) / f"step={given.save}.ckpt"
    # Lightning itself would begin the data again.
    loader = torch.utils.data.DataLoader(tiny.Texts(given, skips=True), tiny.BATCH)
    whole: Any = torch  # torch types this only in part
    trained = whole.compile(module, backend="eager") if given.compiles else module
    trainer.fit(trained, loader, ckpt_path=str(kept) if given.resume else None)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        drawn = [int(row["step"]) for row in csv.DictReader(file) if row["outer_step/number"]]
    tiny.ended(
        module.model,
        module.opt,
        steps=module.opt.steps,
        counted=trainer.global_step,
        scheduled=module.schedule.last_epoch,
        rates=module.rates,
        losses=module.losses,
        drawn=drawn,
    )


if __name__ == "__main__":
    main()
