"""A master in a script of its own: it serves on after the last line, until somebody ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np
import pytest

import pccl
from tests.support.members import Call, pair_at
from tests.support.patience import LIMIT_S

LAST_LINE_DONE = "keeps serving until Ctrl-C"

IN_THE_STYLE_OF_PCCL = """
from pccl import *
def main():
    master = MasterNode(listen_address="127.0.0.1:0")
    master.run()
    print(master.address, flush=True)
main()
"""

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(script: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-X", "dev", "-W", "error", "-c", script]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def line_of(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def reduce_at(address: str) -> None:
    """Two peers join and reduce."""
    first, second = pair_at(address)
    with first, second:
        ones = [np.ones(100), np.ones(100)]
        theirs = Call(second.all_reduce, ones[1])
        first.all_reduce(ones[0])
        theirs.result()
        assert [float(values[7]) for values in ones] == [2.0, 2.0]


def test_it_serves_after_main_has_returned_until_ctrl_c(start: Start) -> None:
    process = start(IN_THE_STYLE_OF_PCCL)
    address = line_of(process.stdout)
    said = line_of(process.stderr)
    assert said.endswith(f" WARNING pccl master: the master at {address} {LAST_LINE_DONE}")
    reduce_at(address)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_sigterm_ends_it_as_any_process(start: Start) -> None:
    process = start(IN_THE_STYLE_OF_PCCL)
    reduce_at(line_of(process.stdout))
    process.terminate()
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_another_thread_ends_it_after_the_last_line(start: Start) -> None:
    process = start(
        "import sys, threading, pccl\n"
        "master = pccl.MasterNode('127.0.0.1:0')\n"
        "master.run()\n"
        "def end():\n"
        "    sys.stdin.readline()\n"
        "    master.interrupt()\n"
        "threading.Thread(target=end, daemon=True).start()\n"
    )
    assert line_of(process.stderr).endswith(LAST_LINE_DONE)
    assert process.communicate("\n", LIMIT_S) == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(3)", 3), ("sys.exit()", 0), ("master = None", 0), ("os.fork() or os._exit(0)", 0)],
)
def test_the_interpreter_waits_however_the_program_ends(
    start: Start, ending: str, code: int
) -> None:
    process = start(
        "import os, sys, warnings, pccl\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "master = pccl.MasterNode('127.0.0.1:0')\n"
        "master.run()\n"
        f"print(master.address, flush=True)\n{ending}\n"
    )
    address = line_of(process.stdout)
    assert line_of(process.stderr).endswith(LAST_LINE_DONE)
    reduce_at(address)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == code


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("master.interrupt()", 0),
        ("import multiprocessing as m\nwith m.get_context('fork').Pool(1) as p: p.apply(abs, (1,))"
         "\nmaster.interrupt()", 0),
    ],
)  # fmt: skip
def test_it_ends_with_a_program_that_fails_and_when_it_is_told(
    start: Start, ending: str, code: int
) -> None:
    process = start(
        "import warnings, pccl\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        f"master = pccl.MasterNode('127.0.0.1:0')\nmaster.run()\n{ending}\n"
    )
    assert process.wait(LIMIT_S) == code


def test_the_end_of_its_block_ends_it(start: Start) -> None:
    process = start("import pccl\nwith pccl.MasterNode('127.0.0.1:0'): pass\n")
    assert process.wait(LIMIT_S) == 0
    assert process.communicate() == ("", "")


def test_an_error_is_made_as_scripts_for_pccl_make_it() -> None:
    error = pccl.PCCLError(pccl.Result.INVALID_ARGUMENT, func_name="pcclConnect")
    assert error.func == "pcclConnect"
    assert str(error) == "pcclConnect: INVALID_ARGUMENT [INVALID_ARGUMENT 3]"
