"""Measures the bytes that survivors send after a member dies in a reduce.

The study runs the production runtime in virtual time: peers with one lane each, and links with a
rate and a delay. It kills a member after a part of the normal time of the reduce. The survivors
reduce in a ring with ``retry=True`` until they have a result, and the study checks it. It compares
the bytes that they send after the loss with those of a full repeat by the survivors.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from pccl.cli.streams import writing
from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, Algorithm, Descriptor, PeerId, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.master_server import MasterServer
from pccl.runtime.requests import JoinRequest, PeerOptions, ReduceInfo, ReduceRequest
from pccl.stress.sim.fold import fold
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.process import MASTER_ADDRESS, ProcessClock
from pccl.transports.base import Address
from pccl.transports.sim.network import SimNetwork

Array = npt.NDArray[Any]

PERCENTS = (10, 30, 50, 70, 90)
WORLD_SIZES = (3, 4, 8)
COUNT = 1 << 20
"""Number of float32 elements: 4 MiB."""
SEGMENT_BYTES = 16 << 10
LATENCY_NS = 10 * NS_PER_S // 1000
BYTES_PER_S = 5_000_000
TAG = 1
LIMIT_S = 400


@dataclass(frozen=True, slots=True)
class Loss:
    """The cost of one loss."""

    peers: int
    percent: int
    """Time of the kill, in percent of an undisturbed reduce."""
    repaired: bool
    """Whether the result contains the dead member's contribution."""
    bytes_after: int
    """Bytes that the survivors sent each other after the kill, headers included."""
    bytes_repeat: int
    """Bytes of a complete reduce of the survivors, headers included."""
    seconds_after: float
    """Virtual seconds from the kill to the last result."""
    seconds_repeat: float
    """Virtual seconds of a complete, undisturbed reduce of the survivors."""

    @property
    def ratio(self) -> float:
        """Bytes after the loss, divided by the bytes of a full repeat."""
        return self.bytes_after / self.bytes_repeat


class ResendRun:
    """One run of ``peers`` processes with one reduce.

    Args:
        peers: number of processes.
        victim: index of the process to kill.
        kill_after_ns: time of the kill after the begin of the reduce; None: no kill.
    """

    def __init__(self, peers: int, victim: int = 0, kill_after_ns: int | None = None) -> None:
        self._loop = VirtualLoop(limit_ns=LIMIT_S * NS_PER_S)
        self._victim = victim
        self._kill_after_ns = kill_after_ns
        self._killed = False
        self._killed_ns = 0
        self._sent_before = 0
        self._inputs = [
            np.random.default_rng(index).standard_normal(COUNT, np.float32)
            for index in range(peers)
        ]
        self._results: dict[int, Array] = {}
        self._network = SimNetwork(
            self._loop,
            Random(peers),
            None,
            latency_ns=LATENCY_NS,
            bytes_per_s=BYTES_PER_S,
            window_bytes=128 << 10,
            ragged=False,
        )
        self._engines = [self._engine(index) for index in range(peers)]
        self.bytes_after = 0
        self.duration_ns = 0
        """Time from the kill, or without a kill from the begin, to the last result."""
        self.repaired = False

    def run(self) -> ResendRun:
        """Simulate the run, check the result, and return this object with its figures."""
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()
        return self

    def _engine(self, index: int) -> PeerEngine:
        host = self._network.host(f"peer{index}")
        options = PeerOptions(
            Timing(),
            Address("", 0),
            lanes=1,
            segment_bytes=SEGMENT_BYTES,
            random_bytes=Random(index).randbytes,
        )
        clock = ProcessClock(self._loop, host)
        return PeerEngine(self._loop, clock, host, MASTER_ADDRESS, 0, options)

    async def _main(self) -> None:
        host = self._network.host("master")
        clock = ProcessClock(self._loop, host)
        nonces = Random(0).randbytes
        master = MasterServer(clock, host, Timing(), nonces, lambda event, effects: None, None)
        await master.start(MASTER_ADDRESS)
        joins: list[asyncio.Task[None]] = []
        everybody = JoinRequest(min_peers=len(self._engines))
        for engine in self._engines:  # one after another, so that the ring has this order
            joins.append(self._loop.create_task(engine.connect(everybody)))
            await self._pause()
        await asyncio.gather(*joins)
        reduces = [
            self._loop.create_task(self._reduce(index, engine))
            for index, engine in enumerate(self._engines)
        ]
        began_ns = self._loop.now_ns()
        if self._kill_after_ns is not None:
            self._loop.call_at_ns(began_ns + self._kill_after_ns, self._kill, reduces)
        reports = await asyncio.gather(*reduces, return_exceptions=True)
        self._judge([r for r in reports if isinstance(r, ReduceInfo)])
        self.duration_ns = self._loop.now_ns() - max(began_ns, self._killed_ns)
        for index, engine in enumerate(self._engines):
            if not (self._killed and index == self._victim):
                await engine.close()
        master.close()

    async def _pause(self) -> None:
        done = self._loop.create_future()
        self._loop.call_at_ns(self._loop.now_ns() + LATENCY_NS, done.set_result, None)
        await done

    async def _reduce(self, index: int, engine: PeerEngine) -> ReduceInfo:
        self._results[index] = buffer = self._inputs[index].copy()
        what = Descriptor(DataType.FLOAT, ReduceOp.SUM, COUNT, algorithm=Algorithm.RING)
        return await engine.reduce(
            ReduceRequest(borrow(buffer), ReduceCall(0, TAG, what), retry=True)
        )

    def _kill(self, reduces: list[asyncio.Task[ReduceInfo]]) -> None:
        self._killed, self._killed_ns = True, self._loop.now_ns()
        self._sent_before = self._sent_bytes()
        self._network.hosts[f"peer{self._victim}"].crash()
        reduces[self._victim].cancel()

    def _judge(self, reports: list[ReduceInfo]) -> None:
        """Compare the results with a fold of the contributors' inputs, and store the figures."""
        contributors = reports[0].contributors
        inputs = [self._inputs[peer - 1] for peer in contributors]
        self.repaired = self._killed and PeerId(self._victim + 1) in contributors
        expected = fold(inputs, ReduceOp.SUM).tobytes()
        survivors = [
            n for n in range(len(self._inputs)) if not (self._killed and n == self._victim)
        ]
        assert len(reports) == len(survivors), reports
        assert all(report.contributors == contributors for report in reports)
        assert all(self._results[index].tobytes() == expected for index in survivors)
        self.bytes_after = self._sent_bytes() - self._sent_before

    def _sent_bytes(self) -> int:
        """Return the bytes that the survivors have sent each other so far."""
        survivors = [
            e for n, e in enumerate(self._engines) if not self._killed or n != self._victim
        ]
        return sum(
            lane.sent_bytes
            for engine in survivors
            for link in engine.links.all()
            if not self._killed or link.peer != self._victim + 1
            for lane in link.lanes
        )


def losses(peers: int) -> Iterator[Loss]:
    """Simulate a kill at each of ``PERCENTS`` of a reduce, and yield the costs."""
    whole, rest = ResendRun(peers).run(), ResendRun(peers - 1).run()
    for percent in PERCENTS:
        kill_after_ns = whole.duration_ns * percent // 100
        run = ResendRun(peers, victim=peers // 2, kill_after_ns=kill_after_ns).run()
        yield Loss(
            peers,
            percent,
            run.repaired,
            run.bytes_after,
            rest.bytes_after,
            run.duration_ns / NS_PER_S,
            rest.duration_ns / NS_PER_S,
        )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one object per loss.")
def resend(as_json: bool) -> None:
    """Measure what a member's death in a reduce costs the survivors, in simulation.

    The tensor has 4 MiB of float32. Links carry 5 MB/s with a round trip of 20 ms. The middle
    rank dies.
    """
    found = [loss for peers in WORLD_SIZES for loss in losses(peers)]
    with writing():
        if as_json:
            for loss in found:
                click.echo(json.dumps({**asdict(loss), "ratio": loss.ratio}))
        else:
            Console().print(_table(found))


def _table(found: list[Loss]) -> Table:
    table = Table("peers", "death at", "outcome", "sent after", "full repeat", "ratio", "seconds")
    for loss in found:
        table.add_row(
            str(loss.peers),
            f"{loss.percent} %",
            "repaired" if loss.repaired else "retried",
            f"{loss.bytes_after / 1e6:.2f} MB",
            f"{loss.bytes_repeat / 1e6:.2f} MB",
            f"{loss.ratio:.2f}",
            f"{loss.seconds_after:.2f} of {loss.seconds_repeat:.2f}",
        )
    return table
