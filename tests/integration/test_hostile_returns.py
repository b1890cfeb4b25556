"""Those who know the token come back from runs that never were, with whatever they like to say."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgpack
import numpy as np
import pytest

import pccl
from pccl import MasterNode, Timing
from pccl.inquiry import master_status
from pccl.protocol import messages as msg
from pccl.protocol.codec import PREFIX_BYTES, encode, frame
from pccl.protocol.limits import ACKNOWLEDGED_BATCH_MAX, PROGRESS_BATCH_MAX
from pccl.protocol.types import HOST_CHARACTERS_MAX, Member, OperationId, PeerId, Roster
from pccl.runtime.master_store import DirectoryStore, Remembered
from tests.integration.conftest import Run
from tests.support.claimant import MASTER, Claimant, alone, returning
from tests.support.commands import PCCL, environment_with, running
from tests.support.members import all_at_once
from tests.support.patience import patient
from tests.support.ports import free_address
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("no_errors")

QUICK = Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.05, recovery_s=1.0)
RUN, INVENTED = b"the run of these", b"never was a run!"
TOKEN = b"a token that is long enough for all"
MIB = 1 << 20
LOAD_S = 4.0
GROWTH_BYTES_MAX = 96 * MIB
"""One report may take 32 MiB, its last message 20 MiB while it is decoded; the rest is what the
allocator keeps."""


def join_s(run: Run) -> float:
    """How long it takes a newcomer to become a member."""
    began_s = time.monotonic()
    run.join()
    return time.monotonic() - began_s


def encoded(message: msg.Return) -> bytes:
    """As it is: ``encode`` cuts a host name."""
    host = message.registration.host
    if len(host) <= HOST_CHARACTERS_MAX:
        return encode(message)
    wire = encode(replace(message, registration=replace(message.registration, host="x" * 253)))
    cut, whole = b"\xd9\xfd" + 253 * b"x", msgpack.packb(host)
    assert wire.count(cut) == 1
    return frame(wire[3], wire[PREFIX_BYTES:].replace(cut, whole))


# -- crowds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["x" * 4000, "x" * 253, ""], ids=["long names", "the longest names", "no names"]
)
def test_300_hostile_returns_and_a_newcomer_is_in_within_a_second(
    new_run: Callable[..., Run], host: str
) -> None:
    """They choose their ids, and each made the master tell all younger ones whom to dial."""
    run = new_run(2)
    run.until(lambda: run.registered == 2)
    with ExitStack() as stack:
        for number in range(300):
            claimant = stack.enter_context(Claimant(run.master.address))
            claimant.send(encoded(returning(run.machine.run, 1000 - number, host)))
        assert join_s(run) < patient(1.0)
    run.check()


def test_300_hostile_returns_to_a_restarted_master(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    """It can't know that none before it has given out those ids."""
    DirectoryStore(tmp_path).save(Remembered(RUN, 1, b"master A"))
    run = new_run()
    run.master.interrupt()
    run.master = MasterNode("127.0.0.1:0", timing=QUICK, state=tmp_path)
    with run.master:
        run.join()
        with ExitStack() as stack:
            for number in range(300):
                claimant = stack.enter_context(Claimant(run.master.address))
                claimant.say(returning(RUN, 1000 - number, "x" * 253))
            assert join_s(run) < patient(1.0)
        run.check()
        for member in run.members:
            member.close()


# -- a standby -------------------------------------------------------------------------------


class Two:
    """A master, its standby, and members that reduce."""

    def __init__(self, stack: ExitStack, state: Path) -> None:
        self._stack = stack
        self._state = state
        self.first, self.second = free_address(), free_address()
        self.master = self._start(self.first, standby=self.second)
        self.standby = self.start_standby()
        self.members: list[pccl.Communicator] = []

    def _start(self, address: str, **options: str | Path) -> MasterNode:
        node = MasterNode(address, timing=QUICK, token=TOKEN, **options)  # type: ignore[arg-type]
        self._stack.callback(node.interrupt)
        node.run()
        return node

    def start_standby(self) -> MasterNode:
        self.standby = self._start(self.second, standby_of=self.first, state=self._state)
        return self.standby

    def standby_knows_the_run(self) -> bool:
        """It asks at every tick until it does."""
        waits_for = master_status(self.second, token=TOKEN).waits_for
        return "0 of ? members of run" in waits_for

    def admit(self, size: int) -> None:
        for _ in range(size):
            comm = pccl.Communicator(self.first, timing=QUICK, token=TOKEN)
            self._stack.callback(comm.close)
            self.members.append(comm)
        all_at_once(*(partial(comm.connect, min_peers=size) for comm in self.members))

    def reduce(self) -> None:
        values = [np.full(100, 1.0) for _ in self.members]
        pairs = zip(self.members, values, strict=True)
        all_at_once(*(partial(comm.all_reduce, array) for comm, array in pairs))
        assert all((array == len(values)).all() for array in values)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(stack, tmp_path / "standby")


def test_an_invented_run_does_not_capture_a_standby(two: Two) -> None:
    """Its master dies, and the members come to it: it has kept itself for them."""
    two.admit(2)
    two.reduce()
    until(two.standby_knows_the_run)
    with Claimant(two.second, TOKEN) as claimant:
        claimant.say(returning(INVENTED, 1, masters=2), alone(1, claimant.key), msg.Reported())
        asked = claimant.hears(msg.Resumed)
        if isinstance(asked, msg.Resumed):  # it would take up that run, if its member follows
            claimant.say(msg.Heartbeat(roster_version=7, term=asked.term))
            claimant.hears(msg.LinkPlan)
        two.master.interrupt()
        two.reduce()


def test_whoever_asks_for_the_run_does_not_capture_a_standby(two: Two) -> None:
    """He knows its real id, and invents the newest roster of it: he alone is left."""
    two.admit(2)
    two.reduce()
    until(two.standby_knows_the_run)
    with Claimant(two.first, TOKEN) as curious:
        curious.say(msg.RunQuery())
        run = curious.hears(msg.RunIs)
    assert isinstance(run, msg.RunIs)
    with Claimant(two.second, TOKEN) as claimant:
        claimant.say(
            returning(run.run, 99, masters=2), alone(99, claimant.key, 1 << 40), msg.Reported()
        )
        assert claimant.hears(msg.Resumed) is None  # closed, when the time to return is over
    two.master.interrupt()
    two.reduce()


def test_whoever_is_there_first_does_not_capture_a_restarted_master(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    """The newest roster counts, if a member tells it."""
    run = new_run()
    run.master.interrupt()
    address = free_address()
    first = MasterNode(address, timing=QUICK, state=tmp_path)
    first.run()
    members = [pccl.Communicator(address, timing=QUICK) for _ in range(2)]
    with ExitStack() as stack:
        for member in members:
            stack.callback(member.close)
        all_at_once(*(partial(member.connect, min_peers=2) for member in members))
        known = DirectoryStore(tmp_path).load()
        assert known is not None
        first.interrupt()
        with MasterNode(address, timing=QUICK, state=tmp_path), Claimant(address) as claimant:
            claimant.say(returning(known.run, 99), alone(99, claimant.key, 1 << 40), msg.Reported())
            arrays = [np.ones(10) for _ in members]
            pairs = zip(members, arrays, strict=True)
            all_at_once(*(partial(member.all_reduce, array) for member, array in pairs))
            assert all((array == 2.0).all() for array in arrays)


def test_a_standby_that_has_not_reached_its_master_takes_up_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nobody, address = free_address(), free_address()
    with (
        caplog.at_level(logging.WARNING, "pccl.master"),
        MasterNode(address, timing=QUICK, standby_of=nobody, state=tmp_path),
    ):
        with Claimant(address) as claimant:
            claimant.say(returning(INVENTED, 1, masters=2), alone(1, claimant.key), msg.Reported())
            assert claimant.hears(msg.Resumed) is None  # closed
        words = master_status(address).waits_for
        assert words.startswith("it is a standby, and continues no run until one of its masters")
        assert nobody in words
        until(lambda: f"{nobody}: cannot reach" in caplog.text)
    assert DirectoryStore(tmp_path).load() is None


def test_a_standby_that_is_started_again_remembers_the_run(two: Two) -> None:
    """Also if its master has died meanwhile, and nobody could tell it any more."""
    two.admit(2)
    two.reduce()
    until(two.standby_knows_the_run)
    two.standby.interrupt()
    two.master.interrupt()
    two.start_standby()
    two.reduce()


# -- memory ----------------------------------------------------------------------------------


@contextmanager
def process(*options: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A master of its own, and where it listens."""
    command = (*PCCL, "master", "--listen", "127.0.0.1:0", *options)
    with running(*command, env=environment_with(), stderr=subprocess.DEVNULL) as started:
        assert started.stdout is not None
        yield started, started.stdout.readline().split()[-1]


def rss_bytes(process: subprocess.Popen[str]) -> int:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def worst_words(peer: int) -> list[bytes]:
    """Messages of a report that take much more memory than bytes."""
    operation = OperationId(1, 0, 4, 5, 0)
    many = tuple(OperationId(1, 0, 1, n % 100, n) for n in range(ACKNOWLEDGED_BATCH_MAX))
    members = tuple(Member(PeerId(n), "", 1) for n in (peer, *range(100_000, 103_800)))
    roster = Roster(9, 0, 4, members, (4,), len(members), 1, len(members))
    words: list[msg.Message] = [
        *(msg.Heartbeat((), many) for _ in range(30)),
        *(msg.Heartbeat((msg.Progress(operation, 1, 1, 1),) * PROGRESS_BATCH_MAX),) * 30,
        *(msg.KnownRoster(_numbered(roster, number), MASTER) for number in range(9, 40)),
    ]
    return [encode(word) for word in words]


def _numbered(roster: Roster, version: int) -> Roster:
    return replace(roster, version=version)


def load(address: str, run: bytes, seconds: float, look: Callable[[], None]) -> None:
    """From one connection at a time the worst that may come in a report, again and again."""
    end_s = time.monotonic() + seconds
    number = 0
    words = worst_words(1)
    while time.monotonic() < end_s:
        number += 1
        with Claimant(address) as claimant:
            try:
                claimant.say(returning(run, 1, masters=2))
                while time.monotonic() < end_s:
                    for word in words:
                        claimant.send(word)
                        look()
            except OSError:
                pass  # thrown out


@pytest.mark.parametrize("kind", ["a restarted master", "a standby"])
def test_reports_without_end_take_bounded_memory(tmp_path: Path, kind: str) -> None:
    standby = kind == "a standby"
    DirectoryStore(tmp_path).save(Remembered(RUN, 1, b"master A", coordinated=not standby))
    options = ("--standby-of", free_address()) if standby else ("--standby", free_address())
    with process("--state", str(tmp_path), *options) as (master, address):
        before = rss_bytes(master)
        highest = before

        def look() -> None:
            nonlocal highest
            highest = max(highest, rss_bytes(master))

        load(address, RUN, LOAD_S, look)
        grown = highest - before
        assert grown < GROWTH_BYTES_MAX, f"{before / MIB:.0f} to {highest / MIB:.0f} MiB"
