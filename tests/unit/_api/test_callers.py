"""Who calls, and whether anybody could go on."""

from __future__ import annotations

import _thread
import asyncio
import gc
import threading
import types
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pccl._api.callers import Callers
from tests.support.members import Call
from tests.support.waiting import until


@types.coroutine
def pause() -> Generator[None, None, None]:
    yield


@pytest.fixture
def with_open_calls() -> Iterator[Callable[[int], Callers]]:
    """Make callers of whose calls the work of so many has not ended."""
    open_calls: list[Coroutine[Any, Any, None]] = []

    async def work() -> None:
        await pause()

    def make(count: int) -> Callers:
        callers = Callers()
        for _ in range(count):
            open_calls.append(callers.counted(work))
            open_calls[-1].send(None)
        return callers

    yield make
    for begun in open_calls:
        begun.close()


@contextmanager
def another_inside(callers: Callers) -> Generator[None]:
    """Another thread is in a call meanwhile."""
    entered, leave = threading.Event(), threading.Event()

    def call() -> None:
        with callers.inside(threading.current_thread()):
            entered.set()
            leave.wait()

    other = Call(call)
    entered.wait()
    yield
    leave.set()
    other.result()


def test_nobody_calls() -> None:
    assert not Callers().all_blocked()


def test_one_thread(with_open_calls: Callable[[int], Callers]) -> None:
    callers, me = with_open_calls(9), threading.current_thread()
    with callers.inside(me):
        assert callers.all_blocked()
        with callers.inside(me):  # from a signal handler
            assert callers.all_blocked()
        assert callers.all_blocked()
    assert not callers.all_blocked()
    assert len(callers) == 1


def test_a_call_that_raises_is_over(with_open_calls: Callable[[int], Callers]) -> None:
    callers, me = with_open_calls(9), threading.current_thread()
    try:
        with callers.inside(me):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not callers.all_blocked()


def test_somebody_else_can_go_on(with_open_calls: Callable[[int], Callers]) -> None:
    callers = with_open_calls(9)
    with another_inside(callers):
        assert callers.all_blocked()
        callers.note(threading.current_thread())
        assert not callers.all_blocked()
        with callers.inside(threading.current_thread()):
            assert callers.all_blocked()
    assert not callers.all_blocked()


def test_threads_that_have_ended_do_not_count(with_open_calls: Callable[[int], Callers]) -> None:
    callers, me = with_open_calls(9), threading.current_thread()
    ended: list[threading.Thread] = []

    def call() -> None:
        ended.append(threading.current_thread())
        callers.note(threading.current_thread())

    Call(call).result()
    with callers.inside(me):
        assert callers.all_blocked()
    assert len(callers) == 2
    ended.clear()
    gc.collect()
    assert len(callers) == 1


def test_threads_of_c_code_that_have_ended_do_not_count(
    with_open_calls: Callable[[int], Callers],
) -> None:
    callers, me, go_on = with_open_calls(9), threading.current_thread(), threading.Lock()

    def call() -> None:
        callers.note(threading.current_thread())
        with go_on:
            pass

    with callers.inside(me):
        with go_on:
            _thread.start_new_thread(call, ())
            until(lambda: len(callers) == 2)
            assert not callers.all_blocked()
        until(callers.all_blocked)


async def test_tasks(with_open_calls: Callable[[int], Callers]) -> None:
    callers = with_open_calls(9)

    async def call(entered: asyncio.Event, leave: asyncio.Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        with callers.inside(task):
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


def test_who_has_not_been_woken_up_yet_is_not_blocked(
    with_open_calls: Callable[[int], Callers],
) -> None:
    callers = with_open_calls(1)

    async def work() -> str:
        return "done"

    with callers.inside(threading.current_thread()):
        assert callers.all_blocked()
        assert asyncio.run(callers.counted(work)) == "done"
        assert callers.all_blocked(), "that one has come and gone"
    callers = with_open_calls(0)
    with callers.inside(threading.current_thread()):
        assert not callers.all_blocked(), "its call has ended"


@pytest.mark.parametrize("ending", [ValueError, asyncio.CancelledError, GeneratorExit])
def test_work_that_fails_is_over(ending: type[BaseException]) -> None:
    callers = Callers()

    async def work() -> None:
        await pause()

    call = callers.counted(work)
    with callers.inside(threading.current_thread()):
        call.send(None)
        assert callers.all_blocked()
        with pytest.raises(ending):
            call.throw(ending())
        assert not callers.all_blocked()


def test_as_many_calls_as_callers(with_open_calls: Callable[[int], Callers]) -> None:
    """Of two that are inside, one has an answer that it does not know of yet."""
    callers = with_open_calls(1)
    with another_inside(callers):
        assert callers.all_blocked()
        with callers.inside(threading.current_thread()):
            assert not callers.all_blocked()
