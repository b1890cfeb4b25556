"""Synchronous DiLoCo as PCCL documents it, without the synchronization of shared state.

This is a program of a user of PCCL: it knows that library's names, positions and habits, and
nothing of ours. ``test_pccl_recipe.py`` runs it.

    pccl_recipe.py master HOST:PORT                  until stdin ends
    pccl_recipe.py peer HOST:PORT PEERS STEPS SEED   with PEERS peers, for STEPS outer steps
"""

import hashlib
import json
import logging
import sys
import time
from typing import Any

import torch

from pccl import (
    AsyncReduceHandle,
    Attribute,
    Communicator,
    DataType,
    DistributionHint,
    MasterNode,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
    SharedState,
    TensorInfo,
)

INNER_STEPS = 8
PAUSE_S = 0.1
SAMPLES_TAG = 1000
LOSS_TAG = 1001


def run_master(address: str) -> None:
    master = MasterNode(listen_address=address)
    master.run()
    sys.stdin.read()
    master.interrupt()


def update_topology(comm: Communicator) -> None:
    while True:
        try:
            comm.update_topology()
            return
        except PCCLError:
            time.sleep(PAUSE_S)


def average_gradients(comm: Communicator, gradients: list[torch.Tensor]) -> int:
    descriptors = [
        ReduceOpDescriptor.from_torch(
            send=gradient,
            recv=gradient,
            reduce_descriptor=ReduceDescriptor(
                count=gradient.numel(),
                op=ReduceOp.AVG,
                tag=tag,
                operand_descriptor=ReduceOperandDescriptor(
                    datatype=DataType.from_torch_dtype(gradient.dtype),
                    distribution_hint=DistributionHint.NORMAL,
                ),
                quantization_options=QuantizationOptions(
                    quantized_datatype=DataType.FLOAT, algorithm=QuantizationAlgorithm.NONE
                ),
            ),
        )
        for tag, gradient in enumerate(gradients)
    ]
    try:
        info = comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=16)
    except PCCLError as error:
        if error.result != Result.TOO_FEW_PEERS:
            raise
        return 1  # everybody left: go on with the local values
    return info.local_world_size


def total_samples(comm: Communicator, own: int) -> int:
    total = torch.zeros(1, dtype=torch.int64)
    while comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) > 1:
        send = torch.tensor([own])
        try:
            handle: AsyncReduceHandle = comm.all_reduce_async(
                send, total, op=ReduceOp.SUM, tag=SAMPLES_TAG
            )
        except PCCLError:
            break
        success, status, info = handle.wait()
        if success:
            assert status == Result.SUCCESS
            assert total.item() == own * info.local_world_size
            return int(total.item())
    return own


def average_loss(comm: Communicator, loss: torch.Tensor) -> float:
    while comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) > 1:
        try:
            comm.all_reduce(
                loss,
                loss,
                op=ReduceOp.AVG,
                tag=LOSS_TAG,
                quantization_options=QuantizationOptions(DataType.UINT8),
            )
            break
        except PCCLError:
            pass  # the world has shrunk
    return float(loss.item())


def train(address: str, peers: int, steps: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # all begin with the same parameters
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    outer = [torch.nn.Parameter(p.detach().clone().float().cpu()) for p in model.parameters()]
    inner_optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer_optimizer: Any = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    for parameter in outer:  # creates the momentum buffers
        parameter.grad = torch.zeros_like(parameter)
    outer_optimizer.step()
    outer_optimizer.zero_grad(set_to_none=False)
    state = outer_optimizer.state
    shared_state = SharedState(
        [TensorInfo.from_torch(p, f"outer.{n}") for n, p in enumerate(outer)]
        + [
            TensorInfo.from_torch(state[p]["momentum_buffer"], f"momentum.{n}")
            for n, p in enumerate(outer)
        ]
    )
    own_data = torch.Generator().manual_seed(seed)

    comm = Communicator(address, 0)
    comm.connect(n_attempts=60)
    losses: list[float] = []
    worlds: list[int] = []
    step, local_iteration = 0, 0
    while step < steps:
        local_iteration += 1
        alone = comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1
        if local_iteration > 1 or alone:
            update_topology(comm)
        if step == 0 and comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < peers:
            time.sleep(PAUSE_S)
            continue
        loss = torch.zeros(())
        for _ in range(INNER_STEPS):
            x = torch.randn(64, 4, generator=own_data)
            loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            inner_optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner_optimizer.step()
        with torch.no_grad():
            gradients = [
                out - inner.cpu() for out, inner in zip(outer, model.parameters(), strict=True)
            ]
        worlds.append(average_gradients(comm, gradients))
        assert total_samples(comm, 64 * INNER_STEPS) >= 64 * INNER_STEPS
        losses.append(average_loss(comm, loss.detach().clone()))
        for parameter, gradient in zip(outer, gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)
        outer_optimizer.step()
        outer_optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            for inner, out in zip(model.parameters(), outer, strict=True):
                inner.copy_(out)
        step += 1
        shared_state.revision = step
    digest = hashlib.sha256()
    for info, tensor in zip(
        shared_state.tensor_infos, [*outer, *(state[p]["momentum_buffer"] for p in outer)],
        strict=True,
    ):  # fmt: skip
        assert info.data_ptr == tensor.data_ptr()
        digest.update(tensor.detach().numpy().tobytes())
    return {
        "parameters": digest.hexdigest(),
        "losses": losses,
        "worlds": worlds,
        "revision": shared_state.revision,
    }


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    role, address, *numbers = sys.argv[1:]
    if role == "master":
        run_master(address)
    else:
        peers, steps, seed = map(int, numbers)
        print(json.dumps(train(address, peers, steps, seed)))  # noqa: T201


if __name__ == "__main__":
    main()
