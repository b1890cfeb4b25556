"""Train a small GPT on the bytes of real text, on one machine or several.

    python examples/train_gpt.py --mode alone --sample 400
    pccl launch -n 4 -- python examples/train_gpt.py --mode sync
    pccl launch -n 4 -- python examples/train_gpt.py --mode streaming --compression int4

The modes differ in how often the peers average, and whether they wait for the average:

- ``alone``: one process, which averages nothing.
- ``data-parallel``: the peers average all gradients at every step.
- ``sync``: DiLoCo: every ``--sync-every`` steps, the peers average the changes of their weights.
- ``delayed``: as ``sync``, but the peers continue to train during the average.
- ``eager``: as ``delayed``, but each peer applies its own share of an average without delay.
- ``streaming``: as ``delayed``, with one fragment of the model after another.

All peers begin with the same weights, and draw different batches. At the end they print the same
``weights:`` if their models are equal bit for bit. ``gpt/trainers.py`` shows the training loop of
each mode.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt.model import GPT, digest
from gpt.optimizers import make_inner
from gpt.options import Options, parse
from gpt.text import Text, load
from gpt.trainers import Trainer, make_trainer
from pccl.bindings.consumers import JsonlWriter, Listeners, StatusLine, TensorBoardWriter
from pccl.bindings.events import Event

LR_FLOOR = 0.1
"""Share of the peak learning rate that remains at the end."""

LOGGED_EVERY = 10
"""Inner steps between two training losses in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """An event of this script: the loss of the batch of this step."""

    step: int
    loss: float
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An event of this script: the loss on the held-out text, in nats per byte.

    ``tokens`` is the number of bytes that a peer which began with the run has trained on.
    """

    step: int
    loss: float
    tokens: int


Tell = Callable[[Event | Trained | Evaluated], None]


def train(given: Options, text: Text, tell: Tell) -> GPT:
    """Train a model as the options say, and return it after the last step."""
    model = GPT(given.shape, given.seed)
    inner = make_inner(model, given.inner, given.lr)
    length = given.shape.context + 1  # the first byte is only input, the last one only target
    held_out = text.held_out_excerpts(given.held_out, length)
    with contextlib.ExitStack() as stack:
        opt = make_trainer(given, model, inner, tell, stack)
        if given.checkpoint is not None and given.checkpoint.exists():
            resume(given, model, opt)
        while opt.steps < given.steps:
            opt.zero_grad()
            step = opt.steps
            rate = learning_rate(step, peak=given.lr, warm_up=given.warm_up, steps=given.steps)
            for group in inner.param_groups:
                group["lr"] = rate
            batch = text.batch(given.batch, length, seed=given.seed, peer=given.peer, step=step)
            loss = model.loss(batch)
            torch.autograd.backward(loss)
            opt.step(weight=given.tokens_per_step)

            made = opt.steps
            if made % LOGGED_EVERY == 0:
                tell(Trained(step=made, loss=loss.item(), learning_rate=rate))
            if made % given.evaluate_every == 0 and made < given.steps:
                judge(given, model, held_out, made, tell)
            if given.checkpoint is not None and made % given.checkpoint_every == 0:
                save(given, model, opt)
        opt.finish()
        made = opt.steps
    judge(given, model, held_out, made, tell)
    return model


def learning_rate(step: int, *, peak: float, warm_up: int, steps: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine down to a floor.

    The rate depends on the step alone, so peers that resume or join have the rate of the run.

    Args:
        step: number of the step, from 0; from ``steps`` on the rate stays at its floor.
        peak: rate in the last step of the warm-up.
        warm_up: number of steps of the warm-up; 0: the rate begins at its peak.
        steps: step from which the rate is a tenth of its peak.
    """
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return peak * (LR_FLOOR + (1 - LR_FLOOR) * (1 + math.cos(math.pi * done)) / 2)


@torch.no_grad()
def evaluate(model: GPT, excerpts: Tensor, batch: int) -> float:
    """Return the mean loss over excerpts of one length, in nats per byte. batch: rows at a time."""
    count = len(excerpts)
    parts = [excerpts[at : at + batch] for at in range(0, count, batch)]
    return math.fsum(model.loss(part).item() * len(part) for part in parts) / count


def judge(given: Options, model: GPT, held_out: Tensor, step: int, tell: Tell) -> None:
    """Print and log the loss of the model on the held-out text."""
    loss = evaluate(model, held_out, given.batch)
    tell(Evaluated(step=step, loss=loss, tokens=step * given.tokens_per_step))
    print(f"step {step}: held-out loss {loss:.4f}")


def save(given: Options, model: GPT, opt: Trainer) -> None:
    """Write a checkpoint. If the process dies meanwhile, the previous checkpoint is intact."""
    assert given.checkpoint is not None
    fresh = given.checkpoint.with_name(f"{given.checkpoint.name}.{os.getpid()}")
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, fresh)
    fresh.replace(given.checkpoint)


def resume(given: Options, model: GPT, opt: Trainer) -> None:
    """Load a checkpoint, and continue after its step."""
    assert given.checkpoint is not None
    saved = torch.load(given.checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    print(f"resumed from {given.checkpoint} after step {opt.steps}")


def main() -> None:
    """Read the options and the text, train, and print the results."""
    given = parse()
    if given.mode != "alone" and "PCCL_MASTER" not in os.environ:
        raise SystemExit(
            f"train_gpt.py: --mode {given.mode} needs a run: put `pccl launch -n 2 -- python` "
            "before the script, or `pccl join` if a master runs; or use --mode alone"
        )
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    try:
        text = load(given.text, given.shape.context + 1)
    except ValueError as error:
        raise SystemExit(f"train_gpt.py: {error}") from None
    began_s = time.perf_counter()
    with contextlib.ExitStack() as stack:
        consumers: list[Callable[[Any], None]] = []
        if given.log is not None:
            consumers.append(stack.enter_context(JsonlWriter(given.log, every_inner=LOGGED_EVERY)))
        if given.tensorboard is not None:
            board = TensorBoardWriter(given.tensorboard, every_inner=LOGGED_EVERY)
            consumers.append(stack.enter_context(board))
        if given.status:
            consumers.append(stack.enter_context(StatusLine()))
        model = train(given, text, Listeners(consumers))
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count} parameters, {given.steps} steps, {time.perf_counter() - began_s:.0f} s")
    print("weights:", digest(model.parameters()))
    if given.sample:
        print(model.write(given.sample, seed=given.seed))


if __name__ == "__main__":
    main()
