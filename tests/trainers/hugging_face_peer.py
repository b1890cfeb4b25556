"""A process that trains with ``transformers.Trainer`` and ``DiLoCo``; see ``tiny``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import pccl
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.trainers import HuggingFaceCallback
from tests.trainers import tiny


def main() -> None:
    """Train until the run has made its steps."""
    given = tiny.given()
    library: Any = import_module("transformers")
    model = tiny.make_model(given.peer)
    callback = HuggingFaceCallback()
    arguments = library.TrainingArguments(
        output_dir=given.folder,
        max_steps=given.steps,
        per_device_train_batch_size=tiny.BATCH,
        gradient_accumulation_steps=tiny.ACCUMULATED,
        bf16=True,
        torch_compile=given.compiles,
        torch_compile_backend="eager" if given.compiles else None,
        logging_steps=1,
        save_strategy="steps" if given.save else "no",
        save_steps=given.save or 1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        pccl.Communicator(given.master) as comm,
        DiLoCo(
            model, inner=inner, comm=comm, sync_every=tiny.SYNC_EVERY, min_peers=given.peers,
            on_event=callback,
        ) as opt,
    ):  # fmt: skip
        trainer = callback.attach(
            library.Trainer(
                model, arguments, train_dataset=tiny.Texts(given), optimizers=(opt, None)
            )
        )
        trainer.remove_callback(library.PrinterCallback)  # the reports are on standard output
        kept = Path(given.folder) / f"checkpoint-{given.save}"
        trainer.train(resume_from_checkpoint=str(kept) if given.resume else None)
        logged = [one for one in trainer.state.log_history if "loss" in one]
        tiny.ended(
            model,
            opt,
            steps=opt.steps,
            counted=trainer.state.global_step,
            scheduled=trainer.lr_scheduler.last_epoch,
            rates={str(one["step"]): one["learning_rate"] for one in logged},
            losses={str(one["step"]): one["loss"] for one in logged},
            drawn=[one["step"] for one in trainer.state.log_history if "outer_step/number" in one],
        )


if __name__ == "__main__":
    main()
