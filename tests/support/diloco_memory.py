"""A peer whose training tells how much memory ``DiLoCo`` takes, in a process of its own.

``python -m tests.support.diloco_memory ADDRESS...``: one address of a master for each of ``MODES``,
in order. It prints a line of JSON: by mode, the peak of its resident memory beyond parameters and
gradients, in bytes per parameter; and the median duration of a step with a round in it, in seconds.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import pccl
from pccl.bindings.diloco import DiLoCo

EVERY = 4
ROUNDS = 3

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "int8": {"compression": "int8"},
    "delay": {"delay": 2},
    "streaming": {"delay": 1, "fragments": 4},
    "eager": {"delay": EVERY, "eager": True},
}
WIDTH, DEPTH = 768, 8
COUNT = WIDTH * WIDTH * DEPTH
MODEL_BYTES = 8
"""Of a parameter and its gradient."""


def train(address: str, width: int, mode: str) -> float:
    """Make some rounds with one other peer.

    Returns:
        The median duration of a step with a round in it, in seconds.
    """
    parameters = [torch.nn.Parameter(torch.ones(width, width)) for _ in range(DEPTH)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    inner = torch.optim.SGD(parameters, lr=1e-3, foreach=False)
    took: list[float] = []
    with (
        pccl.Communicator(address) as comm,
        DiLoCo(parameters, inner=inner, comm=comm, sync_every=EVERY, min_peers=2, **MODES[mode])
        as optimizer,
    ):  # fmt: skip
        optimizer.join()
        for step in range(ROUNDS * EVERY):
            began_s = time.monotonic()
            optimizer.step()
            if step % EVERY == EVERY - 1:
                took.append(time.monotonic() - began_s)
        optimizer.finish()
    return sorted(took)[len(took) // 2]


def resident(field: str) -> int:
    """Resident memory of this process in bytes, now (``VmRSS``) or at most (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) << 10


def main() -> None:
    torch.set_num_threads(1)
    spare, *addresses = sys.argv[1:]
    train(spare, 8, "eager")  # what a first run imports is not counted
    gc.collect()
    idle, found = resident("VmRSS"), {}
    for mode, address in zip(MODES, addresses, strict=True):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        took_s = train(address, WIDTH, mode)
        found[mode] = (resident("VmHWM") - idle) / COUNT - MODEL_BYTES, took_s
        gc.collect()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
