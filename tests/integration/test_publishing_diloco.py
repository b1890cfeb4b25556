"""``DiLoCo(publish_every=)``: readers outside the run get the model of each second outer step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import pccl
from pccl.bindings.diloco import DiLoCo
from pccl.publishing import Subscriber
from tests.integration.conftest import QUICK
from tests.support.patience import LIMIT_S

STEPS = 12
EVERY = 2
SYNC = 3


class Net(torch.nn.Module):
    """Two dtypes, and buffers of three."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 1, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x)).bfloat16()).float()
        return y


def train(master: str, seed: int, waits: threading.Barrier) -> dict[str, torch.Tensor]:
    """Train one replica to the end, together with the other one."""
    model = Net()
    generator = torch.Generator().manual_seed(seed)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    comm = pccl.Communicator(master, timing=QUICK)
    with DiLoCo(
        model,
        inner=inner,
        comm=comm,
        sync_every=SYNC,
        min_peers=2,
        publish_every=EVERY,
    ) as opt:
        while opt.steps < STEPS:
            model(torch.randn(8, 3, generator=generator)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        opt.finish()
        waits.wait(LIMIT_S)  # the reader has the last version
    return dict(model.state_dict())


def test_readers_get_the_model_in_its_dtypes() -> None:
    master = pccl.MasterNode("127.0.0.1:0", timing=QUICK)
    master.run()
    waits = threading.Barrier(3)
    last = STEPS // SYNC
    with (
        Subscriber(master.address, timing=QUICK) as reader,
        ThreadPoolExecutor(2) as pool,
    ):
        peers = [pool.submit(train, master.address, seed, waits) for seed in range(2)]
        version = reader.next(LIMIT_S)
        numbers = [version.number]
        while version.number < last:
            version = reader.next(LIMIT_S)
            numbers.append(version.number)
        waits.wait(LIMIT_S)
        models = [peer.result(LIMIT_S) for peer in peers]
    master.interrupt()
    assert all(number % EVERY == 0 for number in numbers)
    for model in models:
        assert version.tensors.keys() == model.keys()
        for name, tensor in model.items():
            theirs = version.tensors[name]
            mine = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
            if theirs.dtype == np.uint8:
                mine = tensor.reshape(1).view(torch.uint8)
            np.testing.assert_array_equal(theirs.view(mine.numpy().dtype), mine.numpy())
