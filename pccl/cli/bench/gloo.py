"""The other side of a comparison: Gloo, as it comes with torch. Only this module imports torch."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import torch

import pccl
from pccl.cli.bench.values import Array

_torch = cast(Any, torch)  # typed in part only
_distributed: Any = importlib.import_module("torch.distributed")


class Gloo:
    """All-reduce of Gloo, which is in place always: of a buffer, shape (n,)."""

    def __init__(self, buffer: Array) -> None:
        dtype = pccl.DataType.from_numpy_dtype(buffer.dtype).to_torch_dtype()
        # Plain bits: NumPy has types that torch does not take from it.
        self._tensor: torch.Tensor = _torch.from_numpy(buffer.view(f"i{buffer.itemsize}")).view(
            dtype
        )

    def barrier(self) -> None:
        """Wait for all peers."""
        _distributed.barrier()

    def reduce(self) -> str:
        """Add all peers' inputs; tells by which algorithm, which nobody knows."""
        _distributed.all_reduce(self._tensor)
        return ""


@contextlib.contextmanager
def joined(rendezvous: Path, peer: int, peers: int) -> Generator[None]:
    """Join the other processes by a file that nobody has made yet; one thread, as ours have.

    Raises:
        RuntimeError: this torch has no Gloo, or it cannot be used here.
    """
    torch.set_num_threads(1)
    if not (_distributed.is_available() and _distributed.is_gloo_available()):
        raise RuntimeError(f"torch {torch.__version__} was built without Gloo")
    where = rendezvous.as_uri()
    _distributed.init_process_group("gloo", init_method=where, rank=peer, world_size=peers)
    try:
        yield
    finally:
        _distributed.destroy_process_group()
