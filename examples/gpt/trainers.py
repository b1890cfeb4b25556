"""The trainers of ``train_gpt.py``, one for each mode. Each wraps the inner optimizer."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

import pccl
from gpt.model import GPT
from gpt.options import Options
from pccl.bindings.events import Event, InnerStep

if TYPE_CHECKING:
    from pccl.bindings.gradient_averager import GradientAverager

Tell = Callable[[Event], None]


class Trainer(Protocol):
    """The interface of a trainer. :class:`~pccl.bindings.diloco.DiLoCo` has all of its methods."""

    @property
    def steps(self) -> int:
        """The steps of the run, also those before a resume, or before this peer joined."""
        ...

    def zero_grad(self) -> None:
        """Begin a step: clear the gradients."""
        ...

    def step(self, *, weight: float) -> object:
        """Apply the gradients. ``weight``: amount of work that they represent."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        ...

    def finish(self) -> None:
        """Complete the last average, so that all peers have the same model."""
        ...


def make_trainer(
    given: Options,
    model: GPT,
    inner: torch.optim.Optimizer,
    tell: Tell,
    stack: contextlib.ExitStack,
) -> Trainer:
    """Wrap the optimizer for the mode. Training together needs nothing else.

    Args:
        given: the mode and its settings.
        model: the model; all peers begin with the weights of the eldest peer.
        inner: optimizer for the steps between two averages.
        tell: called with every event.
        stack: closes the communicator and the trainer.
    """
    if given.mode == "alone":
        return Alone(inner, tell)
    comm = stack.enter_context(pccl.Communicator())  # PCCL_MASTER names the master
    if given.mode == "data-parallel":
        from pccl.bindings.gradient_averager import GradientAverager

        averager = GradientAverager(
            model,
            inner,
            comm=comm,
            compression=given.compression,
            min_peers=given.min_peers,
            on_event=tell,
        )
        return DataParallel(stack.enter_context(averager), inner, tell)
    from pccl.bindings.diloco import DiLoCo

    opt = DiLoCo(
        model,
        inner=inner,
        comm=comm,
        sync_every=given.sync_every,
        outer=None if given.outer is None else functools.partial(outer, *given.outer),
        delay=given.delay,
        fragments=given.fragments,
        mixing=given.mixing,
        eager=given.mode == "eager",
        compression=given.compression,
        min_peers=given.min_peers,
        on_event=tell,
    )
    return stack.enter_context(opt)


def outer(lr: float, momentum: float, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the outer optimizer: SGD, with Nesterov momentum unless ``momentum`` is 0."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)


class Alone:
    """A trainer of one process: the inner optimizer alone."""

    def __init__(self, inner: torch.optim.Optimizer, tell: Tell) -> None:
        self._inner = inner
        self._pace = Pace(tell)
        self.steps = 0

    def zero_grad(self) -> None:
        """Begin a step: clear the gradients."""
        self._inner.zero_grad()

    def step(self, *, weight: float) -> None:
        """Apply the gradients. One process alone needs no weight."""
        self._inner.step()
        self.steps += 1
        self._pace.stepped(self.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"inner": self._inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self._inner.load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"]

    def finish(self) -> None:
        """Do nothing: there are no other peers."""


class DataParallel:
    """A trainer that averages all gradients at every step, and counts the steps of the run."""

    def __init__(
        self, averager: GradientAverager, inner: torch.optim.Optimizer, tell: Tell
    ) -> None:
        self._averager = averager
        self._inner = inner
        self._pace = Pace(tell)

    @property
    def steps(self) -> int:
        """The number of steps of the run."""
        return self._averager.steps

    def zero_grad(self) -> None:
        """Begin a step: admit newcomers, or join; then clear the gradients."""
        self._averager.update()
        self._inner.zero_grad()

    def step(self, *, weight: float) -> None:
        """Average and apply the gradients. After a loss of membership, the next step rejoins."""
        if self._averager.step():
            self._pace.stepped(self._averager.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"inner": self._inner.state_dict(), "averager": self._averager.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self._inner.load_state_dict(state_dict["inner"])
        self._averager.load_state_dict(state_dict["averager"])

    def finish(self) -> None:
        """Do nothing: all peers have the same model after each step."""


class Pace:
    """Reports the duration of each step."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._last_s = math.nan

    def stepped(self, step: int) -> None:
        """Report that a step has ended."""
        now_s = time.perf_counter()
        self._tell(InnerStep(step=step, seconds=now_s - self._last_s))
        self._last_s = now_s
