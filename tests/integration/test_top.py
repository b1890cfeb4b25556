"""``pccl top`` in a pseudo-terminal of 80 by 24, with a real master."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator

import pytest
from rich.cells import cell_len

import pccl
from tests.integration.conftest import Run
from tests.support.commands import PCCL, environment_with, run_to_end
from tests.support.patience import LIMIT_S
from tests.support.screens import Screen, on_screen

ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"
TOKEN = "b7Qz-Tr4k_Wm9x-Jp2v"


def environment(**more: str) -> dict[str, str]:
    return environment_with(**{"TERM": "xterm", "PYTHONDONTWRITEBYTECODE": "1", **more})


@pytest.fixture
def screen(new_run: Callable[..., Run]) -> Generator[Screen]:
    run = new_run(2)
    run.check()
    command = (*PCCL, "top", run.master.address, "--interval", "0.1")
    with on_screen(command, environment()) as found:
        yield found


def test_it_starts_reacts_to_keys_and_quits(screen: Screen) -> None:
    modes = screen.modes
    drawn = screen.until("2 members")
    assert len(drawn) == 24
    assert {cell_len(line) for line in drawn} == {80}
    assert screen.modes != modes
    screen.press("s")
    screen.until("peer^", absent=True)
    screen.press("\x1b[B")
    screen.until(">    2")
    screen.press("\r")
    screen.until("last call")
    screen.press("\x1b")
    screen.until("last call", absent=True)
    screen.press("1")
    assert "  peer        1 (" in "\n".join(screen.until("last call"))
    screen.press("q")
    assert screen.end() == 0
    assert screen.modes == modes
    assert screen.output.endswith("\x1b[?25h" + LEFT)


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_signals_end_it_and_the_terminal_is_restored(
    screen: Screen, signum: int, status: int
) -> None:
    modes = screen.modes
    screen.until("2 members")
    screen.process.send_signal(signum)
    assert screen.end() == status
    assert screen.modes == modes
    assert LEFT in screen.output
    assert "Traceback" not in screen.output


def test_a_stopped_one_gives_the_terminal_back_until_it_goes_on(screen: Screen) -> None:
    modes = screen.modes
    screen.until("2 members")
    screen.process.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(screen.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert screen.modes == modes
    screen.output = screen.output[screen.output.rindex(ENTERED) + 1 :]
    screen.process.send_signal(signal.SIGCONT)
    while ENTERED not in screen.output:
        screen.read(LIMIT_S)
    assert LEFT in screen.output
    screen.until("2 members")
    assert screen.modes != modes
    screen.press("q")
    assert screen.end() == 0
    assert screen.modes == modes


def test_another_size_is_drawn_at_once(screen: Screen) -> None:
    screen.until("2 members")
    screen.resize(100, 30)
    screen.process.send_signal(signal.SIGWINCH)
    while len(screen.lines) != 30:
        screen.read(LIMIT_S)
    assert {cell_len(line) for line in screen.lines} == {100}


def test_a_master_that_goes_and_comes_back() -> None:
    master = pccl.MasterNode("127.0.0.1:0", token=TOKEN)
    master.run()
    address = master.address
    command = (*PCCL, "top", address, "--interval", "0.1")
    with on_screen(command, environment(PCCL_TOKEN=TOKEN, NO_COLOR="1")) as screen:
        screen.until("0 members")
        master.interrupt()
        screen.until(f"no status from {address}")
        assert "0 members" in "\n".join(screen.until("the state of"))
        with pccl.MasterNode(address, token=TOKEN):
            screen.until("no status", absent=True)
            screen.press("q")
            assert screen.end() == 0
    assert "\x1b[3" not in screen.output, "colours"


def test_without_a_terminal_it_says_what_to_use() -> None:
    done = run_to_end(*PCCL, "top", "127.0.0.1:1", env=environment(), limit_s=LIMIT_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: pccl top needs a terminal; pccl status does not\n"
    wrong = run_to_end(*PCCL, "top", "nowhere", env=environment(), limit_s=LIMIT_S)
    assert wrong.returncode == 2
