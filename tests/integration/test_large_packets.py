"""Peers between which large packets vanish, as behind a VPN whose firewall drops ICMP."""

from __future__ import annotations

import subprocess

import pytest

from tests.integration.test_nat import spawn
from tests.support.nat_networks import NatNetworks
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S

PEER = ROOT / "tests/integration/narrow_peer.py"


SAID = "segments of {} bytes pass; lower the MTU of the VPN or tunnel between them"


@pytest.mark.parametrize(
    ("longest", "segments", "call", "result"),
    [
        (1300, 1200, "reduce", 6.0),
        (1300, 1200, "0", 1.0),  # the elder sends, and the younger has dialled
        (1000, 536, "1", 2.0),
    ],
)
def test_large_packets_vanish(
    longest: int,
    segments: int,
    call: str,
    result: float,
    ready_python: tuple[str, ...],
    ready_pccl: tuple[str, ...],
) -> None:
    with NatNetworks() as nets:
        host, address = nets.public()
        master, peers = f"{address}:48148", [nets.public()[0] for _ in range(2)]
        for peer in peers:
            nets.swallow(peer, longest)
        started: list[subprocess.Popen[str]] = []
        try:
            started.append(spawn(host, [*ready_pccl, "master", "--listen", master]))
            program = [*ready_python, str(PEER), master, call]
            command = [*ready_pccl, "join", master, "--", *program]
            started += [spawn(peer, command) for peer in peers]
            outputs = [one.communicate(timeout=LIMIT_S)[0] for one in started[1:]]
        finally:
            for one in started:
                one.kill()
                one.communicate()
    for output in outputs:
        assert f"got {result}" in output, output
    assert any(SAID.format(segments) in output for output in outputs), outputs
