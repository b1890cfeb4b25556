"""Ray, of which no release types all that is used here, and its list of draining nodes."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any

try:
    ray: Any = import_module("ray")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "pccl.bindings.ray needs Ray: pip install 'pccl[ray]'", name=error.name
    ) from error

GCS_S = 10
"""Limit of a question to Ray's control service, in seconds."""


def draining_nodes() -> Collection[str]:
    """Return the ids of the nodes that Ray will soon remove. Blocks.

    No public function of Ray tells this; Ray Serve asks the same client.
    """
    address = ray.get_runtime_context().gcs_address
    client = import_module("ray._raylet").GcsClient(address=address)
    nodes: dict[str, int] = client.get_draining_nodes(timeout=GCS_S)
    return nodes.keys()


def is_alive(node: str) -> bool:
    """Whether the cluster still has this node. Blocks."""
    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())


def on_node(node: str) -> Any:
    """Return the scheduling strategy that places an actor on a node, and nowhere else."""
    strategies = import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(node, soft=False)
