"""Many open tags: the work grows with their number, not its square, and one line counts them."""

from __future__ import annotations

import sys
from random import Random
from types import FrameType

import numpy as np

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import Descriptor, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import JoinRequest, ReduceRequest
from pccl.stress.sim.loop import VirtualLoop
from pccl.telemetry.events import Waiting
from pccl.telemetry.stream import Stamped
from pccl.transports.sim.network import SimNetwork
from tests.support.virtual_runs import run_peers

TIMING = Timing()
SUM_OF_4 = Descriptor(DataType.FLOAT, ReduceOp.SUM, 4)
LATE_S = 45
"""So much later the second peer calls: the first one waits through reports at 2, 4, ... 32 s."""


def reduce_in_opposite_order(count: int) -> list[Waiting]:
    """Two peers; the second one calls for the same tags later, the last one first.

    Returns:
        What the first one has reported of its waits.
    """
    reports: list[Waiting] = []

    def hear(stamped: Stamped) -> None:
        if isinstance(stamped.event, Waiting):
            reports.append(stamped.event)

    loop = VirtualLoop(limit_ns=10**12)
    network = SimNetwork(loop, Random(1), None, latency_ns=1_000_000, ragged=False)
    arrays = [[np.full(4, 1.0, np.float32) for _ in range(count)] for _ in range(2)]

    async def take_part(engine: PeerEngine, index: int) -> None:
        await engine.connect(JoinRequest(min_peers=2))
        if index == 0:
            engine.events.listen(hear)
        woken = loop.create_future()
        loop.call_at_ns((1 + index * LATE_S) * 10**9, woken.set_result, None)
        await woken
        tags = range(count) if index == 0 else reversed(range(count))
        tickets = [
            engine.launch(ReduceRequest(borrow(arrays[index][tag]), ReduceCall(0, tag, SUM_OF_4)))
            for tag in tags
        ]
        for ticket in tickets:
            await engine.finish(ticket)
            engine.calls.forget(ticket)

    run_peers(network, loop, TIMING, 2, take_part)
    assert all(array.tolist() == [2.0] * 4 for mine in arrays for array in mine)
    return reports


def python_calls_of(count: int) -> int:
    """How many Python functions the library calls for so many tags, in virtual time."""
    calls = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and "pccl" in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        reduce_in_opposite_order(count)
    finally:
        sys.setprofile(before)
    return calls


def test_the_work_does_not_grow_with_the_square_of_the_open_tags() -> None:
    few, many = python_calls_of(100), python_calls_of(400)
    assert many < 5 * few


def test_one_report_counts_what_waits() -> None:
    reports = reduce_in_opposite_order(300)
    assert {(one.call, one.others) for one in reports} == {("tag 0 (SUM of 4 x float32)", 299)}
    assert [one.waited_s for one in reports] == [2, 4, 8, 16, 32]
    assert all(one.waits_for.startswith("peer 2 at ") for one in reports)
