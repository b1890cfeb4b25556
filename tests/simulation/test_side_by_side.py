"""A small reduce beside a large one, over slow links: nobody waits for the other's end."""

from __future__ import annotations

from random import Random

import numpy as np

from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import Descriptor, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.master_server import MasterServer
from pccl.runtime.requests import PeerOptions, ReduceRequest
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.process import MASTER_ADDRESS, ProcessClock
from pccl.transports.base import Address
from pccl.transports.sim.network import SimNetwork

PEERS = 4
BYTES_PER_S = 1_000_000
LARGE_BYTES = 3_000_000
SMALL_BYTES = 40_000
TIMING = Timing(progress_s=2.0)
LIMIT_NS = 400 * 10**9


def test_a_small_reduce_does_not_stand_still_beside_a_large_one() -> None:
    """In one queue for both, its own contributions came last and all of them stood still for so
    long that a busy sender was removed for it."""
    loop = VirtualLoop(limit_ns=LIMIT_NS)
    network = SimNetwork(
        loop,
        Random(1),
        None,
        latency_ns=10_000_000,
        bytes_per_s=BYTES_PER_S,
        window_bytes=16 << 10,
        ragged=False,
    )
    took_s: list[tuple[float, float]] = []

    async def take_part(engine: PeerEngine) -> None:
        await engine.connect(min_peers=PEERS)
        began_s = loop.time()
        large = engine.launch(request(1, LARGE_BYTES))
        small = engine.launch(request(2, SMALL_BYTES))
        assert len((await engine.finish(small)).contributors) == PEERS
        small_s = loop.time() - began_s
        assert len((await engine.finish(large)).contributors) == PEERS
        took_s.append((small_s, loop.time() - began_s))

    async def main() -> None:
        host = network.host("master")
        clock = ProcessClock(loop, host)
        master = MasterServer(
            clock, host, TIMING, Random(2).randbytes, lambda event, effects: None, None
        )
        await master.start(MASTER_ADDRESS)
        engines = [make_peer(loop, network, index) for index in range(PEERS)]
        for task in [loop.create_task(take_part(engine)) for engine in engines]:
            await task
        for engine in engines:
            await engine.close()
        master.close()

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert len(took_s) == PEERS
    for small_s, large_s in took_s:
        # Each peer sends 1.5 times the tensor: 4.5 s at the rate of its link, for the large one.
        assert 4.5 < large_s < 5.5
        # Six hops, each behind no more than a window and a segment of the other one: 0.13 s a hop.
        assert small_s < 1.0


def make_peer(loop: VirtualLoop, network: SimNetwork, index: int) -> PeerEngine:
    host = network.host(f"peer{index}")
    options = PeerOptions(
        TIMING, Address("", 0), segment_bytes=16 << 10, random_bytes=Random(index).randbytes
    )
    return PeerEngine(loop, ProcessClock(loop, host), host, MASTER_ADDRESS, 0, options)


def request(tag: int, nbytes: int) -> ReduceRequest:
    values = np.ones(nbytes // 4, np.float32)
    descriptor = Descriptor(DataType.FLOAT, ReduceOp.SUM, values.size)
    return ReduceRequest(borrow(values, np.empty_like(values)), descriptor, tag)
