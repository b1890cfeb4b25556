"""Any thread, any loop, any number of communicators and masters in one process."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl.errors import CollectiveAborted, DeadlineExceeded, NotConnected
from tests.integration.conftest import Array, Run
from tests.support.commands import run_to_end
from tests.support.members import Call
from tests.support.patience import LIMIT_S, patient

PROMPT_S = patient(3.0)


# -- threads -------------------------------------------------------------------------------------


def test_sixteen_threads_with_sixteen_tags(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    arrays: list[list[Array]] = [[np.full(999, 1.0 + tag) for tag in range(16)] for _ in range(2)]
    rounds = 5

    def reduce(member: pccl.Communicator, array: Array, tag: int) -> None:
        for _ in range(rounds):
            member.all_reduce(array, tag=tag)

    calls = [
        run.start(reduce, member, arrays[rank][tag], tag)
        for rank, member in enumerate(run.members)
        for tag in range(16)
    ]
    for call in calls:
        call.result(LIMIT_S)
    for mine in arrays:
        assert [array[0] for array in mine] == [(1.0 + tag) * 2**rounds for tag in range(16)]


def test_one_connects_another_reduces_a_third_closes(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    comm = run.newcomer()

    run.admit(lambda: Call(comm.connect).result())
    array = np.ones(10)
    theirs = run.start(run.members[0].all_reduce, np.ones(10))
    Call(comm.all_reduce, array).result()
    theirs.result(LIMIT_S)
    assert (array == 2).all()
    Call(comm.close).result()
    run.until(lambda: run.registered == 1)


def test_launched_in_one_thread_awaited_in_another(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    first, second = run.members
    handle = run.start(first.all_reduce_async, np.ones(10)).result(LIMIT_S)

    async def wait() -> pccl.ReduceInfo:
        return await handle

    waits = [run.start(asyncio.run, wait()) for _ in range(8)]
    waits += [run.start(handle.result) for _ in range(8)]
    run.until(lambda: handle._waiters == 16)  # pyright: ignore[reportPrivateUsage]
    second.all_reduce(np.ones(10))
    assert len({id(w.result(LIMIT_S)) for w in waits}) == 1


# -- several communicators and masters -----------------------------------------------------------


def test_two_runs_and_two_groups_in_one_process(new_run: Callable[..., Run]) -> None:
    one, other = new_run(2), new_run(2)
    other.join(group=7)
    other.members[2:] = []
    third = other._made[-1]  # pyright: ignore[reportPrivateUsage]
    arrays = [np.full(100, number) for number in (1.0, 2.0, 3.0, 4.0)]
    calls = [
        run.start(member.all_reduce, array)
        for run, member, array in (
            (one, one.members[0], arrays[0]),
            (other, other.members[0], arrays[2]),
            (one, one.members[1], arrays[1]),
            (other, other.members[1], arrays[3]),
        )
    ]
    for call in calls:
        call.result(LIMIT_S)
    assert [array[0] for array in arrays] == [3.0, 3.0, 7.0, 7.0]
    assert (third.world_size, third.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE)) == (1, 3)


def test_ten_masters_on_one_port() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        address = master.address
    for turn in range(10):
        node = pccl.MasterNode(address)
        node.run()
        comm = pccl.Communicator(address)
        comm.connect()
        assert comm.world_size == 1
        for thing in ((node.interrupt, comm.close), (comm.close, node.interrupt))[turn % 2]:
            thing()


# -- loops ---------------------------------------------------------------------------------------


def test_two_loops_in_two_threads(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    comm = pccl.aio.Communicator(run.master.address, timing=run.timing)
    run.admit(lambda: asyncio.run(comm.connect()))
    arrays = [np.full(10, 1.0), np.full(10, 2.0)]

    async def reduce(tag: int) -> None:
        for _ in range(5):
            await comm.all_reduce(arrays[tag], tag=tag)

    def reduce_too(tag: int) -> None:
        for _ in range(5):
            run.members[0].all_reduce(np.full(10, 1.0), tag=tag)

    calls = [run.start(asyncio.run, reduce(tag)) for tag in range(2)]
    calls += [run.start(reduce_too, tag) for tag in range(2)]
    for call in calls:
        call.result(LIMIT_S)
    assert [array[0] for array in arrays] == [6.0, 7.0]
    asyncio.run(comm.close())


AWAITABLE: dict[str, Callable[[pccl.aio.Communicator, Array], Any]] = {
    "update_topology": lambda comm, array: comm.update_topology(),
    "are_peers_pending": lambda comm, array: comm.are_peers_pending(),
    "optimize_topology": lambda comm, array: comm.optimize_topology(),
    "all_reduce": lambda comm, array: comm.all_reduce(array),
    "broadcast": lambda comm, array: comm.broadcast(array, root=1),
    "barrier": lambda comm, array: comm.barrier(),
}


@pytest.mark.parametrize("name", AWAITABLE)
def test_asyncio_timeout_around_a_call(new_run: Callable[..., Run], name: str) -> None:
    run = new_run(1)
    comm = pccl.aio.Communicator(run.master.address, timing=run.timing)
    run.admit(lambda: asyncio.run(comm.connect()))
    asyncio.run(comm.update_topology())  # went with its admission
    array = np.arange(10.0)

    async def be_late() -> None:
        async with asyncio.timeout(0.05):
            await AWAITABLE[name](comm, array)

    for _ in range(2):
        with pytest.raises(TimeoutError):
            asyncio.run(be_late())
    assert np.array_equal(array, np.arange(10.0))
    with pytest.raises(DeadlineExceeded):
        asyncio.run(comm.barrier(tag=5, timeout_s=0.01))
    asyncio.run(comm.close())
    run.until(lambda: run.registered == 1)


def test_a_loop_that_is_closed_with_a_call_open(new_run: Callable[..., Run]) -> None:
    """The call is withdrawn when its coroutine is thrown away; nothing is left waiting."""
    run = new_run(2)
    comm = pccl.aio.Communicator(run.master.address, timing=run.timing)
    run.admit(lambda: asyncio.run(comm.connect()))
    array = np.ones(10)
    theirs = run.start(run.members[0].all_reduce, np.ones(10))
    loop = asyncio.new_event_loop()
    reducing = loop.create_task(comm.all_reduce(array))
    while run.requests < 2:
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    reducing._log_destroy_pending = False  # type: ignore[attr-defined] # asyncio's own complaint
    reducing.get_coro().close()
    error = theirs.exception(LIMIT_S)
    assert isinstance(error, CollectiveAborted)
    assert "withdrew" in str(error)
    assert (array == 1).all()
    asyncio.run(comm.close())


# -- names that nobody answers for ---------------------------------------------------------------


def test_closing_waits_for_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, asked = threading.Event(), threading.Event()
    look_up = socket.getaddrinfo

    def silent(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != "silent.example" or options.get("flags", 0) & socket.AI_NUMERICHOST:
            return look_up(host, *arguments, **options)
        asked.set()
        answered.wait(LIMIT_S)
        raise socket.gaierror(socket.EAI_AGAIN, "too late")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    comm = pccl.Communicator("silent.example:1", advertise="127.0.0.1")

    joining = Call(comm.connect)
    try:
        assert asked.wait(LIMIT_S)
        started = time.monotonic()
        comm.close()
        assert isinstance(error := joining.exception(), NotConnected)
        assert "closed" in str(error)
        assert time.monotonic() - started < PROMPT_S
    finally:
        answered.set()
    for thread in threading.enumerate():
        if thread.name == "pccl-lookup":
            thread.join(LIMIT_S)


# -- processes -----------------------------------------------------------------------------------

PREAMBLE = """
import asyncio, multiprocessing, os, subprocess, sys, threading, warnings
import numpy as np
import pccl, pccl.aio
from tests.support.members import Call, grow, pair_at

def pair(master):
    return pair_at(master.address)

def reduce(first, second, times):
    arrays = np.ones(100), np.ones(100)
    def all_of_them(comm, array):
        for _ in range(times):
            comm.all_reduce(array)
    theirs = Call(all_of_them, second, arrays[1])
    all_of_them(first, arrays[0])
    theirs.result()
    assert arrays[0][0] == arrays[1][0] == 2.0 ** times
"""

PROGRAMS = {
    "a DataLoader forks workers": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        warnings.simplefilter("ignore", DeprecationWarning)
        with pccl.MasterNode("127.0.0.1:0") as master:
            first, second = pair(master)
            data = TensorDataset(torch.arange(64.0))
            loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
            total = 0.0
            for (batch,) in loader:
                total += float(batch.sum())
                reduce(first, second, 1)
            assert total == 2016.0
            assert len(master._server.machine.membership.peers) == 2
            reduce(first, second, 3)
            first.close(); second.close()
    """,
    "a child that exits as usual": """
        warnings.simplefilter("ignore", DeprecationWarning)
        master = pccl.MasterNode("127.0.0.1:0")
        master.run()
        first, second = pair(master)
        handle = first.all_reduce_async(np.ones(5), tag=1)
        child = os.fork()
        if not child:
            for call in (first.close, handle.wait, lambda: first.barrier(), lambda: None):
                try:
                    call()
                except pccl.PCCLError as error:
                    assert "belongs to the parent process" in str(error), error
            del first, second, master, handle
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        second.all_reduce(np.ones(5), tag=1)
        assert handle.wait()[0]
        reduce(first, second, 3)
        master.interrupt()
    """,
    "a process that is spawned": """
        with pccl.MasterNode("127.0.0.1:0") as master:
            first, second = pair(master)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.apply(abs, (-3,)) == 3
            pool.join()
            reduce(first, second, 3)
            first.close(); second.close()
    """,
    "a program that a thread runs while another one is in a call": """
        with pccl.MasterNode("127.0.0.1:0") as master:
            first, second = pair(master)
            waiting = Call(first.barrier)
            while not first._session.engine.data_plane.transfers:
                pass
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            second.barrier()
            waiting.result()
            first.close(); second.close()
    """,
    "everything at once, warnings and asyncio's debugging on": """
        with pccl.MasterNode("127.0.0.1:0") as master:
            first, second = pair(master)
            reduce(first, second, 3)
            handles = [comm.all_reduce_async(np.ones(9), tag=3) for comm in (first, second)]
            assert all(handle.wait()[0] for handle in handles)
            many, mine = (
                [
                    pccl.ReduceOpDescriptor.from_numpy(
                        array, array, pccl.ReduceDescriptor(5, pccl.ReduceOp.MAX, tag, None, None)
                    )
                    for tag, array in enumerate(np.ones((4, 5)))
                ]
                for _ in range(2)
            )
            theirs = Call(second.all_reduce_multiple_with_retry, many)
            first.all_reduce_multiple_with_retry(mine)
            theirs.result()
            for call in ("are_peers_pending", "optimize_topology", "barrier"):
                other = Call(getattr(second, call))
                getattr(first, call)()
                other.result()
            try:
                first.all_reduce(np.ones(4), timeout_s=0.05)
            except pccl.PCCLError as error:
                assert "ran out" in str(error)
            second.close()
            while first.world_size > 1:
                first.update_topology()
            async def use():
                async with pccl.aio.Communicator(master.address) as comm:
                    joining = asyncio.create_task(comm.connect(min_peers=2))
                    await asyncio.to_thread(grow, first, 2)
                    await joining
                    launched = await comm.all_reduce_async(np.ones(3))
                    await asyncio.to_thread(first.all_reduce, np.ones(3))
                    assert (await launched).local_world_size == 2
            asyncio.run(use())
            first.close()
    """,
}


SLOW = r"WARNING pccl .* (has waited|waits no longer)"
"""What a peer logs on a busy machine."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    options = ["-W", "error", "-X", "dev"]
    if "DataLoader" in name:
        options = ["-W", "error", "-W", "ignore::DeprecationWarning"]  # torch's own
        pytest.importorskip("torch")
    script = PREAMBLE + textwrap.dedent(PROGRAMS[name])
    ended = run_to_end(sys.executable, *options, "-c", script, limit_s=2 * LIMIT_S)
    told = [line for line in ended.stderr.splitlines() if not re.search(SLOW, line)]
    assert (ended.returncode, told) == (0, [])
