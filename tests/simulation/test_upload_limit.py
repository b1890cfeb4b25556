"""Whole runs with an upload limit, in virtual time: slow but steady is not dead."""

from __future__ import annotations

import numpy as np
import pytest

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Descriptor, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.control.greeting import encryption
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import ReduceInfo, ReduceRequest
from tests.support.clear import in_the_clear
from tests.support.virtual_runs import VirtualRun

LIMIT = 64_000
"""The lowest limit."""
COUNT = 1 << 20
ONCE = 20_000
"""What may go at once, beyond the limit."""


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])
@pytest.mark.parametrize("peers", [2, 3])
def test_a_reduce_with_the_lowest_limit(peers: int, encrypted: bool) -> None:
    """All deadlines are those of real runs. Each lane has a small part of the limit."""
    run = VirtualRun(
        [0] * peers,
        {"latency_ns": 20_000_000},
        encrypts=encryption(always=True) if encrypted else in_the_clear,
        upload_bytes_per_s_max=LIMIT,
    )
    values = np.arange(COUNT, dtype=np.int32)

    def reduce(engine: PeerEngine, count: int = COUNT) -> ReduceRequest:
        buffer = values[:count].copy()
        descriptor = Descriptor(DataType.INT32, ReduceOp.SUM, count)
        return ReduceRequest(borrow(buffer), ReduceCall(0, 7, descriptor))

    async def main() -> None:
        await run.start()
        await run.all([engine.reduce(reduce(engine, 1000)) for engine in run.engines])
        await run.sleep(5.0)
        lanes = [[link.lanes for link in engine.links.all()] for engine in run.engines]
        began_ns = run.loop.now_ns()
        requests = [reduce(engine) for engine in run.engines]
        before = [_sent_bytes(engine) for engine in run.engines]
        infos: list[ReduceInfo] = await run.all(
            [engine.reduce(one) for engine, one in zip(run.engines, requests, strict=True)]
        )
        seconds = (run.loop.now_ns() - began_ns) / 1e9
        assert [info.attempts for info in infos] == [1] * peers
        for engine, sent in zip(run.engines, before, strict=True):
            assert _sent_bytes(engine) - sent <= LIMIT * seconds + ONCE
        payload = infos[0].tx_bytes
        assert payload / LIMIT - 1 < seconds < 1.15 * payload / LIMIT + 1, "it uses the limit"
        assert [[link.lanes for link in engine.links.all()] for engine in run.engines] == lanes
        assert sum(len(link) for link in lanes[0]) >= 16
        await run.close()

    run.run_test(main())


def _sent_bytes(engine: PeerEngine) -> int:
    links = engine.ended_lanes.sent_bytes + engine.control_traffic.sent_bytes
    return links + sum(lane.sent_bytes for link in engine.links.all() for lane in link.lanes)
