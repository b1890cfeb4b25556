"""The modes of ``train_gpt.py``: what is put around the inner optimizer in each of them."""

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
    """What the loop needs. :class:`~pccl.bindings.diloco.DiLoCo` has it all; here is the rest."""

    @property
    def steps(self) -> int:
        """How many the run has made up to here, also before a resume, or before this one joined."""
        ...

    def zero_grad(self) -> None:
        """Begin a step: forget the gradients."""
        ...

    def step(self, *, weight: float) -> object:
        """Learn from the gradients; ``weight`` says how much work they stand for."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint."""
        ...

    def finish(self) -> None:
        """The last step is made: give the model what the others have, too."""
        ...


def make_trainer(
    given: Options,
    model: GPT,
    inner: torch.optim.Optimizer,
    tell: Tell,
    stack: contextlib.ExitStack,
) -> Trainer:
    """This is all there is to training together: wrap the optimizer.

    Args:
        given: which mode, and its settings.
        model: the model; of several peers, the eldest one's weights count.
        inner: steps from one synchronization to the next.
        tell: hears of every event.
        stack: closes what is opened here.
    """
    if given.mode == "alone":
        return Alone(inner, tell)
    comm = stack.enter_context(pccl.Communicator())  # the environment says whom to join
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
        model.named_parameters(),
        inner=inner,
        comm=comm,
        sync_every=given.sync_every,
        outer=functools.partial(outer, lr=given.outer_lr, momentum=given.outer_momentum),
        delay=given.delay,
        fragments=given.fragments,
        mixing=given.mixing,
        compression=given.compression,
        min_peers=given.min_peers,
        on_event=tell,
    )
    return stack.enter_context(opt)


def outer(parameters: list[torch.Tensor], *, lr: float, momentum: float) -> torch.optim.Optimizer:
    """The outer optimizer; Nesterov's, if it has momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)


class Alone:
    """The inner optimizer, and nobody else."""

    def __init__(self, inner: torch.optim.Optimizer, tell: Tell) -> None:
        self._inner = inner
        self._pace = Pace(tell)
        self.steps = 0

    def zero_grad(self) -> None:
        """Begin a step."""
        self._inner.zero_grad()

    def step(self, *, weight: float) -> None:
        """Make it; alone, everything weighs the same."""
        self._inner.step()
        self.steps += 1
        self._pace.stepped(self.steps)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"inner": self._inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint."""
        self._inner.load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"]

    def finish(self) -> None:
        """There is nobody else."""


class DataParallel:
    """Every step averages all gradients; the steps that count are the run's."""

    def __init__(
        self, averager: GradientAverager, inner: torch.optim.Optimizer, tell: Tell
    ) -> None:
        self._averager = averager
        self._inner = inner
        self._pace = Pace(tell)

    @property
    def steps(self) -> int:
        """How many steps the run has made."""
        return self._averager.steps

    def zero_grad(self) -> None:
        """Begin a step: let newcomers in, or come in."""
        self._averager.update()
        self._inner.zero_grad()

    def step(self, *, weight: float) -> None:
        """Make it; if this peer has lost its place in the run, the next one joins it again."""
        if self._averager.step():
            self._pace.stepped(self._averager.steps)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"inner": self._inner.state_dict(), "averager": self._averager.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint."""
        self._inner.load_state_dict(state_dict["inner"])
        self._averager.load_state_dict(state_dict["averager"])

    def finish(self) -> None:
        """All have the same model anyway."""


class Pace:
    """Tells of each step how long it took."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._last_s = math.nan

    def stepped(self, step: int) -> None:
        """One was made."""
        now_s = time.perf_counter()
        self._tell(InnerStep(step=step, seconds=now_s - self._last_s))
        self._last_s = now_s
