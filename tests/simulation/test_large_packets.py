"""Large segments vanish on one way of a link: how long it takes until it has smaller ones.

No call fails meanwhile, and none is repeated. Connections to the master have small ones at once.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, Descriptor, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import ReduceRequest
from pccl.stress.sim.runner import run_seed
from pccl.telemetry.events import LargePacketsLost
from tests.support.virtual_runs import VirtualRun

TIMING = Timing()


async def reduce(engine: PeerEngine, count: int) -> tuple[int, int]:
    values = np.full(count, engine.machine.peer, np.int64)
    descriptor = Descriptor(DataType.INT64, ReduceOp.SUM, count)
    info = await engine.reduce(ReduceRequest(borrow(values, values), ReduceCall(0, 0, descriptor)))
    assert values.min() == values.max()
    return int(values[0]), info.attempts


@pytest.mark.parametrize(
    ("largest_bytes", "passes", "sends", "expected_s"),
    [
        (1400, 1200, True, 16.0),
        (1200, 1200, True, 16.0),
        (1199, 536, True, 21.8),
        (1400, 1200, False, 16.0),
        (1199, 536, False, 21.8),
    ],
)
@pytest.mark.parametrize("count", [10_000, 50_000])
def test_a_link_gets_smaller_segments(
    largest_bytes: int, passes: int, sends: bool, expected_s: float, count: int
) -> None:
    """A stuck lane costs ``lane_stall_s``, or from half of it on if lanes are under suspicion.

    ``sends``: whether large packets of the side that dials vanish, or those of the other side;
    ``count``: elements of a reduce; 50,000 fill the send window.
    """
    run = VirtualRun([0, 0], {"latency_ns": 1_000_000}, lanes=1)
    elder, younger = run.engines
    took_s: list[float] = []

    async def main() -> None:
        await run.start()
        for n in range(40):
            began_ns = run.loop.now_ns()
            if n == 3:
                way = ("p1", "p0") if sends else ("p0", "p1")
                run.network.route(*way).largest_bytes = largest_bytes
            works = [reduce(engine, count) for engine in run.engines]
            assert await run.all(works) == [(3, 1)] * 2
            took_s.append((run.loop.now_ns() - began_ns) / NS_PER_S)
        await run.close()

    run.run_test(main())
    assert [elder.machine.peer, younger.machine.peer] == [1, 2], "the younger one dials"
    told = [one.event for one in younger.events.kept if isinstance(one.event, LargePacketsLost)]
    assert [(one.peer_id, one.segment_bytes) for one in told] == [(1, passes)]
    slow = [seconds for seconds in took_s if seconds > 1]
    assert slow == [pytest.approx(expected_s, abs=2 * TIMING.tick_s)]
    assert slow[0] < TIMING.progress_s


@pytest.mark.parametrize(("bytes_per_s", "pause_s"), [(30_000, 0.3), (125_000, 0.2)])
def test_two_outages_in_a_row_are_no_black_hole(bytes_per_s: int, pause_s: float) -> None:
    """The second one stops a lane that is just new; it ends before the lane would be replaced."""
    wire = {"latency_ns": 20_000_000, "bytes_per_s": bytes_per_s}
    run = VirtualRun([0, 0], wire, lanes=1)

    async def main() -> None:
        await run.start()
        for outage in (False, False, True):
            began_ns = run.loop.now_ns()
            if outage:
                run.network.stall("p0", "p1", 10_600_000_000)
                again = partial(run.network.stall, "p0", "p1", 7 * NS_PER_S)
                run.loop.call_later(10.6 + pause_s, again)
            works = [reduce(engine, 50_000) for engine in run.engines]
            assert await run.all(works) == [(3, 1)] * 2
        assert run.loop.now_ns() - began_ns > 17.6 * NS_PER_S
        await run.close()

    run.run_test(main())
    for engine in run.engines:
        assert not [one for one in engine.events.kept if isinstance(one.event, LargePacketsLost)]


def test_large_packets_vanish_between_the_master_and_a_peer() -> None:
    """What the master sends to so many peers at once is larger than a segment."""
    run = VirtualRun([0] * 16, {"latency_ns": 1_000_000}, name="long-name-" * 6)
    for way in (("p15", "master"), ("master", "p15")):
        run.network.route(*way).largest_bytes = 1250

    async def main() -> None:
        await run.start()
        works = [reduce(engine, 1000) for engine in run.engines]
        assert await run.all(works) == [(sum(range(1, 17)), 1)] * 16
        assert run.loop.now_ns() < 2 * NS_PER_S
        await run.close()

    run.run_test(main())


@pytest.mark.parametrize("seed", [52, 54, 1196])
def test_what_the_seeds_have_found(seed: int) -> None:
    """A request for shared state that was sent again and again made its lane look alive.

    1196: the sender, who dials, had handed its answer to the kernel, and did not look any more.
    """
    verdict = run_seed(seed)
    assert verdict.violation is None
    assert verdict.done["lane stuck"] > 0
