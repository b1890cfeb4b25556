"""Whatever happens in one group, the collectives of another take as long as they would alone.

Two groups of two in virtual time on a network without chance. Group 0 reduces all the time; what
it needs per reduce is compared with a run in which nothing happens in group 1.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import CollectiveAborted, DeadlineExceeded, LockstepError, PCCLError
from pccl.protocol.types import NS_PER_S, Descriptor, ReduceOp, RoundKind
from pccl.runtime.collective.operand import borrow
from pccl.runtime.requests import ReduceRequest, RunRequest
from tests.support.virtual_runs import VirtualRun

LATENCY_NS = 5_000_000
REDUCES = 600
TOLERANCE_NS = 1_000_000
"""A fifth of a latency: no message more, and no deadline."""

Trouble = Callable[["World"], Coroutine[Any, Any, None]]


class World(VirtualRun):
    """Peers 0 and 1 in group 0, peers 2 and 3 in group 1."""

    def __init__(self) -> None:
        super().__init__((0, 0, 1, 1), {"ragged": False, "latency_ns": LATENCY_NS}, limit_s=300)
        self.told: list[PCCLError] = []
        """What happened to callers in group 1."""

    async def reduce(self, peer: int, tag: int = 0) -> None:
        buffer = np.arange(1000, dtype=np.float32)
        descriptor = Descriptor(DataType.FLOAT, ReduceOp.SUM, buffer.size)
        await self.engines[peer].reduce(
            ReduceRequest(borrow(buffer), ReduceCall(0, tag, descriptor))
        )
        assert buffer[-1] == 2 * 999

    async def durations_ns(self, peer: int) -> list[int]:
        found: list[int] = []
        for _ in range(REDUCES):
            started_ns = self.loop.now_ns()
            await self.reduce(peer)
            found.append(self.loop.now_ns() - started_ns)
        return found

    async def until_told(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except PCCLError as error:
            self.told.append(error)


async def nothing(world: World) -> None:
    pass


async def a_death(world: World) -> None:
    """Peer 3 dies while the two reduce."""
    waiting = world.loop.create_task(world.until_told(world.reduce(2)))
    dying = world.loop.create_task(world.until_told(world.reduce(3)))
    await world.sleep(2 * LATENCY_NS / NS_PER_S)
    world.hosts[3].crash()
    dying.cancel()
    await waiting


async def a_slow_round(world: World) -> None:
    """Peer 2 waits for everybody in ``update_topology``, to which group 0 does not come."""
    await world.engines[2].round(
        RunRequest(RoundKind.UPDATE_TOPOLOGY)
    )  # the one that the admission satisfies
    await world.until_told(world.engines[2].round(RunRequest(RoundKind.UPDATE_TOPOLOGY, 6)))


async def a_frozen_peer(world: World) -> None:
    """Peer 3 falls silent in the middle of a reduce; peer 2 waits until it is removed."""
    for other in ("master", "p2"):
        world.loop.call_at_ns(
            world.loop.now_ns() + LATENCY_NS, world.network.stall, "p3", other, None
        )
    frozen = world.loop.create_task(world.until_told(world.reduce(3)))
    await world.until_told(world.reduce(2))
    frozen.cancel()


async def a_mistake(world: World) -> None:
    """The two wait for different tags."""
    other = world.loop.create_task(world.until_told(world.reduce(3, tag=1)))
    await world.until_told(world.reduce(2, tag=0))
    await other


def run(trouble: Trouble) -> tuple[list[list[int]], World]:
    world = World()
    found: list[list[int]] = []

    async def main() -> None:
        await world.start()
        busy = [world.loop.create_task(world.durations_ns(peer)) for peer in (0, 1)]
        await trouble(world)
        found.extend([await task for task in busy])
        await world.close()

    world.run_test(main())
    return found, world


@pytest.fixture(scope="module")
def quiet() -> list[list[int]]:
    return run(nothing)[0]


@pytest.mark.parametrize(
    ("trouble", "errors"),
    [
        (a_death, [CollectiveAborted]),
        (a_slow_round, [DeadlineExceeded]),
        (a_frozen_peer, [CollectiveAborted]),
        (a_mistake, [LockstepError, LockstepError]),
    ],
)
def test_trouble_in_one_group_does_not_delay_another(
    trouble: Trouble, errors: list[type[PCCLError]], quiet: list[list[int]]
) -> None:
    durations, world = run(trouble)
    assert len(world.told) == len(errors)
    for error, kind in zip(world.told, errors, strict=True):
        assert isinstance(error, kind), error
    for with_trouble, alone in zip(durations, quiet, strict=True):
        assert max(with_trouble) <= max(alone) + TOLERANCE_NS
        assert sum(with_trouble) <= sum(alone) + REDUCES * TOLERANCE_NS // 10


def test_a_mistake_is_told_in_words() -> None:
    _, world = run(a_mistake)
    for error in world.told:
        assert "peer 3 in tag 0 (SUM of 1000 x float32)" in error.reason
        assert "peer 4 in tag 1 (SUM of 1000 x float32)" in error.reason
        assert "same calls in the same order" in error.reason
