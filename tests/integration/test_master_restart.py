"""A master that dies and comes back, or whose standby takes over: real sockets, real processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import pccl
from pccl import MasterNode, Timing
from pccl.errors import MasterLost
from pccl.inquiry import master_status
from tests.support.commands import PCCL, environment_with, running
from tests.support.insides import machine_of
from tests.support.members import grow
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S, patient
from tests.support.ports import free_address

T = TypeVar("T")
BACK_S = patient(10.0)
"""Control has to be back by then; it takes some 0.1 to 0.6 s on a machine of two cores."""
COUNT = 50_000
QUICK = Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.05, recovery_s=1.0)
TWO_MEMBERS = """
import sys, threading, pccl
comms = [pccl.Communicator(sys.argv[1]) for _ in range(2)]
threads = [threading.Thread(target=comm.connect, kwargs={"min_peers": 3}) for comm in comms]
for thread in threads:
    thread.start()
threading.Event().wait()
"""


class Worker:
    """One member that reduces in a loop until it is told to stop, and checks every value."""

    def __init__(self, comm: pccl.Communicator, factor: int) -> None:
        self.comm = comm
        self.done = 0
        self._factor = factor

    def reduce(self, *, last: bool) -> bool:
        """One reduce of all members; returns whether anybody wants it to be the last one."""
        values = np.arange(COUNT, dtype=np.int64) * self._factor
        values[0] = last
        info = self.comm.all_reduce(values)
        total = sum(10**peer for peer in info.contributors)
        assert np.array_equal(values[1:], np.arange(1, COUNT, dtype=np.int64) * total)
        assert len(info.contributors) == self.comm.world_size
        self.done += 1
        return bool(values[0])


class Run:
    """Masters that come and go on fixed addresses, and members in this process."""

    def __init__(self, stack: ExitStack, timing: Timing = QUICK) -> None:
        self.timing = timing
        self._stack = stack
        self._threads = stack.enter_context(ThreadPoolExecutor(16))
        self.workers: list[Worker] = []
        self._running: list[Future[None]] = []
        self._last = False

    def master(self, listen: str = "127.0.0.1:0", **options: Any) -> MasterNode:
        node = MasterNode(listen, timing=self.timing, **options)
        self._stack.callback(node.interrupt)
        node.run()
        return node

    def submit(self, call: Callable[..., T], *arguments: Any, **options: Any) -> Future[T]:
        """Call from a thread."""
        return self._threads.submit(call, *arguments, **options)

    def join(self, masters: str, size: int, min_peers: int = 0) -> None:
        """So many members at once."""
        comms = [pccl.Communicator(masters, timing=self.timing) for _ in range(size)]
        for comm in comms:
            self._stack.callback(comm.close)
        joining = [
            self._threads.submit(comm.connect, min_peers=min_peers or size) for comm in comms
        ]
        for future in joining:
            future.result(LIMIT_S)
        for comm in sorted(comms, key=lambda comm: comm.rank):
            self.workers.append(Worker(comm, 10 ** own_id(comm)))

    def start(self) -> None:
        """Let all members reduce, again and again."""
        self._running = [self._threads.submit(self._loop, worker) for worker in self.workers]

    def _loop(self, worker: Worker) -> None:
        while not worker.reduce(last=self._last):
            pass

    def stop(self) -> None:
        """All members stop after the same step; none has raised."""
        self._last = True
        for future in self._running:
            future.result(LIMIT_S)
        assert len({worker.done for worker in self.workers}) == 1

    def until(self, condition: Callable[[], bool]) -> float:
        """Wait for it; returns how long that took."""
        start = time.monotonic()
        while not condition():
            for future in self._running:
                if future.done():
                    future.result()
            assert time.monotonic() < start + LIMIT_S
            time.sleep(0.005)
        return time.monotonic() - start

    def goes_on(self) -> float:
        """Wait until everybody has made two more steps."""
        before = max(worker.done for worker in self.workers)
        return self.until(lambda: all(worker.done >= before + 2 for worker in self.workers))


def own_id(comm: pccl.Communicator) -> int:
    return int(comm.members()[comm.rank].peer_id)


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


@pytest.mark.parametrize("keeps", [True, False], ids=["with its state", "without"])
def test_a_master_comes_back_and_no_call_notices(run: Run, tmp_path: Path, keeps: bool) -> None:
    state = tmp_path if keeps else None
    master = run.master(state=state)
    address = master.address
    run.join(address, 3)
    run.start()
    for _ in range(3):
        run.goes_on()
        master.interrupt()
        time.sleep(0.05)  # not a race: the members may be in any step of anything
        master = run.master(address, state=state)
        assert run.goes_on() < BACK_S
    run.stop()


def test_a_standby_takes_over(run: Run) -> None:
    address, second = free_address(), free_address()
    master = run.master(address, standby=second)
    standby = machine_of(run.master(second, standby_of=address))
    run.join(address, 3)
    run.start()
    run.goes_on()
    run.until(lambda: knows_run(second))  # it asks at every tick until it does
    run.until(lambda: len(standby.succession.vouched.keys or {}) == 3)  # then once a heartbeat
    master.interrupt()
    assert run.goes_on() < BACK_S
    run.stop()
    # A newcomer that knows both is admitted by the one that goes on.
    newcomer = pccl.Communicator(f"{address},{second}", timing=run.timing)
    joining = run.submit(newcomer.connect, n_attempts=100)
    growing = [run.submit(grow, worker.comm, 4) for worker in run.workers]
    for member in growing:
        member.result(LIMIT_S)
    joining.result()
    assert newcomer.world_size == 4
    newcomer.close()


def knows_run(standby: str) -> bool:
    """Whether a master has told it which run it coordinates."""
    return "0 of ? members of run" in master_status(standby).waits_for


def test_members_that_are_gone_are_left_behind(run: Run) -> None:
    master = run.master()
    run.join(master.address, 3)
    address = master.address
    master.interrupt()
    run.workers.pop().comm.close()
    run.master(address)
    sizes = [run.submit(_reduce_somehow, worker) for worker in run.workers]
    assert [size.result(LIMIT_S) for size in sizes] == [2, 2]


def _reduce_somehow(worker: Worker) -> int:
    values = np.full(10, float(worker.comm.rank + 1))
    info = worker.comm.all_reduce(values, retry=True)
    assert (values == 3.0).all()
    return len(info.contributors)


def test_a_minority_stops_and_says_so(run: Run) -> None:
    """One of three members is left with a master that has a standby somewhere."""
    run.timing = Timing(
        heartbeat_s=0.1, tick_s=0.05, recovery_s=0.5, resume_s=0.5, master_lost_s=2.0
    )
    address = free_address()
    run.master(address, standby=free_address())
    with subprocess.Popen(
        [sys.executable, "-c", TWO_MEMBERS, address], cwd=ROOT, stdout=subprocess.PIPE
    ) as others:
        try:
            run.join(address, 1, min_peers=3)
            lonely = run.workers[0].comm
            values = np.arange(10.0)
            call = run.submit(lonely.all_reduce, values)
        finally:
            others.kill()
    with pytest.raises(MasterLost, match="shared state are intact"):
        call.result(LIMIT_S)
    assert np.array_equal(values, np.arange(10.0))


def test_without_a_master_calls_fail_in_the_end(run: Run) -> None:
    run.timing = Timing(heartbeat_s=0.1, tick_s=0.05, master_lost_s=1.0)
    master = run.master()
    run.join(master.address, 2)
    buffers = [np.arange(10.0) * (n + 1) for n in range(2)]
    master.interrupt()
    calls = [
        run.submit(worker.comm.all_reduce, values)
        for worker, values in zip(run.workers, buffers, strict=True)
    ]
    for n, call in enumerate(calls):
        with pytest.raises(MasterLost, match="no message from the master for"):
            call.result(LIMIT_S)
        assert np.array_equal(buffers[n], np.arange(10.0) * (n + 1))


# -- as a process ----------------------------------------------------------------------------


def master_process(*options: str) -> AbstractContextManager[subprocess.Popen[str]]:
    kept = environment_with()
    return running(*PCCL, "master", *options, env=kept, stderr=subprocess.DEVNULL)


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    found = re.match(r"master listening on (\S+)", process.stdout.readline())
    assert found is not None
    return found[1]


@pytest.mark.parametrize("keeps", [True, False], ids=["with --state", "without"])
def test_a_killed_master_process_is_started_again(run: Run, tmp_path: Path, keeps: bool) -> None:
    options = ("--state", str(tmp_path / "state")) if keeps else ()
    with master_process("--listen", "127.0.0.1:0", *options) as first:
        address = address_of(first)
        run.join(address, 3)
        run.start()
        run.goes_on()
        first.send_signal(signal.SIGKILL)
        first.wait(LIMIT_S)
    assert (tmp_path / "state" / "master.state").exists() is keeps
    with master_process("--listen", address, *options) as second:
        assert address_of(second) == address
        assert run.goes_on() < BACK_S
        run.stop()
