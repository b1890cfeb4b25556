"""A process that trains a tiny model with ``DiLoCo``, for the tests; it prints what happens.

Standard output is one JSON object a line: events, and a last one with the digest of the model.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

import pccl
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.events import Event, InnerStep, OuterStep


def say(kind: str, **fields: Any) -> None:
    """One line."""
    sys.stdout.write(json.dumps({"event": kind, **fields}) + "\n")
    sys.stdout.flush()


class Ending:
    """When to stop: so many rounds after the first with a peer of this id, or a later one.

    All members see that in the same round, however slowly the peer has started.
    """

    def __init__(self, rounds: int, peer: int) -> None:
        self._rounds = rounds
        self._peer = peer
        self.round = math.inf

    def tell(self, event: Event) -> None:
        """Print an event; inner steps are too many."""
        if isinstance(event, OuterStep) and max(event.contributors) >= self._peer:
            self.round = min(self.round, event.number + self._rounds)
        if not isinstance(event, InnerStep):
            say(type(event).__name__, **asdict(event))


def make_model(seed: int) -> torch.nn.Module:
    """Some tensors of different sizes, and buffers."""
    torch.default_generator.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 3)
    )


def digest(model: torch.nn.Module) -> str:
    """Of all parameters and buffers."""
    values = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(values).hexdigest()


def main() -> None:
    """Train until it is enough."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    index, step_s = given["index"], given["step_s"]
    ending = Ending(given["rounds"], given["after"])
    model = make_model(index)
    own = torch.Generator().manual_seed(index)
    timing = pccl.Timing(**given.get("timing", {}))
    with pccl.Communicator(given["master"], timing=timing) as comm:
        optimizer = DiLoCo(
            model,
            inner=torch.optim.AdamW(model.parameters(), lr=1e-2),
            comm=comm,
            on_event=ending.tell,
            **given["options"],
        )
        scheduler = optimizer.follow(torch.optim.lr_scheduler.StepLR(optimizer, 10_000))
        with optimizer:
            optimizer.join()
            moments = [float(one["step"]) for one in optimizer.state.values()]
            at = {"round": optimizer.round, "model": digest(model), "moments": moments}
            say("joined", index=index, **at)
            while optimizer.round < ending.round:
                x = torch.randn(16, 6, generator=own)
                loss = torch.nn.functional.mse_loss(model(x), x[:, :3] * math.pi)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                time.sleep(step_s)  # stands for a larger model
                optimizer.step(weight=len(x))
                scheduler.step()
            behind = optimizer.steps - scheduler.last_epoch
            say("stopped", round=optimizer.round, behind=behind)
            optimizer.finish()
            say("ended", steps=optimizer.inner_steps, round=optimizer.round, model=digest(model))


if __name__ == "__main__":
    main()
