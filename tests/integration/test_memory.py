"""What has ended keeps no tensor alive: not in the engine, a handle, or an error that is kept."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl.errors import CollectiveAborted, DeadlineExceeded, DescriptorMismatch, TooFewPeers
from pccl.runtime.io_thread import IOThread
from tests.integration.conftest import QUICK, Run
from tests.support.insides import engine_of

Reduce = Callable[[Any], object]


def is_gone(alive: weakref.ref[Any]) -> bool:
    io = IOThread._shared  # pyright: ignore[reportPrivateUsage]
    if io is not None:
        io.call(lambda: None)  # the step that woke us up may not have ended yet
    gc.collect()
    return alive() is None


def error_of(reduce: Reduce, array: Any) -> pccl.PCCLError:
    """The error itself, without the frames of this side, as a caller may keep it."""
    try:
        reduce(array)
    except pccl.PCCLError as error:
        return error.with_traceback(None)
    raise AssertionError("it has not failed")


def failed_with(reduce: Reduce) -> tuple[pccl.PCCLError, weakref.ref[Any]]:
    """Let a reduce fail; return what may live on, and whether the tensor does."""
    array = np.arange(1000.0)
    error = error_of(reduce, array)
    assert np.array_equal(array, np.arange(1000.0))
    return error, weakref.ref(array)


TAGS = itertools.count(100)
"""One for each test: what one member has withdrawn concerns the others' calls of that tag."""


def many(array: Any, tag: int) -> list[pccl.ReduceOpDescriptor]:
    what = pccl.ReduceDescriptor(array.size, pccl.ReduceOp.SUM, tag, None, None)
    return [pccl.ReduceOpDescriptor.from_numpy(array, array, what)]


Start = Callable[[pccl.Communicator, Any, int, float | None], object]
CALLS: dict[str, Start] = {
    "all_reduce": lambda comm, array, tag, limit_s: comm.all_reduce(
        array, tag=tag, timeout_s=limit_s
    ),
    "with retry": lambda comm, array, tag, limit_s: comm.all_reduce(
        array, tag=tag, retry=True, timeout_s=limit_s
    ),
    "broadcast": lambda comm, array, tag, limit_s: comm.broadcast(
        array, tag=tag, timeout_s=limit_s
    ),
    "several": lambda comm, array, tag, limit_s: comm.all_reduce_multiple_with_retry(
        many(array, tag), timeout_s=limit_s
    ),
    "handle": lambda comm, array, tag, limit_s: comm.all_reduce_async(
        array, tag=tag, timeout_s=limit_s
    ).result(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_time_limit(run_of: Callable[..., Run], name: str) -> None:
    comm, tag = run_of(2).members[0], next(TAGS)
    error, alive = failed_with(lambda array: CALLS[name](comm, array, tag, 0.02))
    assert isinstance(error, DeadlineExceeded)
    assert is_gone(alive)


@pytest.mark.parametrize("name", ["all_reduce", "several", "handle"])
def test_nobody_else(run_of: Callable[..., Run], name: str) -> None:
    comm, tag = run_of(1).members[0], next(TAGS)
    error, alive = failed_with(lambda array: CALLS[name](comm, array, tag, None))
    assert isinstance(error, TooFewPeers)
    assert is_gone(alive)


@pytest.mark.parametrize("name", CALLS)
def test_a_mismatch(run_of: Callable[..., Run], name: str) -> None:
    run = run_of(2)
    (first, second), tag = run.members, next(TAGS)
    theirs = run.start(second.all_reduce, np.ones(3), tag=tag)
    error, alive = failed_with(lambda array: CALLS[name](first, array, tag, None))
    assert isinstance(error, DescriptorMismatch)
    assert isinstance(theirs.exception(), DescriptorMismatch)
    assert is_gone(alive)


@pytest.mark.parametrize("name", ["all_reduce", "handle"])
def test_an_abort(new_run: Callable[..., Run], name: str) -> None:
    run = new_run(3)
    first, lost, tag = run.members[0], run.members[2], next(TAGS)

    def lose() -> None:
        run.until(lambda: run.requests == 1)
        lost.close()

    losing = run.start(lose)
    error, alive = failed_with(lambda array: CALLS[name](first, array, tag, None))
    losing.result()
    assert isinstance(error, CollectiveAborted)
    assert is_gone(alive)


@pytest.mark.parametrize("asked", ["nobody waits", "waited for", "dropped"])
def test_handles(run_of: Callable[..., Run], asked: str) -> None:
    run = run_of(2)
    (first, second), tag = run.members, next(TAGS)
    array = np.ones(1000)
    alive = weakref.ref(array)
    handles = [first.all_reduce_async(array, tag=tag)]
    if asked == "dropped":
        handles.clear()
    second.all_reduce(np.ones(1000), tag=tag)
    run.until(lambda: len(engine_of(first).calls) == 0)
    assert (array == 2).all()
    if asked == "waited for":
        assert handles[0].wait()[0]
    del array
    assert is_gone(alive)
    run.each(pccl.Communicator.are_peers_pending)


def test_a_handle_that_failed_and_is_kept(run_of: Callable[..., Run]) -> None:
    comm, tag = run_of(2).members[0], next(TAGS)
    array = np.ones(1000)
    alive = weakref.ref(array)
    handle = comm.all_reduce_async(array, tag=tag, timeout_s=0.02)
    assert handle.wait()[0] is False
    for _ in range(2):
        assert isinstance(error_of(lambda _: handle.result(), None), DeadlineExceeded)
    del array
    assert is_gone(alive)


def test_with_asyncio(new_run: Callable[..., Run]) -> None:
    run = new_run()
    kept: list[object] = []

    async def fail(comm: pccl.aio.Communicator, *, several: bool) -> weakref.ref[Any]:
        array = np.ones(1000)
        try:
            if several:
                await comm.all_reduce_multiple_with_retry(many(array, 1), timeout_s=0.02)
            else:
                await comm.all_reduce(array, timeout_s=0.02)
        except DeadlineExceeded as error:
            kept.append(error.with_traceback(None))
        return weakref.ref(array)

    async def cancel(comm: pccl.aio.Communicator) -> weakref.ref[Any]:
        array = np.ones(1000)
        call = asyncio.create_task(comm.all_reduce(array))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        return weakref.ref(array)

    async def scenario() -> None:
        first, second = (pccl.aio.Communicator(run.master.address, timing=QUICK) for _ in "ab")
        async with first, second:
            await asyncio.gather(first.connect(min_peers=2), second.connect(min_peers=2))
            for work in (fail(first, several=False), fail(first, several=True), cancel(first)):
                alive = await work
                assert is_gone(alive)

    asyncio.run(scenario())
    assert len(kept) == 2
