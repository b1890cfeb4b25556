"""What peers record: asked for through the master, written on failure and SIGQUIT, merged."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import pccl
from pccl.inquiry import EvidenceKind, peer_evidence
from pccl.observe.records import Record, check_record, merge, read_records
from pccl.runtime.collective.data_plane import DataPlane
from pccl.telemetry.clocks import clock_offset
from tests.integration.conftest import Run
from tests.integration.recorded_peer import TIMING
from tests.support.commands import environment_with, run_to_end
from tests.support.patience import LIMIT_S
from tests.support.peers import PeerProcess
from tests.support.skewed_clock import true_ns
from tests.support.trace_format import check_trace
from tests.support.waiting import until
from tests.unit.telemetry.test_records import GOOD

S = 10**9
CLOCKS = ((2 * S, 100), (-S // 2, -100), (11 * S, 50), (17 * S, -75))
"""By how much each peer's clock is ahead, and how many millionths it is too fast."""


class Crew:
    """A master, and members that are processes."""

    def __init__(self) -> None:
        self.master = pccl.MasterNode("127.0.0.1:0", timing=TIMING)
        self.master.run()
        self.peers: list[PeerProcess] = []

    def start(self, *clocks: tuple[int, int]) -> None:
        """Let members join."""
        for number, clock in enumerate(clocks):
            arguments = self.master.address, f"p{number}", *map(str, clock)
            self.peers.append(PeerProcess("tests.integration.recorded_peer", *arguments))
        for peer, found in zip(self.peers, self.ask("connect", len(clocks)), strict=True):
            peer.id = found

    def ask(self, name: str, *arguments: object) -> list[Any]:
        """Let all do the same at the same time."""
        for peer in self.peers:
            peer.tell(name, *arguments)
        return [peer.hear()[1] for peer in self.peers]

    def close(self) -> None:
        for peer in self.peers:
            peer.end()
        self.master.interrupt()

    def records(self) -> list[Record]:
        kind = EvidenceKind.RECORD
        found = [peer_evidence(peer.id, kind, self.master.address) for peer in self.peers]
        return [check_record(one) for one in found]


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.close()


def test_clocks_seconds_apart_show_no_receipt_before_its_sending(crew: Crew) -> None:
    crew.start(*CLOCKS)
    until(lambda: min(crew.ask("reduce", 50_000, 20)) >= 5)
    records = crew.records()
    for record, clock in zip(records, CLOCKS, strict=True):
        assert abs(clock[0]) // 2 < abs(record.now_ns - true_ns(record.now_ns, *clock))
        for segment in record.segments[::100]:
            offset_ns, error_ns = clock_offset(record.clock, segment.began_ns) or (0, -1)
            shown_ns = segment.began_ns + offset_ns
            assert abs(shown_ns - true_ns(segment.began_ns, *clock)) <= error_ns + 1
    trace = merge(records, {})
    check_trace(trace)
    errors_us = {peer["pid"]: peer["clock_error_us"] for peer in trace["otherData"]["peers"]}
    entries = trace["traceEvents"]
    bars = [entry for entry in entries if entry["ph"] == "X" and "offset" in entry["args"]]
    names = {
        (entry["pid"], entry["tid"]): entry["args"]["name"]
        for entry in entries
        if entry["name"] == "thread_name"
    }
    pid_of = {f"p{peer['name'][1:]}": peer["pid"] for peer in trace["otherData"]["peers"]}
    sent: dict[object, int] = {}
    compared = 0
    for sends in (True, False):
        for bar in bars:
            words = names[bar["pid"], bar["tid"]]
            if words.startswith("to ") != sends:
                continue
            other = pid_of[words.partition("(")[2].partition(")")[0]]
            way = (bar["pid"], other) if sends else (other, bar["pid"])
            told = bar["args"]
            key = *way, told["operation"], told["step"], told["offset"]
            if sends:
                sent[key] = bar["ts"]
            elif key in sent:
                compared += 1
                assert bar["ts"] >= sent[key] - errors_us[way[0]] - errors_us[way[1]] - 1
    arrows = [entry for entry in entries if entry["ph"] == "s"]
    assert compared >= len(arrows) > 100


def test_the_commands_save_records_and_merge_them(
    crew: Crew, ready_pccl: tuple[str, ...], tmp_path: Path
) -> None:
    crew.start((0, 0), (0, 0))
    crew.ask("reduce", 1000, 5)
    saved, one, trace = tmp_path / "r.json", tmp_path / "one.json", tmp_path / "t.json"
    where = crew.master.address

    def command(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = run_to_end(*ready_pccl, *arguments, env=environment_with(), limit_s=LIMIT_S)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    assert "records of 2 peers" in command("record", where, "-o", str(saved)).stderr
    command("record", where, "--peer", "p1", "-o", str(one))
    records, unanswered = read_records([one])
    assert ([record.name for record in records], unanswered) == (["p1"], {})
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    missing = command("record", where, "--peer", "p9", "-o", str(one), status=1)
    assert "no peer 'p9'" in missing.stderr

    from_peers = command("trace", where, "-o", str(trace))
    assert "2 peers; error of their clocks: at most" in from_peers.stderr
    check_trace(json.loads(trace.read_text()))
    assert json.loads(command("trace", str(saved), "-o", "/dev/stdout").stdout)
    absent = command("trace", str(tmp_path / "absent.json"), status=2).stderr
    assert "absent.json' is neither a file nor an address, HOST:PORT" in absent
    command("trace", str(saved), "-o", str(trace))
    merged = json.loads(trace.read_text())
    check_trace(merged)
    assert {peer["name"] for peer in merged["otherData"]["peers"]} == {"p0", "p1"}
    one.write_text("{}")
    assert str(one) in command("trace", str(saved), str(one), status=1).stderr

    crew.peers[0].process.send_signal(signal.SIGSTOP)
    try:
        partly = command("trace", where, "-o", str(trace), "--timeout", "1")
    finally:
        crew.peers[0].process.send_signal(signal.SIGCONT)
    assert "no record of peer" in partly.stderr
    assert len(json.loads(trace.read_text())["otherData"]["unanswered"]) == 1


def test_a_trace_may_go_to_a_pipe_which_stays_one(
    ready_pccl: tuple[str, ...], tmp_path: Path
) -> None:
    """As root, a command that renames its draft would replace /dev/stdout with a file."""
    saved, pipe = tmp_path / "r.json", tmp_path / "pipe"
    saved.write_text(json.dumps(GOOD))
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        arguments = "trace", str(saved), "-o", str(pipe)
        done = run_to_end(*ready_pccl, *arguments, env=environment_with(), limit_s=LIMIT_S)
        assert (done.returncode, pipe.is_fifo()) == (0, True), done.stderr
        check_trace(json.loads(os.read(reader, 1 << 16)))
    finally:
        os.close(reader)


def written(folder: Path, count: int) -> list[dict[str, Any]]:
    """The records in a folder, when so many are there."""
    until(lambda: len(list(folder.glob("pccl-*.json"))) == count)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("pccl-*.json"))]


def statuses(pid: int) -> list[Path]:
    """The files with the kernel's view of each thread of a process."""
    return [folder / "status" for folder in Path(f"/proc/{pid}/task").iterdir()]


def test_sigquit_writes_a_record_while_the_main_thread_is_in_c(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_RECORD", str(tmp_path))
    crew.start((0, 0))
    (peer,) = crew.peers
    pid = peer.process.pid
    assert crew.ask("fork") == [-signal.SIGQUIT]  # the default action, in a child
    assert crew.ask("hang_in_c") == ["hangs"]
    for count in (1, 2):
        os.kill(pid, signal.SIGQUIT)
        found = written(tmp_path, count)[-1]
        assert (found["why"], found["name"]) == ("SIGQUIT", "p0")
        assert check_record(found).pid == pid
        assert "in hang_in_c" in found["stacks"]
    # The I/O thread and the one that wrote the record leave the signal to the program's threads.
    masks = [re.search(r"SigBlk:\s*(\w+)", file.read_text()) for file in statuses(pid)]
    blocked = [mask for mask in masks if mask and int(mask[1], 16) >> (signal.SIGQUIT - 1) & 1]
    assert len(blocked) >= 2
    (path, _) = sorted(tmp_path.iterdir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.name.startswith(f"pccl-p0-{pid}-")


def test_a_handler_that_the_program_installs_later_stays(tmp_path: Path) -> None:
    program = """
import os, pathlib, signal, sys, time, pccl
folder = pathlib.Path(os.environ["PCCL_RECORD"])
for count in (1, 2):
    with pccl.Communicator("127.0.0.1:1"):
        os.kill(os.getpid(), signal.SIGQUIT)
        while len(list(folder.glob("pccl-*.json"))) < count:
            time.sleep(0.001)
        signal.signal(signal.SIGQUIT, lambda *_: print("mine"))
    os.kill(os.getpid(), signal.SIGQUIT)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
"""
    environment = environment_with(PCCL_RECORD=str(tmp_path))
    done = run_to_end(sys.executable, "-c", program, env=environment, limit_s=LIMIT_S)
    assert (done.returncode, done.stdout) == (0, "mine\nmine\n"), done.stderr


def test_without_a_folder_sigquit_does_what_it_did(crew: Crew) -> None:
    crew.start((0, 0))
    crew.peers[0].process.send_signal(signal.SIGQUIT)
    assert crew.peers[0].process.wait(LIMIT_S) == -signal.SIGQUIT


def test_a_lost_membership_and_a_bug_write_records(
    new_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_RECORD", str(tmp_path))
    run = new_run(2)
    first, second = run.members
    with patch.object(DataPlane, "post", side_effect=ZeroDivisionError("seeded")):
        failing = run.start(first.all_reduce, np.ones(4))
        with pytest.raises(pccl.errors.LocalProtocolError):
            failing.result(LIMIT_S)
        (bug,) = written(tmp_path, 1)
    assert bug["why"].startswith("INTERNAL_ERROR: internal error")
    assert "ZeroDivisionError" in bug["why"]
    second.close()  # leaving writes nothing
    first.close()
    assert len(written(tmp_path, 1)) == 1


def test_a_lost_master_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_RECORD", str(tmp_path))
    timing = pccl.Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01, master_lost_s=0.5)
    with pccl.MasterNode("127.0.0.1:0", timing=timing) as master:
        comm = pccl.Communicator(master.address, timing=timing)
        comm.connect()
    with comm:
        (lost,) = written(tmp_path, 1)
        assert lost["why"].startswith("MASTER_LOST")
        assert abs(lost["time_s"] - time.time()) < LIMIT_S


@pytest.mark.parametrize("text", ["/nowhere/at/all", "/dev/null"])
def test_a_folder_that_cannot_be_written_is_a_mistake(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_RECORD", text)
    with pytest.raises(ValueError, match="PCCL_RECORD"):
        pccl.Communicator("127.0.0.1:1")


def test_a_communicator_that_cannot_be_made_leaves_sigquit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_RECORD", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("PCCL_METRICS", str(other.getsockname()[1]))
        with pytest.raises(OSError, match="cannot serve metrics"):
            pccl.Communicator("127.0.0.1:1")
    unregister: Any = faulthandler.unregister  # its stub has no result
    assert not unregister(signal.SIGQUIT)
