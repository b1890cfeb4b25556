"""DiLoCo by hand: many local steps, then one average of the changes of the weights.

    pccl launch -n 3 -- python examples/with_torch.py

Each process trains on its own data. Every INNER_STEPS steps the processes average their
pseudo-gradients (old weights minus new weights), and take the same outer step (Douillard et al.,
arXiv:2311.08105). All processes print the same losses, and end with the same weights.
"""

import hashlib
import os
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import pccl

OUTER_STEPS, INNER_STEPS = 8, 20
OUTER_LR, MOMENTUM = 0.7, 0.9


def main() -> None:
    """Train a small network to add four numbers."""
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # the same first weights in all processes
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    inner: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = parameters_to_vector(model.parameters()).detach()
    velocity = torch.zeros_like(outer)
    own_data = torch.Generator().manual_seed(int(os.environ["PCCL_PEER_INDEX"]))

    with pccl.Communicator() as comm:
        comm.connect(min_peers=int(os.environ["PCCL_PEERS"]))
        for step in range(OUTER_STEPS):
            loss = torch.zeros(1)
            for _ in range(INNER_STEPS):
                x = torch.randn(32, 4, generator=own_data)
                loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                inner.zero_grad()
                torch.autograd.backward(loss)
                inner.step()

            pseudo_gradient = outer - parameters_to_vector(model.parameters()).detach()
            mean_loss = loss.detach().reshape(1)
            comm.all_reduce(pseudo_gradient, op=pccl.ReduceOp.AVG, retry=True)
            comm.all_reduce(mean_loss, op=pccl.ReduceOp.AVG, retry=True)
            velocity = MOMENTUM * velocity + pseudo_gradient  # Nesterov
            outer = outer - OUTER_LR * (pseudo_gradient + MOMENTUM * velocity)
            vector_to_parameters(outer.clone(), model.parameters())  # parameters become views
            print(f"outer step {step}: mean loss {mean_loss.item():.4f}")
        print("weights:", hashlib.sha256(outer.numpy().tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
