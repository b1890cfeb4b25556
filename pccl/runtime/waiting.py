"""Waiting for a future without owning it: to leave does not disturb what is waited for."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

_log = logging.getLogger("pccl.peer")

LONG_WAIT_S = 10
"""A call that waits so long for others is worth a warning in the log."""


async def settled(future: asyncio.Future[Any]) -> None:
    """Return when ``future`` is done, whatever it holds."""
    if future.done():
        return
    turn: asyncio.Future[None] = future.get_loop().create_future()
    future.add_done_callback(lambda _: _wake(turn))
    await turn


async def next_turn(loop: asyncio.AbstractEventLoop) -> None:
    """Let everything run that is ready now."""
    turn: asyncio.Future[None] = loop.create_future()
    loop.call_soon(_wake, turn)
    await turn


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # whoever waited may have been cancelled
        turn.set_result(None)


async def cancelled_and_settled(task: asyncio.Task[Any]) -> None:
    """Cancel ``task`` and return when it has ended, however often the caller is cancelled."""
    task.cancel()
    while not task.done():
        with suppress(asyncio.CancelledError):
            await settled(task)
    if not task.cancelled():
        task.exception()  # whoever cancels has an error of his own to raise


def log_wait(text: str, waited_s: int) -> None:
    """Somebody has been waiting for others for a while."""
    level = logging.WARNING if waited_s >= LONG_WAIT_S else logging.DEBUG
    _log.log(level, "%s (for %d s)", text, waited_s)


def log_warning(text: str) -> None:
    """People want to know this, and what to do about it."""
    _log.warning("%s", text)
