"""A Ray cluster of several nodes on this machine, and a board for the peers of a test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

PEER = {"num_cpus": 0, "resources": {"peer": 1}}
"""Options of a peer; each node has room for one."""

NODES = 3

PAUSE_S = 0.1
"""Pause between questions to an actor, which would take all its time otherwise."""


class RayCluster:
    """A head, on which the tests run, and nodes with room for one peer each."""

    def __init__(self) -> None:
        fast = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
        head = {
            "num_cpus": 2,
            "include_dashboard": False,
            "include_log_monitor": False,
            "_system_config": fast,
        }
        cluster = import_module("ray.cluster_utils").Cluster
        self._ray: Any = import_module("ray")
        self._cluster = cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add() for _ in range(NODES)]
        self._ray.init(address=self._cluster.address, log_to_driver=False)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, resources={"peer": 1})

    def drain(self, node_id: str) -> None:
        """Announce that a node will be removed, as ``ray drain-node`` does."""
        client = import_module("ray._raylet").GcsClient(address=self.address)
        reasons: Any = import_module("ray.core.generated.autoscaler_pb2").DrainNodeReason
        reason = reasons.Value("DRAIN_NODE_REASON_PREEMPTION")
        assert client.drain_node(node_id, reason, "test", 0)[0]

    def remove(self, node_id: str) -> None:
        (node,) = (one for one in self.nodes if one.node_id == node_id)
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def pid_of(self, title: str) -> int | None:
        """Return the process id of an actor on the head, by the title that Ray gives it."""
        raylet = self._cluster.head_node.all_processes["raylet"][0].process.pid
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
                with open(f"/proc/{name}/cmdline") as file:
                    is_it = file.read().startswith(f"ray::{title}")
            except OSError:
                continue  # it has ended meanwhile
            if parent == raylet and is_it:
                return int(name)
        return None

    def close(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    if find_spec("ray") is None:
        pytest.skip("pip install -e '.[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # Ray's workers import the tests
        patch.setenv("RAY_AUTH_MODE", "disabled")  # write no secret into the home directory
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # beside other work, actors would hardly run
        made = RayCluster()
        yield made
        made.close()


class Watched:
    """The board of a test."""

    def __init__(self, ray: Any, board: Any) -> None:
        self._ray, self._board = ray, board

    def __call__(self, wanted: Callable[[dict[int, dict[str, Any]]], bool]) -> None:
        """Wait until what the peers report is as wanted."""
        until(lambda: wanted(self._ray.get(self._board.reports.remote())), LIMIT_S, PAUSE_S)

    def all_see(self, *members: int) -> None:
        """Wait until all these slots, and no others, reduce with each other."""
        self(lambda said: all(said.get(n, {}).get("members") == len(members) for n in members))

    def pid(self, slot: int) -> int:
        return int(self._ray.get(self._board.reports.remote())[slot]["pid"])

    def left(self) -> dict[int, dict[str, Any]]:
        left: dict[int, dict[str, Any]] = self._ray.get(self._board.left.remote())
        return left

    def end(self) -> None:
        self._ray.get(self._board.end.remote())


@pytest.fixture
def watched(cluster: RayCluster) -> Iterator[Watched]:
    from pccl.bindings.ray.library import on_node
    from tests.ray.work import BOARD, Board

    ray = import_module("ray")
    head = ray.get_runtime_context().get_node_id()
    options: dict[str, Any] = {"name": BOARD, "namespace": BOARD, "num_cpus": 0}
    options["scheduling_strategy"] = on_node(head)
    board = ray.remote(Board).options(**options).remote()
    yield Watched(ray, board)
    ray.kill(board)
