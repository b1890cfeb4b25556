"""Whole runs in virtual time: a quiet scenario for single faults, and peers that do their part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, ReduceOp
from pccl.runtime.engine import PeerEngine
from pccl.runtime.master_server import MasterServer
from pccl.runtime.requests import JoinRequest, PeerOptions
from pccl.stress.sim.curves import QuickCurves
from pccl.stress.sim.faults.base import MS, Fault
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.process import MASTER_ADDRESS, ProcessClock
from pccl.stress.sim.runner import Verdict, run_scenario
from pccl.stress.sim.scenarios.scenario import TIMINGS, Scenario, Slot
from pccl.transports.base import Address, Connection
from pccl.transports.sim.network import SimNetwork
from tests.support.clear import in_the_clear

QUIET = Scenario(
    seed=1,
    peers=4,
    slots=(Slot(0, 50, DataType.FLOAT, ReduceOp.SUM),),
    segment_bytes=256,
    latency_ns=5 * MS,
    window_bytes=4096,
    stop_ns=NS_PER_S,
    faults=(),
    min_peers=4,
    lanes=2,
    timing=TIMINGS["quick"],
    settles_ns=10 * NS_PER_S,
)
"""Nothing happens in it that no fault of a test makes happen."""


def run_faults(scenario: Scenario, *faults: Fault, **changes: object) -> Verdict:
    """Run a scenario with these faults; it breaks no promise."""
    verdict = run_scenario(replace(scenario, faults=faults, **changes))  # type: ignore[arg-type]
    assert verdict.violation is None, verdict.story
    return verdict


def run_peers(
    network: SimNetwork,
    loop: VirtualLoop,
    timing: Timing,
    peers: int,
    part: Callable[[PeerEngine, int], Coroutine[Any, Any, None]],
    encrypts: Callable[[Connection], bool] = in_the_clear,
    **options: Any,
) -> None:
    """Run a master and so many peers with such options until each has done its part."""

    def peer(index: int) -> PeerEngine:
        host = network.host(f"peer{index}")
        nonces = Random(index).randbytes
        told = PeerOptions(
            timing,
            Address("", 0),
            random_bytes=nonces,
            curves=QuickCurves(),
            encrypts=encrypts,
            **options,
        )
        return PeerEngine(loop, ProcessClock(loop, host), host, MASTER_ADDRESS, 0, told)

    async def main() -> None:
        host = network.host("master")
        master = MasterServer(
            ProcessClock(loop, host),
            host,
            timing,
            Random(2).randbytes,
            curves=QuickCurves(),
            encrypts=encrypts,
        )
        await master.start(MASTER_ADDRESS)
        engines = [peer(index) for index in range(peers)]
        for task in [loop.create_task(part(engine, n)) for n, engine in enumerate(engines)]:
            await task
        for engine in engines:
            await engine.close()
        master.close()

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


class VirtualRun:
    """A master and peers whose insides a test looks at, on a network in virtual time.

    Their keys are quick, as those of the simulator.

    Args:
        groups: of the peers.
        network: what it is like.
        seed: of what the network draws.
        limit_s: of virtual time.
        on_event: what to do at whatever the network notes.
        token: of the run.
        encrypts: which connections the master and the peers want to be encrypted.
        relays: whether the master forwards for peers that cannot dial each other.
        options: of every peer.
    """

    def __init__(
        self,
        groups: Sequence[int],
        network: Mapping[str, Any],
        *,
        seed: int = 1,
        limit_s: int = 600,
        on_event: Callable[[int, str], None] | None = None,
        token: bytes | None = None,
        encrypts: Callable[[Connection], bool] = in_the_clear,
        relays: bool = False,
        **options: Any,
    ) -> None:
        self.loop = VirtualLoop(limit_ns=limit_s * NS_PER_S)
        self.network = SimNetwork(self.loop, Random(seed), on_event, **network)
        master = self.network.host("master")
        self.master = MasterServer(
            self.loop,
            master,
            Timing(),
            Random(2).randbytes,
            token=token,
            curves=QuickCurves(),
            encrypts=encrypts,
            relays=relays,
        )
        told = PeerOptions(
            listen=Address("", 0),
            random_bytes=Random(3).randbytes,
            curves=QuickCurves(),
            token=token,
            encrypts=encrypts,
            **options,
        )
        self.hosts = [self.network.host(f"p{n}") for n in range(len(groups))]
        self.engines = [
            PeerEngine(self.loop, self.loop, host, MASTER_ADDRESS, group, told)
            for host, group in zip(self.hosts, groups, strict=True)
        ]

    def run_test(self, main: Coroutine[Any, Any, None]) -> None:
        """Run it to its end, which is that of the loop."""
        self.loop.run_until_complete(main)
        self.loop.close()

    async def start(self) -> None:
        """All peers join."""
        await self.master.start(MASTER_ADDRESS)
        size = len(self.engines)
        await self.all([engine.connect(JoinRequest(min_peers=size)) for engine in self.engines])

    async def all(self, works: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """What calls return that are made at the same time."""
        return [await task for task in [self.loop.create_task(work) for work in works]]

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        woken: asyncio.Future[None] = self.loop.create_future()
        when_ns = self.loop.now_ns() + round(seconds * NS_PER_S)
        self.loop.call_at_ns(when_ns, woken.set_result, None)
        await woken

    async def close(self) -> None:
        """All that live leave, and the master ends."""
        for engine, host in zip(self.engines, self.hosts, strict=True):
            if host.alive:
                await engine.close()
        self.master.close()
