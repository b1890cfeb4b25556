"""A network of sites with real namespaces: values only, no times."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.patience import LIMIT_S

MATRIX = """
sites = ["a", "b", "c"]
link = "rate=200mbit,rtt=4ms,flow=100mbit,jitter=1ms"
[ports]
c = "up=100mbit,down=150mbit"
"""

PEER = """
import os, sys
from pccl.stress.emulator.sites import enter_site
enter_site(sys.argv[1])
import numpy as np
import pccl
with pccl.Communicator(sys.argv[2]) as comm:
    comm.connect(min_peers=3)
    own = comm.rank
    for algorithm in ("ring", "mesh"):
        out = np.empty(300_000, np.float32)
        comm.all_reduce(np.full(300_000, 1 << own, np.float32), out, algorithm=algorithm)
        assert (out == 7).all()
    print(*(member.host for member in comm.members()), flush=True)
    comm.barrier()
"""

MASTER = """
import sys
from pccl.stress.emulator.sites import enter_site
enter_site(sys.argv[1])
import pccl
with pccl.MasterNode(sys.argv[2] + ":0") as node:
    print(node.address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Name, address and namespace of each site, the outside last."""
    path = tmp_path / "three.toml"
    path.write_text(MATRIX)
    command = [sys.executable, "-m", "pccl.stress", "sites", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        found = [run.stdout.readline().split() for _ in range(4)]
        if not found[-1]:
            error = run.stderr.read()
            assert re.search("needs Linux, root and /dev/net/tun", error), error
            pytest.skip("this system does not let tests make a namespace with an interface")
        try:
            yield found
        finally:
            run.terminate()
            assert "dropped" in run.stdout.read()
    assert run.returncode == 0


def test_peers_at_three_sites_reduce(lines: list[list[str]]) -> None:
    assert [line[:2] for line in lines] == [
        ["a", "10.77.0.1"], ["b", "10.77.0.2"], ["c", "10.77.0.3"], ["outside", "10.77.0.254"]
    ]  # fmt: skip
    program = [sys.executable, "-c"]
    master_command = [*program, MASTER, lines[3][2], lines[3][1]]
    pipe = subprocess.PIPE
    with subprocess.Popen(master_command, stdin=pipe, stdout=pipe, text=True) as master:
        assert master.stdout is not None
        address = master.stdout.readline().strip()
        commands = [[*program, PEER, line[2], address] for line in lines[:3]]
        peers = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in commands]
        said = [peer.communicate(timeout=LIMIT_S)[0] for peer in peers]
        master.communicate("", timeout=LIMIT_S)
    assert [peer.returncode for peer in peers] == [0, 0, 0]
    hosts = {line[1] for line in lines[:3]}
    assert [set(line.split()) for line in said] == [hosts] * 3
