"""SIGTERM under ``pccl join`` and ``pccl launch``: a goodbye, and nobody waits for a deadline.

Real processes. This file is also the program that they run; what it does is named on its command
line. The members that stay live in the test's process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

import pccl

# -- the program -----------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def in_a_collective(comm: pccl.Communicator) -> None:
    say("ready")
    try:
        comm.all_reduce(np.ones(10), tag=1, retry=True)  # another one may have left already
    finally:
        say("cleaned up")


def in_a_thread(comm: pccl.Communicator) -> None:
    def work() -> None:
        try:
            comm.all_reduce(np.ones(10), tag=1)
        except pccl.errors.NotConnected:
            say("told")

    threading.Thread(target=work).start()
    say("ready")
    # Not join(): Python 3.11 takes a thread for ended if that is interrupted, and would not wait.
    threading.Event().wait()


def with_notice(comm: pccl.Communicator) -> None:
    comm.expect_notice(lambda: True)
    say("ready")
    while not comm.is_leaving:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)  # a repetition
    say("finished")


def with_a_handler(comm: pccl.Communicator) -> None:
    say("ready")
    comm.all_reduce(np.ones(10), tag=1)


def with_a_child(comm: pccl.Communicator) -> None:
    ready, is_ready = os.pipe()
    child = os.fork()
    if not child:
        os.write(is_ready, b"!")  # before that Python drops the signals of a new process
        while True:
            time.sleep(1)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    say(f"child ended by {os.WTERMSIG(status)}")
    in_a_collective(comm)


def main(part: str) -> None:
    if part == "with_a_handler":
        signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(7))
    with pccl.Communicator() as comm:
        comm.connect()
        globals()[part](comm)


if __name__ == "__main__":
    main(sys.argv[1])
    sys.exit()

# -- the tests -------------------------------------------------------------------------------------

import pytest  # noqa: E402

from pccl.errors import CollectiveAborted  # noqa: E402
from pccl.inquiry import RemovalCause  # noqa: E402
from tests.integration.conftest import Run  # noqa: E402
from tests.support import commands  # noqa: E402
from tests.support.members import grow  # noqa: E402
from tests.support.patience import LIMIT_S, patient  # noqa: E402

GONE_S = patient(8.0)
"""Less than the default deadline, and far more than a goodbye takes."""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Run a command of ``pccl``; whoever has not ended with the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def make(command: list[str], *, drain: str | None = None) -> subprocess.Popen[str]:
        started.append(_run(command, drain))
        return started[-1]

    yield make
    for process in started:
        process.kill()
        process.communicate()


def _run(command: list[str], drain: str | None) -> subprocess.Popen[str]:
    environment = {**os.environ, "PCCL_LOG": "warning"}
    environment.pop("PCCL_DRAIN", None)
    if drain is not None:
        environment["PCCL_DRAIN"] = drain
    return commands.start(*commands.PCCL, *command, env=environment)


def joining(run: Run, part: str) -> list[str]:
    return ["join", run.master.address, "--", sys.executable, __file__, part]


def lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    patience = threading.Timer(LIMIT_S, process.kill)
    patience.start()
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
            if lines[-1].endswith(last):
                return lines
    finally:
        patience.cancel()
    raise AssertionError((lines, process.stderr.read() if process.stderr else ""))


def leave(run: Run, process: subprocess.Popen[str], peers: int = 1) -> tuple[int, str, str]:
    """Send SIGTERM while it and the first member wait for the others; return how it ended."""
    waiting = run.start(run.members[0].all_reduce, np.ones(10), tag=1)
    run.until(lambda: run.requests == 1 + peers)
    process.send_signal(signal.SIGTERM)
    sent_s = time.monotonic()
    assert isinstance(waiting.exception(LIMIT_S), CollectiveAborted)
    assert time.monotonic() - sent_s < GONE_S
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def removals(run: Run) -> list[RemovalCause]:
    return [removal.cause for removal in pccl.master_status(run.master.address).removals]


def grown(run: Run, by: int) -> None:
    """Let so many more in; the members agree on their calls by what these tell all of them."""
    size = len(run.members) + by
    run.each(lambda member: grow(member, size))


@pytest.mark.parametrize(
    ("part", "says"), [("in_a_collective", "cleaned up\n"), ("in_a_thread", "told\n")]
)
def test_a_joined_program_says_goodbye(
    new_run: Callable[..., Run], start: Start, part: str, says: str
) -> None:
    run = new_run(2)
    process = start(joining(run, part))
    grown(run, 1)
    lines_until(process, "ready")
    assert leave(run, process) == (128 + signal.SIGTERM, says, "")
    assert removals(run) == [RemovalCause.GOODBYE]
    run.check()


def test_all_peers_of_a_launch_say_goodbye(new_run: Callable[..., Run], start: Start) -> None:
    run = new_run(2)
    program = ["--", sys.executable, __file__, "in_a_collective"]
    options = ["-n", "2", "--min-peers", "4", "--master", run.master.address]
    process = start(["launch", *options, *program])
    grown(run, 2)
    for _ in range(2):
        lines_until(process, "ready")
    status, out, err = leave(run, process, peers=2)
    assert (status, err) == (128 + signal.SIGTERM, "")
    host = os.uname().nodename[:40]
    assert sorted(out.splitlines()) == [f"[{host}-p{n}] cleaned up" for n in range(2)]
    assert removals(run) == [RemovalCause.GOODBYE] * 2
    run.check()


def test_a_program_keeps_its_own_handler(new_run: Callable[..., Run], start: Start) -> None:
    run = new_run(2)
    process = start(joining(run, "with_a_handler"))
    grown(run, 1)
    lines_until(process, "ready")
    assert leave(run, process) == (7, "", "")
    assert removals(run) == [RemovalCause.CONNECTIONS_LOST]


def test_a_program_that_expects_notice_finishes_its_work(
    new_run: Callable[..., Run], start: Start
) -> None:
    run = new_run(2)
    process = start(joining(run, "with_notice"))
    grown(run, 1)
    lines_until(process, "ready")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (0, "finished\n", "")
    run.until(lambda: removals(run) == [RemovalCause.GOODBYE])


def test_without_draining_the_others_notice_at_once_all_the_same(
    new_run: Callable[..., Run], start: Start
) -> None:
    run = new_run(2)
    process = start(joining(run, "in_a_collective"), drain="0")
    grown(run, 1)
    lines_until(process, "ready")
    assert leave(run, process) == (-signal.SIGTERM, "", "")
    assert removals(run) == [RemovalCause.CONNECTIONS_LOST]
    run.check()


def test_a_forked_child_ends_as_ever(new_run: Callable[..., Run], start: Start) -> None:
    run = new_run(2)
    process = start(joining(run, "with_a_child"))
    grown(run, 1)
    lines = lines_until(process, "ready")
    assert lines == [f"child ended by {int(signal.SIGTERM)}", "ready"]
    assert leave(run, process)[0] == 128 + signal.SIGTERM
    assert removals(run) == [RemovalCause.GOODBYE]
