"""A peer is killed in the middle of an in-place 32 MiB reduce of three; the others lose nothing.

The master lives in the test's process, which watches its events; the peers are processes of their
own: two survivors that live as long as a test, and a fresh victim for every trial. This file is
also the peers' program, so it imports only what they need.

Verdicts do not depend on luck. Values are small integers, exact in every dtype; each survivor
compares every element with a sum that it computes by itself from the contributors that the outcome
names. Where a trial needs a certain situation (a survivor is done, nothing is committed), the
victim holds it open, and it has been seen by the master before the victim is killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

import pccl
from pccl.errors import CollectiveAborted
from pccl.machines.master.events import ConnectionMessage, MasterEvent, SendTo
from pccl.protocol.frame import FrameHeader
from pccl.protocol.limits import Timing
from pccl.protocol.messages import OperationDone, OperationEnded, OperationStarted
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.clock import LoopClock
from pccl.runtime.collective.transfers.inlet import Placement
from pccl.runtime.io_thread import IOThread
from pccl.runtime.master_server import MasterServer
from pccl.transports.base import Address
from pccl.transports.link import Link
from pccl.transports.tcp import TcpTransport
from tests.support.insides import engine_of
from tests.support.members import grow
from tests.support.patience import LIMIT_S
from tests.support.peers import PeerProcess, obey

COUNT = (32 << 20) // 4
DTYPES = ("float32", "int32")
SEED = 20240229

Array = npt.NDArray[Any]


# -- the peers' program --------------------------------------------------------------------------


PERIOD = 65521
"""No divisor of anything, so that no segment looks like another."""


def contribution(peer: int, trial: int, buffer: int, dtype: str) -> Array:
    """What ``peer`` brings: this, repeated."""
    draw = np.random.default_rng((SEED, peer, trial, buffer))
    return draw.integers(-(2**20), 2**20, PERIOD).astype(dtype)


def fill(array: Array, period: Array) -> None:
    whole = COUNT // PERIOD * PERIOD
    array[:whole].reshape(-1, PERIOD)[:] = period
    array[whole:] = period[: COUNT - whole]


def is_filled(array: Array, period: Array) -> bool:
    whole = COUNT // PERIOD * PERIOD
    return bool(
        (array[:whole].reshape(-1, PERIOD) == period).all()
        and (array[whole:] == period[: COUNT - whole]).all()
    )


class Peer:
    """A member that does what it is told on stdin and reports on stdout."""

    def __init__(self, address: str) -> None:
        self.comm = pccl.Communicator(address)
        self.arrays = [np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)]
        self.digests = [xxhash.xxh3_64_intdigest(array.data) for array in self.arrays]

    def attempt(self, trial: int, buffer: int, dtype: str) -> dict[str, Any]:
        """Reduce in place, once; compare everything afterwards."""
        array = self.arrays[buffer].view(dtype)
        own = contribution(self.comm.peer_id, trial, buffer, dtype)
        fill(array, own)
        contributors: tuple[int, ...] = ()
        reason = ""
        try:
            contributors = self.comm.all_reduce(array, algorithm="ring").contributors
        except CollectiveAborted as error:
            reason = str(error)
        brought = [contribution(peer, trial, buffer, dtype) for peer in contributors]
        expected = np.sum(brought, axis=0, dtype=dtype) if brought else own
        self.digests[buffer] = xxhash.xxh3_64_intdigest(array.data)
        return {
            "contributors": list(contributors),
            "exact": is_filled(array, expected),
            "reason": reason,
            "world": self.comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE),
        }

    def survive(self, trial: int, dtype: str) -> dict[str, Any]:
        """The reduce that the victim is in, then one on another buffer until it succeeds."""
        outcomes = [self.attempt(trial, 0, dtype)]
        late = self._changed(1)  # what the last trial left there
        while len(outcomes) < 2 or not outcomes[-1]["contributors"]:
            outcomes.append(self.attempt(trial, 1, dtype))
        return {"outcomes": outcomes, "late": late or self._changed(0)}

    def _changed(self, buffer: int) -> bool:
        return xxhash.xxh3_64_intdigest(self.arrays[buffer].data) != self.digests[buffer]

    def grow(self, size: int) -> dict[str, Any]:
        grow(self.comm, size)
        return {"world": size}

    def connect(self) -> dict[str, Any]:
        self.comm.connect()
        return {"peer": self.comm.peer_id}

    def kill_after_segments(self, fraction: float) -> dict[str, Any]:
        """End by SIGKILL when this part of all incoming segments is here."""
        complete = Placement.complete

        def complete_or_die(placement: Placement) -> None:
            complete(placement)
            transfer = placement.transfer
            received = transfer.progress.received
            if received >= fraction * (received + transfer.lacking):
                os.kill(os.getpid(), signal.SIGKILL)

        mock.patch.object(Placement, "complete", complete_or_die).start()
        return {}

    def withhold_done(self) -> dict[str, Any]:
        """Do everything except to tell the master that it is done."""
        data_plane = engine_of(self.comm).data_plane
        mock.patch.object(data_plane, "_on_done").start()
        return {}

    def withhold_segment(self, step: int) -> dict[str, Any]:
        """Send everything but one segment of this step: of the victim's, which is the third of
        three, 3 only brings the next in the ring what the one before it has, and 2 what nobody but
        the victim has."""
        transmit = Link.send
        end = 4 * COUNT if step == 3 else 4 * -(-COUNT // 3)

        def send(link: Link, header: FrameHeader, *segment: Any) -> None:
            if not (header.step == step and header.offset + header.length == end):
                transmit(link, header, *segment)

        mock.patch.object(Link, "send", send).start()
        return {}


def serve(address: str) -> None:
    peer = Peer(address)
    obey(peer)
    peer.comm.close()


# -- the test's side -----------------------------------------------------------------------------


class Process(PeerProcess):
    """A peer that can be killed."""

    def __init__(self, address: str) -> None:
        super().__init__(__name__, address)

    def kill(self) -> None:
        self.process.kill()

    def wait_killed(self) -> None:
        assert self.process.wait(LIMIT_S) == -signal.SIGKILL


class WatchedMaster:
    """A master whose decisions the test can wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._started: dict[OperationId, float] = {}
        self._done: dict[OperationId, set[PeerId]] = {}
        self._ended: dict[OperationId, float] = {}
        self._io = IOThread.acquire(self)
        self.server = self._io.submit(self._start).wait()
        self.address = str(self.server.address)

    async def _start(self) -> MasterServer:
        loop = self._io.loop
        transport = TcpTransport(loop)
        server = MasterServer(LoopClock(loop), transport, Timing(), os.urandom, self._observe)
        await server.start(Address("127.0.0.1", 0))
        return server

    def _observe(self, event: MasterEvent, effects: list[object]) -> None:
        now = time.monotonic()
        with self._changed:
            if isinstance(event, ConnectionMessage) and isinstance(event.message, OperationDone):
                peers = self.server.machine.connections.peers
                done = self._done.setdefault(event.message.operation, set())
                done.add(peers[event.connection].id)
            for effect in effects:
                if isinstance(effect, SendTo) and isinstance(effect.message, OperationStarted):
                    self._started.setdefault(effect.message.operation, now)
                if isinstance(effect, SendTo) and isinstance(effect.message, OperationEnded):
                    self._ended.setdefault(effect.message.operation, now)
            self._changed.notify_all()

    def started(self) -> set[OperationId]:
        with self._changed:
            return set(self._started)

    def wait_started(self, known: set[OperationId]) -> OperationId:
        """Wait for an operation that is not among ``known`` and return it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._started.keys() - known, LIMIT_S)
            (operation,) = self._started.keys() - known
            return operation

    def wait_ended(self, operation: OperationId) -> float:
        """Wait for the outcome; return how many seconds it took from the start."""
        with self._changed:
            assert self._changed.wait_for(lambda: operation in self._ended, LIMIT_S)
            return self._ended[operation] - self._started[operation]

    def wait_done(self, operation: OperationId, peers: set[int]) -> None:
        """Wait until exactly ``peers`` have reported done while nothing is decided."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._done.get(operation) == peers, LIMIT_S)
            assert operation not in self._ended

    def done(self, operation: OperationId) -> set[PeerId]:
        with self._changed:
            return set(self._done.get(operation, ()))

    def close(self) -> None:
        self._io.call(self.server.close)
        self._io.release(self)


class Arena:
    """A master, two survivors and the next victims."""

    def __init__(self) -> None:
        self.master = WatchedMaster()
        self.processes: list[Process] = []
        self.survivors: list[Process] = []
        self._trial = 0

    def __enter__(self) -> Arena:
        try:
            self.survivors = [self._start(), self._start()]
            self._next_victim = self._start()
            for size, survivor in enumerate(self.survivors, 1):
                for member in self.survivors[: size - 1]:
                    member.tell("grow", size)
                survivor.id = survivor.ask("connect")["peer"]
                for member in self.survivors[: size - 1]:
                    member.answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.end()
        self.master.close()

    @property
    def ids(self) -> list[int]:
        return [survivor.id for survivor in self.survivors]

    def victim(self) -> Process:
        """Let a victim join; it is the last in the ring of three."""
        victim, self._next_victim = self._next_victim, self._start()
        for survivor in self.survivors:
            survivor.tell("grow", 3)
        victim.id = victim.ask("connect")["peer"]
        for survivor in self.survivors:
            survivor.answer()
        assert victim.id > max(self.ids)
        return victim

    def reduce(self, victim: Process) -> OperationId:
        """Begin a trial; returns when the master has started the operation."""
        self._trial += 1
        known = self.master.started()
        dtype = DTYPES[self._trial % 2]
        for survivor in self.survivors:
            survivor.tell("survive", self._trial, dtype)
        victim.tell("attempt", self._trial, 0, dtype)
        return self.master.wait_started(known)

    def verdict(self, victim: Process) -> bool:
        """Check all that the survivors report; return whether the victim's reduce succeeded."""
        reports = [survivor.answer() for survivor in self.survivors]
        for report in reports:
            assert not report["late"], "something was written after a call had returned"
            for outcome in report["outcomes"]:
                assert outcome["exact"], outcome
                # If it was lost before a survivor asked, the text names only the view.
                names = (f"peer {victim.id}", "the master closed the view before this call")
                assert outcome["contributors"] or any(n in outcome["reason"] for n in names)
        first, *others = [
            [outcome["contributors"] for outcome in report["outcomes"]] for report in reports
        ]
        assert all(other == first for other in others), "not the same outcome for all"
        assert first[0] in ([], [*self.ids, victim.id])
        assert first[-1] == self.ids, "the last one is over the survivors"
        assert all(report["outcomes"][-1]["world"] == 2 for report in reports)
        return bool(first[0])

    def _start(self) -> Process:
        process = Process(self.master.address)
        self.processes.append(process)
        return process


def test_after_some_segments() -> None:
    """The victim dies by itself when a part of its segments, drawn with a seed, is there."""
    draw = random.Random(SEED)
    with Arena() as arena:
        for trial in range(10):
            victim = arena.victim()
            victim.ask("kill_after_segments", (trial + draw.random()) / 10)
            arena.reduce(victim)
            victim.wait_killed()
            arena.verdict(victim)


def test_at_any_time() -> None:
    """The test kills the victim at some time of a reduce, drawn with a seed."""
    draw = random.Random(SEED)
    with Arena() as arena:
        victim = arena.victim()
        duration_s = arena.master.wait_ended(arena.reduce(victim))
        victim.kill()
        assert arena.verdict(victim), "nobody was killed before the outcome"
        for _ in range(6):
            victim = arena.victim()
            arena.reduce(victim)
            time.sleep(draw.uniform(0.0, duration_s))
            victim.kill()
            victim.wait_killed()
            arena.verdict(victim)


@pytest.mark.usefixtures("over_tcp")
def test_after_one_survivor_was_done() -> None:
    """One survivor holds the whole result, and the other one gets from it what is missing."""
    with Arena() as arena:
        for _ in range(6):
            victim = arena.victim()
            victim.ask("withhold_segment", 3)
            operation = arena.reduce(victim)
            arena.master.wait_done(operation, {arena.ids[1], victim.id})
            victim.kill()
            victim.wait_killed()
            assert arena.verdict(victim)
            assert arena.ids[0] in arena.master.done(operation)


@pytest.mark.usefixtures("over_tcp")
def test_after_the_victim_alone_was_done() -> None:
    """What only the victim has finished is gone with it: both survivors get their input back."""
    with Arena() as arena:
        for _ in range(4):
            victim = arena.victim()
            victim.ask("withhold_segment", 2)
            operation = arena.reduce(victim)
            arena.master.wait_done(operation, {victim.id})
            victim.kill()
            victim.wait_killed()
            assert not arena.verdict(victim)
            assert arena.master.done(operation) == {victim.id}


def test_after_all_survivors_were_done() -> None:
    """Nothing is missing but the victim's word: the survivors keep the sum over all three."""
    with Arena() as arena:
        for _ in range(4):
            victim = arena.victim()
            victim.ask("withhold_done")
            operation = arena.reduce(victim)
            arena.master.wait_done(operation, set(arena.ids))
            victim.kill()
            victim.wait_killed()
            assert arena.verdict(victim)


if __name__ == "__main__":
    serve(sys.argv[1])
