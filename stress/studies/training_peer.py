"""One peer of ``python -m pccl.stress training``: makes steps, and tells what they took."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import pccl
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.events import Event, OuterStep

NEVER = 10**9


@dataclass(frozen=True, slots=True)
class TrainingLoad:
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
class StepCost:
    """What a peer has measured: in all steps together, without what follows them.

    Attributes:
        mode: of the wrapper.
        parameters: of the model.
        steps_per_s: of the training loop.
        median_step_ms: how long one took.
        outer_steps: merged meanwhile.
        exposed_s: how long the training thread has waited for them.
        hidden_s: how long they took besides.
        tx_bytes: sent for them.
        compute_ms: of a step, in the mean: the training thread was on a processor.
        queue_ms: likewise: it was ready, and all processors were busy.
        lock_ms: likewise: it waited for something else than an outer step; the interpreter's lock.
        others_ms: likewise: processor time of the other threads of this process.
    """

    mode: str
    parameters: int
    steps_per_s: float
    median_step_ms: float
    outer_steps: int
    exposed_s: float
    hidden_s: float
    tx_bytes: int
    compute_ms: float
    queue_ms: float
    lock_ms: float
    others_ms: float


@dataclass(frozen=True, slots=True)
class Times:
    """Of this thread and its process, in seconds."""

    wall_s: float
    cpu_s: float
    queue_s: float
    process_s: float

    @classmethod
    def now(cls) -> Times:
        """Up to now. Where the kernel does not tell how long a thread was queued it is 0."""
        try:
            words = Path("/proc/thread-self/schedstat").read_text("ascii").split()
        except OSError:
            words = ["0", "0"]
        return cls(
            time.perf_counter(), time.thread_time(), int(words[1]) / 1e9, time.process_time()
        )


def options_of(mode: str, load: TrainingLoad) -> dict[str, Any]:
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


def be_a_peer(
    master: str, listen: str, advertise: str, mode: str, peers: int, load: TrainingLoad
) -> StepCost:
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
        start = Times.now()
        taken_s: list[float] = []
        for _ in range(load.steps):
            began_s = time.perf_counter()
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.mse_loss(model(x), x))
            optimizer.step()
            taken_s.append(time.perf_counter() - began_s)
        end, merged = Times.now(), list(told)
        if mode != "silent":
            optimizer.finish()
            optimizer.close()
    wall_s, cpu_s, queue_s = (
        end.wall_s - start.wall_s,
        end.cpu_s - start.cpu_s,
        end.queue_s - start.queue_s,
    )
    exposed_s = sum(event.exposed_s for event in merged)

    def per_step_ms(seconds: float) -> float:
        return round(1000 * seconds / load.steps, 2)

    return StepCost(
        mode=mode,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        steps_per_s=round(load.steps / wall_s, 2),
        median_step_ms=round(1000 * statistics.median(taken_s), 3),
        outer_steps=len(merged),
        exposed_s=round(exposed_s, 2),
        hidden_s=round(sum(event.hidden_s for event in merged), 2),
        tx_bytes=sum(event.tx_bytes for event in merged),
        compute_ms=per_step_ms(cpu_s),
        queue_ms=per_step_ms(queue_s),
        lock_ms=per_step_ms(wall_s - cpu_s - queue_s - exposed_s),
        others_ms=per_step_ms(end.process_s - start.process_s - cpu_s),
    )


if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    cost = be_a_peer(load=TrainingLoad(**given.pop("load")), **given)
    sys.stdout.write(json.dumps(asdict(cost)) + "\n")
