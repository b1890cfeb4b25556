"""How many trips a small reduction takes: in virtual time nothing but the network takes any."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import EAGER_BYTES_MAX, Timing
from pccl.protocol.types import Algorithm, Collective, Descriptor, ReduceOp
from pccl.runtime.collective.block_operand import borrow_blocks
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import JoinRequest, ReduceRequest
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.sim.network import SimNetwork
from tests.support.virtual_runs import run_peers

TIMING = Timing()
TRIP_NS = 5_000_000
COUNT = 1024
RING = Algorithm.RING


@pytest.mark.parametrize(
    ("peers", "algorithm", "eager_bytes_max", "trips"),
    [
        (2, RING, EAGER_BYTES_MAX, [6, 4, 4]),  # the first one in a view waits for its start
        (2, RING, 0, [6, 6, 6]),
        (2, RING, 4 * COUNT - 1, [6, 6, 6]),
        (4, RING, EAGER_BYTES_MAX, [10, 8, 8]),  # six steps of a ring
        (4, Algorithm.STAR, EAGER_BYTES_MAX, [6, 4, 4]),
        (4, Algorithm.MESH, EAGER_BYTES_MAX, [6, 4, 4]),
    ],
)
def test_trips(peers: int, algorithm: Algorithm, eager_bytes_max: int, trips: list[int]) -> None:
    assert trips_of(peers, algorithm, eager_bytes_max) == [trips] * peers


def test_near_members_announce_a_large_tensor_early() -> None:
    """They take the way of a small one, which is sent early."""
    assert trips_of(3, RING, 4 * COUNT - 1, near=True) == [[8, 6, 6]] * 3
    assert trips_of(3, RING, 4 * COUNT - 1) == [[8, 8, 8]] * 3


def test_parts_of_a_reduction() -> None:
    reduce, scatter = Collective.REDUCE, Collective.REDUCE_SCATTER
    assert trips_of(3, Algorithm.MESH, EAGER_BYTES_MAX, reduce) == [[6, 4, 4]] * 3
    assert trips_of(3, Algorithm.MESH, EAGER_BYTES_MAX, scatter) == [[5, 3, 3]] * 3
    assert trips_of(3, Algorithm.MESH, 0, scatter) == [[5, 5, 5]] * 3


def trips_of(
    peers: int,
    algorithm: Algorithm,
    eager_bytes_max: int,
    collective: Collective = Collective.ALL_REDUCE,
    *,
    near: bool = False,
) -> list[list[int]]:
    """Of each peer, the trips of three reductions, one after the other."""
    loop = VirtualLoop(limit_ns=10**11)
    network = SimNetwork(
        loop,
        Random(1),
        None,
        latency_ns=TRIP_NS,
        bytes_per_s=None,
        window_bytes=1 << 20,
        ragged=False,
    )
    if near:
        network.memories.machines = {f"peer{index}": "m" for index in range(peers)}
    took: dict[int, list[int]] = {}

    async def take_part(engine: PeerEngine, index: int) -> None:
        await engine.connect(JoinRequest(min_peers=peers))
        descriptor = Descriptor(
            DataType.FLOAT, ReduceOp.SUM, COUNT, collective, root=1, algorithm=algorithm
        )
        for n in range(3):
            now_ns = loop.now_ns()
            wait_ns = (n + 1) * 10**9 - now_ns  # all call at the same time
            await sleep(wait_ns)
            values = np.full(COUNT, 2.0**index, np.float32)
            result, operand, buffers = values, None, None
            if collective is Collective.REDUCE_SCATTER:
                result = np.empty(len(np.array_split(values, peers)[index]), np.float32)
                operand, buffers = borrow_blocks(values, result)
            call = ReduceCall(0, 7, descriptor, buffers=buffers)
            await engine.reduce(ReduceRequest(operand or borrow(values), call))
            gets = collective is not Collective.REDUCE or index == descriptor.root
            assert set(result.tolist()) == {2.0**peers - 1 if gets else 2.0**index}
            took.setdefault(index, []).append(round((loop.now_ns() - now_ns - wait_ns) / TRIP_NS))

    async def sleep(wait_ns: int) -> None:
        woken = loop.create_future()
        loop.call_at_ns(loop.now_ns() + wait_ns, woken.set_result, None)
        await woken

    run_peers(network, loop, TIMING, peers, take_part, eager_bytes_max=eager_bytes_max)
    return [took[index] for index in range(peers)]
