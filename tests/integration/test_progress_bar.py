"""A progress bar given to real calls, or put there by the environment."""

import asyncio
import io
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pccl
from pccl.progress import Drawer, ProgressBar
from tests.support.members import grow
from tests.support.patience import LIMIT_S
from tests.support.waiting import wait_for_threads

COUNT = 1_000_000


def state_of(value: float) -> pccl.SharedState:
    weights = np.full(COUNT, value, np.float32)
    return pccl.SharedState([pccl.TensorInfo.from_numpy(weights, "weights")])


def with_a_member(newcomer: Callable[[str], None]) -> None:
    """Let a newcomer join and synchronize with a member whose 4 MB are all 1."""

    def member() -> None:
        with pccl.Communicator(node.address) as comm:
            comm.connect()
            state = state_of(1.0)
            comm.sync_shared_state(state)
            there.set()
            grow(comm, 2)
            state.push_revision()
            comm.sync_shared_state(state)

    there = threading.Event()
    with ThreadPoolExecutor(1) as pool, pccl.MasterNode("127.0.0.1:0") as node:
        run = pool.submit(member)
        assert there.wait(LIMIT_S)
        newcomer(node.address)
        run.result(LIMIT_S)
    wait_for_threads(Drawer)


def test_a_bar_ends_with_the_call() -> None:
    stream = io.StringIO()

    def newcomer(address: str) -> None:
        with pccl.Communicator(address) as comm:
            comm.connect()
            bar = ProgressBar("taking over", stream=stream)
            info = comm.sync_shared_state(state_of(0.0), on_progress=bar)
            assert info.rx_bytes == 4 * COUNT

    with_a_member(newcomer)
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"pccl: taking over: 4\.0 MB(?: in .*)?", lines[-1])


@pytest.mark.parametrize("style", ["blocking", "asyncio"])
def test_the_environment_puts_one_there(
    style: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PCCL_PROGRESS", "1")
    monkeypatch.setattr("pccl.progress.UNASKED_AFTER_S", 0.0)

    def blocking(address: str) -> None:
        with pccl.Communicator(address) as comm:
            state = state_of(0.0)
            comm.connect(shared_state=state)
            comm.sync_shared_state(state)

    async def awaiting(address: str) -> None:
        async with pccl.aio.Communicator(address) as comm:
            state = state_of(0.0)
            await comm.connect(shared_state=state)
            await comm.sync_shared_state(state)

    with_a_member(
        blocking if style == "blocking" else lambda address: asyncio.run(awaiting(address))
    )
    found = capsys.readouterr()
    assert found.out == ""
    assert re.search(r"^pccl: synchronizing: 4\.0 MB(?: in .*)?$", found.err, re.MULTILINE)


def test_what_is_quick_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PCCL_PROGRESS", "1")
    monkeypatch.setattr("pccl.progress.UNASKED_AFTER_S", 3600.0)

    def newcomer(address: str) -> None:
        with pccl.Communicator(address) as comm:
            state = state_of(0.0)
            comm.connect(shared_state=state)
            comm.sync_shared_state(state)

    with_a_member(newcomer)
    assert capsys.readouterr().err == ""
