"""``pccl bench --master`` on two hosts that are processes here: what they say, and how it ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner

import pccl
from pccl.cli.bench.peer import gather
from pccl.cli.main import group
from pccl.cli.processes.reports import Doing
from tests.support.commands import PCCL, environment_with, running
from tests.support.patience import LONG_LIMIT_S
from tests.support.secret_files import keep

SECRET = "b7Qz-Tr4k_Wm9x-Jp2v"
SMALL = ("--size", "4KiB,64KiB", "--rounds", "2", "--warmup", "0")
ENDLESS = ("--size", "1MiB", "--rounds", "1000")
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """A master that wants the token in the file ``token``."""
    keep(tmp_path / "token", SECRET)
    with pccl.MasterNode("127.0.0.1:0", token=SECRET) as node:
        yield node.address


def host(
    tmp_path: Path,
    master: str,
    *options: str,
    pccl: tuple[str, ...] = PCCL,
    stderr: int | IO[str] = subprocess.PIPE,
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """One host's process; it is gone afterwards."""
    where = ("--master", master, "--token", str(tmp_path / "token"))
    return running(*pccl, "bench", *where, *options, env=environment_with(), stderr=stderr)


Host = Callable[..., contextlib.AbstractContextManager[subprocess.Popen[str]]]


@pytest.fixture
def ready_host(ready_pccl: tuple[str, ...], tmp_path: Path) -> Host:
    """One host's process, a fork."""
    return partial(host, tmp_path, pccl=ready_pccl)


def line_with(process: subprocess.Popen[str], words: str) -> str:
    """Wait for a line on stderr."""
    assert process.stderr is not None
    heard: list[str] = []
    for line in process.stderr:
        heard.append(line)
        if words in line:
            return line
    raise AssertionError(f"never said {words!r}, but {heard}")


def test_two_hosts(ready_host: Host, master: str) -> None:
    quantized = ("--algorithm", "mesh", "--quantize", "none,int8")
    with (
        ready_host(master, "--json", "--peers", "2", *SMALL, *quantized) as one,
        ready_host(master, "--json", "--peers", "2", *SMALL, *quantized) as other,
    ):
        ends = [process.communicate(timeout=LONG_LIMIT_S) for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], ends
    ends.sort(key=lambda end: not end[0])
    (figures, first_said), (nothing, second_said) = ends
    assert nothing == ""
    found = [json.loads(line) for line in figures.splitlines()]
    assert [(each["bytes"], each["quantize"]) for each in found] == [
        *((4096, "none"), (4096, "int8"), (65536, "none"), (65536, "int8"))
    ]
    for each in found:
        assert each["values_ok"] is True
        assert (each["peers"], each["algorithm"]) == (2, "mesh")
        assert len(each["seconds"]) == 2
        assert "span" not in each  # hosts have no common clock
        assert each["conditions"]["master"] == master
    assert first_said == "pccl bench: waiting until 2 peers have joined\n"
    assert second_said.splitlines() == [
        "pccl bench: waiting until 2 peers have joined",
        "pccl bench: rank 1 of 2; measuring the plan of rank 0 at 127.0.0.1, which shows the "
        "figures",
        "pccl bench: measured 4 KiB, mesh",
        "pccl bench: measured 4 KiB, mesh int8",
        "pccl bench: measured 64 KiB, mesh",
        "pccl bench: measured 64 KiB, mesh int8",
    ]


def test_hosts_that_were_asked_for_different_things_agree(ready_host: Host, master: str) -> None:
    with ready_host(master, "--peers", "2", "--size", "4KiB", "--rounds", "1") as one:
        line_with(one, "waiting until 2 peers")
        with ready_host(master, "--peers", "2", "--size", "8KiB", "--rounds", "2") as other:
            ends = [process.communicate(timeout=LONG_LIMIT_S)[0] for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0]
    [table] = [end for end in ends if end]
    assert f"between hosts, master at {master}" in table
    assert len(re.findall(r"^ *[48] KiB ", table, re.MULTILINE)) == 1


def test_peers_tell_each_other_what_they_know(master: str) -> None:
    def tell(number: int) -> tuple[int, list[Doing]]:
        with pccl.Communicator(master, token=SECRET) as comm:
            comm.connect(min_peers=3)
            return comm.rank, gather(comm, Doing("é" * (comm.rank + 1)))

    with ThreadPoolExecutor(3) as threads:
        told = list(threads.map(tell, range(3)))
    assert sorted(rank for rank, _ in told) == [0, 1, 2]
    assert all(gathered == [Doing("é"), Doing("éé"), Doing("ééé")] for _, gathered in told)


@pytest.mark.parametrize("for_whom", ["master", "peers"])
def test_ctrl_c_while_waiting(tmp_path: Path, master: str, for_whom: str) -> None:
    where = NOWHERE if for_whom == "master" else master
    keep(tmp_path / "token", SECRET)
    with host(tmp_path, where) as alone:
        line_with(alone, "waiting ")
        alone.send_signal(signal.SIGINT)
        _, said = alone.communicate(timeout=LONG_LIMIT_S)
    assert alone.returncode == 130
    assert "Traceback" not in said


def test_too_few_peers(ready_host: Host, master: str) -> None:
    with ready_host(master, "--peers", "3", "--timeout", "1") as alone:
        out, said = alone.communicate(timeout=LONG_LIMIT_S)
    assert (alone.returncode, out) == (1, "")
    assert said.splitlines()[1:] == [
        f"Error: fewer than 3 peers joined within 1 s; `pccl status {master}` shows which peers "
        "wait there"
    ]


def test_no_master(ready_host: Host, tmp_path: Path) -> None:
    keep(tmp_path / "token", SECRET)
    with ready_host(NOWHERE, "--timeout", "0.1") as alone:
        out, said = alone.communicate(timeout=LONG_LIMIT_S)
    assert (alone.returncode, out) == (1, "")
    assert said.startswith(f"pccl bench: waiting for a master at {NOWHERE} (connection refused)\n")
    assert f"Error: no master answered at {NOWHERE} within 0.1 s" in said


def test_a_wrong_token(ready_host: Host, tmp_path: Path, master: str) -> None:
    keep(tmp_path / "token", "another secret that it is not")
    with ready_host(master) as alone:
        out, said = alone.communicate(timeout=LONG_LIMIT_S)
    assert (alone.returncode, out) == (1, "")
    assert "Error: " in said
    assert "Traceback" not in said


def first_and_second(said: dict[str, Path]) -> tuple[str, str]:
    """Names of both ranks, as soon as the second one has said that it is."""
    deadline = time.monotonic() + LONG_LIMIT_S
    while time.monotonic() < deadline:
        for name, path in said.items():
            if "rank 1 of 2" in path.read_text():
                [other] = set(said) - {name}
                return other, name
        time.sleep(0.01)
    raise AssertionError("they never began")


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("wanted", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_one_ends_and_so_does_the_other(
    ready_host: Host, tmp_path: Path, master: str, wanted: str, whose: int
) -> None:
    said = {name: tmp_path / f"stderr {name}" for name in ("one", "other")}
    with contextlib.ExitStack() as stack:
        processes: dict[str, subprocess.Popen[str]] = {}
        for name, path in said.items():
            stderr = stack.enter_context(path.open("w"))
            made = ready_host(master, "--peers", "2", *ENDLESS, stderr=stderr)
            processes[name] = stack.enter_context(made)
        ranks = first_and_second(said)
        first, second = ranks[whose], ranks[1 - whose]
        processes[first].send_signal(signal.Signals[wanted])
        for process in processes.values():
            process.communicate(timeout=LONG_LIMIT_S)
        expected = {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}[wanted]
        assert processes[first].returncode == expected
        assert processes[second].returncode == 1
    last = said[second].read_text().splitlines()[-1]
    assert last.startswith("Error: the benchmark failed: ")
    assert last.endswith("; start it again on every host")
    assert not any("Traceback" in path.read_text() for path in said.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--timeout", "1"], "--token and --timeout are for --master"),
        (["--master", "host.example"], "write HOST:PORT"),
        (["--master", "host.example:0"], "has port 0"),
        (["--master", NOWHERE, "--peers", "2,3"], "give one count of --peers and one of --lanes"),
        (["--master", NOWHERE, "--lanes", "1,2"], "give one count of --peers and one of --lanes"),
        (["--master", NOWHERE, "--emulate", "rtt=1ms"], "--emulate are for peers of one machine"),
        (["--master", NOWHERE, "--timeout", "0"], "0.0 is not in the range x>0.0"),
    ],
)
def test_options_are_checked_first(options: list[str], words: str) -> None:
    found = CliRunner().invoke(group, ["bench", *options])
    assert found.exit_code == 2, found.output
    assert words in " ".join(found.output.split())


def test_a_token_that_is_none_is_refused(tmp_path: Path) -> None:
    keep(tmp_path / "token", "short")
    options = ["--master", NOWHERE, "--token", str(tmp_path / "token")]
    found = CliRunner().invoke(group, ["bench", *options])
    assert found.exit_code == 2
    assert "a secret of 5 bytes is too short" in " ".join(found.output.split())
