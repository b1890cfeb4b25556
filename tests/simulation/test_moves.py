"""A peer whose address changes in the middle of a run: it returns as itself, and calls go on."""

from __future__ import annotations

import numpy as np
import pytest

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, Descriptor, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import ReduceRequest
from pccl.stress.sim.faults.connections import BehindNat, Moved
from tests.support.virtual_runs import QUIET, VirtualRun, run_faults

TIMING = Timing()
RETURN_S = 2.0
"""Time to dial the master and all other peers, and to tell the new address at a heartbeat."""


async def reduce(engine: PeerEngine) -> tuple[int, int]:
    values = np.full(100, engine.machine.peer, np.int64)
    descriptor = Descriptor(DataType.INT64, ReduceOp.SUM, 100)
    info = await engine.reduce(ReduceRequest(borrow(values, values), ReduceCall(0, 0, descriptor)))
    return int(values[0]), info.attempts


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("index", [0, 2])
def test_who_moves_returns(index: int, is_told: bool) -> None:
    """At once if its system says that its connections are lost.

    Otherwise it finds out before the deadline that the one to the master is dead, and then that the
    lanes are.
    """
    run = VirtualRun([0, 0, 0], {"latency_ns": 1_000_000})
    mover, name = run.engines[index], f"p{index}"
    took_s: list[float] = []

    async def main() -> None:
        await run.start()
        assert await run.all([reduce(engine) for engine in run.engines]) == [(6, 1)] * 3
        peers = [engine.machine.peer for engine in run.engines]
        ends = run.hosts[index].ends
        run.network.move(name)
        for end in ends if is_told else ():
            end.forget()
        for _ in range(3):
            began_ns = run.loop.now_ns()
            assert await run.all([reduce(engine) for engine in run.engines]) == [(6, 1)] * 3
            took_s.append((run.loop.now_ns() - began_ns) / NS_PER_S)
        await run.sleep(2.0)  # so that all have heard of it
        assert [engine.machine.peer for engine in run.engines] == peers
        for engine in run.engines:
            assert engine.machine.newest is not None
            hosts = {member.peer: member.host for member in engine.machine.newest.members}
            assert hosts[mover.machine.peer] == f"{name}-1"
        await run.close()

    run.run_test(main())
    least_s = 0 if is_told else TIMING.deadline_s - 2 * TIMING.resume_s
    lanes_s = 0 if is_told else TIMING.lane_stall_s
    assert least_s <= took_s[0] < least_s + lanes_s + RETURN_S
    assert max(took_s[1:]) < 1.0


@pytest.mark.parametrize("is_told", [True, False])
def test_a_router_that_moves_forgets_its_mappings(is_told: bool) -> None:
    nat = BehindNat((0, 1), refuses=False, is_symmetric=False, together=False, shares_address=True)
    verdict = run_faults(QUIET, nat, Moved(NS_PER_S // 2, 0, is_told), relays=True)
    assert verdict.faults == {"undialable": 1, "moved": 1}
    assert "removed alive" not in verdict.done
    assert verdict.done["converged"] == 1
    assert verdict.done["links at the end"] == 6
