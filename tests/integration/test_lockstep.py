"""Members that wait for different things: told so if nobody is left who could go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl import Timing
from pccl.errors import DeadlineExceeded, LockstepError
from tests.support.patience import LIMIT_S

QUICK = Timing(heartbeat_s=0.05, tick_s=0.02, lockstep_s=0.3)
LONG_S = 1.5
"""Several times the pause after which a mistake is told."""


class Outcome:
    """A call in a thread that ends with it, as a thread of a program does."""

    def __init__(self, call: Callable[..., object], *arguments: Any, **options: Any) -> None:
        self.value: object = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(call, arguments, options))
        self._thread.start()

    def _run(self, call: Callable[..., object], arguments: Any, options: Any) -> None:
        try:
            self.value = call(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def wait(self) -> Exception | None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self.error


@pytest.fixture
def pair() -> Iterator[tuple[pccl.Communicator, pccl.Communicator]]:
    with pccl.MasterNode("127.0.0.1:0", timing=QUICK) as master:
        first = pccl.Communicator(master.address, timing=QUICK)
        second = pccl.Communicator(master.address, timing=QUICK)
        with first, second:
            joining = [Outcome(comm.connect, min_peers=2) for comm in (first, second)]
            assert [outcome.wait() for outcome in joining] == [None, None]
            yield first, second


def test_different_tags(pair: tuple[pccl.Communicator, pccl.Communicator]) -> None:
    first, second = pair
    arrays = [np.ones(10), np.ones(10)]
    calls = [
        Outcome(first.all_reduce, arrays[0], tag=1),
        Outcome(second.all_reduce, arrays[1], tag=2),
    ]
    for call in calls:
        error = call.wait()
        assert isinstance(error, LockstepError)
        assert (error.result, error.func) == (pccl.Result.INVALID_USAGE, "all_reduce")
        assert "tag 1" in str(error)
        assert "tag 2" in str(error)
    assert all((array == 1).all() for array in arrays)
    again = [Outcome(comm.all_reduce, np.ones(3)) for comm in pair]
    assert [call.wait() for call in again] == [None, None]


def test_a_round_and_a_collective(pair: tuple[pccl.Communicator, pccl.Communicator]) -> None:
    """The collective ends; the round, which spans all groups, can still be had."""
    first, second = pair
    asking, waiting = Outcome(first.are_peers_pending), Outcome(second.barrier)
    error = waiting.wait()
    assert isinstance(error, LockstepError)
    assert error.func == "barrier"
    assert "are_peers_pending" in str(error)
    assert Outcome(second.are_peers_pending).wait() is None
    assert asking.wait() is None
    assert asking.value is False


def test_two_rounds(pair: tuple[pccl.Communicator, pccl.Communicator]) -> None:
    first, second = pair
    calls = [Outcome(first.are_peers_pending), Outcome(second.optimize_topology)]
    for call, func in zip(calls, ("are_peers_pending", "optimize_topology"), strict=True):
        error = call.wait()
        assert isinstance(error, LockstepError)
        assert error.func == func


def test_a_caller_who_could_go_on(pair: tuple[pccl.Communicator, pccl.Communicator]) -> None:
    """This thread has made joint calls and lives, so it may make the missing one."""
    first, second = pair
    partner = Outcome(first.barrier)
    second.barrier()
    assert partner.wait() is None
    calls = [
        Outcome(first.barrier, tag=1, timeout_s=LONG_S),
        Outcome(second.barrier, tag=2, timeout_s=LONG_S),
    ]
    for call in calls:
        assert isinstance(call.wait(), DeadlineExceeded)


def test_an_open_handle(pair: tuple[pccl.Communicator, pccl.Communicator]) -> None:
    first, second = pair
    handles: list[pccl.AsyncReduceHandle] = []
    launch = Outcome(lambda: handles.append(first.all_reduce_async(np.ones(3), tag=3)))
    assert launch.wait() is None
    calls = [
        Outcome(first.barrier, tag=1, timeout_s=LONG_S),
        Outcome(second.barrier, tag=2, timeout_s=LONG_S),
    ]
    for call in calls:
        assert isinstance(call.wait(), DeadlineExceeded)
    assert Outcome(second.all_reduce, np.ones(3), tag=3).wait() is None
    assert handles[0].wait()[0]


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
