"""What a program passes to ``DiLoCo``, checked where it comes in."""

from __future__ import annotations

import math
from typing import cast

import torch

from pccl.bindings.diloco.outer import OuterFactory, nesterov

WEIGHT_MAX = 1e30
"""Of one step: sums of it stay far from what a reduce takes."""


def check_mixing(mixing: object, delay: int, sync_steps: int) -> float:
    """How much of the local parameters remains; None: what is good for the delay.

    Args:
        mixing: as of ``DiLoCo``.
        delay: in inner steps.
        sync_steps: inner steps of a period; 0: a time budget counts.

    Raises:
        TypeError, ValueError: it can't be used; the message says why.
    """
    if mixing is None:
        return 0.5 if 0 < delay < (sync_steps or math.inf) else 0.0
    if isinstance(mixing, bool) or not isinstance(mixing, (int, float)):
        raise TypeError(f"mixing must be a number, not {mixing!r}")
    if not 0 <= mixing < 1:
        raise ValueError(
            f"mixing must be at least 0 (take the outer parameters) and less than 1, not {mixing}"
        )
    return float(mixing)


def check_weight(weight: object) -> None:
    """Work done in a step.

    Raises:
        TypeError, ValueError: it is no amount of work.
    """
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise TypeError(f"weight must be a number, not {weight!r}")
    if not 0 <= weight <= WEIGHT_MAX:
        raise ValueError(
            f"weight must be a finite number of at least 0, and at most {WEIGHT_MAX:g}, not "
            f"{weight!r}"
        )


def check_inner(inner: object) -> None:
    """The optimizer of the local steps.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            "inner must be a torch.optim.Optimizer, such as torch.optim.AdamW(model.parameters()), "
            f"not {inner!r}"
        )


def check_outer(outer: object) -> OuterFactory:
    """What makes the outer optimizer; None: the one of the paper.

    Raises:
        TypeError: it makes none.
    """
    if outer is None:
        return nesterov
    if not callable(outer):
        raise TypeError(
            "outer must be a function that makes an optimizer of a list of tensors, as in "
            f"lambda parameters: torch.optim.SGD(parameters, lr=0.7), not {outer!r}"
        )
    return cast("OuterFactory", outer)
