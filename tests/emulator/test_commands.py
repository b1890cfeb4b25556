"""``python -m pccl.stress proxy`` and ``verify-link``, as others use them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from pccl.protocol.handshake.opening import OPENING_BYTES
from pccl.stress.commands import main
from pccl.stress.emulator.verify import StreamMeasured
from tests.support.patience import LIMIT_S

PROXY = [sys.executable, "-m", "pccl.stress", "proxy"]


@contextmanager
def proxy(*arguments: str) -> Generator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    with subprocess.Popen(
        [*PROXY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            words, _, port = first.rpartition(":")
            assert words == "proxy listens on 127.0.0.1", first
            yield process, ("127.0.0.1", int(port))
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_proxy_says_where_it_listens_and_ends_cleanly(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        to = f"127.0.0.1:{listener.getsockname()[1]}"
        arguments = ("--to", to, "--link", "rate=100mbit,rtt=2ms", "--per-peer")
        with (
            proxy(*arguments) as (process, place),
            socket.create_connection(place, LIMIT_S) as near,
        ):
            near.sendall(b"x" * OPENING_BYTES)
            with listener.accept()[0] as far:
                far.settimeout(LIMIT_S)
                assert far.recv(2 * OPENING_BYTES) == b"x" * OPENING_BYTES
            process.send_signal(number)
            out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--link", "rtt=1ms"], "Missing option '--to'"),
        (["--to", "127.0.0.1:1"], "Missing option '--link'"),
        (["--to", "nowhere", "--link", "rtt=1ms"], "'nowhere' is not an address"),
        (["--to", "127.0.0.1:0", "--link", "rtt=1ms"], "'127.0.0.1:0' has port 0"),
        (["--to", "127.0.0.1:1", "--link", ","], "'' is not a part of a link"),
        (["--to", "127.0.0.1:1", "--link", "rtt=80"], "one of us, ms or s, such as rtt=80ms"),
        (["--to", "127.0.0.1:1", "--link", "delay=1ms"], "is not a part of a link"),
        (["--to", "127.0.0.1:1", "--link", "", "--listen", "x"], "'x' is not an address"),
    ],
)
def test_wrong_arguments_are_two_and_a_word(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["proxy", *arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_a_time_that_is_no_number_is_refused() -> None:
    result = CliRunner().invoke(main, ["verify-link", "--link", "", "--seconds", "nan"])
    assert result.exit_code == 2
    assert "'nan' is not a finite number" in result.output


def test_proxy_ends_with_its_stdin_if_it_is_told_to() -> None:
    arguments = ["--to", "127.0.0.1:1", "--link", "", "--until-eof"]
    with subprocess.Popen([*PROXY, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
        try:
            assert p.stdout is not None
            assert p.stdout.readline()
            p.communicate(b"not yet the end", timeout=LIMIT_S)
        finally:
            p.kill()
    assert p.returncode == 0


def proxies_of(pid: int) -> list[int]:
    """Process ids of the proxies that a process has started."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid and b"proxy" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_verify_link_leaves_no_proxy_when_it_is_killed(number: signal.Signals, status: int) -> None:
    with subprocess.Popen(
        [*PROXY[:-1], "verify-link", "--link", "rtt=1ms,rate=1mbit", "--seconds", "600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            give_up_s = time.monotonic() + LIMIT_S
            while not proxies_of(process.pid):
                assert time.monotonic() < give_up_s
            process.send_signal(number)
            # The proxy has inherited stderr: it ends when both have ended.
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (status, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize(
    "arguments",
    [
        ["proxy", "--to", "127.0.0.1:1", "--link", ""],
        ["sim", "--seeds", "0:1", "--json"],
        ["sim", "--seeds", "0:1"],
    ],
)
def test_a_full_stdout_is_one_line_and_one(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [*PROXY[:-1], *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    expected = "Error: cannot write to stdout: No space left on device\n"
    assert (run.returncode, run.stderr) == (1, expected)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        result = CliRunner().invoke(
            main, ["proxy", "--to", "127.0.0.1:1", "--link", "", "--listen", taken]
        )
    assert result.exit_code == 1
    assert f"cannot proxy from {taken} to 127.0.0.1:1: " in result.output


def test_verify_link_prints_what_was_asked_and_what_came_out() -> None:
    arguments = ["verify-link", "--link", "rate=50mbit,rtt=2ms,flow=20mbit", "--flows", "2"]
    result = CliRunner().invoke(main, [*arguments, "--seconds", "0.5", "--both-ways", "--json"])
    told = json.loads(result.output)
    assert result.exit_code == (0 if told["ok"] else 1)
    assert told["link"] == "rate=50mbit,rtt=2ms,flow=20mbit"
    assert (told["flows"], told["asked_bps"], told["asked_rtt_s"]) == (2, 40_000_000, 0.002)
    assert told["rate_bps"] > 0
    assert told["rate_back_bps"] > 0
    assert told["rtt_s"] > 0


@pytest.mark.parametrize(
    ("rate_bps", "back_bps", "rtt_s", "is_ok"),
    [
        (100e6, None, 0.08, True),
        (95.1e6, 104.9e6, 0.0839, True),
        (94.9e6, None, 0.08, False),
        (105.1e6, None, 0.08, False),
        (100e6, 90e6, 0.08, False),
        (100e6, None, 0.0841, False),
        (100e6, None, 0.0759, False),
    ],
)
def test_five_percent_are_the_limit(
    rate_bps: float, back_bps: float | None, rtt_s: float, is_ok: bool
) -> None:
    measured = StreamMeasured("", 1, 100e6, rate_bps, back_bps, 0.08, rtt_s, 0.1)
    assert measured.is_ok == is_ok


def test_what_was_not_asked_for_cannot_be_off() -> None:
    assert StreamMeasured("", 1, None, 1e9, None, 0.0, 0.5, 0.1).is_ok
