"""DiLoCo by hand: a synchronous outer step, and peers that join, leave or are evicted.

    pccl launch -n 2 -- python examples/diloco_by_hand.py

The shared state is a copy of the parameters with the momentum of the outer optimizer. Its revision
counts the outer steps: compute a schedule of learning rates from it.
"""

import contextlib
from typing import Any

import torch

import pccl
from pccl.errors import Evicted, RemovalCause, TooFewPeers

OUTER_STEPS, INNER_STEPS = 10, 8


def main() -> None:
    """Train a small network to add eight numbers."""
    model = torch.nn.Linear(8, 1)
    inner: Any = torch.optim.AdamW(model.parameters(), lr=0.01)  # each peer's own, not shared
    outer = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in outer:
        parameter.grad = torch.zeros_like(parameter)
    sgd: Any = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    sgd.step()  # with zeros: makes the momentum buffers

    infos: list[pccl.TensorInfo] = []
    for number, parameter in enumerate(outer):
        momentum = sgd.state[parameter]["momentum_buffer"]
        infos.append(pccl.TensorInfo.from_torch(parameter, f"outer.{number}"))
        infos.append(pccl.TensorInfo.from_torch(momentum, f"momentum.{number}"))
    state = pccl.SharedState(infos)

    with pccl.Communicator() as comm:
        comm.connect(min_peers=2)
        while state.revision < OUTER_STEPS:
            try:
                comm.update_topology()  # newcomers enter here
                comm.sync_shared_state(state)  # and receive everything here
                for mine, common in zip(model.parameters(), outer, strict=True):
                    mine.data.copy_(common)
                train(model, inner)
                gradients = [
                    common - mine.detach()
                    for mine, common in zip(model.parameters(), outer, strict=True)
                ]
                with contextlib.suppress(TooFewPeers):  # alone: use the own gradients
                    comm.all_reduce_many(gradients, op=pccl.ReduceOp.AVG, retry=True)
            except Evicted as error:
                if error.cause == RemovalCause.STATE_CONFLICT:
                    raise  # a bug: this peer would be removed again and again
                continue  # update_topology() joins again
            for common, gradient in zip(outer, gradients, strict=True):
                assert common.grad is not None
                common.grad.copy_(gradient)
            sgd.step()
            state.push_revision()
    print(f"{state.revision} steps: {outer[0][0, :3].numpy()}")


def train(model: torch.nn.Module, inner: Any) -> None:
    """Make some steps on data of this peer."""
    for _ in range(INNER_STEPS):
        x = torch.randn(32, 8)
        inner.zero_grad()
        torch.autograd.backward((model(x) - x.sum(1, keepdim=True)).pow(2).mean())
        inner.step()


if __name__ == "__main__":
    main()
