"""``SimReaders``: the processes of readers, with what happens to them.

Some are killed, and begin anew or not; some freeze; some are cut off for a while; some send wrong
pieces to other readers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from random import Random

from pccl.machines.publication.reader import ReaderEffect, ReaderEvent
from pccl.protocol.frame import FrameKind
from pccl.protocol.types import NS_PER_S, PeerId
from pccl.runtime.hashing import InlineHasher
from pccl.runtime.publishing.reader import ReaderEngine, ReadVersion
from pccl.runtime.requests import PeerOptions
from pccl.stress.sim.curves import QuickCurves
from pccl.stress.sim.links import Liar, Lips, SimLink
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import MASTER_ADDRESS, ProcessClock
from pccl.stress.sim.publication.checker import PublicationChecker
from pccl.transports.base import Address
from pccl.transports.link import Link
from pccl.transports.sim.network import SimHost, SimNetwork

_FIRST_PORT = 30000
_LIES = 0.3
"""Probability that a lying reader changes a piece."""


@dataclass(slots=True)
class _Reader:
    """One reader: its present process, and its tasks."""

    name: str
    lips: Lips = field(default_factory=Lips)
    boots: int = 0
    host: SimHost | None = None
    engine: ReaderEngine | None = None
    task: asyncio.Task[None] | None = None


class SimReaders:
    """All readers of one run.

    Args:
        parts: shared objects of the run.
        network: connects all hosts.
        checker: checks what they show.
    """

    def __init__(self, parts: RunParts, network: SimNetwork, checker: PublicationChecker) -> None:
        self._parts, self._loop, self._checker = parts, parts.loop, checker
        self._network = network
        self._rng = Random(f"{parts.scenario.seed}/readers")
        self._readers = [_Reader(f"r{index}") for index in range(parts.scenario.readers)]
        checker.readers = {reader.name for reader in self._readers}

    def start(self) -> None:
        """Start all readers at their times, and plan what happens to them."""
        rng, stop_ns = self._rng, self._parts.scenario.stop_ns
        for index, reader in enumerate(self._readers):
            begins_ns = rng.choice((0, rng.randrange(stop_ns)))
            self._loop.call_at_ns(begins_ns, self._boot, reader)
            strikes_ns = begins_ns + rng.randrange(1, 2 * stop_ns)
            what = rng.choice(("nothing", "nothing", "kill", "restart", "freeze", "cut", "lie"))
            if what == "kill" and index:
                self._loop.call_at_ns(strikes_ns, self._kill, reader, None)
            elif what == "restart":
                away_ns = rng.randrange(5 * NS_PER_S)
                self._loop.call_at_ns(strikes_ns, self._kill, reader, away_ns)
            elif what == "freeze":
                for_ns = rng.randrange(1, 15 * NS_PER_S)
                self._loop.call_at_ns(strikes_ns, self._freeze, reader, for_ns)
            elif what == "cut":
                for_ns = rng.randrange(1, 15 * NS_PER_S)
                self._loop.call_at_ns(strikes_ns, self._cut, reader, for_ns)
            elif what == "lie":
                reader.lips.liar = Liar(rng, FrameKind.PIECE, _LIES)

    def _boot(self, reader: _Reader) -> None:
        scenario, port = self._parts.scenario, _FIRST_PORT + reader.boots
        reader.boots += 1
        reader.host = host = self._network.host(reader.name)
        secrets = Random(f"{scenario.seed}/{reader.name}/{reader.boots}")

        def make_link(peer: PeerId) -> Link:
            return SimLink(peer, reader.lips, secrets, scenario.repeats)

        options = PeerOptions(
            scenario.timing,
            listen=Address("", port),
            token=scenario.token,
            random_bytes=secrets.randbytes,
            curves=QuickCurves(),
            encrypts=scenario.encrypts,
        )
        reader.engine = ReaderEngine(
            self._loop, ProcessClock(self._loop, host), host, (MASTER_ADDRESS,), 0, options,
            InlineHasher(), make_link, partial(self._observe, reader, host),
        )  # fmt: skip
        self._checker.begins(reader.name)
        reader.task = self._loop.create_task(self._read(reader, reader.engine))
        reader.task.add_done_callback(self._ended)

    async def _read(self, reader: _Reader, engine: ReaderEngine) -> None:
        await engine.start()
        last: ReadVersion | None = None
        while True:
            last = await engine.next(last, None)
            self._checker.showed(reader.name, last)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._loop.call_exception_handler({"message": "a reader failed", "exception": error})

    def _observe(
        self, reader: _Reader, host: SimHost, event: ReaderEvent, effects: list[ReaderEffect]
    ) -> None:
        if host.alive:
            self._parts.trace.note(self._loop.now_ns(), reader.name, event)

    # -- what happens to them ----------------------------------------------------------------------

    def _kill(self, reader: _Reader, away_ns: int | None) -> None:
        self._checker.done["reader killed"] += 1
        self._end(reader)
        if away_ns is None:
            self._checker.readers.discard(reader.name)
        else:
            self._loop.call_at_ns(self._loop.now_ns() + away_ns, self._boot, reader)

    def _end(self, reader: _Reader) -> None:
        if reader.host is None or reader.engine is None or reader.task is None:
            return
        reader.host.crash()
        reader.task.cancel()
        self._loop.create_task(reader.engine.close())

    def _freeze(self, reader: _Reader, for_ns: int) -> None:
        host = reader.host
        if host is not None and host.alive:
            self._checker.done["reader frozen"] += 1
            host.freeze()
            self._loop.call_at_ns(self._loop.now_ns() + for_ns, host.thaw)

    def _cut(self, reader: _Reader, for_ns: int) -> None:
        self._checker.done["reader cut off"] += 1
        names = [name for name in self._network.hosts if name != reader.name]
        for name in names:
            self._network.stall(reader.name, name, for_ns)

    def close(self) -> None:
        """End all readers."""
        for reader in self._readers:
            self._end(reader)
