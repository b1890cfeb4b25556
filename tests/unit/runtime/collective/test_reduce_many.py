"""Many reduces as one call, over a fake that reduces when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from pccl.machines.batch import may_succeed_again
from pccl.machines.peer.events import LeftCommitted, LeftFailed, PeerEvent, ReduceCall, ReduceResult
from pccl.protocol import errors
from pccl.protocol.data_type import DataType
from pccl.protocol.types import NOBODY, Descriptor, OperationId, PeerId, ReduceOp
from pccl.runtime.calls import Calls
from pccl.runtime.clock import LoopClock
from pccl.runtime.collective.operand import Operand, borrow
from pccl.runtime.collective.reduce_many import ReduceMany
from pccl.runtime.requests import ReduceInfo, ReduceManyRequest, ReduceRequest
from pccl.telemetry.names import Names
from pccl.telemetry.stream import EventStream

SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8)
MEMBERS = (PeerId(1), PeerId(2))
ME = PeerId(2)


def request(tag: int) -> ReduceRequest:
    return ReduceRequest(borrow(np.zeros(8, np.float32)), ReduceCall(0, tag, SUM))


def info(tag: int, *, attempts: int = 1) -> ReduceInfo:
    outcome = ReduceResult(OperationId(1, 0, 1, tag, 0), MEMBERS)
    return ReduceInfo(2, 100 + tag, 10 + tag, MEMBERS, 1, attempts, outcome=outcome)


def lost(peer: int) -> errors.CollectiveAborted:
    return errors.CollectiveAborted(reason=f"peer {peer} lost")


class FakeReducer:
    """Remembers what it was asked for; each reduce ends when the test says how."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.withdrawn: list[int] = []
        """Because another tensor failed."""
        self.cancelled: list[int] = []
        self.left: list[PeerEvent] = []
        """What the caller who has left has not noticed."""
        self.begun_by: list[PeerId] = []
        self.started: set[int] = set()
        self._open: dict[int, asyncio.Future[ReduceInfo]] = {}
        self._operands: dict[int, Operand] = {}

    async def reduce(self, request: ReduceRequest, may_retry: Callable[[], bool]) -> ReduceInfo:
        assert request.operand is not None
        tag = request.tag
        self.begun_by.append(request.asks.begun_by)
        self._operands[tag] = request.operand
        while True:
            self.begun.append(tag)
            self._open[tag] = asyncio.get_running_loop().create_future()
            try:
                return await self._open[tag]
            except errors.CollectiveAborted as error:
                if not (may_retry() and may_succeed_again(error)):
                    raise
            except asyncio.CancelledError:
                self.cancelled.append(tag)
                raise
            finally:
                del self._open[tag]

    def withdraw_unless_started(self, operand: Operand, reason: str) -> None:
        for tag, ending in self._open.items():
            if self._operands[tag] is operand and tag not in self.started and not ending.done():
                self.withdrawn.append(tag)
                ending.set_exception(errors.DeadlineExceeded(reason=reason))

    @property
    def running(self) -> list[int]:
        return list(self._open)

    def end_now(self, tag: int, *, attempts: int = 1) -> None:
        self._open[tag].set_result(info(tag, attempts=attempts))

    def fail_now(self, tag: int, error: BaseException) -> None:
        self._open[tag].set_exception(error)

    async def end(self, tag: int, *, attempts: int = 1) -> None:
        self.end_now(tag, attempts=attempts)
        await turns()

    async def fail(self, tag: int, error: BaseException) -> None:
        self.fail_now(tag, error)
        await turns()


def many(
    loop: asyncio.AbstractEventLoop,
    reducer: FakeReducer,
    requests: Sequence[ReduceRequest],
    in_flight: int,
) -> ReduceMany:
    calls = Calls(loop, LoopClock(loop), reducer.left.append, EventStream(), Names())
    withdraw = reducer.withdraw_unless_started
    wanted = ReduceManyRequest(tuple(requests), in_flight)
    return ReduceMany(loop, calls, reducer.reduce, withdraw, ME, wanted)


async def turns() -> None:
    """Let everything happen that can happen now."""
    for _ in range(20):
        await asyncio.sleep(0)


Story = Callable[[FakeReducer, "asyncio.Task[ReduceInfo]"], Coroutine[Any, Any, None]]


def play(story: Story, *tags: int, in_flight: int = 2) -> FakeReducer:
    """Begin to reduce these tags, then let ``story`` go on; nothing may be left behind."""
    reducer = FakeReducer()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        call = loop.create_task(
            many(loop, reducer, [request(tag) for tag in tags], in_flight).run()
        )
        await turns()
        await story(reducer, call)
        assert call.done()
        assert reducer.running == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run(), debug=True)
    return reducer


def test_all_succeed() -> None:
    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        assert reducer.begun == [7, 3]
        await reducer.end(3)  # in any order
        assert reducer.begun == [7, 3, 5]
        await reducer.end(7, attempts=3)
        assert reducer.begun == [7, 3, 5]
        assert not call.done()
        await reducer.end(5, attempts=2)
        assert call.result() == ReduceInfo(2, 315, 45, MEMBERS, 1, 3)

    play(story, 7, 3, 5)


@pytest.mark.parametrize(("in_flight", "at_once"), [(1, 1), (2, 2), (3, 3), (99, 3)])
def test_so_many_at_a_time(in_flight: int, at_once: int) -> None:
    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        assert reducer.running == [1, 2, 3][:at_once]
        while reducer.running:
            assert len(reducer.running) <= at_once
            await reducer.end(reducer.running[0])

    assert play(story, 1, 2, 3, in_flight=in_flight).begun == [1, 2, 3]


def test_what_has_started_is_waited_for_and_what_waits_for_others_is_withdrawn() -> None:
    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        reducer.started = {1}
        await reducer.fail(2, errors.TooFewPeers(reason="alone"))
        assert reducer.withdrawn == [3]
        assert not call.done()
        assert reducer.begun == [1, 2, 3]  # nothing new
        await reducer.end(1)
        with pytest.raises(errors.TooFewPeers) as caught:
            call.result()
        assert caught.value.completed_tags == (1,)

    play(story, 1, 2, 3, 4, in_flight=3)


def test_the_next_tensors_go_on_with_the_call_of_the_first() -> None:
    """So they end as the first would if the peer has lost its place meanwhile."""

    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        for tag in (1, 2, 3):
            await reducer.end(tag)

    assert play(story, 1, 2, 3, in_flight=2).begun_by == [NOBODY, NOBODY, ME]


def test_a_caller_who_leaves_between_a_loss_and_the_word_of_it_has_not_heard() -> None:
    loss = errors.Evicted(reason="silent")

    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        reducer.started = {1, 2}
        await reducer.fail(1, loss)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    assert play(story, 1, 2, in_flight=2).left == [LeftFailed(loss)]


def test_an_error_that_is_not_of_the_run_stops_everything_as_well() -> None:
    """Whichever lane it happens in, and without waiting for what may wait for ever."""

    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        reducer.started = {3}
        await reducer.fail(2, ValueError("another collective still uses this memory"))
        assert reducer.withdrawn == [1]
        await reducer.end(3)
        with pytest.raises(ValueError, match="another collective still uses this memory"):
            call.result()

    assert play(story, 1, 2, 3, 4, in_flight=3).begun == [1, 2, 3]


# -- members are lost ------------------------------------------------------------------------------


def test_after_a_loss_it_is_tried_again() -> None:
    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        await reducer.fail(2, lost(3))
        await reducer.fail(2, lost(4))
        assert reducer.begun == [1, 2, 2, 2]
        await reducer.end(2)
        await reducer.end(1)
        assert call.result().contributors == MEMBERS

    assert play(story, 1, 2).withdrawn == []


def test_after_a_failure_nothing_is_tried_again() -> None:
    """The others may be gone for good, or not reduce that tensor any more."""

    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        reducer.started = {1}
        await reducer.fail(2, errors.TooFewPeers(reason="alone"))
        await reducer.fail(1, lost(3))
        assert reducer.begun == [1, 2]
        with pytest.raises(errors.TooFewPeers) as caught:
            call.result()
        assert caught.value.completed_tags == ()

    assert play(story, 1, 2).withdrawn == []


@pytest.mark.parametrize("first", [1, 2])
def test_what_ends_at_the_same_instant_as_another_fails_is_complete(first: int) -> None:
    """One message may bring the last outcome and the news that nobody else is left."""

    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        for tag in (first, 3 - first):
            if tag == 1:
                reducer.fail_now(1, errors.TooFewPeers(reason="alone"))
            else:
                reducer.end_now(2)
        await turns()
        with pytest.raises(errors.TooFewPeers, match="tags that completed: 2;") as caught:
            call.result()
        assert caught.value.completed_tags == (2,)

    reducer = play(story, 1, 2)
    assert (reducer.withdrawn, reducer.cancelled, reducer.left) == ([], [], [])


# -- the caller leaves -----------------------------------------------------------------------------


def test_whoever_leaves_withdraws_everything() -> None:
    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        reducer.started = {1}
        call.cancel()
        call.cancel()  # twice is once
        await turns()
        assert call.cancelled()

    reducer = play(story, 1, 2, 3)
    assert sorted(reducer.cancelled) == [1, 2]
    assert reducer.begun == [1, 2]
    assert reducer.left == []


def test_whoever_leaves_while_a_failure_is_waited_out() -> None:
    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        reducer.started = {1}
        await reducer.fail(2, errors.TooFewPeers(reason="alone"))
        call.cancel()
        await turns()
        assert call.cancelled()

    assert play(story, 1, 2).cancelled == [1]


def test_whoever_leaves_does_not_know_what_was_reduced() -> None:
    """He would reduce those tensors a second time."""

    async def story(reducer: FakeReducer, call: asyncio.Task[ReduceInfo]) -> None:
        await reducer.end(2)
        await reducer.end(1)
        call.cancel()
        await turns()
        assert call.cancelled()

    reducer = play(story, 1, 2, 3, 4)
    assert reducer.left == [LeftCommitted(OperationId(1, 0, 1, tag, 0)) for tag in (1, 2)]
    assert sorted(reducer.cancelled) == [3, 4]


# -- what is wrong with the call -------------------------------------------------------------------


def prepare(*requests: ReduceRequest) -> None:
    loop = asyncio.new_event_loop()
    try:
        many(loop, FakeReducer(), requests, 4)
    finally:
        loop.close()


def on(send: Any, recv: Any, tag: int) -> ReduceRequest:
    return ReduceRequest(borrow(send, recv), ReduceCall(0, tag, SUM))


def test_results_may_not_overlap() -> None:
    memory = np.zeros(32, np.float32)
    overlap = "the tensors of tags 1 and 2 overlap; pass copies, or only one"
    with pytest.raises(ValueError, match=overlap):
        prepare(on(memory[:8], None, 1), on(memory[4:12], None, 2))
    with pytest.raises(ValueError, match=overlap):  # also far apart in the list
        prepare(on(memory[:20], None, 1), request(9), on(memory[2:4], None, 2))


def test_a_result_may_not_overlap_an_input() -> None:
    memory = np.zeros(32, np.float32)
    for first, second in ((slice(0, 8), slice(7, 15)), (slice(7, 15), slice(0, 8))):
        with pytest.raises(ValueError, match="overlap"):
            prepare(on(memory[first], memory[16:24], 1), on(memory[second], None, 2))


def test_a_long_result_hides_nothing_behind_a_short_one() -> None:
    """Of the ranges before, the one that reaches furthest counts, not the last."""
    memory = np.zeros(64, np.float32)
    with pytest.raises(ValueError, match="the tensors of tags 1 and 3 overlap"):
        prepare(
            on(memory[0:32], np.zeros(32, np.float32), 1),
            on(memory[4:6], np.zeros(2, np.float32), 2),
            on(memory[20:22], None, 3),
        )


def test_inputs_may_overlap_each_other() -> None:
    memory, results = np.zeros(16, np.float32), np.zeros(16, np.float32)
    prepare(on(memory[:8], results[:8], 1), on(memory[4:12], results[8:], 2))
    prepare(on(memory[:8], results[:8], 1), on(memory[:8], results[8:], 2))


def test_neighbours_do_not_overlap() -> None:
    memory = np.zeros(24, np.float32)
    prepare(*(on(memory[8 * tag : 8 * tag + 8], None, tag) for tag in (2, 0, 1)))
