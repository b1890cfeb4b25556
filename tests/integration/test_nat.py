"""Peers behind real address translators: how they reach each other, and that they work together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from tests.support.nat_networks import NatNetworks
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S

PEER = ROOT / "tests/integration/nat_peer.py"
TOKEN = {"PCCL_TOKEN": "a secret that all members know"}


def one_home(nets: NatNetworks) -> Sequence[str]:
    home = nets.home()
    return nets.inside(home), nets.inside(home)


def two_homes(nets: NatNetworks) -> Sequence[str]:
    return nets.inside(nets.home()), nets.inside(nets.home())


def one_symmetric(nets: NatNetworks) -> Sequence[str]:
    return nets.inside(nets.home()), nets.inside(nets.home(is_symmetric=True))


def two_symmetric(nets: NatNetworks) -> Sequence[str]:
    return tuple(nets.inside(nets.home(is_symmetric=True)) for _ in range(2))


def one_public(nets: NatNetworks) -> Sequence[str]:
    return nets.public()[0], nets.inside(nets.home(is_symmetric=True))


@pytest.mark.parametrize(
    ("where", "path"),
    [
        (one_public, "direct"),
        (one_home, "direct"),
        (two_homes, "punched"),
        (one_symmetric, "relayed"),
        (two_symmetric, "relayed"),
    ],
)
def test_two_peers_work_together(where: Callable[[NatNetworks], Sequence[str]], path: str) -> None:
    with NatNetworks() as nets:
        host, address = nets.public()
        master, peers = f"{address}:48148", where(nets)
        command = [sys.executable, "-m", "pccl.cli.main", "master", "--listen", master, "--relay"]
        started = [spawn(host, command)]
        try:
            command = [sys.executable, str(PEER), master, str(len(peers)), path]
            started += [spawn(peer, command) for peer in peers]
            outputs = [one.communicate(timeout=LIMIT_S)[0] for one in started[1:]]
        finally:
            for one in started:
                one.kill()
                one.communicate()
    assert {line for text in outputs for line in text.splitlines() if line.startswith(path)} == {
        f"{path}, and the state is that of rank 0"
    }, outputs


def spawn(namespace: str, command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, "env", f"PYTHONPATH={ROOT}", *set_up(), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def set_up() -> list[str]:
    return [f"{name}={value}" for name, value in TOKEN.items()]
