"""Lines that data fills, with one queue for data and control, as in the router of a home."""

from __future__ import annotations

import numpy as np
import pytest

from pccl.errors import CollectiveAborted
from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import Descriptor, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import ReduceRequest
from tests.support.virtual_runs import VirtualRun

NETWORK = {
    "latency_ns": 20_000_000, "ragged": False, "bytes_per_s": None, "window_bytes": 256 << 10
}  # fmt: skip
COUNT = 1 << 20
"""Float32 values: 4 MiB."""
QUEUE_S = 1.0
PEERS = 4


def lines(mbit_per_s: int) -> VirtualRun:
    """Four peers, each with one line: ten times as fast down as up; links have many lanes."""
    run = VirtualRun([0] * PEERS, NETWORK, limit_s=4000)
    up = mbit_per_s * 125_000
    for host in run.hosts:
        run.network.set_port(host.name, up=up, down=10 * up, buffer_bytes=int(QUEUE_S * up))
    return run


async def reduce(engine: PeerEngine, value: float) -> None:
    own = np.full(COUNT, value, np.float32)
    what = Descriptor(DataType.FLOAT, ReduceOp.SUM, COUNT)
    await engine.reduce(ReduceRequest(borrow(own), ReduceCall(0, 7, what)))
    assert (own == 10).all()


@pytest.mark.parametrize("mbit_per_s", [1, 10])
def test_reduces_take_the_time_of_their_bytes_and_nobody_is_removed(mbit_per_s: int) -> None:
    run = lines(mbit_per_s)
    took_s: list[float] = []

    async def main() -> None:
        await run.start()
        for _ in range(2):
            began_s = run.loop.time()
            await run.all([reduce(engine, n + 1) for n, engine in enumerate(run.engines)])
            took_s.append(run.loop.time() - began_s)
        assert len(run.master.machine.membership.roster(0).members) == PEERS
        await run.close()

    run.run_test(main())
    bytes_s = 2 * (PEERS - 1) / PEERS * 4 * COUNT / (mbit_per_s * 125_000)
    assert took_s[0] < bytes_s + 2 * QUEUE_S  # it dials lanes too
    assert took_s[1] < 1.05 * bytes_s


@pytest.mark.parametrize("mbit_per_s", [1, 10])
@pytest.mark.parametrize("how", ["killed", "cut off", "frozen"])
def test_a_loss_is_settled_in_time_while_data_fills_the_lines(how: str, mbit_per_s: int) -> None:
    run, timing = lines(mbit_per_s), Timing()
    ended_s: list[float] = []

    def lose() -> None:
        lost = run.hosts[PEERS - 1]
        if how == "frozen":
            lost.freeze()
        else:
            lost.crash(silent=how == "cut off")

    async def fails(engine: PeerEngine, value: float) -> None:
        with pytest.raises(CollectiveAborted):
            await reduce(engine, value)
        ended_s.append(run.loop.time())

    async def main() -> None:
        await run.start()
        lost_s = run.loop.time() + 10 / mbit_per_s
        run.loop.call_at_ns(round(lost_s * 1e9), lose)
        doomed = run.loop.create_task(reduce(run.engines[-1], PEERS))
        await run.all([fails(engine, n + 1) for n, engine in enumerate(run.engines[:-1])])
        assert len(ended_s) == PEERS - 1
        assert max(ended_s) - lost_s < timing.deadline_s + 2
        doomed.cancel()
        await run.close()

    run.run_test(main())
