"""A run to test with: a real master and real members in this process, with threads to call from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

import pccl
from pccl import Attribute, Timing
from pccl.machines.master import inquiries
from pccl.machines.master.machine import MasterMachine
from pccl.protocol.guards.log_quota import LogQuota
from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.opening import Opening
from tests.support import forks, waiting
from tests.support.insides import engine_of, machine_of, registered, signer_of_member
from tests.support.members import grow
from tests.support.patience import LIMIT_S
from tests.support.secrets import secrets_of

Array = npt.NDArray[Any]
T = TypeVar("T")


@pytest.fixture(scope="session")
def forked_python() -> Iterator[tuple[str, ...]]:
    """A command that runs a script or a module: see :mod:`tests.support.forks`."""
    with forks.ready_python() as command:
        yield command


@pytest.fixture(scope="session")
def ready_python(forked_python: tuple[str, ...]) -> tuple[str, ...]:
    """A command that runs a script with torch."""
    pytest.importorskip("torch")
    return forked_python


@pytest.fixture(scope="session")
def ready_pccl(forked_python: tuple[str, ...]) -> tuple[str, ...]:
    """The command ``pccl``, for tests that look at what it says and not at its processes."""
    return (*forked_python, "-m", "pccl.cli.main")


@pytest.fixture
def all_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No quota for log lines, so that each test of a run finds its line at once."""

    def admit(quota: LogQuota, now_ns: int) -> bool:
        return True

    monkeypatch.setattr(LogQuota, "admit", admit)


@pytest.fixture
def quick_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters in this process wait for the answer of a peer for one second, not for three."""
    monkeypatch.setattr(inquiries, "ANSWER_S_MAX", 1)


QUICK = Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01)


def world_size(comm: pccl.Communicator) -> int:
    return comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)


class Run:
    """A master, members in this process, and threads for them to call from.

    Args:
        timing: of all.
        token: of all.
        relay: whether the master forwards for others.
        options: of every member.
    """

    def __init__(
        self,
        timing: Timing = QUICK,
        token: str | None = None,
        *,
        relay: bool = False,
        **options: Any,
    ) -> None:
        self.timing = timing
        self._options: dict[str, Any] = {"timing": timing, "token": token, **options}
        self.members: list[pccl.Communicator] = []
        self._made: list[pccl.Communicator] = []
        self._threads = ThreadPoolExecutor(32)
        self.master = pccl.MasterNode("127.0.0.1:0", timing=timing, token=token, relay=relay)
        self.master.run()

    def close(self) -> None:
        for member in self._made:
            member.close()
        self.master.interrupt()
        self._threads.shutdown()

    # -- what the master knows -----------------------------------------------------------------

    @property
    def requests(self) -> int:
        """How many members have asked for an operation that has not started."""
        ballots = list(self.machine.ballots.open.values())
        return sum(len(ballot.members) - len(ballot.waiting_for()) for ballot in ballots)

    @property
    def round_requests(self) -> int:
        """How many members have asked for a round that is open."""
        rounds = self.machine.rounds.requested
        return sum(len(requested) for requested in rounds.values())

    @property
    def registered(self) -> int:
        """How many peers there are, admitted or not."""
        return len(self.machine.membership.peers)

    @property
    def registered_ever(self) -> int:
        """How many peers there have been, the removed ones included."""
        return self.machine.membership.newest_peer

    def until(self, condition: Callable[[], bool]) -> None:
        waiting.until(condition)

    @property
    def machine(self) -> MasterMachine:
        return machine_of(self.master)

    def greeting(self, opening: Opening) -> Handshake:
        """The handshake of a lane: with the key of a member, or of a newcomer of the master."""
        secrets = secrets_of()
        for member in self.members:
            if engine_of(member).machine.peer == opening.source:
                return Handshake.dial(opening, replace(secrets, signer=signer_of_member(member)))
        return Handshake.dial(registered(self.master, opening, secrets.signer.key), secrets)

    # -- members -------------------------------------------------------------------------------

    def join(self, group: int = 0, **options: Any) -> pccl.Communicator:
        """One more member."""
        newcomer = self.newcomer(group, **options)
        self.admit(newcomer.connect)
        self.members.append(newcomer)
        return newcomer

    def newcomer(self, group: int = 0, **options: Any) -> pccl.Communicator:
        """A communicator that has not connected yet; it is closed with the run."""
        made = pccl.Communicator(self.master.address, group, **{**self._options, **options})
        self._made.append(made)
        return made

    def admit(self, connect: Callable[[], T]) -> T:
        """Let the members make joint calls until somebody has joined who is not among them."""
        size = max(map(world_size, self.members), default=0) + 1
        joining = self.start(connect)
        results_of([self.start(grow, member, size) for member in self.members])
        return joining.result(LIMIT_S)

    # -- calls ---------------------------------------------------------------------------------

    def start(self, call: Callable[..., T], *arguments: Any, **options: Any) -> Future[T]:
        """Call from a thread."""
        return self._threads.submit(call, *arguments, **options)

    def each(self, call: Callable[[pccl.Communicator], T]) -> list[T]:
        """Every member makes a joint call."""
        return results_of([self.start(call, member) for member in self.members])

    def reduce(
        self, sends: list[Any], results: list[Any] | None = None, **options: Any
    ) -> list[pccl.ReduceInfo]:
        """All members in this process reduce, in place unless there are ``results``."""
        into: list[Any] = results or [None] * len(sends)
        return results_of(
            [
                self.start(member.all_reduce, send, recv, **options)
                for member, send, recv in zip(self.members, sends, into, strict=True)
            ]
        )

    def check(self) -> None:
        """The members can still work together; who missed a withdrawal is told of it first."""
        arrays: list[Array] = [np.full(10, 1.0) for _ in self.members]
        self.reduce(arrays, retry=True)
        assert all((array == len(arrays)).all() for array in arrays)


def results_of(futures: list[Future[T]]) -> list[T]:
    return [future.result(LIMIT_S) for future in futures]


@pytest.fixture
def new_run() -> Iterator[Callable[..., Run]]:
    """Make a run of so many members, with such a timing."""
    runs: list[Run] = []

    def make(size: int = 0, timing: Timing = QUICK, **options: Any) -> Run:
        run = Run(timing, **options)
        runs.append(run)
        for _ in range(size):
            run.join()
        return run

    yield make
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def run_of() -> Iterator[Callable[..., Run]]:
    """Find the run of a size, shared by tests that leave its members as they were."""
    runs: dict[tuple[int, Timing], Run] = {}

    def find(size: int, timing: Timing = QUICK) -> Run:
        run = runs.get((size, timing))
        if run is None:
            run = runs[size, timing] = Run(timing)
            for _ in range(size):
                run.join()
        return run

    yield find
    for run in runs.values():
        run.close()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes of tensors travel over connections, as between machines."""
    monkeypatch.setenv("PCCL_LOCAL", "tcp")


@pytest.fixture
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What strangers do is no error of ours; the loop's exception handler logs errors, too."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
