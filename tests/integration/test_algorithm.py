"""Naming an algorithm, or leaving it to the master, through the public API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl import ReduceInfo
from pccl.errors import DescriptorMismatch
from tests.integration.conftest import Run
from tests.support.unnamed import unnamed


def test_the_info_says_how_the_values_travelled(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    for named in ("auto", "ring"):

        def reduce(member: pccl.Communicator, algorithm: str = named) -> tuple[ReduceInfo, Any]:
            array = np.ones(100, np.float32)
            return member.all_reduce(array, algorithm=algorithm), array

        for info, array in run.each(reduce):
            assert info.algorithm in ("ring", "star", "mesh")
            assert named == "auto" or info.algorithm == named
            assert np.array_equal(array, np.full(100, 3, np.float32))

    def launch(member: pccl.Communicator) -> ReduceInfo:
        ended, _, info = member.all_reduce_async(np.ones(9), algorithm="ring").wait()
        assert ended
        assert info is not None
        return info

    assert {info.algorithm for info in run.each(launch)} == {"ring"}

    def broadcast(member: pccl.Communicator) -> ReduceInfo:
        return member.broadcast(np.ones(9))

    assert {info.algorithm for info in run.each(broadcast)} == {"ring"}


def test_members_that_name_different_ones_are_told_so(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    algorithms = dict(zip(run.members, ("ring", "auto"), strict=True))

    def reduce(member: pccl.Communicator) -> str:
        array = np.full(4, 7.0)
        with pytest.raises(DescriptorMismatch) as caught:
            member.all_reduce(array, algorithm=algorithms[member])
        assert np.array_equal(array, np.full(4, 7.0))
        return unnamed(caught.value.reason)

    first, second = run.members
    for reason in run.each(reduce):
        assert f"peer {first.peer_id} asked for SUM of 4 x float64 by ring" in reason
        assert reason.endswith(f"peer {second.peer_id} asked for SUM of 4 x float64") or (
            f"peer {second.peer_id} asked for SUM of 4 x float64; " in reason
        )


def test_mistakes_are_told_before_anything_is_sent(run_of: Callable[..., Run]) -> None:
    first, second = run_of(2).members
    with pytest.raises(ValueError, match="algorithm must be one of"):
        first.all_reduce(np.ones(4), algorithm="tree")
    with pytest.raises(ValueError, match="'star' is for tensors up to 4194304 bytes"):
        first.all_reduce_async(np.ones((4 << 20) // 8 + 1), algorithm="star")
    handle = first.all_reduce_async(np.ones(4))
    second.all_reduce(np.ones(4))
    assert handle.wait()[0]


def test_asyncio() -> None:
    async def part(address: str) -> tuple[str, str]:
        async with pccl.aio.Communicator(address) as comm:
            await comm.connect(min_peers=2)
            with pytest.raises(ValueError, match="algorithm must be one of"):
                await comm.all_reduce(np.ones(4), algorithm="tree")
            info = await comm.all_reduce(np.ones(4), algorithm="ring")
            handle = await comm.all_reduce_async(np.ones(4), algorithm="ring")
            then = await handle
            await comm.barrier()
            return info.algorithm, then.algorithm

    async def main(address: str) -> None:
        both = await asyncio.gather(part(address), part(address))
        assert list(both) == [("ring", "ring"), ("ring", "ring")]

    with pccl.MasterNode("127.0.0.1:0") as master:
        asyncio.run(main(master.address))
