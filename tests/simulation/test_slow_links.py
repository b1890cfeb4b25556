"""Links on which one segment takes longer than any deadline: slow is not dead."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import Descriptor
from pccl.runtime.collective.operand import borrow
from pccl.runtime.control.greeting import encryption
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import JoinRequest, ReduceRequest
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.sim.network import SimNetwork
from tests.support.clear import in_the_clear
from tests.support.virtual_runs import run_peers

TIMING = Timing(tick_s=0.05, lane_stall_s=1.0, progress_s=3.0)
BYTES_PER_S = 20_000
"""Each way between the two, for all lanes together."""
SEGMENT_BYTES = 128 << 10
"""Takes six seconds at least: twice as long as nothing may move."""
LIMIT_NS = 400 * 10**9


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_broadcast_over_slow_lanes(lanes: int, encrypted: bool) -> None:
    """The sender hears of the other side nothing but its signs of life, and no segment is complete
    before everybody's patience would have ended."""
    loop = VirtualLoop(limit_ns=LIMIT_NS)
    network = SimNetwork(
        loop,
        Random(1),
        None,
        latency_ns=50_000_000,
        bytes_per_s=BYTES_PER_S,
        window_bytes=2 << 10,
        ragged=False,
    )
    values = np.arange(lanes * SEGMENT_BYTES // 4, dtype=np.int32)
    results: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    took_s: list[float] = []

    async def take_part(engine: PeerEngine, index: int) -> None:
        await engine.connect(JoinRequest(min_peers=2))
        await barriers(engine, 2)
        root = index == 0
        lanes_before = [lane for link in engine.links.all() for lane in link.lanes]
        assert len(lanes_before) == lanes
        buffer = values.copy() if root else np.zeros_like(values)
        began_s = loop.time()
        descriptor = Descriptor.broadcast(DataType.INT32, buffer.size, 0)
        report = await engine.reduce(ReduceRequest(borrow(buffer), ReduceCall(0, 7, descriptor)))
        took_s.append(loop.time() - began_s)
        assert report.attempts == 1
        assert (report.tx_bytes, report.rx_bytes) == (
            (values.nbytes, 0) if root else (0, values.nbytes)
        )
        assert [lane for link in engine.links.all() for lane in link.lanes] == lanes_before
        results.append(buffer)

    async def barriers(engine: PeerEngine, tag: int) -> None:
        """Let the link be used, so that it gets its lanes."""
        tiny = np.zeros(1, np.int32)
        descriptor = Descriptor.broadcast(DataType.INT32, 1, 0)
        for _ in range(3):
            await engine.reduce(ReduceRequest(borrow(tiny), ReduceCall(0, tag, descriptor)))

    encrypts = encryption(always=True) if encrypted else in_the_clear
    run_peers(
        network,
        loop,
        TIMING,
        2,
        take_part,
        encrypts,
        lanes=lanes,
        segment_bytes=SEGMENT_BYTES,
    )
    assert all(np.array_equal(result, values) for result in results)
    assert all(seconds > 2 * TIMING.progress_s for seconds in took_s)
