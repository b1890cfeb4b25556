"""``pccl master`` as users run it, and the group of commands around it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PCCL = (sys.executable, "-m", "pccl.cli.main")
LIMIT_S = 60.0


def start_master(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PCCL, "master", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_pccl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PCCL, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def read_greeting(master: subprocess.Popen[str]) -> tuple[str, str]:
    """Read all that a master says when it starts; the address that it names, and the words."""
    assert master.stdout is not None
    words = ""
    while "Ctrl-C ends it" not in words:
        line = master.stdout.readline()
        assert line, f"the master ended after saying {words!r}"
        words += line
    found = re.match(r"master listening on (127\.0\.0\.1:\d+)\n", words)
    assert found is not None, words
    return found[1], words


@pytest.fixture
def master() -> Iterator[subprocess.Popen[str]]:
    process = start_master("--listen", "127.0.0.1:0")
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_master_ends_on_a_signal(master: subprocess.Popen[str], signum: signal.Signals) -> None:
    address, said = read_greeting(master)
    assert "this machine only" in said
    assert f'pccl.Communicator("{address}")' in said
    master.send_signal(signum)
    _, complained = master.communicate(timeout=LIMIT_S)
    assert master.returncode == 0, complained
    assert "Traceback" not in complained


def test_port_in_use_is_said_in_a_sentence(master: subprocess.Popen[str]) -> None:
    address, _ = read_greeting(master)
    second = run_pccl("master", "--listen", address)
    assert second.returncode == 1
    assert second.stdout == ""
    (line,) = second.stderr.strip().splitlines()
    assert line.startswith(f"Error: cannot listen on {address}: address already in use; choose")


@pytest.mark.parametrize("address", ["48148", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:99999"])
def test_what_is_no_address_is_refused(address: str) -> None:
    run = run_pccl("master", "--listen", address)
    assert run.returncode == 2
    assert "is not an address; write HOST:PORT" in run.stderr


def test_the_environment_sets_options() -> None:
    run = run_pccl("master", PCCL_MASTER_LISTEN="nonsense")
    assert run.returncode == 2
    assert "'nonsense' is not an address" in run.stderr


def test_help_names_every_command_and_imports_none() -> None:
    probe = (
        "import sys, json, pccl.cli.main as main\n"
        "try: main.main()\n"
        "finally: print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", probe, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0
    assert {"demo", "master"} <= set(re.findall(r"^  (\w+) ", run.stdout, re.MULTILINE))
    loaded = set(json.loads(run.stderr))
    assert loaded.isdisjoint({"torch", "rich", "sklearn", "matplotlib", "pccl.cli.demo"})


def test_version() -> None:
    run = run_pccl("--version")
    assert run.returncode == 0
    assert re.fullmatch(r"pccl \d+\.\d+\S*\n", run.stdout)
