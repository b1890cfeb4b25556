"""A small reduce beside a large one, over slow links: nobody waits for the other's end."""

from __future__ import annotations

from random import Random

import numpy as np

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import Algorithm, Descriptor, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import JoinRequest, ReduceRequest
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.sim.network import SimNetwork
from tests.support.virtual_runs import run_peers

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

    async def take_part(engine: PeerEngine, _: int) -> None:
        await engine.connect(JoinRequest(min_peers=PEERS))
        began_s = loop.time()
        large = engine.launch(request(1, LARGE_BYTES, Algorithm.RING))
        small = engine.launch(request(2, SMALL_BYTES, Algorithm.AUTO))
        assert len((await engine.finish(small)).contributors) == PEERS
        small_s = loop.time() - began_s
        assert len((await engine.finish(large)).contributors) == PEERS
        took_s.append((small_s, loop.time() - began_s))

    run_peers(network, loop, TIMING, PEERS, take_part, segment_bytes=16 << 10)
    assert len(took_s) == PEERS
    for small_s, large_s in took_s:
        # Each peer sends 1.5 times the tensor: 4.5 s at the rate of its link, for the large one.
        assert 4.5 < large_s < 5.5
        # Six hops, each behind no more than a window and a segment of the other one: 0.13 s a hop.
        assert small_s < 1.0


def request(tag: int, nbytes: int, algorithm: Algorithm) -> ReduceRequest:
    values = np.ones(nbytes // 4, np.float32)
    forced = algorithm is not Algorithm.AUTO
    descriptor = Descriptor(
        DataType.FLOAT, ReduceOp.SUM, values.size, algorithm=algorithm, forced=forced
    )
    return ReduceRequest(borrow(values, np.empty_like(values)), ReduceCall(0, tag, descriptor))
