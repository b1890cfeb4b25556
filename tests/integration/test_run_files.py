"""``pccl status`` without arguments sees what ``pccl launch`` has started on this machine."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.commands import HINT, PCCL, environment_with, run_to_end, running
from tests.support.patience import LIMIT_S

PEER = """
import os, signal, pccl
with pccl.Communicator() as comm:
    comm.connect(min_peers=int(os.environ["PCCL_PEERS"]))
    print("ready")
    signal.pause()
"""


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch, ready_pccl: tuple[str, ...]) -> None:
    """Launches are processes, of which one is killed; what only says something is a fork."""
    monkeypatch.setattr(f"{__name__}.SAYS", ready_pccl)


SAYS = PCCL
"""The command ``pccl`` where it only says something."""


@contextlib.contextmanager
def launched(folder: Path, peers: int) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A launch whose peers are members, and the address of its master."""
    command = (*PCCL, "launch", "-n", str(peers), "--", sys.executable, "-c", PEER)
    with running(*command, env=environment(folder)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        hint = process.stderr.readline()
        assert re.match(HINT, hint), hint
        for _ in range(peers):
            assert process.stdout.readline().endswith("] ready\n")
        yield process, hint.split()[5].removesuffix(";")


def environment(folder: Path, **more: str) -> dict[str, str]:
    return environment_with(XDG_RUNTIME_DIR=str(folder), TMPDIR=str(folder), **more)


def status(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = (*SAYS, "status", *arguments)
    return run_to_end(*command, env=environment(folder, **more), limit_s=LIMIT_S)


def members(ended: subprocess.CompletedProcess[str]) -> int:
    assert (ended.returncode, ended.stderr) == (0, "")
    return len(json.loads(ended.stdout)["members"])


def test_one_launch_and_two(tmp_path: Path) -> None:
    with launched(tmp_path, 1) as (_, one):
        assert members(status(tmp_path, "--json")) == 1
        with launched(tmp_path, 2) as (_, two):
            assert (members(status(tmp_path, "--json", two)), two != one) == (2, True)
            assert members(status(tmp_path, "--json", PCCL_MASTER=one)) == 1
            several = status(tmp_path)
            assert (several.returncode, several.stdout) == (2, "")
            assert [line.split()[0] for line in several.stderr.splitlines()[1:]] == [one, two]
        # The second launch was killed, so its file has stayed; but nobody has it locked.
        assert len(list((tmp_path / "pccl").iterdir())) == 4  # each with its keys
        assert members(status(tmp_path, "--json")) == 1
        assert len(list((tmp_path / "pccl").iterdir())) == 2


@pytest.mark.parametrize("wanted", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_removes_the_file(wanted: signal.Signals, tmp_path: Path) -> None:
    with launched(tmp_path, 1) as (process, _):
        assert len(list((tmp_path / "pccl").iterdir())) == 2
        process.send_signal(wanted)
        assert process.wait(LIMIT_S) == 128 + wanted
    assert list((tmp_path / "pccl").iterdir()) == []


def test_an_unsafe_folder_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    for name in ("runtime", "temporary"):
        (tmp_path / name).mkdir()
    (tmp_path / "runtime" / "pccl").mkdir(mode=0o700)
    (tmp_path / "runtime" / "pccl").chmod(0o777)
    settings = environment_with(
        XDG_RUNTIME_DIR=str(tmp_path / "runtime"), TMPDIR=str(tmp_path / "temporary")
    )
    (tmp_path / "temporary").chmod(0o700)
    ended = run_to_end(*SAYS, "launch", "-n", "1", "--", "true", env=settings, limit_s=LIMIT_S)
    assert ended.returncode == 0
    assert re.fullmatch(HINT, ended.stderr)  # the folder of temporary files was good
    assert list((tmp_path / "runtime" / "pccl").iterdir()) == []
    for folder in (tmp_path / "temporary").iterdir():
        folder.chmod(0o777)
    ended = run_to_end(*SAYS, "launch", "-n", "1", "--", "true", env=settings, limit_s=LIMIT_S)
    assert ended.returncode == 0
    assert ended.stderr.startswith("pccl launch: `pccl status` will not find this run: ")
    assert ended.stderr.count("can be used by other users (mode 777)") == 2
