"""``pccl launch`` as users run it: real processes, real signals, and nobody left behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.support.commands import HINT, PCCL, environment_with, run_to_end, without_hint
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S
from tests.support.processes import assert_gone
from tests.support.screens import everything_from
from tests.support.waiting import until

PCCL_LAUNCH = (*PCCL, "launch")
PYTHON = (sys.executable, "-c")

ME = "import os, signal, sys, time; me = int(os.environ['PCCL_PEER_INDEX'])\n"
FOREVER = "\nwhile True: time.sleep(0.01)"
HELLO = ME + "print('pid', os.getpid())" + FOREVER
PARENT = (
    ME
    + "import subprocess\n"
    + "other = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    + "print('pid', os.getpid(), other.pid)\n"
)


class Launched:
    """A launch that runs."""

    command = PCCL_LAUNCH

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*self.command, *arguments],
            cwd=ROOT,
            env=environment_with(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.out = self.process.stdout
        self.err = self.process.stderr

    def read(self, pattern: str, count: int) -> list[re.Match[str]]:
        """Read stdout until so many lines match; those that do not are an error."""
        found: list[re.Match[str]] = []
        while len(found) < count:
            line = self.out.readline()
            match = re.fullmatch(pattern, line.removesuffix("\n"))
            assert match is not None, (line, self.err.read() if not line else "")
            found.append(match)
        return found

    def pids(self, count: int) -> list[int]:
        """What so many peers print about themselves and their children."""
        return [
            int(pid) for found in self.read(r"\[p\d\] pid (.*)", count) for pid in found[1].split()
        ]

    def finish(self) -> tuple[int, str, str]:
        """Status, rest of stdout, rest of stderr, without the line that says how to see the run."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, re.sub(HINT, "", err)


@pytest.fixture
def launched() -> Iterator[list[Launched]]:
    """Whatever a test starts is ended with it."""
    found: list[Launched] = []
    yield found
    for launch in found:
        launch.process.kill()
        launch.process.communicate()


@pytest.fixture
def start(launched: list[Launched]) -> type[Launched]:
    class Noted(Launched):
        def __init__(self, *arguments: str, **environment: str) -> None:
            super().__init__(*arguments, **environment)
            launched.append(self)

    return Noted


@pytest.fixture
def fork(
    start: type[Launched], ready_pccl: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> type[Launched]:
    """The launch itself is a fork, for tests that send it no signal."""
    monkeypatch.setattr(Launched, "command", (*ready_pccl, "launch"))
    return start


# -- what peers find and print ---------------------------------------------------------------------


def test_environment(fork: type[Launched]) -> None:
    source = ME + "import json; print(json.dumps([dict(os.environ), sys.stdin.read()]))"
    launch = fork(
        *("-n", "3", "--group", "5", "--min-peers", "2", "--", *PYTHON, source),
        PCCL_MASTER="host.example:1",
        PCCL_TOKEN="the secret of another run",
        PCCL_TOKEN_FILE="/no/such/file",
        PCCL_LANES="4",
        PCCL_LOG="",
        PCCL_STACKS_DIR="of an outer launch",
    )
    told: dict[int, dict[str, str]] = {}
    stacks: set[str] = set()
    for line in launch.read(r"\[p(\d)\] (.*)", 3):
        environment, read = json.loads(line[2])
        assert read == ""
        assert environment["PYTHONUNBUFFERED"] == "1"
        stacks.add(environment.pop("PCCL_STACKS_DIR"))
        told[int(line[1])] = {
            name: value for name, value in environment.items() if name.startswith("PCCL_")
        }
    assert launch.finish() == (0, "", "")
    assert [Path(folder).exists() for folder in stacks] == [False]
    master, token = told[0]["PCCL_MASTER"], told[0]["PCCL_TOKEN"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", master)
    assert len(token) >= 32
    assert token != "the secret of another run"
    assert told == {
        peer: {
            "PCCL_MASTER": master,
            "PCCL_TOKEN": token,
            "PCCL_PEER_INDEX": str(peer),
            "PCCL_PEERS": "3",
            "PCCL_DRAIN": "1",
            "PCCL_DRAIN_S": "5",
            "PCCL_PROGRESS": "1",
            "PCCL_LOG": "info",
            "PCCL_NAME": f"p{peer}",
            "PCCL_GROUP": "5",
            "PCCL_MIN_PEERS": "2",
            "PCCL_LANES": "4",
        }
        for peer in range(3)
    }


def test_a_name_that_is_too_long_for_numbers(fork: type[Launched]) -> None:
    source = "import os, pccl; print(len(os.environ['PCCL_NAME']), pccl.Communicator('x:1') and 1)"
    launch = fork("-n", "1", "--", *PYTHON, source, PCCL_NAME="é" * 32)
    cut = "é" * 31 + "-0"
    told = f"pccl launch: PCCL_NAME is too long for numbers after it: {cut} and so on\n"
    assert launch.finish() == (0, f"[{cut}] 33 1\n", told)


def test_another_master(fork: type[Launched]) -> None:
    names = ("PCCL_MASTER", "PCCL_TOKEN", "PCCL_TOKEN_FILE", "PCCL_GROUP", "PCCL_MIN_PEERS")
    source = ME + f"print(*(os.environ.get(name) for name in {names}))"
    launch = fork(
        *("-n", "1", "--master", "[2001:db8::1]:48148", "--", *PYTHON, source),
        PCCL_TOKEN_FILE="secret.txt",
    )
    prefix = f"[{os.uname().nodename[:40]}-p0]"
    shown = f"{prefix} [2001:db8::1]:48148 None secret.txt None None\n"
    assert launch.finish() == (0, shown, "")


def test_port(fork: type[Launched]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
        listener.listen()
        taken = fork("--port", port, "--", *PYTHON, "print('never')")
        status, out, err = taken.finish()
    assert (status, out) == (1, "")
    assert err == (
        f"Error: cannot listen on 127.0.0.1:{port}: address already in use; "
        "choose another --port, or leave it out to get a free one\n"
    )
    source = "import os; print(os.environ['PCCL_MASTER'])"
    free = fork("-n", "1", "--port", port, "--", *PYTHON, source)
    assert free.finish() == (0, f"[p0] 127.0.0.1:{port}\n", "")


def test_streams_are_kept_apart_and_no_line_is_lost(fork: type[Launched]) -> None:
    source = ME + "print('out', me); sys.stderr.write(f'err {me}')"
    status, out, err = fork("-n", "2", "--", *PYTHON, source).finish()
    assert status == 0
    assert sorted(out.splitlines()) == ["[p0] out 0", "[p1] out 1"]
    assert sorted(err.splitlines()) == ["[p0] err 0", "[p1] err 1"]


def test_lines_come_whole_and_in_order(fork: type[Launched]) -> None:
    source = ME + "for i in range(300): print(f'{i:03}' * 400)"
    status, out, err = fork("-n", "3", "--", *PYTHON, source).finish()
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 900
    for peer in range(3):
        mine = [line for line in lines if line.startswith(f"[p{peer}] ")]
        assert mine == [f"[p{peer}] " + f"{i:03}" * 400 for i in range(300)]


def test_long_lines_and_garbage_pass(fork: type[Launched]) -> None:
    source = (
        "import sys; out = sys.stdout.buffer\n"
        "out.write(b'x' * 200_000 + b'\\n\\xff\\x00\\xfe\\n\\rhalf\\rdone'); out.flush()"
    )
    status, out, err = fork("-n", "1", "--", *PYTHON, source).finish()
    assert (status, err) == (0, "")
    *long, garbage, half, done = out.split("\n")[:-1]
    assert "".join(line.removeprefix("[p0] ") for line in long) == "x" * 200_000
    assert garbage.encode(errors="surrogateescape") == b"[p0] \xff\x00\xfe"
    assert (half, done) == ("[p0] half", "[p0] done")


def test_lines_come_at_once(start: type[Launched]) -> None:
    launch = start("-n", "1", "--", *PYTHON, "print('now'); import signal; signal.pause()")
    launch.read(r"\[p0\] now", 1)  # while the peer lives on
    assert launch.process.poll() is None


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours(environment: dict[str, str], coloured: bool) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    ours, theirs = pty.openpty()
    try:
        launch = subprocess.run(
            [*PCCL_LAUNCH, "-n", "2", "--", *PYTHON, "print('\\x1b[1mbold')"],
            cwd=ROOT,
            env={**clean, "TERM": "xterm-256color", **environment},
            stdout=theirs,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
            check=True,
        )
    finally:
        os.close(theirs)
    said = everything_from(ours).encode().replace(b"\r\n", b"\n")
    assert without_hint(launch.stderr.decode()) == ""
    lines = sorted(said.splitlines())
    if coloured:
        assert len({line.partition(b"[p0] ")[0] for line in lines}) == 2
        assert all(
            re.fullmatch(rb"\x1b\[[\d;]+m\[p\d\] \x1b\[0m\x1b\[1mbold\x1b\[0m", line)
            for line in lines
        )
    else:
        assert lines == [b"[p0] \x1b[1mbold", b"[p1] \x1b[1mbold"]


def unread_bytes(pipe: IO[str]) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


FULL_BYTES = 32 << 10
"""The writer of a pipe with so many bytes will block soon."""


# -- how it ends -----------------------------------------------------------------------------------


def test_first_failure_by_time_is_the_status(fork: type[Launched], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    source = (
        ME
        + f"if me == 0: open({str(gate)!r}).read(); sys.exit(4)\n"
        + "if me == 1: sys.exit(3)\n"
        + "print('went on')"
    )
    launch = fork("-n", "3", "--", *PYTHON, source)
    assert without_hint(launch.err.readline()) == ""
    assert launch.err.readline() == "pccl launch: p1 failed: exit code 3\n"
    gate.write_text("")  # only now can peer 0 end
    assert launch.finish() == (3, "[p2] went on\n", "pccl launch: p0 failed: exit code 4\n")


def test_death_by_signal(fork: type[Launched]) -> None:
    source = ME + "if me == 1: os.kill(os.getpid(), signal.SIGKILL)\nprint('went on')"
    launch = fork("-n", "2", "--", *PYTHON, source)
    error = "pccl launch: p1 failed: signal SIGKILL\n"
    assert launch.finish() == (137, "[p0] went on\n", error)


def test_fail_fast(start: type[Launched], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    source = ME + f"print('pid', os.getpid())\nif me == 1: open({str(gate)!r}).read(); sys.exit(3)"
    launch = start("-n", "3", "--fail-fast", "--", *PYTHON, source + FOREVER)
    pids = launch.pids(3)
    gate.write_text("")
    assert launch.finish() == (
        3,
        "",
        "pccl launch: p1 failed: exit code 3\npccl launch: ending the other peers (--fail-fast)\n",
    )
    assert_gone(pids)


@pytest.mark.parametrize("wanted", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_each_peer_once(wanted: signal.Signals, start: type[Launched]) -> None:
    source = (
        ME
        + "def end(signum, frame):\n    print('got', signum)\n    done.append(signum)\n"
        + f"done = []; signal.signal({int(wanted)}, end); print('pid', os.getpid())\n"
        + "while not done: time.sleep(0.01)"
    )
    before = signal.signal(wanted, signal.SIG_DFL)  # nohup ignores SIGHUP, for children too
    try:
        launch = start("-n", "3", "--", *PYTHON, source)
    finally:
        signal.signal(wanted, before)
    pids = launch.pids(3)
    launch.process.send_signal(wanted)
    status, out, err = launch.finish()
    assert status == 128 + wanted
    assert sorted(out.splitlines()) == [f"[p{peer}] got {int(wanted)}" for peer in range(3)]
    assert err == ""
    assert_gone(pids)


def test_a_signal_reaches_what_a_shell_runs(start: type[Launched]) -> None:
    """A shell waits for its child before it looks at a signal of its own."""
    script = '"$0" -c "$1"; echo shell went on'
    launch = start("-n", "1", "--", "sh", "-c", script, sys.executable, HELLO)
    pids = launch.pids(1)
    launch.process.terminate()
    assert launch.finish()[0] == 143
    assert_gone(pids)


def test_ctrl_c_is_forwarded_also_in_the_background(start: type[Launched]) -> None:
    """A shell without job control has SIGINT ignored there, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        launch = start("-n", "1", "--", *PYTHON, HELLO)
    finally:
        signal.signal(signal.SIGINT, before)
    pids = launch.pids(1)
    launch.process.send_signal(signal.SIGINT)
    assert launch.finish()[0] == 130
    assert_gone(pids)


DEAF = ME + "signal.signal(signal.SIGTERM, lambda *_: print('heard'))\nprint('pid', os.getpid())"


@pytest.mark.parametrize(
    ("options", "environment"), [(("--grace", "0.3"), {}), ((), {"PCCL_LAUNCH_GRACE": "0"})]
)
def test_grace(
    options: tuple[str, ...], environment: dict[str, str], start: type[Launched]
) -> None:
    launch = start("-n", "2", *options, "--", *PYTHON, DEAF + FOREVER, **environment)
    pids = launch.pids(2)
    launch.process.terminate()
    status, _, err = launch.finish()
    assert status == 143
    said = [f"pccl launch: killed p{peer}, which did not end at the signal" for peer in (0, 1)]
    assert sorted(err.splitlines()) == said
    assert_gone(pids)


def test_second_signal_kills(start: type[Launched]) -> None:
    launch = start("-n", "2", "--grace", str(LIMIT_S), "--", *PYTHON, DEAF + FOREVER)
    pids = launch.pids(2)
    began = time.monotonic()
    launch.process.terminate()
    launch.read(r"\[p\d\] heard", 2)
    launch.process.send_signal(signal.SIGINT)
    assert launch.finish()[0] == 143  # the first one counts
    assert time.monotonic() - began < LIMIT_S
    assert_gone(pids)


def test_grandchildren_end_with_their_peer(start: type[Launched]) -> None:
    """They hold the pipes open, too, and must not keep us waiting."""
    launch = start("-n", "2", "--", *PYTHON, PARENT + "sys.exit(me)")
    pids = launch.pids(2)
    assert len(pids) == 4
    assert launch.finish() == (1, "", "pccl launch: p1 failed: exit code 1\n")
    assert_gone(pids)


def test_nobody_outlives_a_killed_launch(start: type[Launched]) -> None:
    launch = start("-n", "2", "--", *PYTHON, PARENT + FOREVER)
    pids = launch.pids(2)
    assert len(pids) == 4
    launch.process.kill()
    assert launch.finish()[0] == -signal.SIGKILL
    assert_gone(pids)


def test_reader_gone(start: type[Launched]) -> None:
    source = ME + "print('pid', os.getpid())\nwhile True: print('more')"
    launch = start("-n", "1", "--", *PYTHON, source)
    pids = launch.pids(1)
    launch.out.close()
    assert launch.process.wait(LIMIT_S) == 141
    assert without_hint(launch.err.read()) == ""
    assert_gone(pids)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("grace_s", "signals"), [(0.2, [signal.SIGTERM]), (LIMIT_S, [signal.SIGTERM, signal.SIGINT])]
)
def test_paused_reader_delays_no_signal(
    stream: str, grace_s: float, signals: list[signal.Signals], start: type[Launched]
) -> None:
    """Our output is full and nobody reads it: peers and launch end all the same."""
    source = (
        ME
        + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('pid', os.getpid())\n"
        + f"while True: print('more' * 1000, file=sys.{stream})"
    )
    launch = start("-n", "1", "--grace", str(grace_s), "--", *PYTHON, source)
    pids = launch.pids(1)
    out = launch.out if stream == "stdout" else launch.err
    until(lambda: unread_bytes(out) >= FULL_BYTES)
    for wanted in signals:
        launch.process.send_signal(wanted)
    assert_gone(pids)
    assert launch.process.wait(LIMIT_S) in (128 + wanted for wanted in signals)


def test_nohup_stays_in_force(start: type[Launched], tmp_path: Path) -> None:
    """The terminal is closed, the run goes on."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    source = ME + f"print('pid', os.getpid())\nopen({str(gate)!r}).read(); print('went on')"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch = start("-n", "1", "--", *PYTHON, source)
    finally:
        signal.signal(signal.SIGHUP, before)
    launch.pids(1)
    launch.process.send_signal(signal.SIGHUP)
    gate.write_text("")
    assert launch.finish() == (0, "[p0] went on\n", "")


def test_no_descriptors_left() -> None:
    """Those that were started are ended."""
    limited = ("sh", "-c", 'ulimit -n 40; exec "$@"', "sh", *PCCL_LAUNCH)
    command = (*limited, "-n", "64", "--", *PYTHON, ME + FOREVER)
    launch = run_to_end(*command, limit_s=LIMIT_S)
    assert launch.returncode == 71
    complaint = r"pccl launch: cannot start p\d+: Too many open files\n"
    assert re.fullmatch(complaint, without_hint(launch.stderr)), launch.stderr


# -- commands that cannot be run -------------------------------------------------------------------


def test_missing_command(fork: type[Launched]) -> None:
    error = "Error: command not found: no-such-command\n"
    assert fork("--", "no-such-command").finish() == (127, "", error)


def test_not_executable(fork: type[Launched]) -> None:
    status, out, err = fork("--", "./README.md").finish()
    assert (status, out) == (126, "")
    assert err.startswith("Error: README.md is not executable")


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        ("#!/no/such/interpreter\n", 127, "the interpreter that its first line names"),
        ("no program\n", 126, "not a program; a script needs a first line such as"),
    ],
)
def test_what_the_system_refuses(
    content: str, status: int, words: str, fork: type[Launched], tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text(content)
    script.chmod(0o755)
    ended, out, err = fork("-n", "1", "--", str(script)).finish()
    assert (ended, out) == (status, "")
    refused, verdict = err.splitlines()
    assert refused.startswith(f"[p0] cannot run {script}: {words}")
    assert verdict == f"pccl launch: p0 failed: exit code {status}"


# -- a run -----------------------------------------------------------------------------------------

REDUCE = """
import os, numpy, pccl
with pccl.Communicator(os.environ["PCCL_MASTER"]) as comm:
    comm.connect()
    while comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < int(os.environ["PCCL_PEERS"]):
        comm.update_topology()
    x = numpy.full(4, 10.0 ** int(os.environ["PCCL_PEER_INDEX"]), dtype=numpy.float32)
    comm.all_reduce(x, op=pccl.ReduceOp.SUM)
    print(x)
"""


def test_three_peers_reduce(start: type[Launched]) -> None:
    status, out, err = start("-n", "3", "--", *PYTHON, REDUCE, PCCL_LOG="").finish()
    assert status == 0
    assert all(re.match(r"\[p\d\] \S+ INFO pccl p\d: ", line) for line in err.splitlines())
    assert err.count("joined the run ") == err.count("left the run") == 3
    assert sorted(out.splitlines()) == [f"[p{peer}] [111. 111. 111. 111.]" for peer in range(3)]
