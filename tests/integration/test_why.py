"""``pccl why`` names who holds up a run: ten situations with real processes.

The master and the proxies live in the test's process; the three peers are processes. This file is
also the peers' program, so it imports only what they need.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import pccl
from tests.support.patience import LIMIT_S
from tests.support.peers import PeerProcess, obey
from tests.support.ports import free_port
from tests.support.processes import wait_stopped
from tests.support.waiting import until

TOKEN = "eight plain words that nobody will ever guess"
PATIENT = pccl.Timing(
    heartbeat_s=0.2, tick_s=0.05, deadline_s=600.0, progress_s=600.0, lane_stall_s=600.0,
    resume_s=600.0, waiting_report_s=0.5, lockstep_s=600.0, master_lost_s=600.0,
)  # fmt: skip
"""Nobody is removed, and no wait is ended, while the test looks at the run."""


# -- the peers' program ----------------------------------------------------------------------------


class Program:
    """A peer. A call of the test brings it into a situation, and it stays there."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        self.comm = pccl.Communicator(address, token=TOKEN, timing=PATIENT, **options)

    def connect(self, size: int) -> dict[str, Any]:
        self.comm.connect(min_peers=size)
        self.comm.update_topology()
        return {"peer": self.comm.peer_id}

    def reduce(self, tag: int, nbytes: int) -> None:
        self.comm.all_reduce(np.ones(nbytes // 4, np.float32), tag=tag)

    def update(self) -> None:
        self.comm.update_topology()

    def hold_the_lock(self) -> None:
        while True:  # a signal, as for the stacks, ends one sleep
            ctypes.PyDLL(None).sleep(600)  # unlike CDLL it keeps the interpreter lock

    def wait_for_a_lock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # nobody releases it

    def compute(self) -> None:
        while True:
            time.sleep(0.01)

    def synchronize(self, revision: int, full: bool) -> None:
        values = np.full(1 << 20, revision, np.float32)
        state = pccl.SharedState([pccl.TensorInfo.from_numpy(values, "weights")])
        state.revision = revision
        no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patched = mock.patch("os.posix_fallocate", side_effect=no_room)
        with patched if full else contextlib.nullcontext(), contextlib.suppress(OSError):
            self.comm.sync_shared_state(state, staging_bytes_max=0)
        self.compute()


# -- the test's side -------------------------------------------------------------------------------


class Crew:
    """A master and its peers, which see each other through proxies where the test wants that."""

    def __init__(self, stacks: str) -> None:
        self.stack = contextlib.ExitStack()
        inspect = partial(inspect_process, folder=stacks)
        node = pccl.MasterNode("127.0.0.1:0", token=TOKEN, timing=PATIENT, inspect_process=inspect)
        self.address = self.stack.enter_context(node).address
        self.peers: list[PeerProcess] = []

    def start(self, address: str = "", **options: Any) -> PeerProcess:
        given = json.dumps({"name": f"p{len(self.peers)}", **options})
        peer = PeerProcess(__name__, address or self.address, given)
        self.stack.callback(peer.end)
        self.peers.append(peer)
        return peer

    def connect(self) -> None:
        """All that were started and as many more as make three, in the order of their ids."""
        while len(self.peers) < 3:
            self.start()
        for number, peer in enumerate(self.peers):
            peer.tell("connect", 3)
            until(partial(self._has_registered, number + 1), pause_s=0.01)
        assert [peer.answer()["peer"] for peer in self.peers] == [1, 2, 3]

    def _has_registered(self, count: int) -> bool:
        seen = self.status()
        return seen.newcomer_count + seen.member_count == count

    def status(self) -> pccl.MasterStatus:
        return pccl.master_status(self.address, token=TOKEN, timeout_s=LIMIT_S)

    def reduce(self, *numbers: int, tag: int = 0, nbytes: int = 4096) -> None:
        for number in numbers:
            self.peers[number].tell("reduce", tag, nbytes)
        until(lambda: self._are_inside(numbers), pause_s=0.01)

    def _are_inside(self, numbers: tuple[int, ...]) -> bool:
        return all(self.status().members[number].calls for number in numbers)

    def finding(self, cause: Cause, peer: int | None = None) -> BlameFinding:
        """The first conclusion, once it is this one, about this peer: some evidence takes seconds
        to come, as the speed of a narrow link."""
        seen: list[BlameFinding] = []

        def is_first() -> bool:
            status = self.status()
            asker = Asker(self.address, TOKEN.encode(), LIMIT_S)
            seen[:] = find_blame(status, asker.clues(status))
            return bool(seen) and seen[0].cause is cause and peer in (None, *seen[0].peers)

        until(is_first, pause_s=0.2)
        return seen[0]


if __name__ == "__main__":
    obey(Program(sys.argv[1], json.loads(sys.argv[2])))
else:
    import pytest
    from click.testing import CliRunner

    from pccl.cli.why import Asker, why
    from pccl.observe.blame import BlameFinding, Cause, find_blame
    from pccl.observe.process import inspect_process
    from pccl.stress.emulator import LinkSpec, ProxyThread

    LARGE = 48 << 20
    """Bytes that no socket buffer holds."""

    @pytest.fixture
    def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
        monkeypatch.setenv("PCCL_STACKS_DIR", str(tmp_path))
        monkeypatch.setenv("PCCL_LOCAL", "tcp")
        crew = Crew(str(tmp_path))
        with crew.stack:
            yield crew

    def behind_proxy(crew: Crew, spec: str) -> ProxyThread:
        """Start the first peer, which the others reach through a proxy: newcomers dial elders."""
        port = free_port()
        door = ProxyThread(f"127.0.0.1:{port}", LinkSpec.parse(spec))
        crew.stack.enter_context(door)
        crew.start(advertise=str(door.address), listen=f"127.0.0.1:{port}")
        return door

    @pytest.mark.usefixtures("quick_silence")
    def test_a_stopped_process(crew: Crew) -> None:
        crew.connect()
        victim = crew.peers[1].process
        victim.send_signal(signal.SIGSTOP)
        wait_stopped(victim.pid)
        crew.reduce(0, 2)
        found = crew.finding(Cause.STOPPED)
        assert found.peers == (2,)
        assert found.remedy == f"kill -CONT {victim.pid}"

    def test_a_held_interpreter_lock(crew: Crew) -> None:
        crew.connect()
        crew.peers[1].tell("hold_the_lock")
        crew.reduce(0, 2)
        found = crew.finding(Cause.LOCK_HELD)
        assert found.peers == (2,)
        assert "in hold_the_lock" in found.text
        assert "that waits" in found.text

    def test_a_lock_of_the_program(crew: Crew) -> None:
        crew.connect()
        crew.peers[2].tell("wait_for_a_lock")
        crew.reduce(0, 1)
        found = crew.finding(Cause.BLOCKED)
        assert found.peers == (3,)
        assert "lock.acquire()  # nobody releases it" in found.text

    def test_a_call_that_one_member_does_not_make(crew: Crew) -> None:
        crew.connect()
        for peer in crew.peers:
            peer.tell("reduce", 0, 4096)  # the last call
        crew.peers[0].tell("compute")
        crew.reduce(1, 2, tag=7)
        found = crew.finding(Cause.NO_CALL)
        assert found.peers == (1,)
        assert "has not made the call tag 7" in found.text
        assert "time.sleep(0.01)" in found.text

    def test_crossed_tags(crew: Crew) -> None:
        crew.connect()
        crew.reduce(0, tag=1)
        crew.reduce(1, tag=2)
        crew.reduce(2, tag=2)
        found = crew.finding(Cause.CROSSED_CALLS)
        assert set(found.peers) == {1, 2, 3}
        assert "peer 1 in tag 1" in found.text
        assert "peers 2, 3 in tag 2" in found.text

    def test_a_slow_link(crew: Crew) -> None:
        behind_proxy(crew, "rate=8mbit,rtt=2ms")
        crew.connect()
        crew.reduce(0, 1, 2, nbytes=LARGE)
        assert "the link from peer" in crew.finding(Cause.SLOW_LINK, peer=1).text

    def test_a_dead_link(crew: Crew) -> None:
        door = behind_proxy(crew, "")
        crew.connect()
        door.stall()
        crew.reduce(0, 1, 2, nbytes=LARGE)
        assert 1 in crew.finding(Cause.DEAD_LINK).peers

    def test_a_full_disk_while_staging(crew: Crew) -> None:
        crew.connect()
        for number, (revision, full) in enumerate(((5, False), (5, False), (4, True))):
            crew.peers[number].tell("synchronize", revision, full)
        found = crew.finding(Cause.NO_ROOM)
        assert found.peers == (3,)
        assert os.strerror(errno.ENOSPC) in found.text

    @pytest.mark.usefixtures("quick_silence")
    def test_a_master_that_one_member_cannot_reach(crew: Crew) -> None:
        way = crew.stack.enter_context(ProxyThread(crew.address, LinkSpec.parse("")))
        crew.start()
        crew.start(str(way.address))
        crew.connect()
        way.stall()
        crew.reduce(0, 2)
        found = crew.finding(Cause.MASTER_UNREACHABLE)
        assert found.peers == (2,)
        assert "peers 1, 3 can still reach it" in found.text

    def test_two_groups_of_which_one_updates(crew: Crew) -> None:
        crew.start()
        crew.start()
        crew.start(peer_group=1)
        crew.connect()
        crew.peers[2].tell("compute")
        for peer in crew.peers[:2]:
            peer.tell("update")
        found = crew.finding(Cause.OTHER_GROUP)
        assert found.peers == (3,)

    def test_the_command(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        crew.connect()
        monkeypatch.setenv("PCCL_TOKEN", TOKEN)
        run: Callable[..., Any] = partial(CliRunner().invoke, why)
        calm = run([crew.address])
        assert (calm.exit_code, calm.stdout.splitlines()[1:]) == (
            0,
            ["no call waits for a member"],
        )
        crew.peers[1].tell("wait_for_a_lock")
        crew.reduce(0, 2)
        crew.finding(Cause.BLOCKED)
        found = run([crew.address])
        assert found.exit_code == 3
        assert "the program waits for a lock of its own: peer 2 (p1) has not made" in found.stdout
        as_json = json.loads(run([crew.address, "--json"]).stdout)
        assert [one["cause"] for one in as_json["blame"]] == ["BLOCKED"]
        assert run(["127.0.0.1:1"]).exit_code == 1
