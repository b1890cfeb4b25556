"""DiLoCo as PCCL documents it, with shared state: synchronous, and with reduces a step behind.

This is a program of a user of PCCL: it knows that library's names, positions and habits, and
nothing of ours. ``test_pccl_state_recipe.py`` runs it. Peers begin with parameters of their own.

    pccl_state_recipe.py sync HOST:PORT STEPS SEED STEP=PEERS ...
    pccl_state_recipe.py async HOST:PORT STEPS SEED STEP=PEERS ...

Before that outer step it waits until there are so many peers. A line is printed after each step.
"""

import hashlib
import json
import logging
import sys
import threading
import time
from typing import Any

import torch

from pccl import (
    Attribute,
    Communicator,
    DataType,
    PCCLError,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    SharedState,
    SharedStateSyncStrategy,
    TensorInfo,
)

INNER_STEPS = 4
PAUSE_S = 0.05


def update_topology(comm: Communicator) -> None:
    while True:
        try:
            comm.update_topology()
            return
        except PCCLError:
            time.sleep(PAUSE_S)


def average(comm: Communicator, gradients: list[torch.Tensor]) -> None:
    descriptors = [
        ReduceOpDescriptor.from_torch(
            gradient,
            gradient,
            ReduceDescriptor(
                gradient.numel(),
                ReduceOp.AVG,
                tag,
                ReduceOperandDescriptor(DataType.from_torch_dtype(gradient.dtype)),
                None,
            ),
        )
        for tag, gradient in enumerate(gradients)
    ]
    comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=16)


class Trainer:
    """An inner model, its outer copy on the CPU, and their optimizers."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.default_generator.manual_seed(seed)
        self.data = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        self.outer = [torch.nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.inner_optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.outer_optimizer: Any = torch.optim.SGD(self.outer, lr=0.7, momentum=0.9, nesterov=True)
        for parameter in self.outer:  # creates the momentum buffers
            parameter.grad = torch.zeros_like(parameter)
        self.outer_optimizer.step()
        self.step = torch.zeros(1, dtype=torch.int64)
        state = self.outer_optimizer.state
        self.tensors = [*self.outer, *(state[p]["momentum_buffer"] for p in self.outer)]
        self.state = SharedState(
            [
                *(TensorInfo.from_torch(t, f"outer.{n}") for n, t in enumerate(self.tensors)),
                TensorInfo.from_torch(self.step, "step"),
            ]
        )

    def train_inner(self) -> float:
        loss = torch.zeros(())
        for _ in range(INNER_STEPS):
            x = torch.randn(64, 4, generator=self.data)
            loss = torch.nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
            self.inner_optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.inner_optimizer.step()
        return float(loss.item())

    def pseudo_gradients(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [o - i for o, i in zip(self.outer, self.model.parameters(), strict=True)]

    def step_outer(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.outer, gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad(set_to_none=False)
        self.copy_outer_to_inner()

    def copy_outer_to_inner(self) -> None:
        with torch.no_grad():
            for inner, outer in zip(self.model.parameters(), self.outer, strict=True):
                inner.copy_(outer)

    def digest(self) -> str:
        digest = hashlib.sha256()
        for tensor in (*self.tensors, self.step):
            digest.update(tensor.detach().numpy().tobytes())
        return digest.hexdigest()


def synchronous(
    comm: Communicator, trainer: Trainer, steps: int, wanted: dict[int, int]
) -> dict[str, Any]:
    step, local_iteration = 0, 0
    received: list[int] = []
    losses: list[float] = []
    while step < steps:
        local_iteration += 1
        world = comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
        if local_iteration > 1 or world == 1:
            update_topology(comm)
            world = comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
        if world < max(2, wanted.get(step, 0)):
            time.sleep(PAUSE_S)
            continue
        info = comm.sync_shared_state(trainer.state)
        step = trainer.state.revision
        received.append(info.rx_bytes)
        if len(received) == 1:
            trainer.copy_outer_to_inner()
        else:
            assert info.rx_bytes == 0, "drift"
        losses.append(trainer.train_inner())
        gradients = trainer.pseudo_gradients()
        average(comm, gradients)
        trainer.step_outer(gradients)
        step += 1
        trainer.step.fill_(step)
        trainer.state.revision = step
        print(step, flush=True)  # noqa: T201
    return {"received": received, "losses": losses, "revision": trainer.state.revision}


def asynchronous(
    comm: Communicator, trainer: Trainer, steps: int, wanted: dict[int, int]
) -> dict[str, Any]:
    local_iteration = 0
    received: list[int] = []
    losses: list[float] = []
    thread: threading.Thread | None = None
    in_flight: list[torch.Tensor] = []

    def sync(strategy: SharedStateSyncStrategy) -> None:
        received.append(comm.sync_shared_state(trainer.state, strategy).rx_bytes)
        trainer.state.push_revision()

    while trainer.step.item() < steps:
        local_iteration += 1
        changed = local_iteration == 1
        if local_iteration > 1:
            pending = comm.are_peers_pending()
            fewest = max(2, wanted.get(int(trainer.step.item()), 0))
            while not pending and comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < fewest:
                time.sleep(PAUSE_S)
                pending = comm.are_peers_pending()
            if pending:
                if thread is not None:
                    thread.join()
                update_topology(comm)
                changed = True
        if comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < 2:
            time.sleep(PAUSE_S)
            continue
        if changed:
            is_first = not received
            sync(SharedStateSyncStrategy.ENFORCE_POPULAR)
            if is_first:
                trainer.copy_outer_to_inner()
        losses.append(trainer.train_inner())
        if thread is not None:
            thread.join()
        averaged, in_flight = in_flight, trainer.pseudo_gradients()
        catches_up = changed and trainer.step.item() > 0
        if thread is not None:
            trainer.step_outer(averaged)
            if catches_up:
                sync(SharedStateSyncStrategy.SEND_ONLY)
        elif catches_up:  # a newcomer, who was not in the reduce that the others have waited for
            sync(SharedStateSyncStrategy.RECEIVE_ONLY)
            trainer.copy_outer_to_inner()
        thread = threading.Thread(target=average, args=(comm, in_flight))
        thread.start()
        trainer.step += 1
        print(int(trainer.step.item()), flush=True)  # noqa: T201
    assert thread is not None
    thread.join()
    trainer.step_outer(in_flight)
    return {"received": received, "losses": losses, "revision": trainer.state.revision}


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    how, address, steps, seed, *waits = sys.argv[1:]
    wanted = {int(step): int(peers) for step, _, peers in (w.partition("=") for w in waits)}
    trainer = Trainer(int(seed))
    comm = Communicator(address, 0)
    comm.connect(n_attempts=60)
    recipe = {"sync": synchronous, "async": asynchronous}[how]
    result = recipe(comm, trainer, int(steps), wanted)
    print(json.dumps({**result, "digest": trainer.digest()}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
