"""Members that wait for different things: told so if nobody is left who could go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl import Timing
from pccl.errors import DeadlineExceeded, LockstepError
from tests.support.members import Call, pair_at
from tests.support.patience import LIMIT_S

QUICK = Timing(heartbeat_s=0.05, tick_s=0.02, lockstep_s=0.3)
LONG_S = 1.5
"""Several times the pause after which a mistake is told."""


Pair = tuple[pccl.Communicator, pccl.Communicator]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pccl.MasterNode("127.0.0.1:0", timing=QUICK) as master:
        first, second = Call(pair_at, master.address, timing=QUICK).result()
        with first, second:
            yield first, second


def test_different_tags(pair: Pair) -> None:
    first, second = pair
    arrays = [np.ones(10), np.ones(10)]
    calls = [Call(first.all_reduce, arrays[0], tag=1), Call(second.all_reduce, arrays[1], tag=2)]
    for call in calls:
        error = call.exception()
        assert isinstance(error, LockstepError)
        assert (error.result, error.func) == (pccl.Result.INVALID_USAGE, "all_reduce")
        assert "tag 1" in str(error)
        assert "tag 2" in str(error)
    assert all((array == 1).all() for array in arrays)
    again = [Call(comm.all_reduce, np.ones(3)) for comm in pair]
    assert [call.exception() for call in again] == [None, None]


def test_a_round_and_a_collective(pair: Pair) -> None:
    """The collective ends; the round, which spans all groups, can still be had."""
    first, second = pair
    asking, waiting = Call(first.are_peers_pending), Call(second.barrier)
    error = waiting.exception()
    assert isinstance(error, LockstepError)
    assert error.func == "barrier"
    assert "are_peers_pending" in str(error)
    assert Call(second.are_peers_pending).exception() is None
    assert asking.result() is False


def test_two_rounds(pair: Pair) -> None:
    first, second = pair
    calls = Call[object](first.are_peers_pending), Call[object](second.optimize_topology)
    for call, func in zip(calls, ("are_peers_pending", "optimize_topology"), strict=True):
        error = call.exception()
        assert isinstance(error, LockstepError)
        assert error.func == func


def test_a_caller_who_could_go_on(pair: Pair) -> None:
    """This thread has made joint calls and lives, so it may make the missing one."""
    first, second = pair
    partner = Call(first.barrier)
    second.barrier()
    assert partner.exception() is None
    calls = [
        Call(first.barrier, tag=1, timeout_s=LONG_S),
        Call(second.barrier, tag=2, timeout_s=LONG_S),
    ]
    for call in calls:
        assert isinstance(call.exception(), DeadlineExceeded)


def test_an_open_handle(pair: Pair) -> None:
    first, second = pair
    handles: list[pccl.AsyncReduceHandle] = []
    launch = Call(lambda: handles.append(first.all_reduce_async(np.ones(3), tag=3)))
    assert launch.exception() is None
    calls = [
        Call(first.barrier, tag=1, timeout_s=LONG_S),
        Call(second.barrier, tag=2, timeout_s=LONG_S),
    ]
    for call in calls:
        assert isinstance(call.exception(), DeadlineExceeded)
    assert Call(second.all_reduce, np.ones(3), tag=3).exception() is None
    assert handles[0].wait()[0]


def test_waits_for_one_of_several_handles(pair: Pair) -> None:
    """A caller may stop waiting for a handle, so no member is told of a mistake."""
    first, second = pair
    launches = [Call(first.all_reduce_async, np.ones(3), tag=tag) for tag in range(2)]
    handles = [launch.result() for launch in launches]
    waiting = Call(handles[0].wait)
    barrier = Call(second.barrier, tag=2, timeout_s=LONG_S)
    assert isinstance(barrier.exception(), DeadlineExceeded)
    for tag in range(2):
        assert Call(second.all_reduce, np.ones(3), tag=tag).exception() is None
    assert waiting.result()[0]
    assert handles[1].wait()[0]


def test_tasks() -> None:
    async def main() -> tuple[object, object]:
        async with (
            pccl.aio.Communicator(master.address, timing=QUICK) as first,
            pccl.aio.Communicator(master.address, timing=QUICK) as second,
        ):
            await asyncio.gather(first.connect(min_peers=2), second.connect(min_peers=2))
            async with asyncio.timeout(LIMIT_S):
                return await asyncio.gather(
                    first.barrier(tag=1), second.barrier(tag=2), return_exceptions=True
                )

    with pccl.MasterNode("127.0.0.1:0", timing=QUICK) as master:
        outcomes = asyncio.run(main())
    assert all(isinstance(outcome, LockstepError) for outcome in outcomes)
