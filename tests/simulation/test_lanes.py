"""Lanes are cut at every event of an all-reduce: it commits nevertheless, in its first attempt.

Peers in virtual time. Between two reduces lost lanes come back. Windows are smaller than a frame,
so that lanes are cut in the middle of frames, too.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, Algorithm, Descriptor, OperationId, PeerId, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import ReduceInfo, ReduceRequest
from pccl.topology.link_steps import TellLink
from pccl.transports.link import Lane
from pccl.transports.sim.connection import SimConnection
from tests.support.virtual_runs import VirtualRun

Array = npt.NDArray[Any]
Work = Callable[["World"], Coroutine[Any, Any, None]]

SEGMENT_BYTES = 64
WINDOW_BYTES = 100
"""Less than a segment with its header."""
LATENCY_NS = 1_000_000
TIMING = Timing()


Strikes = dict[int, Callable[[], None]]
"""What to do at the n-th event that the network notes from now on."""


class World(VirtualRun):
    """Peers, each pair of whose links gets so many lanes."""

    def __init__(
        self, peers: int, lanes: int, *, ragged: bool = False, window_bytes: int = WINDOW_BYTES
    ) -> None:
        self._events = 0
        self._strikes: Strikes = {}
        self._cut: list[Lane] = []
        self.lanes = lanes
        self.link_changes: list[tuple[PeerId, PeerId, str | None]] = []
        """Who told his machine of the link to whom, and why it is down."""
        network = {"ragged": ragged, "latency_ns": LATENCY_NS, "bytes_per_s": 1_000_000}
        super().__init__(
            [0] * peers,
            {**network, "window_bytes": window_bytes},
            limit_s=3600 * 1000,
            on_event=self._note,
            lanes=lanes,
            segment_bytes=SEGMENT_BYTES,
        )

    def run(self, work: Work) -> None:
        """Form the run, do the work, close."""

        async def main() -> None:
            await self.start()
            for engine in self.engines:
                self._watch(engine)
            await work(self)
            await self.close()

        self.run_test(main())

    def _watch(self, engine: PeerEngine) -> None:
        keeper: Any = engine.keeper
        tell = keeper._on_change

        def on_change(link: TellLink) -> None:
            self.link_changes.append((engine.machine.peer, link.peer, link.reason))
            tell(link)

        keeper._on_change = on_change

    def _note(self, now_ns: int, what: str) -> None:
        self._events += 1
        strike = self._strikes.pop(self._events, None)
        if strike is not None:
            self.loop.call_soon(strike)

    # -- lanes -----------------------------------------------------------------------------------

    def between(self, one: int, other: int) -> list[tuple[Lane, Lane]]:
        """Both ends of every lane between two peers that is up at both, by number."""
        a, b = self.engines[one], self.engines[other]
        here = {lane.number: lane for lane in a.links.to(b.machine.peer).lanes}
        there = {lane.number: lane for lane in b.links.to(a.machine.peer).lanes}
        return [
            (here[number], there[number])
            for number in sorted(here.keys() & there.keys())
            if here[number].connection.local == there[number].connection.remote
        ]

    def lives(self, ends: tuple[Lane, Lane]) -> bool:
        """Whether a lane was not cut."""
        return not any(lane in self._cut for lane in ends)

    def struck(self, lanes: list[tuple[Lane, Lane]]) -> None:
        """These may lose what they carry."""
        for ends in lanes:
            self._cut += ends

    def cut(self, lanes: list[tuple[Lane, Lane]]) -> None:
        self.struck(lanes)
        for ends in lanes:
            connection = ends[0].connection
            assert isinstance(connection, SimConnection)
            connection.reset()

    async def until_whole(self) -> None:
        """Lost lanes are back, and old enough for their next end to be no sign of trouble."""
        await self.sleep(TIMING.redial_max_s + 0.1)
        size = len(self.engines)
        for one in range(size):
            for other in range(one):
                numbers = [here.number for here, _ in self.between(one, other)]
                assert numbers == list(range(self.lanes))

    # -- reduces ---------------------------------------------------------------------------------

    async def reduce(
        self, strikes: Strikes | None = None, *, in_place: bool = False
    ) -> tuple[list[ReduceInfo], int]:
        """One all-reduce, checked; returns the infos and how many events it had."""
        size = len(self.engines)
        count = size * 4 * SEGMENT_BYTES // 8
        sends: list[Array] = [np.arange(count, dtype=np.int64) * (n + 1) for n in range(size)]
        results = sends if in_place else [np.zeros(count, np.int64) for _ in range(size)]
        descriptor = Descriptor(DataType.INT64, ReduceOp.SUM, count, algorithm=Algorithm.RING)
        views = {engine.roster.view for engine in self.engines if engine.roster is not None}
        changes = len(self.link_changes)
        self._events, self._strikes, self._cut = 0, strikes or {}, []
        infos = await self.all(
            [
                engine.reduce(ReduceRequest(borrow(send, result), ReduceCall(0, 0, descriptor)))
                for engine, send, result in zip(self.engines, sends, results, strict=True)
            ]
        )
        events, self._strikes = self._events, {}
        expected = (np.arange(count) * (size * (size + 1) // 2)).tolist()
        assert all(result.tolist() == expected for result in results)
        payload = 2 * (size - 1) * 4 * SEGMENT_BYTES
        assert [info.attempts for info in infos] == [1] * size
        assert [info.rx_bytes for info in infos] == [payload] * size  # each once
        assert {engine.roster.view for engine in self.engines if engine.roster is not None} == views
        again = sum(info.tx_bytes - payload for info in infos)
        outcome = infos[0].outcome
        assert outcome is not None
        operation = outcome.operation
        assert 0 <= again <= SEGMENT_BYTES * sum(given(lane, operation) for lane in self._cut)
        assert self.link_changes[changes:] == []  # no machine heard of it
        return infos, events


def given(lane: Lane, operation: OperationId) -> int:
    """How many segments of an operation a lane was given before it was lost."""
    return len(lane.carried.get(operation, ()))


@pytest.mark.parametrize(
    ("peers", "lanes", "ragged"),
    [(2, 2, False), (3, 2, False), (2, 3, True)],
)
def test_each_lane_is_cut_at_every_event(peers: int, lanes: int, ragged: bool) -> None:
    """One at a time, between the first two; rings look the same from everywhere."""
    partly: list[bool] = []
    again: list[int] = []

    async def work(world: World) -> None:
        await world.reduce()
        await world.until_whole()
        infos, events = await world.reduce()
        undisturbed = sum(info.tx_bytes for info in infos)
        for number in range(lanes):
            for at in range(1, events + 1):
                await world.until_whole()
                ends = world.between(0, 1)[number]

                def strike(ends: tuple[Lane, Lane] = ends) -> None:
                    partly.append(any(lane.receiving for lane in ends))
                    world.cut([ends])

                infos, _ = await world.reduce({at: strike})
                again.append(sum(info.tx_bytes for info in infos) - undisturbed)

    World(peers, lanes, ragged=ragged).run(work)
    assert partly.count(True) > 5
    assert partly.count(False) > 5
    assert sum(1 for nbytes in again if nbytes) > 5  # it did matter
    assert sum(1 for nbytes in again if not nbytes) > 5  # what had arrived was not repeated


@pytest.mark.parametrize(("peers", "lanes"), [(2, 3), (3, 3)])
def test_all_lanes_but_one_are_cut_at_once(peers: int, lanes: int) -> None:
    async def work(world: World) -> None:
        await world.reduce()
        await world.until_whole()
        _, events = await world.reduce()
        for at in range(1, events + 1):
            await world.until_whole()
            spared = at % lanes
            doomed = [ends for ends in world.between(0, 1) if ends[0].number != spared]
            await world.reduce({at: partial(world.cut, doomed)})

    World(peers, lanes).run(work)


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 6])
def test_lanes_are_cut_and_cut_again_while_one_lives(seed: int) -> None:
    """Questions, answers, and what is sent again are lost, too."""
    rng = Random(seed)
    peers, lanes = rng.choice((2, 3)), rng.choice((2, 3, 4))
    cuts: list[int] = []

    async def work(world: World) -> None:
        await world.reduce()
        await world.until_whole()
        _, events = await world.reduce()

        def strike() -> None:
            living = [ends for ends in world.between(0, 1) if world.lives(ends)]
            if len(living) > 1:
                world.cut([rng.choice(living)])
                cuts[-1] += 1

        for _ in range(40):
            await world.until_whole()
            cuts.append(0)
            times = rng.randint(2, 12)
            first = rng.randrange(1, events)
            spread = rng.choice((8, 30, events))
            strikes = {first + rng.randrange(spread): strike for _ in range(times)}
            await world.reduce(strikes, in_place=rng.random() < 0.5)

    World(peers, lanes, ragged=rng.random() < 0.5).run(work)
    assert sum(1 for times in cuts if times > 1) > 5


@pytest.mark.parametrize("window_bytes", [WINDOW_BYTES, 1 << 16])
@pytest.mark.parametrize(("peers", "lanes"), [(2, 2), (2, 3), (3, 3)])
def test_lanes_that_deliver_nothing_are_replaced(peers: int, lanes: int, window_bytes: int) -> None:
    """All but one die without a word in the middle of a reduce.

    With a large window they had taken all there was to send: only a ping can find out.
    """

    async def work(world: World) -> None:
        await world.reduce()
        await world.until_whole()
        _, events = await world.reduce()
        for at in range(events // 8, events // 2, 1 + events // 40):
            # Soon after each other, such losses look like large packets that vanish.
            await world.sleep(5 * TIMING.lane_stall_s)
            await world.until_whole()
            doomed = world.between(0, 1)[1:]

            def strike(doomed: list[tuple[Lane, Lane]] = doomed) -> None:
                for end in (end for ends in doomed for end in ends):
                    assert isinstance(end.connection, SimConnection)
                    end.connection.stall(None)
                world.struck(doomed)

            started_ns = world.loop.now_ns()
            await world.reduce({at: strike})
            took_s = (world.loop.now_ns() - started_ns) / NS_PER_S
            taken.append(took_s)
            after = {here.number: here for here, _ in world.between(0, 1)}
            if took_s > 1:
                assert all(after.get(here.number) is not here for here, _ in doomed)

    taken: list[float] = []
    World(peers, lanes, window_bytes=window_bytes).run(work)
    slow = [took_s for took_s in taken if took_s > 1]
    assert len(slow) >= 3, taken  # else nothing that was needed was on them
    assert min(slow) >= TIMING.lane_stall_s
    assert max(slow) < TIMING.lane_stall_s + 4 * TIMING.tick_s


def test_64_peers_finish_and_agree() -> None:
    async def work(world: World) -> None:
        await world.reduce()  # which compares the results

    World(64, 2, window_bytes=1 << 16).run(work)
