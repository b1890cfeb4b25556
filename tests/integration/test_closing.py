"""However a communicator or a master ends, nothing is left: no thread, descriptor or warning."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pccl
from pccl._api.session import Session
from pccl.errors import LinkError, NotConnected
from pccl.runtime.engine import PeerEngine
from tests.support.commands import run_to_end
from tests.support.insides import engine_of, machine_of
from tests.support.members import Call, pair_at
from tests.support.patience import LIMIT_S, patient
from tests.support.waiting import until

PROMPT_S = patient(3.0)
"""Shorter than every time limit of the library that could be waited out by mistake."""

FDS = Path("/proc/self/fd")


def descriptors() -> dict[str, str]:
    found: dict[str, str] = {}
    for fd in FDS.iterdir() if FDS.exists() else ():
        with contextlib.suppress(OSError):  # the one that lists
            found[fd.name] = str(fd.readlink())
    return found


def io_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pccl-io"]


@pytest.fixture(scope="module", autouse=True)
def what_the_first_loop_leaves() -> None:
    """Uvloop opens a pipe for signals when it makes its first loop, and keeps it."""
    pccl.Communicator("127.0.0.1:1").close()


@pytest.fixture(autouse=True)
def nothing_is_left(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    gc.collect()
    before = descriptors()
    yield
    assert not io_threads()
    assert descriptors().keys() <= before.keys()
    gc.collect()  # what is collected only now may complain now
    assert [str(warning.message) for warning in recwarn] == []


def peers_of(master: pccl.MasterNode) -> int:
    """How many peers the master knows."""
    return len(machine_of(master).membership.peers)


def connected(address: str) -> pccl.Communicator:
    comm = pccl.Communicator(address)
    comm.connect()
    return comm


@pytest.fixture
def master() -> Iterator[pccl.MasterNode]:
    with pccl.MasterNode("127.0.0.1:0") as node:
        yield node


# -- a communicator ------------------------------------------------------------------------------


def test_never_connected() -> None:
    with pccl.Communicator("127.0.0.1:1"):
        assert len(io_threads()) == 1


def test_leaving_with_says_goodbye(master: pccl.MasterNode) -> None:
    with pccl.Communicator(master.address) as comm:
        comm.connect()
        assert peers_of(master) == 1
    until(lambda: peers_of(master) == 0)


def test_exception_inside_with_passes(master: pccl.MasterNode) -> None:
    def fail() -> None:
        with pccl.Communicator(master.address) as comm:
            comm.connect()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    until(lambda: peers_of(master) == 0)


def test_close_twice(master: pccl.MasterNode) -> None:
    comm = connected(master.address)
    comm.close()
    comm.close()
    with comm, pytest.raises(NotConnected, match="closed"):
        comm.update_topology()


def test_del_without_close(master: pccl.MasterNode) -> None:
    comm = connected(master.address)
    del comm
    until(lambda: peers_of(master) == 0)


def test_collected_in_a_cycle(master: pccl.MasterNode) -> None:
    cycle: list[object] = [connected(master.address)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    until(lambda: peers_of(master) == 0)


def test_close_while_another_thread_waits_in_a_call(master: pccl.MasterNode) -> None:
    first, second = pair_at(master.address)
    values = np.arange(1000, dtype=np.float32)
    waiting = Call(first.all_reduce, values)
    until(lambda: bool(engine_of(first).data_plane.transfers))
    first.close()
    assert isinstance(waiting.exception(PROMPT_S), NotConnected)
    assert np.array_equal(values, np.arange(1000, dtype=np.float32))
    second.close()


def test_close_after_the_master_has_gone() -> None:
    master = pccl.MasterNode("127.0.0.1:0")
    master.run()
    comm = connected(master.address)
    master.interrupt()
    started = time.monotonic()
    comm.close()
    assert time.monotonic() - started < PROMPT_S


def test_close_during_connect() -> None:
    comm = pccl.Communicator("127.0.0.1:1")
    joining = Call(comm.connect, n_attempts=1000)
    until(lambda: engine_of(comm).machine.standing.value == "joining")
    comm.close()
    assert isinstance(joining.exception(PROMPT_S), NotConnected)


def test_two_communicators_in_one_process(master: pccl.MasterNode) -> None:
    first, second = pair_at(master.address)
    assert len(io_threads()) == 1
    first.close()
    while second.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) > 1:
        second.update_topology()
    second.close()
    until(lambda: peers_of(master) == 0)


def test_a_hundred_communicators(master: pccl.MasterNode) -> None:
    before = len(descriptors())
    for _ in range(100):
        connected(master.address).close()
        until(lambda: peers_of(master) == 0)
    until(lambda: len(descriptors()) <= before, PROMPT_S)  # the other sides close, too
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) in (PeerEngine, Session)]


# -- a master ------------------------------------------------------------------------------------


def test_masters_one_after_another_on_one_port() -> None:
    with pccl.MasterNode("127.0.0.1:0") as first:
        address = first.address
        comm = connected(address)
    with pccl.MasterNode(address) as second:
        assert second.address == address
        comm.update_topology()  # went with the admission
        comm.update_topology()  # the second master has taken up the run
        assert comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) == 1
    with pccl.MasterNode(address):
        comm.close()


def test_master_on_a_taken_port(master: pccl.MasterNode) -> None:
    with pytest.raises(LinkError, match="address already in use"):
        pccl.MasterNode(master.address).run()


def test_master_is_interrupted_twice_and_runs_again() -> None:
    master = pccl.MasterNode("127.0.0.1:0")
    master.interrupt()
    master.run()
    with pytest.raises(pccl.PCCLError, match="already"):
        master.run()
    master.interrupt()
    master.interrupt()
    master.run()
    connected(master.address).close()
    master.interrupt()


def test_a_master_that_nobody_keeps_serves_on() -> None:
    master = pccl.MasterNode("127.0.0.1:0")
    master.run()
    address, kept = master.address, weakref.ref(master)
    del master
    gc.collect()
    connected(address).close()
    again = kept()
    assert again is not None
    again.interrupt()
    del again
    gc.collect()
    assert kept() is None


# -- the interpreter -----------------------------------------------------------------------------

PREAMBLE = """
import asyncio, os, socket, sys, threading, warnings
import numpy as np
import pccl, pccl.aio
from tests.support import members
master = pccl.MasterNode("127.0.0.1:0")
master.run()
threading._register_atexit(master.interrupt)  # or the interpreter would wait for it
"""

ENDINGS = {
    "a master": "",
    "a communicator that was never connected": """
        comm = pccl.Communicator("127.0.0.1:1")
    """,
    "a connected communicator": """
        comm = pccl.Communicator(master.address)
        comm.connect()
    """,
    "sys.exit inside with": """
        with pccl.Communicator(master.address) as comm:
            comm.connect()
            sys.exit()
    """,
    "a communicator in a module that refers to itself": """
        comm = pccl.Communicator(master.address)
        comm.connect()
        comm.me = sys.modules["__main__"].keep = [comm]
    """,
    "another thread in a reduce": """
        first, second = members.pair_at(master.address)
        members.Call(first.all_reduce, np.ones(1000, np.float32))
        while not first._session.engine.data_plane.transfers:
            pass
    """,
    "an asyncio communicator whose loop is gone": """
        async def main():
            comm = pccl.aio.Communicator(master.address)
            await comm.connect()
            return comm
        comm = asyncio.run(main())
    """,
    "an asyncio call that was cancelled with its loop": """
        async def main():
            comm = pccl.aio.Communicator("127.0.0.1:1")
            joining = asyncio.create_task(comm.connect(n_attempts=1000))
            await asyncio.sleep(0)
            return comm, joining
        comm = asyncio.run(main())
    """,
    "a child process made by fork": """
        comm = pccl.Communicator(master.address)
        comm.connect()
        warnings.simplefilter("ignore", DeprecationWarning)  # "multi-threaded, may deadlock"
        child = os.fork()
        if not child:
            for fd in map(int, os.listdir("/proc/self/fd")):
                try:
                    with socket.socket(fileno=os.dup(fd)) as sock:
                        assert sock.family == socket.AF_UNIX  # of some loop
                except OSError:
                    pass  # not a socket
            try:
                comm.update_topology()
            except pccl.PCCLError as error:
                assert "parent" in str(error)
            with pccl.MasterNode("127.0.0.1:0") as own, pccl.Communicator(own.address) as mine:
                mine.connect()
        else:
            assert os.waitpid(child, 0)[1] == 0
            comm.update_topology()
            assert len(master._server.machine.membership.peers) == 1
            with pccl.Communicator(master.address) as another:
                members.admit(comm, another)
    """,
}


def run_script(script: str) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    program = PREAMBLE + textwrap.dedent(script)
    command = (sys.executable, "-X", "dev", "-W", "error", "-c", program)
    finished = run_to_end(*command, limit_s=LIMIT_S)
    return finished, time.monotonic() - started


@pytest.fixture(scope="module")
def bare_s() -> float:
    """How long it takes here and now to start Python and import everything."""
    finished, duration_s = run_script("master.interrupt()")
    assert (finished.returncode, finished.stderr) == (0, "")
    return duration_s


@pytest.mark.parametrize("script", ENDINGS.values(), ids=ENDINGS)
def test_interpreter_exit_without_close(script: str, bare_s: float) -> None:
    finished, duration_s = run_script(script)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert duration_s < bare_s + PROMPT_S


def test_interpreter_exit_by_an_exception() -> None:
    finished, _ = run_script("comm = pccl.Communicator(master.address)\ncomm.connect()\n1 / 0")
    assert finished.returncode == 1
    assert finished.stderr.count("Traceback") == 1
    assert finished.stderr.endswith("ZeroDivisionError: division by zero\n")
