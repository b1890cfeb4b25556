"""The calls of one peer, over a machine that says what the test says."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from pccl.machines.peer.events import (
    CallEvent,
    Claim,
    Forget,
    JoinCall,
    LeaveCall,
    LeftAdmitted,
    LeftAnswered,
    LeftCommitted,
    PeerEvent,
    ReduceCall,
    ReduceResult,
    RoundCall,
)
from pccl.protocol import errors
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Descriptor, OperationId, PeerId, ReduceOp, RoundKind
from pccl.runtime.calls import LEFT, Calls, OpenCall
from pccl.runtime.collective.operand import borrow
from pccl.runtime.requests import Deadline, ReduceInfo
from pccl.telemetry.names import Names
from pccl.telemetry.stream import EventStream

SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8)
OPERATION = OperationId(1, 0, 1, 7, 0)
MEMBERS = (PeerId(1), PeerId(2))
RESULT = ReduceResult(OPERATION, MEMBERS, 2)
DEADLINE = Deadline(5_000, 0.25)


class FakeTimer:
    def __init__(self, when_ns: int, callback: Callable[..., object], arguments: Any) -> None:
        self.when_ns = when_ns
        self.cancelled = False
        self._callback, self._arguments = callback, arguments

    def cancel(self) -> None:
        self.cancelled = True

    def fire(self) -> None:
        assert not self.cancelled
        self._callback(*self._arguments)


class FakeClock:
    def __init__(self) -> None:
        self.timers: list[FakeTimer] = []

    def now_ns(self) -> int:
        return 0

    def call_at_ns(
        self, when_ns: int, callback: Callable[..., object], *arguments: Any
    ) -> FakeTimer:
        self.timers.append(FakeTimer(when_ns, callback, arguments))
        return self.timers[-1]


class Bench:
    """Calls, what they told the machine, and what the machine answers at once."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.told: list[PeerEvent] = []
        self.answer: Callable[[PeerEvent], None] = lambda event: None
        self.calls = Calls(self.loop, self.clock, self._feed, EventStream(), Names())

    def _feed(self, event: PeerEvent) -> None:
        self.told.append(event)
        self.answer(event)

    def run_test(self, story: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(story)

    def launch(self, call: OpenCall | None = None, deadline: Deadline | None = None) -> int:
        return self.calls.launch(reduce_event(), deadline, call or self.calls.new())

    def wait(self, event: CallEvent) -> asyncio.Task[Any]:
        return self.loop.create_task(self.calls.wait(event, None, self.calls.new()))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.loop.run_until_complete(asyncio.sleep(0))
    made.loop.close()


def reduce_event(call: int = 0) -> ReduceCall:
    return ReduceCall(call, 7, SUM, True)


def reject_with(bench: Bench, error: errors.PCCLError | ValueError) -> Callable[[PeerEvent], None]:
    def answer(event: PeerEvent) -> None:
        if isinstance(event, ReduceCall):
            bench.calls.reject(event.call, error)

    return answer


# -- outcomes ------------------------------------------------------------------------------------


async def test_a_call_returns(bench: Bench) -> None:
    call = bench.calls.new()
    waiting = bench.loop.create_task(bench.calls.wait(reduce_event(), DEADLINE, call))
    await asyncio.sleep(0)
    assert bench.told == [ReduceCall(1, 7, SUM, True)]
    assert (len(bench.calls), bench.calls.open.get(1)) == (1, call)
    call.tx_bytes, call.rx_bytes = 30, 20
    bench.calls.resolve(1, RESULT)
    assert (len(bench.calls), bench.calls.open.get(1)) == (0, None)
    assert await waiting == ReduceInfo(2, 30, 20, MEMBERS, 1, 2, "ring", 0.0)
    (timer,) = bench.clock.timers
    assert timer.when_ns == 5_000
    assert timer.cancelled
    assert len(bench.told) == 1


def test_a_time_limit(bench: Bench) -> None:
    ticket = bench.launch(deadline=DEADLINE)
    bench.clock.timers[0].fire()
    assert bench.told[1:] == [LeaveCall(ticket, "timeout_s=0.25 ran out")]


async def test_an_error_is_a_copy(bench: Bench) -> None:
    """The original, in the machine's history, does not keep what it has gone through."""
    told = errors.DescriptorMismatch(reason="who asked what")
    told.completed_tags = (3, 4)
    told.__cause__ = KeyError("why")
    for _ in range(2):
        waiting = bench.wait(reduce_event())
        await asyncio.sleep(0)
        (number,) = (number for number, _ in bench.calls.open.items())
        bench.calls.reject(number, told)
        with pytest.raises(errors.DescriptorMismatch) as caught:
            await waiting
        assert caught.value is not told
        assert (caught.value.result, caught.value.reason) == (3, "who asked what")
        assert caught.value.completed_tags == (3, 4)
        assert caught.value.__cause__ is told.__cause__
    assert told.__traceback__ is None


def test_what_has_ended_lends_no_memory(bench: Bench) -> None:
    array = np.ones(8, np.float32)
    alive = weakref.ref(array)
    calls = [bench.calls.new(borrow(array)) for _ in range(3)]
    del array
    tickets = [bench.launch(call) for call in calls]
    bench.calls.resolve(tickets[0], RESULT)
    bench.calls.reject(tickets[1], errors.Evicted(reason="gone"))
    gc.collect()
    assert alive() is not None
    bench.calls.break_down(errors.LocalProtocolError(reason="a bug"))
    gc.collect()
    assert alive() is None
    assert [call.operand for call in calls] == [None] * 3


async def test_all_calls_and_later_ones_fail_by_a_bug(bench: Bench) -> None:
    tickets = [bench.launch(deadline=DEADLINE) for _ in range(2)]
    waiting = bench.wait(RoundCall(0, RoundKind.UPDATE_TOPOLOGY))
    await asyncio.sleep(0)
    bench.calls.break_down(errors.LocalProtocolError(reason="a bug"))
    for outcome in (waiting, *map(bench.calls.finish, tickets)):
        with pytest.raises(errors.LocalProtocolError, match="a bug"):
            await outcome
    told = len(bench.told)
    with pytest.raises(errors.LocalProtocolError, match="a bug"):
        await bench.wait(RoundCall(0, RoundKind.UPDATE_TOPOLOGY))
    assert len(bench.told) == told, "the machine hears of no later call"
    assert len(bench.calls) == 0
    assert all(timer.cancelled for timer in bench.clock.timers)


# -- leaving -------------------------------------------------------------------------------------


def join_event(*, rejoins: bool) -> JoinCall:
    return JoinCall(0, 0, "", 1, 5, rejoins=rejoins)


@pytest.mark.parametrize(
    ("event", "value", "told"),
    [
        *((RoundCall(0, kind), None, LeftAnswered(kind)) for kind in RoundKind),
        (join_event(rejoins=False), None, LeftAdmitted()),
        (join_event(rejoins=True), None, LeftAnswered(RoundKind.UPDATE_TOPOLOGY)),
        (reduce_event(), RESULT, LeftCommitted(OPERATION)),
    ],
    ids=["update", "pending", "optimize", "join", "rejoin", "reduce"],
)
@pytest.mark.parametrize("answered", ["never", "before", "while it leaves"])
async def test_leaving_before_and_after_the_answer(
    bench: Bench, event: CallEvent, value: ReduceResult | None, told: PeerEvent, answered: str
) -> None:
    waiting = bench.wait(event)
    await asyncio.sleep(0)
    if answered == "before":
        bench.calls.resolve(1, value)
    waiting.cancel()
    if answered == "while it leaves":
        bench.calls.resolve(1, value)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert bench.told[1:] == [LeaveCall(1, LEFT) if answered == "never" else told]
    assert len(bench.calls) == 0


@pytest.mark.parametrize("leaves_first", [False, True])
async def test_leaving_after_a_failure(bench: Bench, leaves_first: bool) -> None:
    waiting = bench.wait(reduce_event())
    await asyncio.sleep(0)
    if leaves_first:
        waiting.cancel()
    bench.calls.reject(1, errors.CollectiveAborted(reason="peer 3 lost"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(bench.told) == 1


# -- launched calls ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        errors.TooFewPeers(reason="alone"),
        errors.NotConnected(reason="connect first"),
        errors.ResyncRequired(reason="connect again"),
        errors.PCCLError(errors.Result.INVALID_ARGUMENT, reason="tag 7 is in use"),
        ValueError("root must be a rank of the group"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_wrong_with_a_launch_raises_at_once(
    bench: Bench, error: errors.PCCLError | ValueError
) -> None:
    bench.answer = reject_with(bench, error)
    with pytest.raises(type(error)) as caught:
        bench.launch()
    assert str(caught.value) == str(error)
    assert bench.told == [reduce_event(1), Claim(1)]
    assert bench.calls.has_ended(1)


@pytest.mark.parametrize(
    "error",
    [
        errors.CollectiveAborted(reason="peer 3 lost"),
        errors.DescriptorMismatch(reason="who asked what"),
        errors.Evicted(reason="gone"),
        errors.MasterLost(reason="no word"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_becomes_of_the_run_is_told_by_the_wait(
    bench: Bench, error: errors.PCCLError
) -> None:
    bench.answer = reject_with(bench, error)
    ticket = bench.launch()
    assert bench.told == [reduce_event(ticket)]
    with pytest.raises(type(error), match=error.reason) as caught:
        await bench.calls.finish(ticket)
    assert type(caught.value) is type(error)
    assert bench.told[1:] == [Claim(ticket)]


async def test_a_ticket(bench: Bench) -> None:
    ticket = bench.launch()
    assert not bench.calls.has_ended(ticket)
    waits = [bench.loop.create_task(bench.calls.finish(ticket)) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.sleep(0)
    assert bench.told == [reduce_event(ticket)], "the reduce goes on"
    bench.calls.resolve(ticket, RESULT)
    assert bench.calls.has_ended(ticket)
    assert await waits[1] == ReduceInfo(2, 0, 0, MEMBERS, 1, 2, "ring")
    assert bench.told[1:] == [Claim(ticket)]


def test_a_ticket_that_is_forgotten_before_its_outcome(bench: Bench) -> None:
    """The machine hears of it at once, and again in the turn in which the outcome is there."""
    for resolve in (True, False):
        ticket = bench.launch()
        bench.told.clear()
        bench.calls.forget(ticket)
        bench.calls.forget(ticket)
        assert bench.told == [Forget(ticket)]
        assert bench.calls.has_ended(ticket)
        if resolve:
            bench.calls.resolve(ticket, RESULT)
        else:
            bench.calls.reject(ticket, errors.CollectiveAborted(reason="peer 3 lost"))
        assert bench.told == [Forget(ticket), Forget(ticket)]


def test_a_ticket_that_is_forgotten_after_its_outcome(bench: Bench) -> None:
    ticket = bench.launch()
    bench.calls.resolve(ticket, RESULT)
    bench.calls.forget(ticket)
    assert bench.told[1:] == [Forget(ticket)]


@pytest.mark.parametrize("outcome", ["none", "committed", "failed"])
def test_leaving_a_launch(bench: Bench, outcome: str) -> None:
    ticket = bench.launch()
    left: list[PeerEvent] = [LeaveCall(ticket, LEFT)]
    if outcome == "committed":
        bench.calls.resolve(ticket, RESULT)
        left = [LeftCommitted(OPERATION)]
    elif outcome == "failed":
        bench.calls.reject(ticket, errors.CollectiveAborted(reason="peer 3 lost"))
        left = []
    bench.calls.withdraw(ticket)
    bench.calls.withdraw(ticket)
    assert bench.told[1:] == [*left, Forget(ticket)]
