"""The run's key-value store with real members: waits, threads, deaths, returning masters."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import pccl
from pccl import MasterNode, Timing
from pccl.aio import Communicator as AsyncCommunicator
from pccl.errors import DeadlineExceeded, NotConnected, PCCLError
from tests.integration.conftest import QUICK, Run
from tests.support.commands import environment_with
from tests.support.insides import engine_of
from tests.support.patience import LIMIT_S
from tests.support.ports import free_address
from tests.support.waiting import until

RunOf = Callable[..., Run]
RETURNING = Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.05, recovery_s=1.0)
KILLED = """
import sys, pccl
comm = pccl.Communicator(sys.argv[1])
comm.connect()
comm.store.set("of the killed one", b"it stays")
comm.store.add("n", 5)
print("wrote", flush=True)
comm.store.get("never")
"""


def add_many(member: pccl.Communicator, key: str, count: int) -> list[int]:
    return [member.store.add(key) for _ in range(count)]


def test_all_calls(run_of: RunOf) -> None:
    one, two = (member.store for member in run_of(2).members)
    one.set("key", b"value")
    assert two.get("key") == b"value"
    assert [two.add("n", 3), one.add("n", -5), one.add("n")] == [3, -2, -1]
    assert one.get("n") == b"-1"
    assert one.compare_set("c", b"no", b"new") is None
    assert one.compare_set("c", b"", b"new") == b"new"
    assert two.compare_set("c", b"no", b"newer") == b"new"
    assert two.compare_set("c", b"new", b"newer") == b"newer"
    two.append("c", b"!")
    one.append("d", b"first")
    assert (one.get("c"), two.get("d")) == (b"newer!", b"first")
    assert one.count() == 4
    assert one.check(["key", "n", "c", "d"])
    assert not one.check(["key", "missing"])
    assert two.delete("key")
    assert not one.delete("key")
    assert one.check([])
    one.wait([])


def test_a_member_waits_for_the_key_of_another(run_of: RunOf) -> None:
    run = run_of(3)
    one, *others = run.members
    got = [run.start(member.store.get, "late", timeout_s=LIMIT_S) for member in others]
    waited = run.start(one.store.wait, [f"k{n}" for n in range(150)], timeout_s=LIMIT_S)
    with pytest.raises(DeadlineExceeded, match="waited for a member to set 'late'"):
        one.store.get("late", timeout_s=0.05)
    for n in range(150):
        others[n % 2].store.set(f"k{n}", b"")
    waited.result(LIMIT_S)
    assert one.store.check([f"k{n}" for n in range(150)])
    one.store.set("late", b"here")
    assert [future.result(LIMIT_S) for future in got] == [b"here"] * 2


def test_many_threads_add(run_of: RunOf) -> None:
    run = run_of(2)
    futures = [run.start(add_many, member, "many", 20) for member in run.members for _ in range(8)]
    sums = [n for future in futures for n in future.result(LIMIT_S)]
    assert sorted(sums) == list(range(1, 321))


def test_the_store_does_not_hide_a_lockstep_error_nor_count_as_a_caller(run_of: RunOf) -> None:
    run = run_of(2)
    waiting = run.start(run.members[0].store.get, "k")
    run.check()
    session: Any = run.members[0]._session  # pyright: ignore[reportPrivateUsage]
    until(lambda: session.callers.all_blocked() is False)
    run.members[1].store.set("k", b"v")
    assert waiting.result(LIMIT_S) == b"v"


@pytest.mark.parametrize(
    ("call", "arguments", "kind"),
    [
        ("set", ("k" * 257, b""), ValueError),
        ("set", ("k", bytes((64 << 10) + 1)), ValueError),
        ("set", ("k", "text"), TypeError),
        ("set", (1, b""), TypeError),
        ("check", ("one key",), TypeError),
        ("add", ("k", 1 << 63), ValueError),
        ("get", ("k", 0), ValueError),
    ],
)
def test_mistakes(
    run_of: RunOf, call: str, arguments: tuple[object, ...], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        getattr(run_of(1).members[0].store, call)(*arguments)


def test_bounds(run_of: RunOf) -> None:
    one, two = (member.store for member in run_of(2).members)
    one.set("text", b"abc")
    with pytest.raises(ValueError, match="64-bit number"):
        one.add("text")
    value = bytes(64 << 10)
    for n in range(15):
        one.set(f"{n}", value)
    with pytest.raises(PCCLError, match="this peer has 1 MiB in the store") as full:
        one.set("15", value)
    assert full.value.result is pccl.Result.INVALID_USAGE
    with pytest.raises(ValueError, match="append"):
        two.append("0", b"!")
    two.set("there is room", value)
    for n in range(15):
        one.delete(f"{n}")
    one.set("now", value)


def test_only_members_may_ask(new_run: RunOf) -> None:
    run = new_run(1)
    with pytest.raises(NotConnected, match="connect"):
        run.newcomer().store.count()
    (member,) = run.members
    waiting = run.start(member.store.get, "never")
    until(lambda: len(engine_of(member).machine.store) == 1)
    member.close()
    with pytest.raises(NotConnected):
        waiting.result(LIMIT_S)
    with pytest.raises(NotConnected):
        member.store.count()


def test_for_asyncio(new_run: RunOf) -> None:
    run = new_run(1)

    async def work() -> bytes:
        async with AsyncCommunicator(run.master.address, timing=QUICK) as comm:
            joining = asyncio.create_task(comm.connect())
            while run.members[0].world_size == 1:
                await asyncio.to_thread(run.members[0].update_topology)
            await joining
            assert await comm.store.add("n", 2) == 2
            waiting = asyncio.create_task(comm.store.get("k"))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await comm.store.set("k", b"v")
            return await comm.store.get("k")

    assert asyncio.run(work()) == b"v"


# -- deaths --------------------------------------------------------------------------------------


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_killed_member_leaves_its_keys(new_run: RunOf) -> None:
    run = new_run(1)
    (member,) = run.members
    command = [sys.executable, "-c", KILLED, run.master.address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment_with()
    ) as killed:
        try:
            joined = run.start(member.store.get, "of the killed one", timeout_s=LIMIT_S)
            while member.world_size == 1:  # once it is a member, it makes no joint call
                member.update_topology()
                time.sleep(0.01)
            assert killed.stdout is not None
            assert killed.stdout.readline() == "wrote\n"
        finally:
            killed.kill()
    assert joined.result(LIMIT_S) == b"it stays"
    assert member.store.add("n", 1) == 6


def test_a_master_that_comes_back_has_the_keys(stack: ExitStack, tmp_path: Path) -> None:
    """Calls under way go on, and each addition counts once."""
    address = free_address()

    def begin() -> MasterNode:
        node = MasterNode(address, timing=RETURNING, state=tmp_path / "state")
        stack.callback(node.interrupt)
        node.run()
        return node

    node, threads = begin(), stack.enter_context(ThreadPoolExecutor(16))
    members = [pccl.Communicator(address, timing=RETURNING) for _ in range(3)]
    for member in members:
        stack.callback(member.close)
    for joining in [threads.submit(member.connect, min_peers=3) for member in members]:
        joining.result(LIMIT_S)
    members[0].store.set("mine", b"1")
    members[1].store.set("gone", b"2")
    members[2].store.delete("gone")
    waiting = threads.submit(members[1].store.get, "later")

    adding = [threads.submit(add_many, member, "n", 150) for member in members]
    for restart in range(3):
        least = 20 * (restart + 1)
        while members[0].store.add("steps") < least:
            pass
        node.interrupt()
        node = begin()
    sums = [n for future in adding for n in future.result(LIMIT_S)]
    assert sorted(sums) == list(range(1, 451))
    assert members[2].store.get("mine") == b"1"
    assert not members[0].store.check(["gone"])
    members[2].store.set("later", b"now")
    assert waiting.result(LIMIT_S) == b"now"
