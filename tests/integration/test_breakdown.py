"""What must hold when something of ours fails, or the caller leaves in a hurry."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl._api.session import Session
from pccl.errors import CollectiveAborted, LocalProtocolError, NotConnected, ResyncRequired
from pccl.observe.events import Joined, MembershipLost, PeerReport
from pccl.protocol.types import PeerId
from pccl.runtime.collective.data_plane import DataPlane
from tests.support.insides import engine_of
from tests.support.members import Call, grow, pair_at
from tests.support.members import admit as admit_to
from tests.support.patience import LIMIT_S
from tests.support.waiting import until


async def admit(member: pccl.Communicator) -> None:
    await asyncio.to_thread(grow, member, 2)


async def join(newcomer: pccl.aio.Communicator, member: pccl.Communicator) -> None:
    joining = asyncio.create_task(newcomer.connect())
    await admit(member)
    await joining


def test_a_call_that_another_thread_closes_under_says_so() -> None:
    """The interleaving, made certain: the call has found it open, then it is closed."""
    submit = Session.submit

    def closing(session: Session, call: Any, joint: Any) -> Any:
        submission = submit(session, call, joint)
        Call(session.close).result()
        return submission

    async def with_asyncio() -> None:
        comm = pccl.aio.Communicator("127.0.0.1:1")
        with pytest.raises(NotConnected, match="closed by another thread"):
            await asyncio.wait_for(comm.update_topology(), LIMIT_S)

    with patch.object(Session, "submit", closing):
        blocking = pccl.Communicator("127.0.0.1:1")
        with pytest.raises(NotConnected, match="closed by another thread"):
            Call(blocking.update_topology).result()
        asyncio.run(with_asyncio())


def test_an_internal_error_fails_the_call_and_frees_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    post = DataPlane.post
    broken: list[int] = []

    def failing(plane: DataPlane, *arguments: Any, **options: Any) -> tuple[PeerId, ...]:
        own = options["own"]
        if own == 2 and not broken:
            broken.append(own)
            raise RuntimeError("planted")
        return post(plane, *arguments, **options)

    with pccl.MasterNode("127.0.0.1:0") as node:
        one, other = pair_at(node.address)
        x, y = np.arange(4.0), np.arange(4.0)
        with patch.object(DataPlane, "post", failing):
            theirs = Call(other.all_reduce, y)
            with pytest.raises(CollectiveAborted):
                one.all_reduce(x)
            with pytest.raises(LocalProtocolError, match="planted"):
                theirs.result()
        assert x.tolist() == y.tolist() == [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(LocalProtocolError):
            other.all_reduce(y)
        admit_to(one, other)
        theirs = Call(other.all_reduce, y)
        one.all_reduce(x)
        assert theirs.result().contributors == (1, 3)
        assert x.tolist() == y.tolist() == [0.0, 2.0, 4.0, 6.0]
        other.close()
        one.close()
    assert "planted" in caplog.text


def test_an_internal_error_ends_every_call(caplog: pytest.LogCaptureFixture) -> None:
    """Also those whose handles nobody has asked; their memory can be used after a rejoin."""

    def failing(plane: DataPlane, *_: Any, **options: Any) -> None:
        raise RuntimeError("planted")

    with pccl.MasterNode("127.0.0.1:0") as node:
        one, other = pair_at(node.address)
        other.update_topology()  # went with its admission
        x, y = np.ones(4), np.ones(4)
        handle = one.all_reduce_async(x, tag=1, timeout_s=LIMIT_S)
        forgotten = np.ones(4)
        one.all_reduce_async(forgotten, tag=2, timeout_s=LIMIT_S)
        asking = Call(one.are_peers_pending)
        engine = engine_of(one)
        heard: list[PeerReport] = []
        one.on_event(heard.append)
        until(lambda: len(engine.calls) == 3)
        timers = [call.timer for call in engine.calls if call.timer is not None]
        assert len(timers) == 2
        with (
            patch.object(DataPlane, "post", failing),
            pytest.raises(LocalProtocolError, match="planted"),
        ):
            one.all_reduce(y)
        with pytest.raises(LocalProtocolError, match="planted"):
            asking.result()
        assert handle.wait()[:2] == (False, pccl.Result.INTERNAL_ERROR)
        with pytest.raises(LocalProtocolError, match="planted"):
            one.all_reduce_async(y)
        assert len(engine.calls) == 0
        assert all(getattr(timer, "cancelled")() for timer in timers)  # noqa: B009
        before = one.peer_id
        again = Call(one.connect)
        while other.world_size < 2 or before in {member.peer_id for member in other.members()}:
            other.update_topology()
        again.result()
        for array in (x, forgotten, y):
            theirs = Call(other.all_reduce, np.ones(4), tag=1)
            one.all_reduce(array, tag=1)
            theirs.result()
            assert array.tolist() == [2.0] * 4
        until(lambda: any(isinstance(event, Joined) for event in heard))
        (lost,) = [event for event in heard if isinstance(event, MembershipLost)]
        (joined,) = [event for event in heard if isinstance(event, Joined)]
        assert (lost.cause, joined.rejoined) == ("INTERNAL_ERROR", True)
        other.close()
        one.close()
    assert "planted" in caplog.text


def test_cancelled_twice_the_buffer_is_still_the_callers() -> None:
    async def scenario(node: pccl.MasterNode) -> None:
        other = pccl.Communicator(node.address)
        other.connect()
        async with pccl.aio.Communicator(node.address) as mine:
            await join(mine, other)
            x = np.ones(8_000_000, np.float32)
            theirs = Call(other.all_reduce, np.ones(8_000_000, np.float32))
            call = asyncio.create_task(mine.all_reduce(x))
            await asyncio.sleep(0.005)
            call.cancel()
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            left = x.copy()
            await mine.close()  # the other one may have called after the withdrawal: it waits
            outcome = await asyncio.to_thread(theirs.exception)
            if outcome is not None:  # otherwise it was committed before the cancellation came
                assert isinstance(outcome, CollectiveAborted)
                assert float(left.min()) == float(left.max()) == 1.0
            assert np.array_equal(x, left)
            other.close()

    with pccl.MasterNode("127.0.0.1:0") as node:
        asyncio.run(scenario(node))


def test_leaving_after_an_unnoticed_commit_requires_a_resync_and_connect_rejoins() -> None:
    async def scenario(node: pccl.MasterNode) -> None:
        other = pccl.Communicator(node.address)
        other.connect()
        async with pccl.aio.Communicator(node.address) as mine:
            await join(mine, other)
            x, y = np.ones(8), np.ones(8)
            call = asyncio.create_task(mine.all_reduce(x))
            await asyncio.sleep(0)
            # This loop is busy while the I/O thread commits; the commit cannot be noticed.
            Call(other.all_reduce, y).result()
            Call(until, lambda: bool(x[0] == 2.0)).result()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert x.tolist() == [1.0] * 8
            with pytest.raises(ResyncRequired, match="rejoin"):
                await mine.all_reduce(x)
            rejoining = asyncio.create_task(mine.connect())
            await asyncio.sleep(0)
            with pytest.raises(CollectiveAborted):  # it has left
                other.all_reduce(y)
            await admit(other)
            await rejoining
            theirs = Call(other.all_reduce, y)
            await mine.all_reduce(x)
            theirs.result()
            assert x.tolist() == y.tolist() == [3.0] * 8
            other.close()

    with pccl.MasterNode("127.0.0.1:0") as node:
        asyncio.run(scenario(node))
