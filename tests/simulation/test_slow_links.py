"""Links on which one segment takes longer than any deadline: slow is not dead."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import Descriptor
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.master_server import MasterServer
from pccl.runtime.requests import PeerOptions, ReduceRequest
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.process import MASTER_ADDRESS, ProcessClock
from pccl.transports.base import Address
from pccl.transports.sim.network import SimNetwork

TIMING = Timing(tick_s=0.05, lane_stall_s=1.0, progress_s=3.0)
BYTES_PER_S = 20_000
"""Each way between the two, for all lanes together."""
SEGMENT_BYTES = 128 << 10
"""Takes six seconds at least: twice as long as nothing may move."""
LIMIT_NS = 400 * 10**9


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_broadcast_over_slow_lanes(lanes: int) -> None:
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

    async def take_part(engine: PeerEngine, root: bool) -> None:
        await engine.connect(min_peers=2)
        await barriers(engine, 2)
        lanes_before = [lane for link in engine.links.all() for lane in link.lanes]
        assert len(lanes_before) == lanes
        buffer = values.copy() if root else np.zeros_like(values)
        began_s = loop.time()
        descriptor = Descriptor.broadcast(DataType.INT32, buffer.size, 0)
        report = await engine.reduce(ReduceRequest(borrow(buffer), descriptor, 7))
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
            await engine.reduce(ReduceRequest(borrow(tiny), descriptor, tag))

    async def main() -> None:
        host = network.host("master")
        clock = ProcessClock(loop, host)
        nonces = Random(2).randbytes
        master = MasterServer(clock, host, TIMING, nonces, lambda event, effects: None, None)
        await master.start(MASTER_ADDRESS)
        engines: list[PeerEngine] = []
        for index in range(2):
            host = network.host(f"peer{index}")
            options = PeerOptions(
                TIMING,
                Address("", 0),
                lanes=lanes,
                segment_bytes=SEGMENT_BYTES,
                random_bytes=Random(index).randbytes,
            )
            clock = ProcessClock(loop, host)
            engines.append(PeerEngine(loop, clock, host, MASTER_ADDRESS, 0, options))
        first = loop.create_task(take_part(engines[0], True))
        second = loop.create_task(take_part(engines[1], False))
        await first
        await second
        for engine in engines:
            await engine.close()
        master.close()

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert all(np.array_equal(result, values) for result in results)
    assert all(seconds > 2 * TIMING.progress_s for seconds in took_s)
