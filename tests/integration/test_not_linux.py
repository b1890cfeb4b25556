"""A run on a system without what only Linux has. It is no test on macOS, but of the same paths."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.support.commands import PCCL, environment_with
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S

PEER = """
    import os, sys
    import numpy as np
    import pccl

    assert sys.platform == "darwin" and not os.path.exists("/proc/self/nothing")
    with pccl.Communicator() as comm:
        comm.connect(min_peers=3)
        values = np.full(1 << 18, float(comm.rank), np.float32)
        state = pccl.SharedState([pccl.TensorInfo.from_numpy(values, "values")])
        comm.all_reduce(values)
        comm.sync_shared_state(state)
        assert (values == 3).all()
        if comm.rank == 1:
            os._exit(7)
        left = comm.all_reduce(values, retry=True).contributors
        print("sum", *sorted({float(value) for value in values}), "of", len(left))
"""


def test_peers_reduce_synchronize_and_survive() -> None:
    paths = f"{ROOT / 'tests' / 'support' / 'not_linux'}:{ROOT}"
    command = (sys.executable, "-W", "error", "-c", textwrap.dedent(PEER))
    ended = subprocess.run(
        [*PCCL, "launch", "-n", "3", "--", *command],
        env=environment_with(PYTHONPATH=paths, PCCL_LOG="warning"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 7, ended.stderr
    sums = [line.partition("] ")[2] for line in ended.stdout.splitlines() if "sum" in line]
    assert sums == ["sum 6.0 of 2"] * 2
    assert "failed: exit code 7" in ended.stderr
