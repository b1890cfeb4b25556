"""``pccl join`` as users run it. The master is a port that begins to listen when the test says."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pccl
from tests.support import commands
from tests.support.commands import PCCL, environment_with, run_to_end
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S
from tests.support.secret_files import keep

SECRET = "b7Qz-Tr4k_Wm9x-Jp2v"

SHOW = """
import json, os, sys
told = {name: value for name, value in os.environ.items() if name.startswith("PCCL_")}
print(json.dumps({"pid": os.getpid(), "told": told, "arguments": sys.argv[1:]}))
"""


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return commands.start(*PCCL, "join", *arguments, env=environment_with(**environment))


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(params=["127.0.0.1", "localhost", "[::1]"])
def port(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, str]]:
    """A port that refuses until ``listen`` is called, and its address."""
    host: str = request.param
    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind(("::1" if "[" in host else "127.0.0.1", 0))
        yield listener, f"{host}:{listener.getsockname()[1]}"


@pytest.fixture
def closed(port: tuple[socket.socket, str]) -> str:
    """The address of a port where nobody ever listens."""
    return port[1]


only_v4 = pytest.mark.parametrize("port", ["127.0.0.1"], indirect=True)


def test_waits_for_a_late_master(port: tuple[socket.socket, str], tmp_path: Path) -> None:
    listener, address = port
    token = tmp_path / "token"
    keep(token, SECRET)
    relative = os.path.relpath(token, ROOT)
    options = (
        "--group",
        "3",
        "--min-peers",
        "2",
        "--advertise",
        "198.51.100.7:5000-5009",
        "--token",
        relative,
    )
    join = start(
        *("--timeout", str(LIMIT_S), "--upload-max", "2M", *options, "--no-map-port", address),
        *("--", sys.executable, "-c", SHOW, "--group", "--", "x y"),
        PCCL_TOKEN="another secret, which must not come first",
        PCCL_LOG="",
        XDG_RUNTIME_DIR=str(tmp_path),
    )
    assert join.stderr is not None
    assert join.stderr.readline() == (
        f"pccl join: waiting for a master at {address} (connection refused)\n"
    )
    listener.listen()
    out, err = finish(join)
    assert join.returncode == 0, err
    assert err.startswith("pccl join: the master answered after ")
    assert err.count("\n") == 1
    shown = json.loads(out)
    assert shown["pid"] == join.pid
    assert shown["arguments"] == ["--group", "--", "x y"]
    assert shown["told"] == {
        "PCCL_MASTER": address,
        "PCCL_GROUP": "3",
        "PCCL_MIN_PEERS": "2",
        "PCCL_ADVERTISE": "198.51.100.7:5000-5009",
        "PCCL_MAP_PORT": "0",
        "PCCL_TOKEN_FILE": str(token),
        "PCCL_UPLOAD_MAX": "2097152",
        "PCCL_DRAIN": "1",
        "PCCL_PROGRESS": "1",
        "PCCL_LOG": "info",
        "PCCL_STACKS_DIR": str(tmp_path / "pccl"),
    }


@only_v4
def test_says_nothing_when_the_master_is_there(port: tuple[socket.socket, str]) -> None:
    listener, address = port
    listener.listen()
    given = {"PCCL_TOKEN": SECRET, "PCCL_GROUP": "9", "PCCL_DRAIN": "0", "PCCL_PROGRESS": "0"}
    given |= {"PCCL_LOG": "off", "PCCL_STACKS_DIR": "/of/a/launch"}
    join = start(address, "--", sys.executable, "-c", SHOW, **given)
    out, err = finish(join)
    assert (join.returncode, err) == (0, "")
    told = json.loads(out)["told"]
    assert told == {"PCCL_MASTER": address, **given}


@only_v4
@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_status_is_that_of_the_command(
    port: tuple[socket.socket, str], source: str, status: int
) -> None:
    listener, address = port
    listener.listen()
    join = start(address, "--", sys.executable, "-c", source)
    finish(join)
    assert join.returncode == status


@only_v4
def test_signals_are_as_a_shell_leaves_them(port: tuple[socket.socket, str]) -> None:
    listener, address = port
    listener.listen()
    join = start(address, "--", "sh", "-c", "kill -PIPE $$; echo SIGPIPE is ignored")
    assert finish(join) == ("", "")
    assert join.returncode == -signal.SIGPIPE


@only_v4
def test_gives_up_in_time(closed: str) -> None:
    join = start("--timeout", "0.4", closed, "--", sys.executable, "-c", "print('never')")
    out, err = finish(join)
    assert (join.returncode, out) == (1, "")
    waiting, verdict = err.splitlines()
    assert waiting == f"pccl join: waiting for a master at {closed} (connection refused)"
    assert verdict.startswith(
        f"Error: no master answered at {closed} within 0.4 s (connection refused); is `pccl master`"
    )


def test_a_name_that_nobody_knows() -> None:
    join = start("--timeout", "0.1", "no-such-host.invalid:1", "--", "true")
    _, err = finish(join)
    assert join.returncode == 1
    assert "Error: no master answered at no-such-host.invalid:1 within 0.1 s" in err


@only_v4
def test_ctrl_c_while_waiting(closed: str) -> None:
    join = start(closed, "--", "true")
    assert join.stderr is not None
    assert "waiting" in join.stderr.readline()
    join.send_signal(signal.SIGINT)
    assert finish(join) == ("", "")
    assert join.returncode == 130


@only_v4
def test_a_missing_command_is_told_before_waiting(closed: str) -> None:
    join = start(closed, "--", "no-such-command")
    assert finish(join) == ("", "Error: command not found: no-such-command\n")
    assert join.returncode == 127


# -- why -------------------------------------------------------------------------------------------

STOPS = """
import os, signal, pccl
with pccl.Communicator() as comm:
    comm.connect(min_peers=1)
    print("joined", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.usefixtures("quick_silence")
def test_why_inspects_a_joined_peer_of_its_own_machine(tmp_path: Path) -> None:
    """The master is no parent of the peer, and cannot know of its process."""
    (tmp_path / "pccl").mkdir(mode=0o700)
    left = tmp_path / "pccl" / f"{2**22 + 1}.stacks"  # above the largest process id of Linux
    left.touch(mode=0o600)
    node = pccl.MasterNode("127.0.0.1:0")
    node.run()
    known = {"XDG_RUNTIME_DIR": str(tmp_path)}
    program = ("--", sys.executable, "-c", STOPS)
    join = start("--name", "alice", node.address, *program, **known)
    try:
        assert join.stdout is not None
        assert join.stdout.readline() == "joined\n"
        why = run_to_end(*PCCL, "why", node.address, env=environment_with(**known), limit_s=LIMIT_S)
        assert f"1. the process is stopped: peer 1 (alice): its process {join.pid}" in why.stdout
        assert why.returncode == 3
        assert not left.exists()
        elsewhere = environment_with(XDG_RUNTIME_DIR=str(tmp_path / "pccl"))
        why = run_to_end(*PCCL, "why", node.address, env=elsewhere, limit_s=LIMIT_S)
        assert "its process is stopped, or C code holds its interpreter lock" in why.stdout
        assert "run pccl why (for a peer of pccl join)" in why.stdout
    finally:
        join.kill()
        finish(join)
        node.interrupt()
