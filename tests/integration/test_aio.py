"""The asyncio API: the same calls, and leaving them early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl import Attribute, ReduceOp
from pccl.errors import (
    CollectiveAborted,
    DeadlineExceeded,
    NotConnected,
    PendingOperations,
    TooFewPeers,
)
from tests.integration.conftest import Run
from tests.support.patience import LIMIT_S, patient

PROMPT_S = patient(3.0)
"""Well below the deadlines of 10 s that would end a call that is not left promptly."""


def world_size(comm: pccl.aio.Communicator) -> int:
    return comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)


def on_loop(main: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


@asynccontextmanager
async def members_of(run: Run, size: int) -> AsyncGenerator[list[pccl.aio.Communicator], None]:
    """Members that share this loop."""
    members: list[pccl.aio.Communicator] = []

    async def grow(member: pccl.aio.Communicator) -> None:
        while world_size(member) <= len(members):
            await member.update_topology()

    async with AsyncExitStack() as stack:
        for _ in range(size):
            comm = pccl.aio.Communicator(run.master.address, timing=run.timing)
            await stack.enter_async_context(comm)
            await asyncio.gather(comm.connect(), *map(grow, members))
            members.append(comm)
        yield members


def test_calls(new_run: Callable[..., Run]) -> None:
    run = new_run()

    async def main() -> None:
        async with members_of(run, 3) as members:
            assert [world_size(member) for member in members] == [3, 3, 3]
            assert len({member.peer_id for member in members}) == 3
            pending = await asyncio.gather(*(member.are_peers_pending() for member in members))
            assert pending == [False, False, False]
            tags = range(7)
            arrays = [
                (rank, tag, np.full(1 + 9_973 * tag, 10**tag * (rank + 1)))
                for tag in tags
                for rank in range(3)
            ]
            infos = await asyncio.gather(
                *(members[rank].all_reduce(array, tag=tag) for rank, tag, array in arrays)
            )
            assert {info.local_world_size for info in infos} == {3}
            assert all((array == 6 * 10**tag).all() for _, tag, array in arrays)
            results = [np.zeros(100) for _ in members]
            await asyncio.gather(
                *(
                    member.all_reduce(np.full(100, 3.0 * rank), result, op=ReduceOp.AVG)
                    for rank, (member, result) in enumerate(zip(members, results, strict=True))
                )
            )
            assert all((result == 3).all() for result in results)

    on_loop(main())


def test_errors(new_run: Callable[..., Run]) -> None:
    run = new_run()

    async def main() -> None:
        async with members_of(run, 1) as (alone,):
            with pytest.raises(TooFewPeers) as caught:
                await alone.all_reduce(np.ones(3))
            assert caught.value.func == "all_reduce"
            with pytest.raises(ValueError, match="no elements"):
                await alone.all_reduce(np.ones(0))
            with pytest.raises(pccl.PCCLError, match="connected already"):
                await alone.connect()
            async with pccl.aio.Communicator(run.master.address) as other:
                with pytest.raises(NotConnected):
                    await other.update_topology()
            with pytest.raises(NotConnected, match="closed"):
                await other.connect()
            await other.close()

    on_loop(main())


def test_cancelled_reduce_pairs_with_the_retry(new_run: Callable[..., Run]) -> None:
    run = new_run()

    async def main() -> None:
        async with members_of(run, 3) as members:
            impatient, second, third = members
            array, original = np.arange(1e6), np.arange(1e6)
            for partners in (0, 1):
                calls = [asyncio.create_task(impatient.all_reduce(array))]
                others = [np.ones(1_000_000) for _ in range(2)]
                if partners:
                    calls.append(asyncio.create_task(second.all_reduce(others[0])))
                await until(lambda: run.requests == len(calls))  # noqa: B023
                started = time.monotonic()
                calls[0].cancel()
                with pytest.raises(asyncio.CancelledError):
                    await calls[0]
                assert time.monotonic() - started < PROMPT_S
                assert np.array_equal(array, original)
                if partners:
                    with pytest.raises(
                        CollectiveAborted, match=rf"peer {impatient.peer_id} \(\S+\) withdrew"
                    ):
                        await calls[1]
                    assert (others[0] == 1).all()
                # Whoever has an answer that was given later knows of the withdrawal, too.
                await asyncio.gather(*(member.are_peers_pending() for member in members))
                mine = array.copy()
                infos = await asyncio.gather(
                    impatient.all_reduce(mine),
                    second.all_reduce(others[0], retry=True),
                    third.all_reduce(others[1], retry=True),
                )
                assert [info.attempts for info in infos] == [1, 1 if partners else 2, 2]
                assert {info.local_world_size for info in infos} == {3}
                assert np.array_equal(mine, original + 2)
                assert np.array_equal(others[0], mine)
                assert np.array_equal(others[1], mine)

    on_loop(main())


def test_cancelled_round_is_taken_up_again(new_run: Callable[..., Run]) -> None:
    run = new_run()

    async def main() -> None:
        async with members_of(run, 2) as (first, second):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await first.are_peers_pending()
            asked = asyncio.create_task(second.are_peers_pending())
            assert await first.are_peers_pending() is False
            assert await asked is False

    on_loop(main())


def test_the_other_calls(new_run: Callable[..., Run]) -> None:
    run = new_run()

    async def main() -> None:
        async with members_of(run, 2) as members:
            first, second = members
            assert [(member.rank, member.world_size) for member in members] == [(0, 2), (1, 2)]
            assert first.members() == second.members()
            await asyncio.gather(*(member.optimize_topology() for member in members))
            await asyncio.gather(*(member.barrier() for member in members))
            arrays = [np.zeros(5), np.ones(5)]
            infos = await asyncio.gather(
                *(
                    member.broadcast(array, root=1)
                    for member, array in zip(members, arrays, strict=True)
                )
            )
            assert {info.contributors for info in infos} == {(1, 2)}
            assert (arrays[0] == 1).all()
            await asyncio.gather(
                *(
                    member.all_reduce_multiple_with_retry(several(arrays[rank]), max_in_flight=1)
                    for rank, member in enumerate(members)
                )
            )
            assert [array.tolist() for array in arrays] == [[2.0, 2.0, 1.0, 1.0, 1.0]] * 2

    def several(array: Any) -> list[pccl.ReduceOpDescriptor]:
        return [
            pccl.ReduceOpDescriptor.from_numpy(
                part, part, pccl.ReduceDescriptor(part.size, op, tag, None, None)
            )
            for tag, (part, op) in enumerate(((array[2:], ReduceOp.AVG), (array[:2], ReduceOp.SUM)))
        ]

    on_loop(main())


def test_handles(new_run: Callable[..., Run]) -> None:
    run = new_run()

    async def main() -> None:
        async with members_of(run, 2) as (first, second):
            array = np.arange(10.0)
            handle = await first.all_reduce_async(array, op=ReduceOp.MAX, tag=4)
            with pytest.raises(pccl.PCCLError, match="tag 4 is in use"):
                await first.all_reduce_async(np.ones(3), tag=4)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await handle
            assert not handle.done
            with pytest.raises(PendingOperations):
                await first.update_topology()
            await second.all_reduce(np.full(10, 4.5), op=ReduceOp.MAX, tag=4)
            info = await handle
            assert info == await handle
            assert handle.wait() == (True, pccl.Result.SUCCESS, info)
            assert array.tolist() == [4.5] * 5 + [5, 6, 7, 8, 9]
            await asyncio.gather(first.update_topology(), second.update_topology())

    on_loop(main())


def test_budgets(new_run: Callable[..., Run]) -> None:
    run = new_run()

    async def main() -> None:
        async with members_of(run, 2) as (first, second):
            array = np.ones(10)
            for call in (
                first.all_reduce(array, timeout_s=0.05),
                first.barrier(timeout_s=0.05),
                first.are_peers_pending(timeout_s=0.05),
            ):
                with pytest.raises(DeadlineExceeded, match=r"timeout_s=0\.05 ran out"):
                    await call
            assert (array == 1).all()
            asked = await asyncio.gather(first.are_peers_pending(), second.are_peers_pending())
            assert list(asked) == [False, False]

    on_loop(main())


def test_cancelled_connect(new_run: Callable[..., Run]) -> None:
    run = new_run()

    async def main() -> None:
        async with members_of(run, 1) as (first,):
            second = pccl.aio.Communicator(run.master.address, timing=run.timing)
            async with second:
                joining = asyncio.create_task(second.connect())
                await until(lambda: run.registered == 2)
                joining.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await joining
                await until(lambda: run.registered == 1)
                joining = asyncio.create_task(second.connect())
                while world_size(first) < 2:
                    await first.update_topology()
                await joining
                assert world_size(second) == 2

    on_loop(main())
