"""One peer of ``python -m pccl.stress training``: makes steps, and tells what they took."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

import pccl
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.events import Event, OuterStep

NEVER = 10**9


@dataclass(frozen=True, slots=True)
class Load:
    """What each peer computes.

    Attributes:
        width: of the hidden layers; the model has about ``2 * width ** 2`` parameters.
        batch: samples in a step.
        steps: inner steps that are timed.
        sync_every: H.
        fragments: of the mode ``streaming``.
        compression: a wire format.
    """

    width: int
    batch: int
    steps: int
    sync_every: int
    fragments: int
    compression: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What a peer has measured."""

    mode: str
    parameters: int
    steps_per_s: float
    median_step_ms: float
    outer_steps: int
    exposed_s: float
    hidden_s: float
    tx_bytes: int


def options_of(mode: str, load: Load) -> dict[str, Any]:
    """What the wrapper is made with."""
    every, parts = load.sync_every, load.fragments
    shared: dict[str, Any] = {"sync_every": every, "compression": load.compression}
    options: dict[str, dict[str, Any]] = {
        "idle": {"sync_every": NEVER},
        "sync": shared,
        "delayed": shared | {"delay": every},
        "streaming": shared | {"delay": every // parts, "fragments": parts},
    }
    return options[mode]


def be_a_peer(master: str, listen: str, advertise: str, mode: str, peers: int, load: Load) -> Cost:
    """Train; all modes make the same steps."""
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)
    width = load.width
    layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)]
    model = torch.nn.Sequential(*layers)
    inner: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(load.batch, width)
    told: list[OuterStep] = []

    def listen_to(event: Event) -> None:
        if isinstance(event, OuterStep):
            told.append(event)

    with pccl.Communicator(master, listen=listen, advertise=advertise) as comm:
        comm.connect(min_peers=peers)
        optimizer: Any = inner
        if mode != "silent":
            optimizer = DiLoCo(
                model.named_parameters(),
                inner=inner,
                comm=comm,
                min_peers=peers,
                on_event=listen_to,
                **options_of(mode, load),
            )
            optimizer.join()
        start_s = time.perf_counter()
        taken_s: list[float] = []
        for _ in range(load.steps):
            began_s = time.perf_counter()
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.mse_loss(model(x), x))
            optimizer.step()
            taken_s.append(time.perf_counter() - began_s)
        whole_s = time.perf_counter() - start_s
        if mode != "silent":
            optimizer.finish()
            optimizer.close()
    return Cost(
        mode,
        sum(parameter.numel() for parameter in model.parameters()),
        round(load.steps / whole_s, 2),
        round(1000 * statistics.median(taken_s), 3),
        len(told),
        round(sum(event.exposed_s for event in told), 2),
        round(sum(event.hidden_s for event in told), 2),
        sum(event.tx_bytes for event in told),
    )


if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    cost = be_a_peer(load=Load(**given.pop("load")), **given)
    sys.stdout.write(json.dumps(asdict(cost)) + "\n")
