"""``all_reduce_async`` and its handles: values, failures, every way of waiting, and not waiting."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import AsyncReduceHandle, ReduceInfo, ReduceOp, Result
from pccl._api.arguments import reduce_request
from pccl._api.session import CheckedCall
from pccl.errors import (
    CollectiveAborted,
    DeadlineExceeded,
    DescriptorMismatch,
    MasterLost,
    NotConnected,
    PendingOperations,
    TooFewPeers,
)
from tests.integration.conftest import Run
from tests.support.commands import run_to_end
from tests.support.insides import engine_of
from tests.support.patience import LIMIT_S, patient

PROMPT_S = patient(3.0)
NOTHING = ReduceInfo(0, 0, 0)


def launch(run: Run, size: int = 1000, tag: int = 0) -> tuple[list[Any], list[AsyncReduceHandle]]:
    """Every member launches the same reduce; member r contributes r + 1 everywhere."""
    arrays = [np.full(size, rank + 1.0) for rank in range(len(run.members))]
    handles = [
        member.all_reduce_async(array, tag=tag)
        for member, array in zip(run.members, arrays, strict=True)
    ]
    return arrays, handles


# -- values --------------------------------------------------------------------------------------


def test_several_in_flight(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    arrays = {
        (tag, rank): np.full(1 + 7_919 * tag, 10**tag * (rank + 1))
        for tag in range(6)
        for rank in range(3)
    }
    handles = {
        (tag, rank): run.members[rank].all_reduce_async(arrays[tag, rank], tag=tag)
        for rank in range(3)
        for tag in ([5, 3, 0, 1, 2, 4], [0, 1, 2, 3, 4, 5], [2, 5, 4, 1, 0, 3])[rank]
    }
    ids = tuple(member.peer_id for member in run.members)
    for (tag, rank), handle in handles.items():
        ok, status, info = handle.wait()
        assert ok is True
        assert status is Result.SUCCESS
        assert (info.local_world_size, info.contributors, info.attempts) == (3, ids, 1)
        assert (arrays[tag, rank] == 6 * 10**tag).all()
        assert handle.done
        assert handle.wait() == (True, Result.SUCCESS, info)
        assert handle.result() == info
    moved = sum(handle.result().tx_bytes for handle in handles.values())
    assert moved == sum(handle.result().rx_bytes for handle in handles.values())
    assert moved == 4 * sum(8 * (1 + 7_919 * tag) for tag in range(6))


def test_separate_buffers_and_ops(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    sends = [np.array([3, -5], np.int16), np.array([4, -2], np.int16)]
    results = [np.zeros(2, np.int16) for _ in sends]
    handles = [
        member.all_reduce_async(send, result, op=ReduceOp.AVG, tag=2)
        for member, send, result in zip(run.members, sends, results, strict=True)
    ]
    assert all(handle.wait()[0] for handle in handles)
    assert [result.tolist() for result in results] == [[3, -3], [3, -3]]
    assert [send.tolist() for send in sends] == [[3, -5], [4, -2]]


def test_any_thread_may_wait(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    array = np.ones(1000)
    handle = run.members[0].all_reduce_async(array)
    waits = [run.start(handle.wait) for _ in range(4)]
    run.until(lambda: handle._waiters == 4)  # pyright: ignore[reportPrivateUsage]
    assert not handle.done
    run.members[1].all_reduce(np.ones(1000))
    (outcome,) = {wait.result(LIMIT_S) for wait in waits}
    assert outcome[0] is True
    assert outcome == handle.wait()


# -- what raises at once, and what does not ------------------------------------------------------


def test_wrong_launches(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    first, second = run.members
    array = np.ones(1000)
    handle = first.all_reduce_async(array, tag=1)
    with pytest.raises(pccl.PCCLError, match="tag 1 is in use") as caught:
        first.all_reduce_async(np.ones(5), tag=1)
    assert caught.value.result is Result.INVALID_ARGUMENT
    assert caught.value.func == "all_reduce_async"
    with pytest.raises(ValueError, match="still uses this memory"):
        first.all_reduce_async(array[10:], tag=2)
    with pytest.raises(ValueError, match="no elements"):
        first.all_reduce_async(np.ones(0), tag=2)
    for joint in (first.update_topology, first.optimize_topology):
        with pytest.raises(PendingOperations, match="still open; wait for them") as pending:
            joint()
        assert pending.value.result is Result.PENDING_ASYNC_OPS
    second.all_reduce(np.ones(1000), tag=1)
    run.until(lambda: handle.done)
    with pytest.raises(PendingOperations):
        first.update_topology()  # it has ended, but nobody has waited for it
    assert handle.wait()[0]
    run.each(pccl.Communicator.update_topology)


def test_launches_outside_a_run(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    (alone,) = run.members
    with pytest.raises(TooFewPeers) as caught:
        alone.all_reduce_async(np.ones(3))
    assert caught.value.func == "all_reduce_async"
    with pytest.raises(NotConnected, match=r"connect\(\)"):
        run.newcomer().all_reduce_async(np.ones(3))
    alone.close()
    with pytest.raises(NotConnected, match="closed"):
        alone.all_reduce_async(np.ones(3))


def test_a_lost_member(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    lost = run.members.pop()
    arrays, handles = launch(run)
    run.until(lambda: run.requests == 2)
    gone = lost.peer_id
    lost.close()
    run.until(lambda: all(handle.done for handle in handles))
    for member, handle, array in zip(run.members, handles, arrays, strict=True):
        assert member.world_size == 3, "nothing changes but in a call"
        assert handle.wait() == (False, Result.RANK_CONNECTION_LOST, NOTHING)
        assert member.world_size == 2
        assert len(set(array.tolist())) == 1
        for _ in range(2):
            with pytest.raises(CollectiveAborted, match=f"peer {gone}") as caught:
                handle.result()
            assert caught.value.func == "all_reduce_async"
        assert handle.wait() == (False, 8, NOTHING)
    assert [array[0] for array in arrays] == [1.0, 2.0]
    _, again = launch(run)
    assert all(handle.wait()[0] for handle in again)


def test_an_unseen_loss_is_told_by_the_handle(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    run.members.pop().close()
    run.until(lambda: run.registered == 2)
    run.each(pccl.Communicator.are_peers_pending)  # so they know, but their callers do not
    arrays, handles = launch(run)
    assert [handle.wait()[:2] for handle in handles] == [(False, 8), (False, 8)]
    assert [array[0] for array in arrays] == [1.0, 2.0]
    assert [member.world_size for member in run.members] == [2, 2]


def test_a_mismatch(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    handles = [
        member.all_reduce_async(np.ones(5 + rank)) for rank, member in enumerate(run.members)
    ]
    assert [handle.wait() for handle in handles] == [(False, 3, NOTHING)] * 2
    with pytest.raises(DescriptorMismatch, match="SUM of 6 x float64"):
        handles[0].result()
    run.check()


def test_quantization_must_agree(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    options = [pccl.QuantizationOptions(), pccl.QuantizationOptions(pccl.DataType.UINT16)]
    for pair in (options, [options[0], None]):
        handles = [
            member.all_reduce_async(np.ones(5), quantization_options=option)
            for member, option in zip(run.members, pair, strict=True)
        ]
        for handle in handles:
            with pytest.raises(DescriptorMismatch, match="quantized as uint8 in blocks of 96"):
                handle.result(LIMIT_S)
    arrays = [np.full(5, 0.1), np.full(5, 0.2)]
    run.reduce(arrays, quantization_options=options[0])
    assert arrays[0].tolist() == arrays[1].tolist() == [0.1 + 0.2] * 5


def test_a_budget_of_its_own(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    first, second = run.members
    array = np.arange(1000.0)
    handle = first.all_reduce_async(array, timeout_s=0.1)
    run.until(lambda: handle.done)
    assert handle.wait() == (False, Result.RANK_CONNECTION_LOST, NOTHING)
    with pytest.raises(DeadlineExceeded, match=r"timeout_s=0\.1 ran out"):
        handle.result()
    assert np.array_equal(array, np.arange(1000.0))
    run.each(pccl.Communicator.are_peers_pending)
    again = first.all_reduce_async(array, timeout_s=LIMIT_S)
    with pytest.raises(CollectiveAborted, match=r"withdrew: timeout_s=0\.1 ran out"):
        second.all_reduce(np.ones(1000))  # the one that the first has given up
    second.all_reduce(np.ones(1000))
    assert again.wait()[0]
    assert np.array_equal(array, np.arange(1000.0) + 1)


# -- leaving a wait ------------------------------------------------------------------------------


def test_a_wait_that_is_too_short(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    first, second = run.members
    handle = first.all_reduce_async(np.ones(10))
    for _ in range(2):
        with pytest.raises(TimeoutError, match="but continues; wait again"):
            handle.result(timeout_s=0.02)
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout_s"):
            handle.result(wrong)
    second.all_reduce(np.ones(10))
    assert handle.result(LIMIT_S).local_world_size == 2


def test_ctrl_c_in_a_wait(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    array = np.ones(10)
    handle = run.members[0].all_reduce_async(array)
    main = threading.get_ident()

    def interrupt() -> None:
        run.until(lambda: handle._waiters == 1)  # pyright: ignore[reportPrivateUsage]
        signal.pthread_kill(main, signal.SIGINT)

    for _ in range(2):
        interrupting = run.start(interrupt)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
        assert time.monotonic() - started < PROMPT_S
        interrupting.result(LIMIT_S)
    assert not handle.done
    run.members[1].all_reduce(np.ones(10))
    assert handle.wait()[0]
    assert (array == 2).all()


def test_await(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    first, second = run.members

    async def impatient(handle: AsyncReduceHandle) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await handle

    async def both(handle: AsyncReduceHandle, other: Callable[[], object]) -> list[ReduceInfo]:
        waits = [asyncio.ensure_future(_info_of(handle)) for _ in range(3)]
        await asyncio.to_thread(other)
        return await asyncio.gather(*waits)

    handle = first.all_reduce_async(np.ones(10))
    asyncio.run(impatient(handle))
    asyncio.run(impatient(handle))
    infos = asyncio.run(both(handle, lambda: second.all_reduce(np.ones(10))))
    assert infos == [handle.result()] * 3
    assert asyncio.run(_info_of(handle)) == infos[0]
    mismatch = first.all_reduce_async(np.ones(10))
    with pytest.raises(DescriptorMismatch):
        second.all_reduce(np.ones(11))
    with pytest.raises(DescriptorMismatch) as caught:
        asyncio.run(_info_of(mismatch))
    assert caught.value.func == "all_reduce_async"


async def _info_of(handle: AsyncReduceHandle) -> ReduceInfo:
    return await handle


def test_one_leaves_and_another_stays(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    handle = run.members[0].all_reduce_async(np.ones(10))
    staying = run.start(handle.wait)
    run.until(lambda: handle._waiters == 1)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(TimeoutError):
        handle.result(timeout_s=0.01)
    run.members[1].all_reduce(np.ones(10))
    assert staying.result(LIMIT_S)[0]


def test_ctrl_c_in_a_launch(run_of: Callable[..., Run]) -> None:
    """Whoever leaves without a handle gets the memory back at once."""
    run = run_of(2)
    first, second = run.members
    array = np.arange(10.0)
    session = first._session  # pyright: ignore[reportPrivateUsage]
    call = CheckedCall("all_reduce_async", session.launch, reduce_request(array), joint=False)
    submission = session.submit(call, None)
    submission.wait()
    session.settle_left(call, submission)  # as if the signal had come right now
    handle = first.all_reduce_async(array)
    run.each(pccl.Communicator.are_peers_pending)
    second.all_reduce(np.ones(10), retry=True)  # the first one was withdrawn
    assert handle.wait()[0]
    assert np.array_equal(array, np.arange(10.0) + 1)
    run.each(pccl.Communicator.update_topology)


# -- never waiting -------------------------------------------------------------------------------


def test_a_dropped_handle(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    arrays, handles = launch(run, size=100_000)
    array = arrays[0]
    handles[0] = handles[1]
    gc.collect()
    assert handles[1].wait()[0]
    run.each(pccl.Communicator.are_peers_pending)
    # The outcome was claimed for nobody, so nothing is pending.
    run.each(pccl.Communicator.update_topology)
    assert (array == 3).all()
    run.check()


def test_a_dropped_handle_shows_nothing(new_run: Callable[..., Run]) -> None:
    """What the caller sees changes when a joint call returns, and not by chance."""
    run = new_run(3)
    first, second = run.members[:2]
    handles = [first.all_reduce_async(np.ones(10))]
    run.until(lambda: run.requests == 1)
    run.members.pop().close()
    run.until(lambda: handles[0].done)
    handles.clear()
    gc.collect()
    asked = run.start(first.are_peers_pending)
    second.are_peers_pending()
    asked.result(LIMIT_S)  # the engine knows by now
    assert (first.world_size, second.world_size) == (3, 3)
    run.each(pccl.Communicator.update_topology)
    assert (first.world_size, second.world_size) == (2, 2)
    run.check()


def test_a_dropped_handle_keeps_nobody_from_an_update(new_run: Callable[..., Run]) -> None:
    """Nobody can wait for it, so nothing is pending, although it has not ended."""
    run = new_run(2)
    first, second = run.members
    second.update_topology()  # went with its admission
    array = np.ones(10)
    handles = [first.all_reduce_async(array)]
    with pytest.raises(PendingOperations):
        first.update_topology()
    handles.clear()
    gc.collect()
    run.each(pccl.Communicator.update_topology)
    second.all_reduce(np.ones(10))
    run.until(lambda: len(engine_of(first).calls) == 0)
    assert (array == 2).all()
    run.each(pccl.Communicator.update_topology)


@pytest.mark.parametrize("dropped", ["before", "after"])
def test_a_dropped_handle_swallows_no_loss(new_run: Callable[..., Run], dropped: str) -> None:
    run = new_run(2, pccl.Timing(heartbeat_s=0.1, tick_s=0.05, master_lost_s=0.3))
    first = run.members[0]
    handles = [first.all_reduce_async(np.ones(10))]
    if dropped == "before":
        handles.clear()
        gc.collect()
    run.master.interrupt()
    run.until(lambda: engine_of(first).machine.standing.value == "lost")
    if dropped == "after":
        handles.clear()
        gc.collect()
    with pytest.raises(MasterLost):
        first.are_peers_pending()
    with pytest.raises(NotConnected):
        first.are_peers_pending()


def test_a_handle_whose_communicator_is_closed(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    first, second = run.members
    array = np.ones(10)
    handle = first.all_reduce_async(array)
    waiting = run.start(handle.wait)
    run.until(lambda: handle._waiters == 1)  # pyright: ignore[reportPrivateUsage]
    unasked = second.all_reduce_async(np.ones(11), tag=1)
    first.close()
    second.close()
    assert waiting.result(LIMIT_S) == (False, Result.INVALID_USAGE, NOTHING)
    assert (array == 1).all()
    assert unasked.done
    assert unasked.wait() == (False, Result.INVALID_USAGE, NOTHING)
    with pytest.raises(NotConnected, match="closed"):
        unasked.result()
    with pytest.raises(NotConnected):
        handle.result()


PROGRAM = """
import os
import numpy as np
import pccl
from tests.support.members import pair_at

with pccl.MasterNode("127.0.0.1:0") as master:
    first, second = pair_at(master.address)
    handles = [first.all_reduce_async(np.ones(5), tag=tag) for tag in range(3)]
    {ending}
"""

ENDINGS = {
    "left to the end of the interpreter": "",
    "closed with handles open": "first.close(); second.close()",
    "dropped after the end of the communicator": "del first, second; handles.clear()",
    "failed, and nobody asks": "second.close(); first.are_peers_pending()",
    "forked": """
    child = os.fork()
    if not child:
        print(handles[0].done, handles[0].wait()[0], flush=True)
        handles.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    second.all_reduce(np.ones(5), tag=0)
    print(handles[0].wait()[0])
    """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_word_at_the_end(ending: str) -> None:
    program = PROGRAM.format(ending=textwrap.dedent(ENDINGS[ending]).replace("\n", "\n    "))
    command = (sys.executable, "-W", "error", "-X", "dev", "-c", program)
    ended = run_to_end(*command, limit_s=LIMIT_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == (["True", "False", "True"] if ending == "forked" else [])


@pytest.mark.parametrize("algorithm", ["ring", "mesh"])
def test_what_had_ended_well_is_told_after_closing(
    new_run: Callable[..., Run], algorithm: str
) -> None:
    """Its result is in the tensor: to say that it failed would let it be reduced once more."""
    run = new_run(2)
    tensors = [np.full(4, 1.0), np.full(4, 2.0)]
    handles = [
        member.all_reduce_async(tensor, algorithm=algorithm)
        for member, tensor in zip(run.members, tensors, strict=True)
    ]
    run.until(lambda: all(handle.done for handle in handles))
    for member in run.members:
        member.close()
    for handle, tensor in zip(handles, tensors, strict=True):
        assert tensor.tolist() == [3.0] * 4
        assert handle.wait()[:2] == (True, pccl.Result.SUCCESS)
        assert handle.result().local_world_size == 2
