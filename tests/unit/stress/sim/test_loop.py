"""The event loop whose clock jumps."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pccl.stress.sim.loop as loop_module
from pccl.stress.sim.loop import Deadlock, LoopTimer, OutOfTime, VirtualLoop
from tests.support.patience import patient

S = 1_000_000_000
DAY_S = 86_400


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def run_out(loop: VirtualLoop) -> None:
    """Run until nothing is left."""
    with pytest.raises(Deadlock):
        loop.run_forever()


def test_time_jumps_and_is_exact(loop: VirtualLoop) -> None:
    async def main() -> list[int]:
        seen = [loop.now_ns()]
        for delay in (0.1, 30 * DAY_S, 1e-9, 0):
            await asyncio.sleep(delay)
            seen.append(loop.now_ns())
        return seen

    started = time.monotonic()
    seen = loop.run_until_complete(main())
    assert time.monotonic() - started < patient(5.0)
    first = S // 10
    second = first + 30 * DAY_S * S
    assert seen == [0, first, second, second + 1, second + 1]
    assert loop.time() == seen[-1] / S


def test_timers_of_one_instant_run_in_the_order_they_were_set(loop: VirtualLoop) -> None:
    seen: list[str] = []
    loop.call_at_ns(2, seen.append, "c")
    loop.call_at_ns(1, seen.append, "a")
    loop.call_at_ns(2, seen.append, "d")
    loop.call_at(1e-9, seen.append, "b")
    run_out(loop)
    assert seen == ["a", "b", "c", "d"]


def test_adjacent_instants_are_not_one(loop: VirtualLoop) -> None:
    seen: list[int] = []
    for when in (1000 * S, 1000 * S + 1, 1000 * S + 2):
        loop.call_at_ns(when, lambda: seen.append(loop.now_ns()))
    run_out(loop)
    assert seen == [1000 * S, 1000 * S + 1, 1000 * S + 2]


def test_the_past_is_now(loop: VirtualLoop) -> None:
    seen: list[int] = []

    def late() -> None:
        loop.call_at_ns(3, lambda: seen.append(loop.now_ns()))
        loop.call_soon(lambda: seen.append(-1))

    loop.call_at_ns(7, late)
    run_out(loop)
    assert seen == [-1, 7]


def test_a_cancelled_timer_neither_runs_nor_holds_time_up(loop: VirtualLoop) -> None:
    seen: list[int] = []
    for when in range(1, 1001):
        timer = loop.call_at_ns(when, seen.append, when)
        if when % 10:
            timer.cancel()
            timer.cancel()
    run_out(loop)
    assert seen == list(range(10, 1001, 10))
    assert loop.now_ns() == 1000
    loop.call_at_ns(5000, seen.append, 0).cancel()
    run_out(loop)
    assert loop.now_ns() == 1000


def test_cancelled_while_due(loop: VirtualLoop) -> None:
    seen: list[str] = []
    second: list[LoopTimer] = []
    loop.call_at_ns(1, lambda: second[0].cancel())
    second.append(loop.call_at_ns(1, seen.append, "no"))
    run_out(loop)
    assert not seen


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=300))
def test_many_timers(entries: list[tuple[int, bool]]) -> None:
    loop = VirtualLoop()
    seen: list[tuple[int, int]] = []

    def note(n: int) -> None:
        seen.append((loop.now_ns(), n))

    timers = [loop.call_at_ns(when, note, n) for n, (when, _) in enumerate(entries)]
    for timer, (_, cancelled) in zip(timers, entries, strict=True):
        if cancelled:
            timer.cancel()
    run_out(loop)
    loop.close()
    kept = [(when, n) for n, (when, cancelled) in enumerate(entries) if not cancelled]
    assert seen == sorted(kept)


@given(st.floats(0, 1e6), st.floats(1e-9, 1e3))
def test_no_timer_is_early_nor_a_nanosecond_late(start: float, delay: float) -> None:
    loop = VirtualLoop()
    seen: list[tuple[float, float]] = []

    def arm() -> None:
        when = loop.time() + delay
        loop.call_at(when, lambda: seen.append((loop.time(), when)))

    loop.call_at(start, arm)
    run_out(loop)
    loop.close()
    ((now, when),) = seen
    assert when <= now <= when + 2e-9


def test_nothing_left_is_a_deadlock_that_names_who_waits(loop: VirtualLoop) -> None:
    async def hopeless() -> None:
        await loop.create_future()

    task = loop.create_task(hopeless(), name="bob")
    with pytest.raises(Deadlock, match=r"no timer is left at 0 ns; waiting: bob in .*hopeless"):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    with pytest.raises(Deadlock, match="waiting: no task"):
        loop.run_forever()


def test_the_limit() -> None:
    loop = VirtualLoop(limit_ns=10 * S)

    async def main() -> None:
        for _ in range(100):
            await asyncio.sleep(1)

    task = loop.create_task(main())
    with pytest.raises(OutOfTime, match="limit is reached at 10000000000 ns"):
        loop.run_until_complete(task)
    assert loop.now_ns() == 10 * S
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_spinning_is_noticed(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "TURNS_PER_INSTANT_MAX", 1000)

    def spin() -> None:
        loop.call_soon(spin)

    spin()
    with pytest.raises(OutOfTime, match="never end at 0 ns"):
        loop.run_forever()


def test_a_busy_instant_is_not_spinning(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "TURNS_PER_INSTANT_MAX", 1000)

    async def main() -> None:
        for _ in range(10):
            for _ in range(900):
                await asyncio.sleep(0)
            await asyncio.sleep(1e-9)

    loop.run_until_complete(main())


def test_context_and_exceptions_are_asyncios(loop: VirtualLoop) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    context = contextvars.copy_context()
    context.run(variable.set, "mine")
    seen: list[str] = []
    loop.call_at(1e-9, lambda: seen.append(variable.get()), context=context)
    loop.set_exception_handler(lambda _, told: seen.append(str(told.get("exception"))))
    loop.call_at_ns(2, int, "no number")
    run_out(loop)
    assert seen[0] == "mine"
    assert "invalid literal" in seen[1]


def test_it_runs_what_asyncio_offers() -> None:
    async def main() -> str:
        async with asyncio.timeout(10):
            await asyncio.sleep(9.5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.sleep(10.5)
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(lambda: None)
        return str(loop.time())

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(main()) == "19.5"


def test_closed(loop: VirtualLoop) -> None:
    loop.call_at_ns(1, lambda: None)
    loop.close()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_at_ns(1, lambda: None)
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, lambda: None)
