"""DiLoCo by hand, with averages that are applied one outer step late.

    pccl launch -n 2 -- python examples/diloco_one_step_late.py

The members average one step's pseudo-gradients while the next step trains. The revision of the
shared state counts synchronizations, which they make only for newcomers. Each newcomer needs two of
them. The second one gives it the result of the reduce that began without it.

A newcomer skips ``are_peers_pending`` and ``update_topology`` in its first round, because the
members have just called them. A complete program also handles ``TooFewPeers`` from
``flying.result()``. After ``Evicted`` it begins like a newcomer: ``update_topology()``, and
``flying = None``.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import pccl
from pccl import SharedStateSyncStrategy as Strategy

OUTER_STEPS, INNER_STEPS = 10, 8


def main() -> None:
    """Train a small network to add eight numbers."""
    model = torch.nn.Linear(8, 1)
    inner: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = parameters_to_vector(model.parameters()).detach().clone()
    step = torch.zeros(1, dtype=torch.int64)
    state = pccl.SharedState(
        [pccl.TensorInfo.from_torch(outer, "outer"), pccl.TensorInfo.from_torch(step, "step")]
    )
    average = torch.zeros_like(outer)

    def sync(strategy: Strategy) -> None:
        comm.sync_shared_state(state, strategy)
        state.push_revision()

    with pccl.Communicator() as comm, ThreadPoolExecutor(1) as pool:
        comm.connect(min_peers=2)
        flying: Future[Any] | None = None  # the reduce of the previous step
        while step < OUTER_STEPS:
            is_first = has_changed = flying is None
            if flying is not None and comm.are_peers_pending():  # allowed while a reduce is open
                flying.result()
                comm.update_topology()
                has_changed = True
            if has_changed:
                sync(Strategy.ENFORCE_POPULAR)
            if is_first:
                vector_to_parameters(outer.clone(), model.parameters())
            for _ in range(INNER_STEPS):
                x = torch.randn(32, 8)
                inner.zero_grad()
                torch.autograd.backward((model(x) - x.sum(1, keepdim=True)).pow(2).mean())
                inner.step()
            pseudo = outer - parameters_to_vector(model.parameters()).detach()
            if flying is not None:
                flying.result()
                outer -= 0.7 * average  # the outer step, one step late
            if has_changed and step > 0:  # a newcomer receives the result of that reduce
                sync(Strategy.RECEIVE_ONLY if is_first else Strategy.SEND_ONLY)
            vector_to_parameters(outer.clone(), model.parameters())
            average = pseudo
            flying = pool.submit(comm.all_reduce, average, op=pccl.ReduceOp.AVG, retry=True)
            step += 1
        if flying is not None:
            flying.result()
        print(f"{step.item()} steps: {outer[:3].numpy()}")


if __name__ == "__main__":
    main()
