"""What the callbacks refuse, and how they leave a run."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pccl
from pccl.bindings.diloco import DiLoCo
from pccl.errors import NotConnected

if any(find_spec(name) is None for name in ("accelerate", "lightning", "transformers")):
    pytest.skip("pip install -e '.[trainers]'", allow_module_level=True)


def test_the_best_model_of_one_peer_is_refused() -> None:
    from pccl.bindings.trainers import HuggingFaceCallback

    callback = HuggingFaceCallback()
    arguments = SimpleNamespace(load_best_model_at_end=True)
    with pytest.raises(ValueError, match="would give each peer a model of its own"):
        callback.on_train_begin(arguments, None, None)


@pytest.mark.filterwarnings("ignore")  # Lightning warns of what this test is not about
def test_lightning_leaves_the_run_after_an_exception(tmp_path: Path) -> None:
    from pccl.bindings.trainers import LightningCallback

    lightning: Any = import_module("lightning")

    def training_step(x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise ZeroDivisionError
        loss: torch.Tensor = module.net(x).square().mean()
        return loss

    with pccl.MasterNode("127.0.0.1:0") as node:
        comm = pccl.Communicator(node.address)
        module = lightning.LightningModule()
        module.net = torch.nn.Linear(8, 1)
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        module.configure_optimizers = lambda: DiLoCo(inner=inner, comm=comm, sync_every=2)
        module.training_step = training_step
        trainer = lightning.Trainer(
            max_steps=10,
            accelerator="cpu",
            logger=False,
            callbacks=[LightningCallback()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
        )
        data: Any = torch.randn(80, 8)
        with pytest.raises(ZeroDivisionError):
            trainer.fit(module, torch.utils.data.DataLoader(data, 8))
        assert trainer.global_step == 3
        with pytest.raises(NotConnected):
            assert comm.peer_id
