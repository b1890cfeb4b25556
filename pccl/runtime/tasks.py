"""Background tasks of one engine or master: they end with it, and failures are reported."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


class Tasks:
    """Tasks that no coroutine awaits.

    Args:
        loop: event loop that the tasks run on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._open: dict[asyncio.Task[None], None] = {}

    def create(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task. If it fails, the loop's exception handler gets the exception."""
        task = self.loop.create_task(work)
        self._open[task] = None
        task.add_done_callback(self._done)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        self.abandon()
        for task in list(self._open):
            with suppress(asyncio.CancelledError):
                await task

    def abandon(self) -> None:
        """Cancel all tasks. They end when the loop runs again."""
        for task in list(self._open):
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._open[task]
        if not task.cancelled() and task.exception() is not None:
            context = {"message": "a task of pccl failed", "exception": task.exception()}
            self.loop.call_exception_handler(context)
