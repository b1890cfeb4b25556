"""The all-reduce of Gloo, for comparison. No other module of the benchmark imports torch."""

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
    """The all-reduce of Gloo, always in place, of a buffer of shape (n,)."""

    def __init__(self, buffer: Array) -> None:
        dtype = pccl.DataType.from_numpy_dtype(buffer.dtype).to_torch_dtype()
        # As integers first, because torch does not accept all types of NumPy arrays.
        self._tensor: torch.Tensor = _torch.from_numpy(buffer.view(f"i{buffer.itemsize}")).view(
            dtype
        )

    def barrier(self) -> None:
        """Wait for all peers."""
        _distributed.barrier()

    def reduce(self) -> str:
        """Sum the inputs of all peers in place; return no algorithm: Gloo does not name it."""
        _distributed.all_reduce(self._tensor)
        return ""


@contextlib.contextmanager
def joined(rendezvous: Path, peer: int, peers: int) -> Generator[None]:
    """Join the Gloo group whose peers meet at the file ``rendezvous``; use one thread, like pccl.

    Raises:
        RuntimeError: this torch has no Gloo, or Gloo does not work here.
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
