"""Peers that train a small model with ``DiLoCo`` in threads of one process, over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

import pccl
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.events import Event, OuterStep
from tests.support.insides import machine_of
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

Batch = tuple[torch.Tensor, torch.Tensor]


def make_model(seed: int = 0) -> torch.nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 6, generator=generator)
    return x, torch.sin(x[:, :3])


def make_inner(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model: torch.nn.Module, data: Batch) -> torch.Tensor:
    loss = torch.nn.functional.mse_loss(model(data[0]), data[1])
    torch.autograd.backward(loss)
    return loss


def parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


def paper_outer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Make the outer optimizer of the papers, which have larger models than those of tests."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class Peers:
    """A run, and peers that train in threads."""

    def __init__(self) -> None:
        self.master = pccl.MasterNode("127.0.0.1:0")
        self.master.run()
        self.events: dict[int, list[Event]] = {}
        self._threads = ThreadPoolExecutor(8)
        self._comms: list[pccl.Communicator] = []

    def close(self) -> None:
        for comm in self._comms:
            comm.close()
        self._threads.shutdown()
        self.master.interrupt()

    def comm(self) -> pccl.Communicator:
        self._comms.append(pccl.Communicator(self.master.address))
        return self._comms[-1]

    def make(self, rank: int, model: torch.nn.Module, **options: Any) -> DiLoCo:
        self.events[rank] = []
        options.setdefault("outer", paper_outer)
        return DiLoCo(
            model,
            inner=make_inner(model),
            comm=self.comm(),
            on_event=self.events[rank].append,
            **options,
        )

    def start(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        return self._threads.submit(call, *arguments, **options)

    def train(
        self,
        rank: int,
        steps: int,
        *,
        seed: int = 0,
        data: Callable[[int, int], Batch] = batch,
        **options: Any,
    ) -> list[torch.Tensor]:
        """One peer, from the beginning to the end."""
        model = make_model(seed)
        optimizer = self.make(rank, model, **options)
        with optimizer:
            optimizer.join()
            for step in range(steps):
                optimizer.zero_grad()
                backward(model, data(rank, step))
                optimizer.step()
            optimizer.finish()
        return parameters(model)

    def train_all(self, count: int, steps: int, **options: Any) -> list[list[torch.Tensor]]:
        """Peers whose ids are in the order of their ranks."""
        calls: list[Future[list[torch.Tensor]]] = []
        for rank in range(count):
            calls.append(self.start(self.train, rank, steps, min_peers=count, **options))
            self.until_registered(len(calls))
        return [call.result(LIMIT_S) for call in calls]

    def until_registered(self, count: int) -> None:
        """So many peers have got their ids, admitted or not."""
        until(lambda: len(machine_of(self.master).membership.peers) == count)

    def outer_steps(self, rank: int) -> list[OuterStep]:
        return [event for event in self.events[rank] if isinstance(event, OuterStep)]
