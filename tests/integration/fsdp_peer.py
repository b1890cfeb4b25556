"""One shard of one replica, sharded by FSDP2 over gloo, averaged across replicas by ``DiLoCo``.

For the tests; prints a digest of the whole model, and of its own shard, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pccl
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.events import Event, OuterStep


def make_model(seed: int) -> torch.nn.Sequential:
    """Rows that two shards split evenly, and an odd number that they don't."""
    torch.default_generator.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters, gathered from the shards of this replica."""
    gathered: list[Any] = [parameter.detach() for parameter in model.parameters()]
    return [parameter.full_tensor() for parameter in gathered]


def main() -> None:
    """Train for some rounds."""
    given = json.loads(sys.argv[1])
    replica, shard = given["replica"], given["shard"]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{given['store']}", rank=shard, world_size=2
    )
    model = make_model(given["seed"])
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    data = torch.Generator().manual_seed(replica)  # the shards of a replica share their batches
    outer_steps: list[OuterStep] = []

    def listen(event: Event) -> None:
        if isinstance(event, OuterStep):
            outer_steps.append(event)

    with (
        pccl.Communicator(given["master"], peer_group=shard) as comm,
        DiLoCo(
            model.named_parameters(),
            inner=torch.optim.AdamW(model.parameters(), lr=1e-2),
            comm=comm,
            min_peers=2,
            on_event=listen,
            **given["options"],
        ) as optimizer,
    ):
        while optimizer.round < given["rounds"]:
            x = torch.randn(16, 6, generator=data)
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.mse_loss(model(x), x[:, :3]))
            optimizer.step()
        optimizer.finish()
        values = b"".join(tensor.numpy().tobytes() for tensor in whole(model))
        worlds = sorted({len(step.contributors) for step in outer_steps})
        out = {"event": "ended", "model": hashlib.sha256(values).hexdigest(), "worlds": worlds}
        sys.stdout.write(json.dumps(out) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
