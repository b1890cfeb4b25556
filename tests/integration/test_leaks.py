"""Nothing grows: not over hundreds of communicators, and not inside one that lives for long."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest

import pccl
from pccl.errors import DeadlineExceeded, MasterLost
from pccl.runtime.io_thread import IOThread
from tests.integration.conftest import QUICK, Run
from tests.support.insides import engine_of, machine_of
from tests.support.waiting import until

COMMUNICATORS = 300

GROWTH_BYTES_MAX = 1_000_000
"""What they may leave in logs of bounded length: removals and rosters at the master, half of that.
An engine alone takes more than 20,000."""

LOGS = {"AlgorithmTable", "Member", "Removal", "Roster"}
"""Kept by the master for peers that come back late, so many and no more."""
IN_HISTORIES = (
    "peer.events.",
    "master.events.",
    "messages.",
    "handshake.certificates.",
    ".reachability.",
    ".telemetry.",
)
"""The histories of the machines are of bounded length."""


@pytest.fixture(autouse=True)
def no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed connection may keep a timer for some seconds; here it does not."""
    monkeypatch.setattr("pccl.transports.tcp_socket.LINGER_S", 0.001)


@pytest.fixture(autouse=True)
def everything_counts() -> None:
    """The census also counts what was frozen when the tests were collected."""
    gc.unfreeze()


@pytest.fixture
def master() -> Iterator[pccl.MasterNode]:
    with pccl.MasterNode("127.0.0.1:0", timing=QUICK) as node:
        yield node


@contextmanager
def cheap_collections() -> Generator[None, None, None]:
    """What exists already is not looked at again by every ``gc.collect()``."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def io_thread() -> IOThread:
    io = IOThread._shared  # pyright: ignore[reportPrivateUsage]
    assert io is not None
    return io


def census() -> dict[str, Any]:
    """Everything that could be left."""
    io = io_thread()
    objects: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = cast("type[object]", type(thing))
        if str(getattr(kind, "__module__", "")).startswith("pccl.") and kind.__name__ not in LOGS:
            objects[f"{kind.__module__}.{kind.__qualname__}"] += 1
    for name in list(objects):
        if any(part in name for part in IN_HISTORIES):
            del objects[name]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": io.call(lambda: len(asyncio.all_tasks(io.loop))),
        "users": len(io._users),  # pyright: ignore[reportPrivateUsage]
        "objects": dict(objects),
    }


def check_same(after: dict[str, Any], before: dict[str, Any]) -> None:
    """Nothing is left that was not there before; what differs is named."""
    kinds = {**after["objects"], **before["objects"]}
    counts = {kind: (before["objects"].get(kind), after["objects"].get(kind)) for kind in kinds}
    assert {kind: pair for kind, pair in counts.items() if pair[0] != pair[1]} == {}
    assert after == before


def settled_census(master: pccl.MasterNode) -> dict[str, Any]:
    """The census once the other ends, and timers of a millisecond, have gone as well."""
    until(lambda: not machine_of(master).membership.peers)
    found = census()
    while True:
        gc.collect()
        time.sleep(0.05)
        again = census()
        if again == found:
            return found
        found = again


def use(master: pccl.MasterNode, ending: int) -> None:
    comm = pccl.Communicator(master.address, timing=QUICK)
    comm.connect()
    comm.barrier()
    match ending % 4:
        case 0:
            comm.close()
        case 1:
            with comm:
                pass
        case 2:
            del comm
        case _:
            cycle: list[Any] = [comm]
            cycle.append(cycle)
            del comm, cycle
            gc.collect()


def test_hundreds_of_communicators(master: pccl.MasterNode) -> None:
    for number in range(40):
        use(master, number)
    with cheap_collections():
        before = settled_census(master)
        tracemalloc.start()
        try:
            start_bytes = tracemalloc.get_traced_memory()[0]
            for number in range(COMMUNICATORS):
                use(master, number)
            after = settled_census(master)
            grown_bytes = tracemalloc.get_traced_memory()[0] - start_bytes
        finally:
            tracemalloc.stop()
    check_same(after, before)
    assert grown_bytes < GROWTH_BYTES_MAX


def test_failed_connects_and_time_limits(master: pccl.MasterNode) -> None:
    def fail(address: str) -> None:
        with pytest.raises(MasterLost), pccl.Communicator(address, timing=QUICK) as comm:
            comm.connect(n_attempts=1)

    def be_late() -> None:
        with pytest.raises(DeadlineExceeded), pccl.Communicator(master.address) as comm:
            comm.connect(min_peers=1000, timeout_s=0.001)  # however many are there at a time

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        fail(nobody)
        be_late()
        before = settled_census(master)
        with cheap_collections():
            for _ in range(30):
                fail(nobody)
                be_late()
        check_same(settled_census(master), before)


# -- inside a long life --------------------------------------------------------------------------


def sizes(thing: object, depth: int = 4) -> dict[str, int]:
    """How long every table is that the machines, engines and their parts hold."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def look(owner: Any, name: str, left: int) -> None:
        if id(owner) in seen or not left:
            return
        seen.add(id(owner))
        held = cast("dict[str, Any]", getattr(owner, "__dict__", {}))
        for key, value in held.items():
            where, kind = f"{name}.{key}", cast("type[object]", type(value))
            if kind is deque and value.maxlen is not None:
                continue  # a ring, which is there to be full
            if kind in (dict, list, set, deque, Counter):
                found[where] = len(value)
            elif str(kind.__module__).startswith("pccl."):
                look(value, where, left - 1)

    look(thing, type(thing).__name__, depth)
    return {name: size for name, size in found.items() if not name.endswith("names._names")}


def tables(run: Run) -> dict[str, int]:
    """Of the master and both members, once all that was said is acknowledged."""
    master = machine_of(run.master)
    run.until(lambda: not list(master.finals.outcomes.everybody_owed()))
    run.until(lambda: not list(master.finals.answers.everybody_owed()))
    run.until(lambda: not any(len(engine_of(m).machine.finals) for m in run.members))
    found: dict[str, int] = {}
    for owner in (master, *map(engine_of, run.members)):
        found.update({f"{id(owner)} {name}": size for name, size in sizes(owner).items()})
    return found


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Which have grown; a count per peer may come with the peer's first turn."""
    return {
        name: (before.get(name, 0), size)
        for name, size in after.items()
        if size > before.get(name, 0) and not (name.endswith("._opened") and size <= 2)
    }


def test_a_thousand_reduces(new_run: Callable[..., Run]) -> None:
    run = new_run(2)

    def reduce(member: pccl.Communicator, times: int) -> None:
        array = np.ones(16, np.int32)
        for number in range(times):
            if number % 4:
                member.all_reduce(array, tag=number % 50)
            else:
                member.all_reduce_async(array, tag=number % 50).wait()

    run.each(lambda member: reduce(member, 100))
    before = tables(run)
    run.each(lambda member: reduce(member, 1000))
    assert grown(before, tables(run)) == {}


def test_handles_that_are_dropped(new_run: Callable[..., Run]) -> None:
    run = new_run(2)

    def drop(member: pccl.Communicator, times: int) -> None:
        for number in range(times):
            member.all_reduce_async(np.ones(16), tag=number % 4)
            if number % 4 == 3:  # before a tag is used again, its reduce must have ended
                run.until(lambda: not len(engine_of(member).calls))

    def calm() -> None:
        run.each(pccl.Communicator.update_topology)  # nothing is pending

    run.each(lambda member: drop(member, 8))
    calm()
    before = tables(run)
    run.each(lambda member: drop(member, 200))
    calm()
    assert grown(before, tables(run)) == {}


def test_peers_come_and_go(new_run: Callable[..., Run]) -> None:
    run = new_run(2)

    def one_comes_and_goes() -> None:
        with pccl.Communicator(run.master.address, timing=QUICK) as newcomer:
            run.admit(newcomer.connect)
            newcomer.all_reduce_async(np.ones(16))  # and leaves without the others' call
        until(lambda: len(machine_of(run.master).membership.peers) == 2)
        run.each(pccl.Communicator.update_topology)

    for _ in range(3):
        one_comes_and_goes()
    before = tables(run)
    for _ in range(30):
        one_comes_and_goes()
    bounded = {"recent", "rosters", "_items"}  # logs that keep so many and no more
    assert not {
        name: sizes
        for name, sizes in grown(before, tables(run)).items()
        if name.rpartition(".")[2] not in bounded
    }


def test_numbers_of_tags_are_forgotten_with_their_view(new_run: Callable[..., Run]) -> None:
    """Whoever takes a new tag every time pays for it until the membership changes twice."""
    run = new_run(2)

    def take_new_tags(member: pccl.Communicator) -> None:
        for tag in range(200):
            member.barrier(tag=tag)

    run.each(take_new_tags)
    master = machine_of(run.master)
    assert len(master.ballots.next_n) == 200
    for _ in range(2):
        run.join()
        run.members.pop().close()
        run.each(pccl.Communicator.update_topology)
    assert len(master.ballots.next_n) == 0
    for member in run.members:
        operations = engine_of(member).machine.operations
        assert len(operations._next_n) == 0  # pyright: ignore[reportPrivateUsage]
