"""Ctrl-C in every call that blocks: prompt, and everything is as if the call had not been made."""

from __future__ import annotations

import gc
import linecache
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

import pccl
from pccl.errors import CollectiveAborted, ResyncRequired
from pccl.machines.peer.machine import Standing
from pccl.runtime.engine import PeerEngine
from tests.integration.conftest import Array, Run
from tests.support.insides import engine_of, machine_of
from tests.support.patience import LIMIT_S, patient
from tests.support.unnamed import unnamed
from tests.support.waiting import until

PROMPT_S = patient(3.0)
"""Well under the shortest deadline that could end a call that is not left promptly."""


def interrupt(thread: int) -> None:
    signal.pthread_kill(thread, signal.SIGINT)


@contextmanager
def interrupted_when(run: Run, condition: Callable[[], bool]) -> Generator[None, None, None]:
    """Ctrl-C as soon as ``condition``; the block raises KeyboardInterrupt promptly."""
    main = threading.get_ident()
    sent_s: list[float] = []

    def send() -> None:
        run.until(condition)
        sent_s.append(time.monotonic())
        interrupt(main)

    sending = run.start(send)
    with pytest.raises(KeyboardInterrupt):
        yield
    assert time.monotonic() - sent_s[0] < PROMPT_S
    sending.result(LIMIT_S)


def io_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pccl-io"]


# -- connect -------------------------------------------------------------------------------------


def test_connect_to_nobody(new_run: Callable[..., Run]) -> None:
    run = new_run()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pccl.Communicator(f"127.0.0.1:{taken.getsockname()[1]}") as comm:
            machine = engine_of(comm).machine
            with interrupted_when(run, lambda: machine.standing is Standing.JOINING):
                comm.connect(n_attempts=1000)


@pytest.mark.parametrize("min_peers", [1, 3])
def test_connect_before_admission(new_run: Callable[..., Run], min_peers: int) -> None:
    run = new_run(1 if min_peers == 1 else 0)
    newcomer, before = run.newcomer(), run.registered
    with interrupted_when(run, lambda: run.registered == before + 1):
        newcomer.connect(min_peers=min_peers)
    run.until(lambda: run.registered == before)
    run.admit(newcomer.connect)  # the process goes on, and so does the communicator


# -- joint calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["update_topology", "are_peers_pending", "optimize_topology"])
def test_rounds(new_run: Callable[..., Run], call: str) -> None:
    run = new_run(2)
    run.members[1].update_topology()  # went with its admission
    with interrupted_when(run, lambda: run.round_requests == 1):
        getattr(run.members[0], call)()
    run.each(lambda member: getattr(member, call)())
    run.check()


COLLECTIVES: dict[str, Callable[[pccl.Communicator, Array], object]] = {
    "all_reduce": lambda comm, array: comm.all_reduce(array),
    "all_reduce with retry": lambda comm, array: comm.all_reduce(array, retry=True),
    "barrier": lambda comm, array: comm.barrier(),
    "broadcast": lambda comm, array: comm.broadcast(array, root=1),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(new_run: Callable[..., Run], name: str) -> None:
    """The other one that is in it sees an abort; the third is told when it comes to it."""
    run = new_run(3)
    call = COLLECTIVES[name]
    arrays: list[Array] = [np.arange(1000.0) + rank for rank in range(3)]
    left = run.members[0].peer_id
    theirs = run.start(COLLECTIVES[name.removesuffix(" with retry")], run.members[1], arrays[1])
    with interrupted_when(run, lambda: run.requests == 2):
        call(run.members[0], arrays[0])
    error = theirs.exception(LIMIT_S)
    assert isinstance(error, CollectiveAborted)
    assert f"peer {left} withdrew" in unnamed(error)
    run.each(pccl.Communicator.are_peers_pending)  # all know of the withdrawal
    run.check()
    assert all(np.array_equal(array, np.arange(1000.0) + rank) for rank, array in enumerate(arrays))


def test_many_at_once(new_run: Callable[..., Run]) -> None:
    """All inputs are what they were, also of tensors that the other one got the sum of.

    So this member's state differs from the other's, which it has to take over.
    """
    run = new_run(2)
    mine: list[Array] = [np.full(1000, 1.0 + tag) for tag in range(6)]
    theirs: list[Array] = [np.full(1000, 10.0) for _ in range(6)]
    first, second = run.members

    def reduce_two() -> None:
        for tag in range(2):
            second.all_reduce(theirs[tag], tag=tag)

    reducing = run.start(reduce_two)

    def only_others_are_open() -> bool:
        return (
            reducing.done()
            and run.requests == 3
            and len(engine_of(first).data_plane.transfers) == 3
        )

    with interrupted_when(run, only_others_are_open):
        first.all_reduce_multiple_with_retry(
            [
                pccl.ReduceOpDescriptor.from_numpy(
                    array,
                    array,
                    pccl.ReduceDescriptor(array.size, pccl.ReduceOp.SUM, tag, None, None),
                )
                for tag, array in enumerate(mine)
            ],
            max_in_flight=3,
        )
    at_the_interrupt = [array.copy() for array in mine]
    reducing.result(LIMIT_S)
    assert [array[0] for array in mine] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [array[0] for array in theirs] == [11.0, 12.0] + 4 * [10.0]
    with pytest.raises(ResyncRequired, match=r"connect\(\) again"):
        first.are_peers_pending()
    connecting, before = run.start(first.connect), first.peer_id
    while before in {member.peer_id for member in second.members()} or second.world_size < 2:
        second.update_topology()
    connecting.result(LIMIT_S)
    run.check()
    for array, copy in zip(mine, at_the_interrupt, strict=True):
        assert np.array_equal(array, copy)


@pytest.mark.parametrize("wait", [pccl.AsyncReduceHandle.wait, pccl.AsyncReduceHandle.result])
def test_handles(
    new_run: Callable[..., Run], wait: Callable[[pccl.AsyncReduceHandle], Any]
) -> None:
    """Leaving a wait is not leaving the reduce."""
    run = new_run(2)
    array = np.ones(10)
    handle = run.members[0].all_reduce_async(array)
    with interrupted_when(run, lambda: handle._waiters == 1):  # pyright: ignore[reportPrivateUsage]
        wait(handle)
    run.members[1].all_reduce(np.ones(10))
    assert handle.wait()[0]
    assert (array == 2.0).all()


def test_nothing_is_written_after_it(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever moment it comes, the array is either reduced or untouched, and stays so.

    Not before the call has begun: then the other member waits for one that was never made.
    """
    run = new_run(2)
    first, second = run.members
    size = 2_000_000
    main = threading.get_ident()
    begun = threading.Event()
    reduce = PeerEngine.reduce

    async def telling(engine: PeerEngine, *args: Any, **options: Any) -> Any:
        if engine is engine_of(first):
            begun.set()
        return await reduce(engine, *args, **options)

    def interrupt_later(delay_s: float) -> None:
        assert begun.wait(LIMIT_S)
        time.sleep(delay_s)
        interrupt(main)

    monkeypatch.setattr(PeerEngine, "reduce", telling)
    for delay_s in (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016):
        array = np.ones(size, np.float32)
        theirs = run.start(second.all_reduce, np.ones(size, np.float32))
        run.until(lambda: run.requests == 1)
        begun.clear()
        sending = run.start(interrupt_later, delay_s)
        interrupted = False
        try:
            first.all_reduce(array)
            sending.result(LIMIT_S)
            time.sleep(LIMIT_S)  # if it comes after the call, it comes here
        except KeyboardInterrupt:
            interrupted = True
        left = array.copy()
        assert interrupted
        outcome = theirs.exception(LIMIT_S)
        assert outcome is None or isinstance(outcome, CollectiveAborted)
        assert np.array_equal(array, left)
        assert left.min() == left.max()
        if (outcome is None and left[0] == 1.0) or engine_of(first).machine.needs_resync:
            break  # left, and committed by the other: this member has to rejoin
        run.each(pccl.Communicator.are_peers_pending)


# -- the ends ------------------------------------------------------------------------------------


def test_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says goodbye all the same, and leaves no thread."""
    main = threading.get_ident()
    close = PeerEngine.close

    async def interrupting(engine: PeerEngine) -> None:
        interrupt(main)
        await close(engine)

    monkeypatch.setattr(PeerEngine, "close", interrupting)
    with pccl.MasterNode("127.0.0.1:0") as master:
        comm = pccl.Communicator(master.address)
        comm.connect()

        def close_and_wait() -> None:
            comm.close()
            time.sleep(LIMIT_S)  # it may come only now

        with pytest.raises(KeyboardInterrupt):
            close_and_wait()
        until(lambda: not machine_of(master).membership.peers)
        comm.close()
    until(lambda: not io_threads())


SWEPT = ("io_thread.py", "_api/session.py", "master_node.py", "weakref.py")


def interrupted_at(step: int, act: Callable[[], None]) -> bool:
    """Raise KeyboardInterrupt at that line of ours that runs; False: not so many do.

    A line that runs again is not counted.
    """
    left, seen = step, set[tuple[str, int]]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        name, line = frame.f_code.co_filename, frame.f_lineno
        if not name.endswith(SWEPT):
            return None
        # A lock is taken and given back without a moment in which a signal is looked at.
        if (
            event == "line"
            and (name, line) not in seen
            and "_lock:" not in linecache.getline(name, line)
        ):
            seen.add((name, line))
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_at_every_line_of_a_life() -> None:
    """Made, connected, closed: wherever Ctrl-C strikes, nothing is left that would live on."""
    step, struck = 0, True
    while struck:
        step += 1
        nodes: list[pccl.MasterNode] = []
        comms: list[pccl.Communicator] = []

        def live(
            nodes: list[pccl.MasterNode] = nodes, comms: list[pccl.Communicator] = comms
        ) -> None:
            nodes.append(pccl.MasterNode("127.0.0.1:0"))
            nodes[0].run()
            comms.append(pccl.Communicator(nodes[0].address))
            comms[0].connect()
            comms[0].close()
            nodes[0].interrupt()

        struck = interrupted_at(step, live)
        for comm in comms:
            comm.close()
        for node in nodes:
            node.interrupt()
        comms.clear()
        nodes.clear()
        gc.collect()
        until(lambda: not io_threads())
    assert step > 100
