"""Slow lines behind routers with long queues, which control and data share: slow is not dead."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import PCCLError
from pccl.protocol.limits import Timing
from pccl.protocol.types import Descriptor, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import ReduceInfo, ReduceRequest
from tests.support.virtual_runs import VirtualRun

MBIT = 125_000
PEERS = 4
COUNT = 1 << 18
QUEUE_BYTES = 1 << 20
"""At 1 Mbit/s it takes 8 s to empty: nearly the deadline of a silent peer."""
NETWORK = {"latency_ns": 20_000_000, "ragged": False}
LINES = [(1, 1), (1, 10), (10, 10)]


def started(up: int, down: int) -> VirtualRun:
    """Peers behind such ports, and a master with a good line."""
    run = VirtualRun([0] * PEERS, NETWORK)
    for host in run.hosts:
        run.network.set_port(host.name, up=up * MBIT, down=down * MBIT, buffer_bytes=QUEUE_BYTES)
    return run


def reduce(engine: PeerEngine) -> ReduceRequest:
    descriptor = Descriptor(DataType.FLOAT, ReduceOp.AVG, COUNT)
    return ReduceRequest(borrow(np.ones(COUNT, np.float32)), ReduceCall(0, 7, descriptor))


def queue_s(run: VirtualRun, peer: int) -> float:
    """How long a heartbeat of a peer, and one to it, would wait now."""
    host = run.hosts[peer].name
    there, back = run.network.route(host, "master"), run.network.route("master", host)
    return max(there.answer_ns - there.delay_ns, back.answer_ns - back.delay_ns) / 1e9


@pytest.mark.parametrize(("up", "down"), LINES)
def test_control_goes_before_data(up: int, down: int) -> None:
    run = started(up, down)
    queues: list[float] = []

    async def watch() -> None:
        while len(queues) < 100:
            await run.sleep(0.25)
            queues.append(max(queue_s(run, peer) for peer in range(PEERS)))

    async def main() -> None:
        await run.start()
        watching = run.loop.create_task(watch())
        began_s = run.loop.time()
        sent_bytes = 0
        for _ in range(2):
            infos: list[ReduceInfo] = await run.all(
                [engine.reduce(reduce(engine)) for engine in run.engines]
            )
            assert [(info.attempts, len(info.contributors)) for info in infos] == [(1, PEERS)] * 4
            sent_bytes = infos[0].tx_bytes
        least_s = 2 * sent_bytes / (up * MBIT)
        assert run.loop.time() - began_s < 1.35 * least_s + 2, "the line is in use"
        await watching
        lanes = [len(link.lanes) for engine in run.engines for link in engine.links.all()]
        assert lanes == [16] * PEERS * (PEERS - 1), "no handshake was late"
        await run.close()

    run.run_test(main())
    assert max(queues[8:]) < 2
    assert sum(queues[8:]) / len(queues[8:]) < 1


@pytest.mark.parametrize(("up", "down"), LINES)
@pytest.mark.parametrize("silent", [False, True], ids=["killed", "switched off"])
def test_a_death_is_settled_while_data_fills_the_lines(up: int, down: int, silent: bool) -> None:
    run = started(up, down)
    *survivors, _ = run.engines
    told_s: list[float] = []

    async def part(engine: PeerEngine) -> None:
        with pytest.raises(PCCLError, match="lost peer"):
            await engine.reduce(reduce(engine))
        told_s.append(run.loop.time())

    async def main() -> None:
        await run.start()
        await run.all([engine.reduce(reduce(engine)) for engine in run.engines])
        tasks = [run.loop.create_task(part(engine)) for engine in survivors]
        last = run.loop.create_task(run.engines[-1].reduce(reduce(run.engines[-1])))
        await run.sleep(0.3 * COUNT * 4 / (up * MBIT))
        last.cancel()
        run.hosts[-1].crash(silent=silent)
        died_s = run.loop.time()
        for task in tasks:
            await task
        deadline_s = Timing().deadline_s if silent else 0.0
        assert max(told_s) - died_s < deadline_s + 2
        infos: list[ReduceInfo] = await run.all(
            [engine.reduce(reduce(engine)) for engine in survivors]
        )
        assert [len(info.contributors) for info in infos] == [PEERS - 1] * (PEERS - 1)
        await run.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # those of the dead one
            task.cancel()
        await run.sleep(0.1)

    run.run_test(main())
