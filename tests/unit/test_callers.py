"""Who calls, and whether anybody could go on."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

from pccl.callers import Callers


def run(target: object) -> None:
    thread = threading.Thread(target=target)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_nobody_calls() -> None:
    assert not Callers().all_blocked(open_calls=9)


def test_one_thread() -> None:
    callers, me = Callers(), threading.current_thread()
    with callers.inside(me):
        assert callers.all_blocked(open_calls=9)
        with callers.inside(me):  # from a signal handler
            assert callers.all_blocked(open_calls=9)
        assert callers.all_blocked(open_calls=9)
    assert not callers.all_blocked(open_calls=9)
    assert len(callers) == 1


def test_a_call_that_raises_is_over() -> None:
    callers, me = Callers(), threading.current_thread()
    try:
        with callers.inside(me):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not callers.all_blocked(open_calls=9)


def test_somebody_else_can_go_on() -> None:
    callers = Callers()
    entered, leave = threading.Event(), threading.Event()

    def call() -> None:
        with callers.inside(threading.current_thread()):
            entered.set()
            leave.wait()

    other = threading.Thread(target=call)
    other.start()
    entered.wait()
    assert callers.all_blocked(open_calls=9)
    callers.note(threading.current_thread())
    assert not callers.all_blocked(open_calls=9)
    with callers.inside(threading.current_thread()):
        assert callers.all_blocked(open_calls=9)
    leave.set()
    other.join()
    assert not callers.all_blocked(open_calls=9)


def test_threads_that_have_ended_do_not_count() -> None:
    callers, me = Callers(), threading.current_thread()
    ended: list[threading.Thread] = []

    def call() -> None:
        ended.append(threading.current_thread())
        callers.note(threading.current_thread())

    run(call)
    with callers.inside(me):
        assert callers.all_blocked(open_calls=9)
    assert len(callers) == 2
    ended.clear()
    gc.collect()
    assert len(callers) == 1


def test_tasks() -> None:
    callers = Callers()

    async def call(entered: asyncio.Event, leave: asyncio.Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        with callers.inside(task):
            entered.set()
            await leave.wait()

    async def main() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(call(entered, leave))
        await entered.wait()
        assert callers.all_blocked(open_calls=9)
        leave.set()
        await task
        assert not callers.all_blocked(open_calls=9)
        entered.clear()
        leave.clear()
        again = asyncio.create_task(call(entered, leave))
        await entered.wait()
        assert callers.all_blocked(open_calls=9), "the first task is done"
        leave.set()
        await again

    asyncio.run(main())


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
    callers = Callers()
    with callers.inside(threading.current_thread()):
        assert callers.all_blocked(open_calls=1)
        assert not callers.all_blocked(open_calls=0), "its call has ended"
