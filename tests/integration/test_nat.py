"""Peers behind real address translators: how they reach each other, and that they work together.

The second peer joins after the first, which is the elder.
"""

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


def elder_public(nets: NatNetworks) -> Sequence[str]:
    return nets.public()[0], nets.inside(nets.home(is_symmetric=True))


def younger_public(nets: NatNetworks) -> Sequence[str]:
    return nets.inside(nets.home(is_symmetric=True)), nets.public()[0]


NAMES = ("alice", "bob")
OPEN_A_PORT = "open a port of one of them, or switch on port mapping: docs/two-machines.md"
NEITHER = "neither peer 1 (alice) nor peer 2 (bob) can be dialled"
DIALLED_BACK = (
    "dialled back: peer 1 (alice) cannot be dialled, so it has dialled peer 2 (bob); "
    "open a port of peer 1 (alice): then peers that cannot be dialled reach it, too"
)
PUNCHED = f"punched: {NEITHER}; for several connections, {OPEN_A_PORT}"
RELAYED = (
    f"relayed by the master: {NEITHER}, and simultaneous open has not succeeded; {OPEN_A_PORT}"
)


@pytest.mark.parametrize(
    ("where", "path"),
    [
        (elder_public, "direct"),
        (younger_public, DIALLED_BACK),
        (one_home, "direct"),
        (two_homes, PUNCHED),
        (one_symmetric, RELAYED),
        (two_symmetric, RELAYED),
    ],
)
def test_two_peers_work_together(where: Callable[[NatNetworks], Sequence[str]], path: str) -> None:
    with NatNetworks() as nets:
        host, address = nets.public()
        master, peers = f"{address}:48148", where(nets)
        command = [sys.executable, "-m", "pccl.cli.main", "master", "--listen", master, "--relay"]
        started = [spawn(host, command)]
        try:
            for place, peer in enumerate(peers):
                command = [sys.executable, str(PEER), master, str(len(peers)), str(place), path]
                started.append(spawn(peer, command, PCCL_NAME=NAMES[place]))
            outputs = [one.communicate(timeout=LIMIT_S)[0] for one in started[1:]]
        finally:
            for one in started:
                one.kill()
                one.communicate()
    ends = [text.splitlines()[-1:] for text in outputs]
    assert ends == [["the state is that of rank 0"]] * len(outputs), outputs


def spawn(namespace: str, command: Sequence[str], **settings: str) -> subprocess.Popen[str]:
    set_up = [f"{name}={value}" for name, value in {**TOKEN, **settings}.items()]
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, "env", f"PYTHONPATH={ROOT}", *set_up, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
