"""Helpers for the tensors of a model: parts of sharded tensors, and names."""

from __future__ import annotations

from typing import Any

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a parameter: all of it, or the shard of a DTensor."""
    detached: Any = tensor.detach()
    shard: torch.Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return shard


def shards_of(tensor: torch.Tensor) -> int:
    """Return the number of processes that hold a part of a parameter; 1 if it is no DTensor."""
    mesh = mesh_of(tensor)
    return 1 if mesh is None else int(mesh.size())


def mesh_of(tensor: torch.Tensor) -> Any:
    """Return the device mesh of a DTensor; None for another tensor."""
    return getattr(tensor, "device_mesh", None)


def own_name(name: str) -> str:
    """Return a parameter's name without the prefix of a peer that uses ``torch.compile``."""
    return name.replace("_orig_mod.", "")
