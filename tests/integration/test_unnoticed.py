"""Callers who leave at the instant in which their call had returned: nobody is left behind.

An asyncio caller keeps its own loop busy while the I/O thread completes the call, and is cancelled
before it can look. A blocking caller is put into the place of one whom Ctrl-C strikes right then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl._api.arguments import join_request, reduce_request
from pccl._api.session import CheckedCall
from pccl.errors import NotConnected, ResyncRequired
from pccl.machines.peer.machine import Standing
from pccl.protocol.types import RoundKind
from pccl.runtime.requests import RunRequest
from tests.integration.conftest import QUICK, Run
from tests.support.insides import engine_of
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

ROUNDS = ["update_topology", "are_peers_pending", "optimize_topology"]


def keep_busy_until(condition: Callable[[], bool]) -> None:
    """Block this thread, and the loop that runs on it."""
    until(condition)


async def cancelled_unnoticed(comm: pccl.aio.Communicator, work: Coroutine[Any, Any, Any]) -> None:
    """Cancel the call when its answer is here, and nobody has looked."""
    calls = engine_of(comm).calls
    begun = calls._last  # pyright: ignore[reportPrivateUsage]
    call = asyncio.create_task(work)
    await asyncio.sleep(0)  # it has been handed over
    keep_busy_until(lambda: calls._last == begun + 1 and not len(calls))  # pyright: ignore[reportPrivateUsage]
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, LIMIT_S)


async def within_limit(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*work), LIMIT_S)


class Pair:
    """Two members of the asyncio API on this loop."""

    def __init__(self, address: str) -> None:
        self.both = [pccl.aio.Communicator(address, timing=QUICK) for _ in range(2)]

    async def __aenter__(self) -> tuple[pccl.aio.Communicator, pccl.aio.Communicator]:
        first, second = self.both
        await within_limit(first.connect(min_peers=2), second.connect(min_peers=2))
        return first, second

    async def __aexit__(self, *_: object) -> None:
        for comm in self.both:
            await comm.close()


async def reduce_once(*members: pccl.aio.Communicator) -> None:
    arrays = [np.full(10, 1.0) for _ in members]
    await within_limit(
        *(member.all_reduce(array) for member, array in zip(members, arrays, strict=True))
    )
    assert all((array == len(members)).all() for array in arrays)


# -- asyncio ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_counts_also_for_whoever_left_it(new_run: Callable[..., Run], name: str) -> None:
    run = new_run()

    async def scenario() -> None:
        async with Pair(run.master.address) as (first, second):
            await within_limit(first.update_topology(), second.update_topology())
            theirs = asyncio.create_task(getattr(second, name)())
            await cancelled_unnoticed(first, getattr(first, name)())
            value = await asyncio.wait_for(theirs, LIMIT_S)
            # The other one goes on to the next call, and does not come to another round.
            assert await asyncio.wait_for(getattr(first, name)(), LIMIT_S) == value
            await reduce_once(first, second)
            await within_limit(getattr(first, name)(), getattr(second, name)())

    asyncio.run(scenario())


def test_an_update_that_is_followed_by_a_reduce(new_run: Callable[..., Run]) -> None:
    """Whoever doesn't call it again reduces with the others all the same."""
    run = new_run()

    async def scenario() -> None:
        async with Pair(run.master.address) as (first, second):
            await within_limit(first.update_topology(), second.update_topology())
            theirs = asyncio.create_task(second.update_topology())
            await cancelled_unnoticed(first, first.update_topology())
            await theirs
            await reduce_once(first, second)

    asyncio.run(scenario())


def test_an_update_that_went_with_the_admission(new_run: Callable[..., Run]) -> None:
    run = new_run()

    async def scenario() -> None:
        async with Pair(run.master.address) as (first, second):
            await cancelled_unnoticed(first, first.update_topology())
            await within_limit(first.update_topology(), second.update_topology())
            await reduce_once(first, second)

    asyncio.run(scenario())


def test_an_admission(new_run: Callable[..., Run]) -> None:
    """As if the call had not been made: the run goes on without, and it can be made again."""
    run = new_run()

    async def scenario() -> None:
        async with pccl.aio.Communicator(run.master.address, timing=QUICK) as comm:
            await cancelled_unnoticed(comm, comm.connect())
            assert engine_of(comm).machine.standing is Standing.LOST
            await asyncio.to_thread(run.until, lambda: run.registered == 0)
            await asyncio.wait_for(comm.connect(), LIMIT_S)
            assert (comm.world_size, run.registered) == (1, 1)

    asyncio.run(scenario())


def test_an_admission_of_somebody_who_closes_at_once(new_run: Callable[..., Run]) -> None:
    run = new_run()

    async def scenario() -> None:
        comm = pccl.aio.Communicator(run.master.address, timing=QUICK)
        await cancelled_unnoticed(comm, comm.connect())
        await comm.close()
        with pytest.raises(NotConnected, match="closed"):
            await comm.connect()

    asyncio.run(scenario())
    run.until(lambda: run.registered == 0)


def test_several_tensors_of_which_some_are_reduced(new_run: Callable[..., Run]) -> None:
    """His inputs are what they were; the others have a result, and he is told so."""
    run = new_run()

    async def scenario() -> None:
        async with Pair(run.master.address) as (first, second):
            arrays = [np.full(10, 1.0), np.full(10, 2.0)]
            many = [
                pccl.ReduceOpDescriptor.from_numpy(
                    array, array, pccl.ReduceDescriptor(10, pccl.ReduceOp.SUM, tag, None, None)
                )
                for tag, array in enumerate(arrays)
            ]
            call = asyncio.create_task(first.all_reduce_multiple_with_retry(many))
            await asyncio.wait_for(second.all_reduce(np.full(10, 4.0), tag=0), LIMIT_S)
            keep_busy_until(lambda: len(engine_of(first).calls) == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert [array[0] for array in arrays] == [1.0, 2.0]
            for _ in range(2):
                with pytest.raises(ResyncRequired, match=r"tag 0.*connect\(\) again"):
                    await first.all_reduce(np.full(10, 1.0), tag=9)

    asyncio.run(scenario())


# -- Ctrl-C ----------------------------------------------------------------------------------------


def interrupted_unnoticed(comm: pccl.Communicator, call: Any) -> None:
    """The call has returned, and Ctrl-C comes before this thread knows."""
    session = comm._session  # pyright: ignore[reportPrivateUsage]
    with session.inside(call, threading.current_thread()) as joint:
        submission = session.submit(call, joint)
        submission.wait()
        session.settle_left(call, submission)


@pytest.mark.parametrize("name", ROUNDS)
def test_ctrl_c_after_a_round(new_run: Callable[..., Run], name: str) -> None:
    run = new_run(2)
    first, second = run.members
    second.update_topology()  # went with its admission
    theirs = run.start(getattr(second, name))
    kind = next(kind for kind in RoundKind if kind.call_name == name)
    interrupted_unnoticed(first, CheckedCall(name, engine_of(first).round, RunRequest(kind)))
    value = theirs.result(LIMIT_S)
    assert run.start(getattr(first, name)).result(LIMIT_S) == value
    run.check()
    run.each(lambda member: getattr(member, name)())


def test_ctrl_c_after_an_admission(new_run: Callable[..., Run]) -> None:
    run = new_run()
    comm = run.newcomer()
    joins = CheckedCall("connect", engine_of(comm).connect, join_request(), joint=False)
    interrupted_unnoticed(comm, joins)
    run.until(lambda: run.registered == 0)
    comm.connect()
    assert comm.world_size == 1


def test_ctrl_c_after_a_reduce(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    first, second = run.members
    array = np.ones(10)
    theirs = run.start(second.all_reduce, np.ones(10))
    call = CheckedCall("all_reduce", engine_of(first).reduce, reduce_request(array))
    interrupted_unnoticed(first, call)
    theirs.result(LIMIT_S)
    with pytest.raises(ResyncRequired):
        first.are_peers_pending()
