"""Who calls, and whether anybody could go on."""

from __future__ import annotations

import _thread
import asyncio
import gc
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress

from pccl._api.callers import Callers
from pccl.runtime.calls import JOINT_WORK, JointWork, OpenCall
from tests.support.members import Call
from tests.support.waiting import until


class Work(JointWork):
    """Work on the I/O thread whose state the test sets."""

    def __init__(self, *, is_undecided: bool = True) -> None:
        super().__init__()
        self.undecided = is_undecided

    @property
    def is_undecided(self) -> bool:
        return self.undecided


@contextmanager
def another_inside(callers: Callers) -> Generator[None]:
    """Another thread is in a call meanwhile."""
    entered, leave = threading.Event(), threading.Event()

    def call() -> None:
        with callers.inside(threading.current_thread(), Work()):
            entered.set()
            leave.wait()

    other = Call(call)
    entered.wait()
    yield
    leave.set()
    other.result()


def test_nobody_calls() -> None:
    assert not Callers().all_blocked()


def test_one_thread() -> None:
    callers, me = Callers(), threading.current_thread()
    with callers.inside(me, Work()):
        assert callers.all_blocked()
        with callers.inside(me, Work()):  # from a signal handler
            assert callers.all_blocked()
        assert callers.all_blocked()
    assert not callers.all_blocked()
    assert len(callers) == 1


def test_a_call_that_raises_is_over() -> None:
    callers, me = Callers(), threading.current_thread()
    try:
        with callers.inside(me, Work()):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not callers.all_blocked()


def test_somebody_else_can_go_on() -> None:
    callers = Callers()
    with another_inside(callers):
        assert callers.all_blocked()
        callers.note(threading.current_thread())
        assert not callers.all_blocked()
        with callers.inside(threading.current_thread(), Work()):
            assert callers.all_blocked()
    assert not callers.all_blocked()


def test_threads_that_have_ended_do_not_count() -> None:
    callers, me = Callers(), threading.current_thread()
    ended: list[threading.Thread] = []

    def call() -> None:
        ended.append(threading.current_thread())
        callers.note(threading.current_thread())

    Call(call).result()
    with callers.inside(me, Work()):
        assert callers.all_blocked()
    assert len(callers) == 2
    ended.clear()
    gc.collect()
    assert len(callers) == 1


def test_threads_of_c_code_that_have_ended_do_not_count() -> None:
    callers, me, go_on = Callers(), threading.current_thread(), threading.Lock()

    def call() -> None:
        callers.note(threading.current_thread())
        with go_on:
            pass

    with callers.inside(me, Work()):
        with go_on:
            _thread.start_new_thread(call, ())
            until(lambda: len(callers) == 2)
            assert not callers.all_blocked()
        until(callers.all_blocked)


async def test_tasks() -> None:
    callers = Callers()

    async def call(entered: asyncio.Event, leave: asyncio.Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        with callers.inside(task, Work()):
            entered.set()
            await leave.wait()

    entered, leave = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(call(entered, leave))
    await entered.wait()
    assert callers.all_blocked()
    leave.set()
    await task
    assert not callers.all_blocked()
    entered.clear()
    leave.clear()
    again = asyncio.create_task(call(entered, leave))
    await entered.wait()
    assert callers.all_blocked(), "the first task is done"
    leave.set()
    await again


def test_callers_are_not_kept_alive_and_may_outlive_it() -> None:
    callers = Callers()
    alive = weakref.ref(callers)
    threads = [threading.Thread() for _ in range(50)]
    for number in range(50):
        callers.note(threads[number])
    kept = threads.pop()
    threads.clear()
    gc.collect()
    assert len(callers) == 1
    del callers
    gc.collect()
    assert alive() is None
    del kept


def test_who_has_not_been_woken_up_yet_is_not_blocked() -> None:
    callers, work = Callers(), Work()
    with callers.inside(threading.current_thread(), work):
        assert callers.all_blocked()
        work.undecided = False
        assert not callers.all_blocked()


def test_of_two_that_are_inside_one_has_an_answer_that_it_does_not_know_of_yet() -> None:
    callers, me = Callers(), threading.current_thread()
    with another_inside(callers):
        assert callers.all_blocked()
        with callers.inside(me, Work(is_undecided=False)):
            assert not callers.all_blocked()
        with callers.inside(me, Work()):
            assert callers.all_blocked()


def test_who_only_waits_for_handles_is_no_caller() -> None:
    callers, me = Callers(), threading.current_thread()
    with callers.waiting(me, Work()):
        assert not callers.all_blocked()
    assert len(callers) == 0
    callers.note(me)
    with callers.waiting(me, Work()):
        assert callers.all_blocked()
    assert not callers.all_blocked()


def test_two_wait_for_one_handle() -> None:
    callers, handle = Callers(), Work()
    with (
        another_inside(callers),
        callers.inside(threading.current_thread(), handle),
        callers.inside(threading.current_thread(), handle),
    ):
        assert callers.all_blocked()


def open_call() -> OpenCall:
    return OpenCall(asyncio.get_running_loop().create_future())


async def test_work_is_undecided_while_it_waits_for_calls_without_an_outcome() -> None:
    joint, first, second = JointWork(), open_call(), open_call()

    async def work() -> None:
        assert JOINT_WORK.get() is joint
        assert not joint.is_undecided, "it does something else"
        with joint.waits_for(first):
            await first.future
        assert not joint.is_undecided
        with joint.waits_for(second), suppress(ValueError):
            await second.future

    assert not joint.is_undecided, "it has not begun"
    task = asyncio.create_task(joint.do(work))
    await asyncio.sleep(0)
    assert joint.is_undecided
    first.future.set_result(None)
    assert not joint.is_undecided, "it will be woken up"
    await asyncio.sleep(0)
    assert joint.is_undecided
    second.future.set_exception(ValueError())
    assert not joint.is_undecided
    await task
    assert not joint.is_undecided
    assert JOINT_WORK.get() is None


async def test_work_whose_parts_wait_in_tasks_of_their_own() -> None:
    joint, calls = JointWork(), [open_call(), open_call()]

    async def part(call: OpenCall) -> None:
        assert JOINT_WORK.get() is joint
        with joint.waits_for(call):
            await call.future

    async def work() -> None:
        await asyncio.gather(*(part(call) for call in calls))

    task = asyncio.create_task(joint.do(work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert joint.is_undecided
    calls[0].future.set_result(None)
    assert not joint.is_undecided
    await asyncio.sleep(0)
    assert joint.is_undecided, "the other one has no outcome"
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert not joint.is_undecided
