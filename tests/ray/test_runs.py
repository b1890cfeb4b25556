"""Runs in a Ray cluster whose nodes come and go: training goes on, and all peers end equal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pccl.inquiry import master_status
from tests.ray.conftest import PAUSE_S, PEER, RayCluster, Watched
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

if find_spec("ray") is None:
    pytest.skip("pip install -e '.[ray]'", allow_module_level=True)

from pccl.bindings.ray import RayRun
from tests.ray import work

SECRET = "a long secret of the tests"


def place_of(run: RayRun, slot: int) -> str:
    """Return the node on which the peer of a slot runs; wait until it does."""
    until(lambda: run.peers()[slot].node is not None, LIMIT_S, PAUSE_S)
    return str(run.peers()[slot].node)


def test_nodes_processes_and_the_master_go_and_come(cluster: RayCluster, watched: Watched) -> None:
    """Training goes on, and all peers end equal. The master starts again at its address."""
    with RayRun(work.reduce, peers=3, options=PEER, token=SECRET) as run:
        watched.all_see(0, 1, 2)
        assert len({peer.node for peer in run.peers()}) == 3
        cluster.remove(place_of(run, 1))
        watched.all_see(0, 2)
        cluster.nodes.append(cluster.add())
        os.kill(watched.pid(2), signal.SIGKILL)
        until(lambda: [peer.starts for peer in run.peers()] == [1, 2, 2], LIMIT_S, PAUSE_S)
        watched.all_see(0, 1, 2)
        first = cluster.pid_of("MasterActor")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: cluster.pid_of("MasterActor") not in (None, first), LIMIT_S, PAUSE_S)
        until(lambda: _members(run.master) == 3, LIMIT_S, PAUSE_S)
        watched.end()
        assert len(set(run.wait(LIMIT_S))) == 1
        assert [peer.starts for peer in run.peers()] == [1, 2, 2]


def _members(master: str) -> int:
    try:
        return len(master_status(master, token=SECRET).members)
    except Exception:  # noqa: BLE001  it starts just now
        return 0


def test_peers_hand_over_their_steps(cluster: RayCluster, watched: Watched) -> None:
    """Of a node that drains, which another node replaces; then of all, when the run is stopped."""
    with RayRun(work.train, peers=2, options=PEER) as run:
        watched(lambda said: all(said.get(slot, {}).get("made", 0) > 5 for slot in (0, 1)))
        node = place_of(run, 1)
        cluster.drain(node)
        until(lambda: run.peers()[1].starts == 2, LIMIT_S, PAUSE_S)
        left = watched.left()
        assert left.keys() == {1}
        assert left[1]["averaged"] == left[1]["made"] > 5
        assert place_of(run, 1) != node
        watched(lambda said: said[1]["pid"] != left[1]["pid"] and said[1]["made"] > 5)
        run.stop()
    ends = watched.left()
    assert all(end["averaged"] == end["made"] > 5 for end in ends.values())
    assert ends[0]["model"] == ends[1]["model"] != left[1]["model"]
    cluster.remove(node)


def test_failures_in_a_row_end_the_run(cluster: RayCluster, tmp_path: Path) -> None:
    """First the process of the peer dies, then the program raises."""
    mark = {"MARK": str(tmp_path / "mark")}
    with RayRun(work.fail, peers=1, options=PEER, failures_max=1, environment=mark) as run:
        with pytest.raises(ValueError, match="a mistake in the program") as raised:
            run.wait(LIMIT_S)
        assert run.peers()[0].starts == 2
    assert 'raise ValueError("a mistake in the program")' in str(raised.value)


DRIVER = f"""
import sys
import ray
from pccl.bindings.ray import RayRun
from tests.ray import work
ray.init(address=sys.argv[1], log_to_driver=False)
RayRun(work.reduce, peers=2, options={PEER!r}, name="run", master=sys.argv[2], token={SECRET!r})
"""


def test_a_run_with_a_name_outlives_its_driver(cluster: RayCluster, watched: Watched) -> None:
    """Its master is outside; another program attaches, and gets the results."""
    pccl: Any = import_module("pccl")
    host = import_module("ray").util.get_node_ip_address()
    with pccl.MasterNode(f"{host}:0", token=SECRET) as master:
        command = [sys.executable, "-c", DRIVER, cluster.address, master.address]
        subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S, capture_output=True)
        watched.all_see(0, 1)
        run = RayRun.attach("run")
        assert run.master == master.address
        watched.end()
        assert len(set(run.wait(LIMIT_S))) == 1
        run.stop()
    with pytest.raises(ValueError, match="run"):
        RayRun.attach("run")


def test_no_peer_outlives_its_supervisor(cluster: RayCluster, watched: Watched) -> None:
    run = RayRun(work.wait, peers=1, options=PEER)
    watched(lambda said: 0 in said)
    supervisor = cluster.pid_of("Supervisor")
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{watched.pid(0)}"), LIMIT_S, PAUSE_S)
    run.stop()
