"""Data parallelism: average the gradients of every step, during the backward pass.

    pccl launch -n 3 -- python examples/data_parallel.py

Each process trains on its own data. All processes print the same losses, and end with the same
weights, even if one is killed or another one joins.
"""

import hashlib
import os

import torch

import pccl
from pccl.bindings.gradient_averager import GradientAverager

STEPS = 60


def main() -> None:
    """Train a small network to add four numbers."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own_data = torch.Generator().manual_seed(int(os.environ["PCCL_PEER_INDEX"]))
    peers = int(os.environ["PCCL_PEERS"])

    with (
        pccl.Communicator() as comm,
        GradientAverager(model, optimizer, comm=comm, min_peers=peers) as averager,
    ):
        while True:
            averager.update()  # joins the run, and admits newcomers
            if averager.steps >= STEPS:
                break
            x = torch.randn(32, 4, generator=own_data)
            loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            mean_loss = loss.detach().reshape(1)
            averager.step(mean_loss)
            if averager.steps % 10 == 0:
                print(f"step {averager.steps}: mean loss {mean_loss.item():.4f}")
        averager.verify()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    print("weights:", hashlib.sha256(weights.tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
