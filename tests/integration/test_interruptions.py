"""What breaks in on a blocking call: a lost master, a frozen peer, Ctrl-C.

Where a signal is sent, the member is a process of its own; this file is its program, too.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import Attribute, Result, Timing
from pccl.errors import CollectiveAborted, Evicted, MasterLost, NotConnected
from tests.integration.conftest import Array, Run
from tests.support.insides import engine_of
from tests.support.patience import LIMIT_S, patient
from tests.support.peers import PeerProcess, report
from tests.support.unnamed import unnamed

PROMPT_S = patient(3.0)
"""Well below the deadlines of 10 s that would end a call that is not left promptly."""


def world_size(comm: pccl.Communicator) -> int:
    return comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)


# -- the master is not there ---------------------------------------------------------------------


@pytest.fixture
def silent_port() -> Iterator[str]:
    """An address that nobody listens on, and nobody else can take."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_connect_with_nobody_there(silent_port: str) -> None:
    timing = Timing(connect_retry_s=0.01)
    with pccl.Communicator(silent_port, timing=timing) as comm:
        for attempts in (1, 3):
            with pytest.raises(
                MasterLost, match=f"after {attempts} attempts?: .*refused"
            ) as caught:
                comm.connect(n_attempts=attempts)
            assert caught.value.result == Result.MASTER_CONNECTION_FAILED
            assert silent_port in str(caught.value)
            assert caught.value.func == "connect"


def test_connect_finds_a_master_that_comes_later() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        address = master.address
    with pccl.Communicator(address, timing=Timing(connect_retry_s=0.01)) as comm:
        joining = threading.Thread(target=comm.connect, args=(10_000,))
        joining.start()
        with pytest.raises(NotConnected):
            comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
        with pccl.MasterNode(address):
            joining.join(LIMIT_S)
            assert world_size(comm) == 1


def test_master_is_lost_in_the_middle(new_run: Callable[..., Run]) -> None:
    timing = Timing(heartbeat_s=0.1, tick_s=0.05, master_lost_s=0.5)
    run = new_run(3, timing)
    first, second, third = run.members
    array, original = np.arange(1e6), np.arange(1e6)
    reducing = run.start(first.all_reduce, array)
    asking = run.start(second.are_peers_pending)
    run.until(lambda: run.requests + run.round_requests == 2)
    run.master.interrupt()
    for future, result, func in (
        (reducing, Result.RANK_CONNECTION_LOST, "all_reduce"),
        (asking, Result.INVALID_USAGE, "are_peers_pending"),
    ):
        error = future.exception(LIMIT_S)
        assert isinstance(error, MasterLost)
        assert (error.result, error.func) == (result, func)
        assert "no message from the master" in str(error)
    assert np.array_equal(array, original)
    run.until(lambda: engine_of(third).machine.standing.value == "lost")
    with pytest.raises(MasterLost) as caught:
        third.update_topology()
    assert caught.value.result == Result.UPDATE_TOPOLOGY_FAILED
    for member in run.members:
        with pytest.raises(NotConnected, match=r"connect\(\)"):
            member.are_peers_pending()
    with pccl.MasterNode(run.master.address):
        first.connect()
        assert world_size(first) == 1


def test_master_is_lost_under_load(new_run: Callable[..., Run]) -> None:
    """Whatever each reduce was doing: it failed and left its input, or it has the exact sum."""
    run = new_run(3, Timing(master_lost_s=0.3, tick_s=0.05))
    reduced = threading.Semaphore(0)

    def reduce_until_lost(member: pccl.Communicator, rank: int) -> None:
        original = np.arange(300_007) * (rank + 1)
        while True:
            array = original.copy()
            try:
                member.all_reduce(array)
            except MasterLost:
                assert np.array_equal(array, original)
                return
            assert np.array_equal(array, np.arange(300_007) * 6)
            reduced.release()

    futures = [
        run.start(reduce_until_lost, member, rank) for rank, member in enumerate(run.members)
    ]
    for _ in range(20):
        assert reduced.acquire(timeout=LIMIT_S)
    run.master.interrupt()
    for future in futures:
        future.result(LIMIT_S)


# -- members that are processes ----


def serve(address: str) -> None:
    """The program of a member: do what stdin says, report on stdout."""
    comm = pccl.Communicator(address, timing=Timing(heartbeat_s=0.1, tick_s=0.05))
    for line in sys.stdin:
        (name,) = json.loads(line)
        answer: dict[str, Any] = {}
        array = np.arange(1_000_000, dtype=np.int64)
        try:
            if name == "all_reduce":
                answer["contributors"] = comm.all_reduce(array).contributors
            elif name == "grow":
                size = world_size(comm)
                while world_size(comm) == size:
                    comm.update_topology()
            else:
                getattr(comm, name)()
        except (pccl.PCCLError, KeyboardInterrupt) as error:
            answer["error"] = type(error).__name__
            answer["words"] = str(error)
        answer["intact"] = bool(np.array_equal(array, np.arange(1_000_000)))
        answer["sum"] = int(array.sum())
        report(answer)
    comm.close()


@contextmanager
def a_process(run: Run) -> Generator[PeerProcess]:
    """A process that is a member of the run."""
    process = PeerProcess(__name__, run.master.address)
    try:
        assert "error" not in run.admit(lambda: process.ask("connect"))
        yield process
    finally:
        process.end()


def test_members_in_processes_of_their_own(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    with a_process(run) as second:
        for _ in range(3):
            second.tell("all_reduce")
            array = np.arange(1_000_000, dtype=np.int64)
            info = run.members[0].all_reduce(array)
            answer = second.answer()
            assert tuple(answer["contributors"]) == info.contributors
            assert np.array_equal(array, 2 * np.arange(1_000_000))
            assert answer["sum"] == array.sum()


def test_frozen_peer_is_removed_and_can_come_back(new_run: Callable[..., Run]) -> None:
    timing = Timing(heartbeat_s=0.1, tick_s=0.05, deadline_s=1.0)
    run = new_run(2, timing)
    with a_process(run) as third:
        frozen_id = 3
        third.process.send_signal(signal.SIGSTOP)
        arrays: list[Array] = [np.arange(1e6), np.arange(1e6)]
        futures = [
            run.start(member.all_reduce, array)
            for member, array in zip(run.members, arrays, strict=True)
        ]
        for future, array in zip(futures, arrays, strict=True):
            error = future.exception(LIMIT_S)
            assert isinstance(error, CollectiveAborted)
            assert f"the run lost peer {frozen_id}: silent" in unnamed(error)
            assert np.array_equal(array, np.arange(1e6))
        infos = run.reduce(arrays)
        assert {info.contributors for info in infos} == {(1, 2)}
        assert all(np.array_equal(array, 2 * np.arange(1e6)) for array in arrays)
        third.process.send_signal(signal.SIGCONT)
        answer = third.ask("update_topology")
        assert answer["error"] == Evicted.__name__
        assert "the run evicted this peer" in answer["words"]
        assert third.ask("all_reduce")["error"] == NotConnected.__name__
        assert "error" not in run.admit(lambda: third.ask("connect"))
        third.tell("all_reduce")
        infos = run.reduce([np.arange(1_000_000), np.arange(1_000_000)])
        assert {info.contributors for info in infos} == {(1, 2, 4)}
        assert third.answer()["contributors"] == [1, 2, 4]


@pytest.mark.parametrize("partners_in_it", [0, 1])
def test_ctrl_c_leaves_a_blocking_reduce(new_run: Callable[..., Run], partners_in_it: int) -> None:
    """Whoever was in that operation gets an abort; whoever was not is told when he comes to it."""
    run = new_run(2)
    with a_process(run) as third:
        arrays: list[Array] = [np.arange(1_000_000) for _ in run.members]
        third.tell("all_reduce")
        futures = [
            run.start(member.all_reduce, array)
            for member, array in zip(run.members[:partners_in_it], arrays, strict=False)
        ]
        run.until(lambda: run.requests == 1 + partners_in_it)
        started = time.monotonic()
        third.process.send_signal(signal.SIGINT)
        answer = third.answer()
        assert time.monotonic() - started < PROMPT_S
        assert answer["error"] == KeyboardInterrupt.__name__
        assert answer["intact"]
        for future, array in zip(futures, arrays, strict=False):
            error = future.exception(LIMIT_S)
            assert isinstance(error, CollectiveAborted)
            assert "peer 3 withdrew" in unnamed(error)
            assert np.array_equal(array, np.arange(1_000_000))
        # Whoever has an answer that was given later knows of the withdrawal, too.
        third.tell("are_peers_pending")
        run.each(pccl.Communicator.are_peers_pending)
        assert "error" not in third.answer()
        third.tell("all_reduce")
        infos = run.reduce(arrays, retry=True)
        assert [info.attempts for info in infos] == [1 if n < partners_in_it else 2 for n in (0, 1)]
        assert {info.contributors for info in infos} == {(1, 2, 3)}
        assert all(np.array_equal(array, 3 * np.arange(1_000_000)) for array in arrays)
        assert third.answer()["sum"] == arrays[0].sum()


def test_ctrl_c_leaves_connect_and_rounds(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    with a_process(run) as second:
        assert "error" not in second.ask("update_topology")  # went with the admission
        for call in ("update_topology", "are_peers_pending"):
            second.tell(call)
            run.until(lambda: run.round_requests == 1)
            second.process.send_signal(signal.SIGINT)
            assert second.answer()["error"] == KeyboardInterrupt.__name__
            again = run.start(getattr(run.members[0], call))
            assert "error" not in second.ask(call)
            again.result(LIMIT_S)
        third = PeerProcess(__name__, run.master.address)
        try:
            third.tell("connect")
            run.until(lambda: run.registered == 3)
            third.process.send_signal(signal.SIGINT)
            assert third.answer()["error"] == KeyboardInterrupt.__name__
            run.until(lambda: run.registered == 2)
        finally:
            third.end()


if __name__ == "__main__":
    serve(sys.argv[1])
