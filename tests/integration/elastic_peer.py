"""A process that trains with samples of the run, for the tests; it prints what it does.

Standard output is one JSON object a line. Samples are their positions: they are not shuffled, and
there is no end.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pccl
from pccl.bindings.data import ElasticSampler
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.events import Event, GradientsAveraged
from pccl.bindings.gradient_averager import GradientAverager

STEP_S = 0.002
TIMING = pccl.Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01, deadline_s=3.0)


def say(**fields: Any) -> None:
    """One line."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def told_end() -> Callable[[], float]:
    """Return a function that tells when to stop: at a number of steps or rounds, or never yet."""
    ends: list[float] = []

    def end() -> float:
        if not ends and select.select([sys.stdin], [], [], 0)[0]:
            ends.append(float(sys.stdin.readline()))
        return ends[0] if ends else float("inf")

    return end


def average(comm: pccl.Communicator, sampler: ElasticSampler) -> torch.Tensor:
    """Train with averaged gradients; return the ledger of samples."""
    model: Any = nn.Linear(1, 1)

    def on_event(event: Event) -> None:
        if isinstance(event, GradientsAveraged):
            say(number=event.step, contributors=event.contributors)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    averager = GradientAverager(
        model, optimizer, comm=comm, min_peers=1, data=sampler, on_event=on_event
    )
    batches, end = sampler.batches(), told_end()
    while True:
        averager.update()
        if averager.steps >= end():
            averager.verify()
            ledger: torch.Tensor = averager.state_dict()["samples"]
            return ledger
        optimizer.zero_grad()
        samples = next(batches)
        say(number=averager.steps + 1, peer=comm.peer_id, samples=samples)  # backward sends already
        model(torch.ones(1)).backward()
        time.sleep(STEP_S)
        averager.step()


def train_rounds(
    comm: pccl.Communicator, sampler: ElasticSampler, options: dict[str, Any]
) -> torch.Tensor:
    """Train with DiLoCo; return the ledger of samples."""
    model: Any = nn.Linear(1, 1)
    reduce: Any = comm.all_reduce

    def all_reduce(*tensors: Any, tag: int, **options: Any) -> pccl.ReduceInfo:
        info: pccl.ReduceInfo = reduce(*tensors, tag=tag, **options)
        assert info.outcome is not None
        if tag == 1:
            operation = str(info.outcome.operation)
            say(operation=operation, contributors=info.contributors, weights=info.weights)
        return info

    setattr(comm, "all_reduce", all_reduce)  # noqa: B010
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with DiLoCo(model, inner=inner, comm=comm, data=sampler, min_peers=2, **options) as opt:
        end = told_end()
        for samples in sampler.batches():
            model(torch.ones(1)).backward()
            say(number=opt.round, peer=comm.peer_id, samples=samples)
            time.sleep(STEP_S)
            opt.step()
            opt.zero_grad()
            if opt.round >= end():
                break
        opt.finish()
        ledger: torch.Tensor = opt.state_dict()["outer"]["samples"]
        return ledger


def main() -> None:
    """Train until told to stop, and print the ledger."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    sampler = ElasticSampler(1 << 40, 4, shuffle=False, lease=50)
    with pccl.Communicator(given["master"], timing=TIMING) as comm:
        if given["options"] is None:
            ledger = average(comm, sampler)
        else:
            ledger = train_rounds(comm, sampler, given["options"])
        say(ledger=ledger.numpy().tolist())


if __name__ == "__main__":
    main()
