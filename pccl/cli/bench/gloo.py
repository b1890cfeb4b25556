"""The all-reduce of Gloo, for comparison. No other module of the benchmark imports torch.

Gloo's sockets have the system's congestion control, and this library's local links may have another
one. So the peers join a second group, whose sockets have that one, in a network namespace.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch

import pccl
from pccl.cli.bench import machine, namespace
from pccl.cli.bench.ring import HOST
from pccl.cli.bench.statistics import Figures
from pccl.cli.bench.values import Array

_torch = cast(Any, torch)  # typed in part only
_distributed: Any = importlib.import_module("torch.distributed")


class Gloo:
    """The all-reduce of Gloo in one group, always in place, of a buffer of shape (n,)."""

    def __init__(self, group: Any, congestion: str, buffer: Array, _: Array) -> None:
        self._group = group
        self._congestion = congestion
        self.result = buffer
        dtype = pccl.DataType.from_numpy_dtype(buffer.dtype).to_torch_dtype()
        # As integers first, because torch does not accept all types of NumPy arrays.
        self._tensor: torch.Tensor = _torch.from_numpy(buffer.view(f"i{buffer.itemsize}")).view(
            dtype
        )

    def barrier(self) -> None:
        """Wait for all peers."""
        _distributed.barrier(self._group)

    def reduce(self) -> str:
        """Sum the inputs of all peers in place; return no algorithm: Gloo does not name it."""
        _distributed.all_reduce(self._tensor, group=self._group)
        return ""

    def figures(self) -> Figures:
        """Return the congestion control of the group's connections."""
        return {"algorithm": "", "congestion": self._congestion}


def store_at(port: int) -> Any:
    """Return the store over which the peers find each other. It has a ``port``.

    Args:
        port: the port of another peer's store; 0: a new store.

    Raises:
        RuntimeError: this torch has no Gloo, or there is no store.
    """
    if not (_distributed.is_available() and _distributed.is_gloo_available()):
        raise RuntimeError(f"torch {torch.__version__} was built without Gloo")
    return _distributed.TCPStore(HOST, port, is_master=not port, wait_for_workers=False)


@contextlib.contextmanager
def joined(
    store: Any, peer: int, peers: int, network: int | None, congestion: str
) -> Generator[dict[str, Any]]:
    """Join the Gloo groups of the peers; use one thread, like pccl.

    Args:
        store: what ``store_at`` has returned.
        peer: number of this peer.
        peers: number of all peers.
        network: descriptor of the network namespace for the second group; None: no second group.
        congestion: congestion control of the second group.

    Yields:
        The groups by their congestion control, the system's first.

    Raises:
        RuntimeError: Gloo does not work here.
        OSError: the system forbids to enter the namespace.
    """
    torch.set_num_threads(1)
    _distributed.init_process_group("gloo", store=store, rank=peer, world_size=peers)
    try:
        groups: dict[str, Any] = {machine.congestion_default(): _distributed.group.WORLD}
        if network is not None and congestion not in groups:
            with ThreadPoolExecutor(1) as thread:  # it ends in the namespace
                name = thread.submit(namespace.enter_network, network, congestion).result()
                groups[name] = thread.submit(_distributed.new_group, backend="gloo").result()
        yield groups
    finally:
        _distributed.destroy_process_group()
