"""The other side of a comparison: Gloo, as it comes with torch. Only this module imports torch."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import torch

import pccl
from pccl.cli.bench.peers.values import Array

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types by bytes, for tensors that torch is given as plain bits."""

_torch = cast(Any, torch)  # typed in part only
_distributed: Any = importlib.import_module("torch.distributed")


class Gloo:
    """All-reduce of Gloo, which is in place always.

    Args:
        buffer: shape (n,), shared with the tensor that is reduced.
    """

    name = "gloo"

    def __init__(self, buffer: Array) -> None:
        self.input = self.result = buffer
        dtype = pccl.DataType.from_numpy_dtype(buffer.dtype).to_torch_dtype()
        bits: torch.Tensor = _torch.from_numpy(buffer.view(f"i{buffer.itemsize}"))
        assert bits.dtype == SIGNED[buffer.itemsize]
        self._tensor = bits.view(dtype)

    def barrier(self) -> None:
        """Wait for all peers."""
        _distributed.barrier()

    def reduce(self) -> None:
        """Add all peers' inputs."""
        _distributed.all_reduce(self._tensor)


@contextlib.contextmanager
def group(rendezvous: Path, peer: int, peers: int) -> Generator[None]:
    """Join the other processes; all threads but Gloo's own are limited to one, as ours are.

    Args:
        rendezvous: a file that nobody has made yet.
        peer: which one this is, from 0.
        peers: how many there are.

    Raises:
        RuntimeError: this torch has no Gloo, or it cannot be used here.
    """
    torch.set_num_threads(1)
    if not (_distributed.is_available() and _distributed.is_gloo_available()):
        raise RuntimeError(f"torch {torch.__version__} was built without Gloo")
    _distributed.init_process_group(
        "gloo", init_method=rendezvous.as_uri(), rank=peer, world_size=peers
    )
    try:
        yield
    finally:
        _distributed.destroy_process_group()
