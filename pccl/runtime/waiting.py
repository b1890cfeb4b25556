"""Waits for futures that other code owns; cancelling a wait cancels no future."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any


async def settled(future: asyncio.Future[Any]) -> None:
    """Return when ``future`` is done. This never raises the future's own exception."""
    if future.done():
        return
    turn: asyncio.Future[None] = future.get_loop().create_future()
    future.add_done_callback(lambda _: _wake(turn))
    await turn


async def next_turn(loop: asyncio.AbstractEventLoop) -> None:
    """Return after the callbacks that are ready now have run."""
    turn: asyncio.Future[None] = loop.create_future()
    loop.call_soon(_wake, turn)
    await turn


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # the waiter may have been cancelled
        turn.set_result(None)


async def cancelled_and_settled(task: asyncio.Task[Any]) -> None:
    """Cancel ``task`` and return when it has ended, however often the caller is cancelled."""
    task.cancel()
    while not task.done():
        with suppress(asyncio.CancelledError):
            await settled(task)
    if not task.cancelled():
        task.exception()  # mark it as retrieved: the caller raises an error of its own
