"""What four members do together: they reduce, share a state, and train a tiny model."""

from __future__ import annotations

import numpy as np
import torch

import pccl
from pccl.bindings.diloco import DiLoCo

ROUNDS = 2


def reduce(comm: pccl.Communicator) -> float:
    """Return twice the number of members, if the result is right."""
    total = np.empty(1000, np.float32)
    comm.all_reduce(np.ones(1000, np.float32), total, op="sum", retry=True)
    return float(total.min() + total.max())


def share(comm: pccl.Communicator) -> float:
    """Return the value that all members have after a synchronization."""
    weights = np.full(1000, comm.peer_id, np.float32)
    comm.sync_shared_state(pccl.SharedState([pccl.TensorInfo.from_numpy(weights, "weights")]))
    return float(weights.min() + weights.max())


def train(comm: pccl.Communicator) -> bytes:
    """Train for some rounds; return all parameters, which members have alike."""
    model = torch.nn.Linear(8, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(
        model.named_parameters(), inner=inner, comm=comm, sync_every=2, min_peers=4
    ) as optimizer:
        optimizer.join()
        while optimizer.round < ROUNDS:
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.full((2, 8), float(comm.rank))).square().mean())
            optimizer.step()
        optimizer.finish()
    return b"".join(one.detach().numpy().tobytes() for one in model.parameters())
