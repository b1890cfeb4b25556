"""Outer optimizers: the usual one, one that clips the average, and schedules of their rate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from pccl.bindings.arguments import check_amount
from pccl.bindings.diloco.schedule import Schedule
from pccl.checks import shown

PlainFactory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
OuterFactory = PlainFactory | Callable[[list[torch.Tensor], tuple[str, ...]], torch.optim.Optimizer]
"""Makes an optimizer for a list of tensors. A parameter ``names`` gets their names."""

OuterFactor = Callable[[int], float]
"""Returns the factor of the outer learning rate for an outer step of a fragment, from 0."""

FACTOR_MAX = 1e6

SMALL_BELOW = 10_000_000
"""A model with fewer parameters is small. The papers' smallest ones have 20 million (2401.09135)
and 35 million (2503.09799); the sweep of docs/benchmarks.md had 35 thousand."""

_LANES = 1 << 16
"""Sums of squares that ``exact_norm`` adds to side by side."""

SHOWN_STEPS = (0, 1, 10, 100, 1000, 10_000)
"""Outer steps whose factors members compare when they join."""


def nesterov(
    parameters: list[torch.Tensor], lr: float = 0.7, momentum: float = 0.9
) -> torch.optim.Optimizer:
    """Make SGD with Nesterov momentum, as DiLoCo (arXiv:2311.08105, section 3) has it outside."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)


def default_outer(size: int, timing: Schedule) -> PlainFactory:
    """Return the maker of the outer optimizer for a program that names none.

    For a large model that of the paper; for a small one what the sweep of docs/benchmarks.md found.
    With small models, momentum from before a delay costs more than it brings.

    Args:
        size: number of parameters of the whole model.
        timing: the schedule; its delay counts.
    """
    if size >= SMALL_BELOW:
        return nesterov
    lr, momentum = (1.0, 0.0) if timing.delay else (0.7, 0.6)
    return partial(nesterov, lr=lr, momentum=momentum)


def outer_factory(
    outer: object, size: int = SMALL_BELOW, timing: Schedule | None = None
) -> OuterFactory:
    """Return the function that makes the outer optimizer; for None, that of ``default_outer``.

    Raises:
        TypeError: ``outer`` is not callable.
    """
    if outer is None:
        return default_outer(size, timing or Schedule())
    if isinstance(outer, _ClippedDefault):
        return _clipping(outer_factory(None, size, timing), outer.max_norm)
    if not callable(outer):
        raise TypeError(
            "outer must be a function that makes an optimizer for a list of tensors, as in "
            f"lambda parameters: torch.optim.SGD(parameters, lr=0.7), not {shown(outer)}"
        )
    return cast("OuterFactory", outer)


def outer_factor(asked: object) -> OuterFactor | None:
    """Return the checked schedule of the outer learning rate; None: it is constant.

    Raises:
        TypeError, ValueError: ``asked`` is no function, or a factor is no number from 0.
    """
    if asked is None:
        return None
    if not callable(asked):
        raise TypeError(
            "outer_lr_lambda must be a function from the number of an outer step to a factor, as "
            f"for torch.optim.lr_scheduler.LambdaLR, not {shown(asked)}"
        )

    def factor(step: int) -> float:
        # Rounded, because the mathematical functions of machines may differ in the last bit.
        return float(f"{check_amount('a factor', asked(step), FACTOR_MAX):.9g}")

    for step in SHOWN_STEPS:
        factor(step)
    return factor


def clipped(outer: OuterFactory | None = None, *, max_norm: float) -> OuterFactory:
    """Return an outer optimizer that first scales an average down to an L2 norm of ``max_norm``.

    As for ``torch.nn.utils.clip_grad_norm_``, but for the average of one fragment::

        DiLoCo(model, inner=inner, comm=comm, outer=clipped(max_norm=1.0))

    Args:
        outer: makes the optimizer; None: the default of ``DiLoCo``.
        max_norm: the largest norm; equal on all members.

    Raises:
        TypeError, ValueError: ``outer`` is not callable, or ``max_norm`` is no positive number.
    """
    limit = check_amount("max_norm", max_norm, math.inf)
    if not limit:
        raise ValueError("max_norm must be above 0")
    if isinstance(outer, _ClippedDefault):
        return _ClippedDefault(min(limit, outer.max_norm))
    return _ClippedDefault(limit) if outer is None else _clipping(outer_factory(outer), limit)


@dataclass(frozen=True, slots=True)
class _ClippedDefault:
    """What ``clipped`` returns without ``outer``: ``DiLoCo`` knows its default."""

    max_norm: float

    def __call__(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        make: Any = outer_factory(self)
        optimizer: torch.optim.Optimizer = make(parameters)
        return optimizer


def _clipping(make: Any, limit: float) -> OuterFactory:
    @functools.wraps(make)
    def made(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(*arguments, **options)
        for group in optimizer.param_groups:
            # Members with another limit are told when they join.
            group["max_norm"] = min(limit, group.get("max_norm", limit))
        optimizer.register_step_pre_hook(_clip)
        return optimizer

    return made


def _clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
    held = [p.grad for group in optimizer.param_groups for p in group["params"]]
    gradients = [gradient for gradient in held if gradient is not None]
    norm, limit = exact_norm(gradients), optimizer.param_groups[0]["max_norm"]
    if norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)


def exact_norm(tensors: list[torch.Tensor]) -> float:
    """Return the L2 norm of tensors on the host, which has the same bits on every machine.

    The order of additions is fixed. That of ``torch.linalg.vector_norm`` depends on the processor.
    """
    sums, used = np.zeros(_LANES), 0
    for tensor in tensors:
        values = tensor.detach().reshape(-1).numpy()
        for start in range(0, len(values), _LANES):
            part = values[start : start + _LANES].astype(np.float64)
            sums[: len(part)] += part * part
            used = max(used, len(part))
    return math.sqrt(math.fsum(sums[:used]))
