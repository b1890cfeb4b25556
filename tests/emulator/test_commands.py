"""``python -m pccl.stress relay`` and ``verify-link``, as others use them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from pccl.stress.commands import main
from pccl.stress.emulator.verify import Measured

RELAY = [sys.executable, "-m", "pccl.stress", "relay"]


@contextmanager
def relay(*arguments: str) -> Generator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    with subprocess.Popen(
        [*RELAY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            words, _, port = first.rpartition(":")
            assert words == "relay listens on 127.0.0.1", first
            yield process, ("127.0.0.1", int(port))
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_relay_says_where_it_listens_and_ends_cleanly(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        to = f"127.0.0.1:{listener.getsockname()[1]}"
        arguments = ("--to", to, "--link", "rate=100mbit,rtt=2ms", "--per-peer")
        with (
            relay(*arguments) as (process, place),
            socket.create_connection(place, 30) as near,
        ):
            near.sendall(b"x" * 80)
            with listener.accept()[0] as far:
                far.settimeout(30)
                assert far.recv(100) == b"x" * 80
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--link", "rtt=1ms"], "Missing option '--to'"),
        (["--to", "127.0.0.1:1"], "Missing option '--link'"),
        (["--to", "nowhere", "--link", "rtt=1ms"], "'nowhere' is not an address"),
        (["--to", "127.0.0.1:1", "--link", "rtt=80"], "one of us, ms or s, such as rtt=80ms"),
        (["--to", "127.0.0.1:1", "--link", "delay=1ms"], "is no part of a link"),
        (["--to", "127.0.0.1:1", "--link", "", "--listen", "x"], "'x' is not an address"),
    ],
)
def test_wrong_arguments_are_two_and_a_word(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["relay", *arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        result = CliRunner().invoke(
            main, ["relay", "--to", "127.0.0.1:1", "--link", "", "--listen", taken]
        )
    assert result.exit_code == 1
    assert f"cannot relay from {taken} to 127.0.0.1:1: " in result.output


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
    measured = Measured("", 1, 100e6, rate_bps, back_bps, 0.08, rtt_s, 0.1)
    assert measured.is_ok == is_ok


def test_what_was_not_asked_for_cannot_be_off() -> None:
    assert Measured("", 1, None, 1e9, None, 0.0, 0.5, 0.1).is_ok
