"""Trainings with DDP, each through Gloo and through pccl, as a program of two ranks.

None has callbacks that wait for another collective, such as those of PowerSGD: Gloo can hang then.

It prints a line for each: its name, and a digest of the parameters from each backend.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

dist: Any = import_module("torch.distributed")
seed_all: Any = import_module("torch.random").manual_seed
WIDTH = 16
BUCKET_MB = 1e-3
"""A bucket for each layer."""

Training = Callable[[Any], Iterator[nn.Module]]
"""Trains models of a process group, and then gives them."""


def network(seed: int = 0) -> nn.Sequential:
    seed_all(seed)
    layers = (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


class OneOfThree(nn.Module):
    """A model of which each step uses a part."""

    def __init__(self) -> None:
        super().__init__()
        seed_all(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, values: Tensor, which: int) -> Tensor:
        result: Tensor = self.last(self.parts[which](values))
        return result


def loss_of(model: Any, step: int, *given: Any) -> Any:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return model(torch.randn(8, WIDTH, generator=generator), *given).pow(2).mean()


def wrapped(group: Any, module: nn.Module, **arguments: Any) -> Any:
    return DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=BUCKET_MB, **arguments
    )


def optimizer_of(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for one in modules for p in one.parameters()], lr=0.01)


def plain(
    group: Any,
    hook: Callable[[Any], tuple[Any, Any]] | None = None,
    **arguments: Any,
) -> Iterator[nn.Module]:
    module = network()
    model, optimizer = wrapped(group, module, **arguments), optimizer_of(module)
    if hook is not None:
        model.register_comm_hook(*hook(group))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    yield module


def scaled(group: Any) -> Iterator[nn.Module]:
    """Mixed precision; in one step, the gradients of one rank are infinite."""
    module = network()
    model, optimizer = wrapped(group, module), optimizer_of(module)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, step)
        overflows = step == 2 and dist.get_rank() == 1
        loss = scaler.scale(loss * float("inf") if overflows else loss)
        loss.backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512
    yield module


def accumulated(group: Any) -> Iterator[nn.Module]:
    module = network()
    model, optimizer = wrapped(group, module), optimizer_of(module)
    for step in range(9):
        with nullcontext() if step % 3 == 2 else model.no_sync():
            loss_of(model, step).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    yield module


def unused(group: Any) -> Iterator[nn.Module]:
    """In each step, each rank uses another part of the model, and one part is not used."""
    module = OneOfThree()
    model = wrapped(group, module, find_unused_parameters=True)
    optimizer = optimizer_of(module)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step, (step + dist.get_rank()) % 3).backward()
        optimizer.step()
    yield module


def in_a_thread(group: Any) -> Iterator[nn.Module]:
    module = network()
    model, optimizer = wrapped(group, module), optimizer_of(module)
    for step in range(3):
        optimizer.zero_grad()
        thread = threading.Thread(target=loss_of(model, step).backward)
        thread.start()
        thread.join()
        optimizer.step()
    yield module


def two_in_turn(group: Any) -> Iterator[nn.Module]:
    """Two models, first with a backward pass for each, and then with one for both."""
    modules = network(1), network(2)
    models, optimizer = [wrapped(group, one) for one in modules], optimizer_of(*modules)
    for step in range(4):
        optimizer.zero_grad()
        first, second = [loss_of(model, step) for model in models]
        for loss in [first + second] if step > 1 else [second, first]:
            loss.backward()
        optimizer.step()
    yield from modules


def two_at_once(group: Any) -> Iterator[nn.Module]:
    """In two threads, each with a process group of its own."""
    backend = dist.get_backend(group)
    groups = [dist.new_group(backend=backend) for _ in range(2)]
    modules = network(1), network(2)
    models = [wrapped(*one) for one in zip(groups, modules, strict=True)]

    def train(module: nn.Module, model: Any) -> None:
        optimizer = optimizer_of(module)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    pairs = zip(modules, models, strict=True)
    threads = [threading.Thread(target=train, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from modules


def uneven(group: Any) -> Iterator[nn.Module]:
    """One rank has more steps."""
    module = network()
    model, optimizer = wrapped(group, module), optimizer_of(module)
    with model.join():
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    yield module


def compressed(group: Any) -> tuple[Any, Any]:
    return group, default_hooks.fp16_compress_hook


TRAININGS: dict[str, Training] = {
    "plain": plain,
    "a view of the bucket": partial(plain, gradient_as_bucket_view=True),
    "a static graph": partial(plain, static_graph=True, gradient_as_bucket_view=True),
    "compression": partial(plain, hook=compressed),
    "scaled": scaled,
    "accumulated": accumulated,
    "unused": unused,
    "in a thread": in_a_thread,
    "two in turn": two_in_turn,
    "two at once": two_at_once,
    "uneven": uneven,
}


def digest_of(modules: Iterator[nn.Module]) -> str:
    digests = [
        hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in one.parameters()))
        for one in modules
    ]
    return " ".join(sorted(one.hexdigest()[:16] for one in digests))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("pccl")
    groups = dist.new_group(backend="gloo"), dist.group.WORLD
    for name, train in TRAININGS.items():
        digests = [digest_of(train(group)) for group in groups]
        print(name, *digests, sep=": ", flush=True)  # noqa: T201 - a test reads it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
