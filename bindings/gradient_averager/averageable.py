"""Checks which gradients can be averaged; errors say why a gradient cannot, and what to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def averageable(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return the names and parameters whose gradients are averaged, in registration order.

    Raises:
        ValueError: a gradient cannot be averaged, or no parameter is trained.
    """
    ours = {id(parameter) for parameter in model.parameters()}
    groups: Any = optimizer.param_groups
    if any(id(parameter) not in ours for group in groups for parameter in group["params"]):
        raise ValueError(
            "the optimizer has parameters that are not the model's; their gradients would not be "
            "averaged: pass the module that holds all of them, such as an nn.ModuleList"
        )
    whole: Any = model  # torch types this only in part
    for name, module in whole.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"{name or type(module).__name__!r} makes sparse gradients, but buckets hold only "
                "dense ones; create it with sparse=False"
            )
    named: list[tuple[str, Tensor]] = [
        (name, p) for name, p in model.named_parameters() if p.requires_grad
    ]
    if not named:
        raise ValueError("no parameter of the model has requires_grad; there is nothing to average")
    devices = sorted({str(parameter.device) for _, parameter in named})
    if len(devices) > 1:
        raise ValueError(
            f"the model is on {', '.join(devices)}; put all trained parameters on one device"
        )
    for name, parameter in named:
        if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
            raise ValueError(
                f"{name!r} is a DTensor, of which this process holds a shard; all_reduce the "
                "gradients' .to_local() among the peers with the same shard (peer_group)"
            )
        if not parameter.dtype.is_floating_point or parameter.element_size() < 2:
            raise ValueError(
                f"{name!r} is {parameter.dtype}; gradients can be averaged in float16, bfloat16, "
                "float32 and float64. For a complex one, keep a real parameter, and use "
                "torch.view_as_complex in the forward pass"
            )
    return named
