"""Processes of one machine pull segments from each other's memory, and nothing else changes.

``PCCL_TEST_KILLS=500 pytest tests/integration/test_local_links.py -k kills`` kills so many members.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pccl
from pccl.cli.processes.proxies import free_addresses
from pccl.stress.emulator import LinkSpec, ProxyThread
from pccl.transports.local.process_memory import process_memory
from tests.support import waiting
from tests.support.patience import LONG_LIMIT_S
from tests.support.peers import PeerProcess
from tests.support.processes import wait_stopped

KIB, MIB = 1 << 10, 1 << 20
KILLS = int(os.environ.get("PCCL_TEST_KILLS", "8"))
TRIALS = iter(range(1, 1 << 30))

Report = dict[str, Any]


class Crew:
    """A master in this process, and members that are processes.

    Args:
        deadline_s: how long a member may be silent.
    """

    def __init__(self, deadline_s: float = 10.0) -> None:
        self._timing = pccl.Timing(deadline_s=deadline_s)
        self._master = pccl.MasterNode("127.0.0.1:0", timing=self._timing)
        self._master.run()
        self.members: list[PeerProcess] = []
        self._made: list[PeerProcess] = []

    def start(self, *, uid: int = 0, prefix: tuple[str, ...] = ()) -> PeerProcess:
        """Start a process that is no member yet."""
        arguments = (self._master.address, str(uid), str(self._timing.deadline_s))
        peer = PeerProcess("tests.integration.local_peer", *arguments, prefix=prefix)
        self._made.append(peer)
        return peer

    def join(self, peer: PeerProcess) -> PeerProcess:
        """Let it become a member."""
        size = len(self.members) + 1
        for member in self.members:
            member.tell("grow", size)
        peer.id = ask(peer, "connect")
        for member in self.members:
            member.answer()
        self.members.append(peer)
        return peer

    def reduce(self, nbytes: int, **how: Any) -> list[Report]:
        """All members reduce once."""
        self.tell_all("reduce", next(TRIALS), nbytes, how)
        return [member.answer() for member in self.members]

    def tell_all(self, name: str, *arguments: object) -> None:
        for member in self.members:
            member.tell(name, *arguments)

    def lose(self, *victims: PeerProcess) -> None:
        for victim in victims:
            victim.process.kill()
            victim.process.wait()
            self.members.remove(victim)

    def until_all_pull(self, algorithm: str) -> None:
        """Reduce until all links between the members are proven."""

        def all_pulled() -> bool:
            reports = self.reduce(4 * MIB, algorithm=algorithm)
            return all(report["pulled"] == report["rx"] for report in reports)

        waiting.until(all_pulled)

    def close(self) -> None:
        for peer in self._made:
            peer.end()
        self._master.interrupt()


def ask(peer: PeerProcess, name: str, *arguments: object) -> Any:
    peer.tell(name, *arguments)
    return peer.hear()[1]


def check(reports: list[Report], *, pulled: bool | None = True) -> None:
    """All are exact; and all large segments were pulled, or none was."""
    assert all(report["exact"] for report in reports), reports
    assert len({tuple(report["contributors"]) for report in reports}) == 1, reports
    for report in reports if pulled is not None else ():
        assert report["contributors"], report
        assert report["pulled"] == (report["rx"] if pulled else 0), report
        assert (report["socket"] < report["rx"] // 8) is pulled, report


@pytest.fixture(scope="module")
def crew_of() -> Iterator[Callable[[int], Crew]]:
    """Find the crew of a size, shared by tests that leave it as it was."""
    crews: dict[int, Crew] = {}

    def find(size: int) -> Crew:
        if size not in crews:
            crews[size] = Crew()
            for peer in [crews[size].start() for _ in range(size)]:
                crews[size].join(peer)
        return crews[size]

    yield find
    for crew in crews.values():
        crew.close()


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture(scope="module", autouse=True)
def _system_lets_processes_pull() -> None:
    with contextlib.closing(Crew()) as crew:
        for peer in [crew.start() for _ in range(2)]:
            crew.join(peer)
        reports = crew.reduce(4 * MIB)
        if process_memory() is None or not all(report["pulled"] for report in reports):
            pytest.skip("this system forbids to read the memory of other processes")


# -- reduces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("algorithm", ["ring", "mesh"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_bit_is_right_and_every_segment_is_pulled(
    crew_of: Callable[[int], Crew], size: int, algorithm: str, in_place: bool
) -> None:
    crew = crew_of(size)
    crew.until_all_pull(algorithm)
    for nbytes in (4 * MIB, 8 * MIB, 4 * MIB + 4):
        check(crew.reduce(nbytes, algorithm=algorithm, in_place=in_place))
    check(crew.reduce(MIB, algorithm=algorithm, in_place=in_place), pulled=None)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("parts", "pulled"), [(5, True), (1000, False)])
def test_lists_of_tensors(
    crew_of: Callable[[int], Crew], size: int, parts: int, in_place: bool, pulled: bool
) -> None:
    """Many small ones are gathered, and sent."""
    check(crew_of(size).reduce(4 * MIB, parts=parts, in_place=in_place), pulled=pulled)


def test_members_that_split_the_tensor_in_different_ways(crew_of: Callable[[int], Crew]) -> None:
    crew, trial = crew_of(4), next(TRIALS)
    for parts, member in enumerate(crew.members):
        member.tell("reduce", trial, 4 * MIB, {"parts": parts})
    check([member.answer() for member in crew.members])


def test_with_retry(crew_of: Callable[[int], Crew]) -> None:
    check(crew_of(2).reduce(4 * MIB, retry=True))


def test_tcp_only(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """One member that does not want to is enough for its own links, and for no others."""
    peers = [crew.start() for _ in range(2)]
    monkeypatch.setenv("PCCL_LOCAL", "tcp")
    peers.append(crew.start())
    for peer in peers:
        crew.join(peer)

    def two_pull() -> bool:
        reports = crew.reduce(6 * MIB, algorithm="mesh")
        check(reports, pulled=None)
        assert all(report["pulled"] <= report["rx"] // 2 for report in reports)
        return [report["pulled"] > 0 for report in reports] == [True, True, False]

    waiting.until(two_pull)


def test_several_lanes(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_LANES", "4")
    for peer in [crew.start() for _ in range(3)]:
        crew.join(peer)
    for in_place in (False, True):
        check(crew.reduce(8 * MIB, in_place=in_place))


# -- members that die, stop, leave and fork --------------------------------------------------------


def test_kills() -> None:
    """Members are killed in the middle of pulls; survivors lose nothing, and go on pulling."""
    rng = random.Random(22)
    options = [
        {"in_place": in_place, "algorithm": algorithm, "parts": parts}
        for in_place in (False, True)
        for algorithm in ("ring", "mesh")
        for parts in (0, 3)
    ]
    committed = aborted = 0
    with contextlib.closing(Crew()) as crew:
        for peer in [crew.start() for _ in range(2)]:
            crew.join(peer)
        spare = [crew.start()]
        for number in range(KILLS):
            spare.append(crew.start())
            victim = crew.join(spare.pop(0))
            if number % 2:
                ask(victim, "die_after", rng.random())
            how = options[number % len(options)]
            crew.tell_all("reduce", next(TRIALS), rng.choice((1, 4, 16)) * MIB, how)
            if not number % 2:
                time.sleep(rng.uniform(0.0, 0.03))  # no limit: any moment is right
                victim.process.kill()
            assert victim.process.wait() == -signal.SIGKILL
            crew.lose(victim)
            reports = [member.answer() for member in crew.members]
            check(reports, pulled=None)
            committed += bool(reports[0]["contributors"])
            aborted += not reports[0]["contributors"]
            crew.tell_all("shrink", 2)
            assert all(member.hear() for member in crew.members)
            if not number % 16:
                check(crew.reduce(4 * MIB, **how))
    print(f"{KILLS} kills: {committed} reduces committed, {aborted} aborted")  # noqa: T201


@pytest.mark.parametrize("fraction", [0.3, 0.7, 0.95])
def test_a_member_that_stops_for_a_while(crew_of: Callable[[int], Crew], fraction: float) -> None:
    crew = crew_of(4)
    stopped = crew.members[1]
    ask(stopped, "stop_after", fraction)
    crew.tell_all("reduce", next(TRIALS), 8 * MIB, {"in_place": True})
    wait_stopped(stopped.process.pid)
    stopped.process.send_signal(signal.SIGCONT)
    check([member.answer() for member in crew.members])


def test_callers_that_leave_when_they_are_done_and_use_their_memory() -> None:
    """What they had announced is withdrawn; the last one gets the result from copies."""
    with contextlib.closing(Crew(LONG_LIMIT_S)) as crew:
        leave_when_done(crew)


def leave_when_done(crew: Crew) -> None:
    for peer in [crew.start() for _ in range(3)]:
        crew.join(peer)
    late = crew.members[2]
    how = {"algorithm": "ring", "in_place": True}
    for _ in range(10):
        ask(late, "stop_after", 0.9)
        trial = next(TRIALS)
        for member in crew.members[:2]:
            ask(member, "begin", trial, 48 * MIB, {**how, "reuse": True})
        late.tell("reduce", trial, 48 * MIB, how)
        wait_stopped(late.process.pid)
        if all(member.ask("is_done", 2.0) for member in crew.members[:2]):
            break
        late.process.send_signal(signal.SIGCONT)  # it has stopped before all was announced
        late.answer()
        for member in crew.members[:2]:
            member.ask("finish")
    left = [member.ask("leave") for member in crew.members[:2]]
    late.process.send_signal(signal.SIGCONT)
    assert all("OutcomeUnknown" in report["error"] for report in left), left
    assert all(report["exact"] for report in left), left
    report = late.answer()
    assert report["contributors"] == [member.id for member in crew.members]
    assert report["exact"], report
    assert all(ask(member, "kept") for member in crew.members[:2])


def test_memory_that_is_unmapped_after_an_abort(crew: Crew) -> None:
    """A late pull finds nothing there, and the link is as good as before."""
    for peer in [crew.start() for _ in range(3)]:
        crew.join(peer)
    stopped, victim = crew.members[0], crew.members[2]
    ask(stopped, "stop_after", 0.2)
    crew.tell_all("reduce", next(TRIALS), 48 * MIB, {"algorithm": "ring"})
    wait_stopped(stopped.process.pid)
    crew.lose(victim)
    stopped.process.send_signal(signal.SIGCONT)
    reports = [member.answer() for member in crew.members]
    check(reports, pulled=None)
    crew.tell_all("shrink", 2)
    assert all(member.hear() for member in crew.members)
    check(crew.reduce(4 * MIB))


def test_forks_in_the_middle(crew_of: Callable[[int], Crew]) -> None:
    crew = crew_of(2)
    first, second = crew.members
    trial = next(TRIALS)
    first.tell("fork_during", trial, 32 * MIB, {"in_place": True})
    second.tell("reduce", trial, 32 * MIB, {"in_place": True})
    reports = [first.answer(), second.answer()]
    check(reports)
    assert reports[0]["children"] == [0] * 4
    check(crew.reduce(4 * MIB))


# -- other users, other namespaces -----------------------------------------------------------------


def check_goes_by_tcp(crew: Crew, *peers: PeerProcess) -> None:
    for peer in peers:
        crew.join(peer)
    for algorithm in ("ring", "mesh"):
        reports = crew.reduce(4 * MIB, algorithm=algorithm)
        check(reports, pulled=False)
    for peer in peers:
        lines = [line for line in ask(peer, "logged") if "memory" in line or "pull" in line]
        assert lines == []


def test_another_user(crew: Crew) -> None:
    if os.geteuid():
        pytest.skip("only root can start processes of other users")
    check_goes_by_tcp(crew, *(crew.start(uid=uid) for uid in (65534, 65533)))


def test_members_behind_proxies(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated link carries all bytes, though both ends of a connection are on one machine."""
    peers: list[PeerProcess] = []
    with contextlib.ExitStack() as stack:
        for door in free_addresses(2):
            proxy = stack.enter_context(ProxyThread(door, LinkSpec.parse("rtt=1ms")))
            monkeypatch.setenv("PCCL_LISTEN", door)
            monkeypatch.setenv("PCCL_ADVERTISE", str(proxy.address))
            peers.append(crew.start())
        check_goes_by_tcp(crew, *peers)


def test_another_namespace_of_processes(crew: Crew) -> None:
    prefix = ("unshare", "--pid", "--fork", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("this system does not let tests make a namespace")
    check_goes_by_tcp(crew, crew.start(prefix=prefix), crew.start(prefix=prefix))
